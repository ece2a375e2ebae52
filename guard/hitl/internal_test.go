package hitl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func full() Escalation {
	at := time.Unix(1_800_000_000, 123).UTC()
	e := Escalation{
		ID: "i", Level: Stop, LevelName: "stop", Cause: CauseTampered, Summary: "s", Workflow: "w", Caller: "c",
		Links: Links{Checkpoint: "k", Rollback: "r", Error: "e", Execution: "x", Upstream: "u"},
		State: Open, Opened: at, Changed: at.Add(1), Attempts: 3, LastError: "l", NextAttempt: at.Add(2),
		Status: Denied, Proposal: Proposal{Resume, "t", "h", "p"}, RequiredRole: "r", Quorum: 2, Requester: "q",
		Deadline: at.Add(3), Held: true, Token: "t1", Resolution: "t2",
		Unreachable: Unreachable{unreachableEscalate, "n", time.Minute},
		Private:     Private{Final: true, Notice: true, Round: 17, Approvals: 19, Tokens: []string{"hidden-token"}, Boot: "hidden-member"},
		Participants: []Participant{
			{Agent: "p", Confirmed: lifted, At: at.Add(6), Since: at.Add(7), Reason: "y", address: address{"hidden-uri", true}}, {Agent: "o"},
		},
		Decisions: []Decision{{By: "a", Decision: Approve, Reason: "b", At: at.Add(4)}, {By: "c", Decision: deny, At: at.Add(5)}},
	}
	return e
}

func leaves(t *testing.T, v reflect.Value, name string) {
	if v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]() {
		for i := range v.NumField() {
			leaves(t, v.Field(i), name+"."+v.Type().Field(i).Name)
		}
	} else if v.IsZero() && name != ".WorkflowName" && name != ".Page" {
		t.Errorf("the test leaves %s empty", name)
	}
}

func TestEscalationKeepsEveryField(t *testing.T) {
	want := full()
	leaves(t, reflect.ValueOf(want), "")
	got := Escalation{}
	if err := store.Decode(store.Encode(nil, &want), &got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// What is private is stored, and not a word of it is in a document (P8).
func TestNothingPrivateIsShown(t *testing.T) {
	e := full()
	e.Page = "hidden-page"
	for name, shown := range map[string]any{"value": e, "pointer": &e, "page": Page{Escalations: []Escalation{e}}} {
		text, err := json.Marshal(shown)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{"hidden", "rivate", "Round", "17", "19", "otice", "inal", "URI", "efused", "Within"} {
			if strings.Contains(string(text), word) {
				t.Errorf("%s: %q stands in %s", name, word, text)
			}
		}
	}
	for _, hidden := range []reflect.Type{reflect.TypeFor[Private](), reflect.TypeFor[address]()} {
		for _, in := range []reflect.Type{reflect.TypeFor[Escalation](), reflect.TypeFor[Participant]()} {
			for i := range in.NumField() {
				if f := in.Field(i); f.Type == hidden && f.Tag.Get("json") != "-" {
					t.Errorf("%s is shown with %s", hidden, in)
				}
			}
		}
	}
}

// A cause that this build does not know stays as it is: the set is open when read.
func TestUnknownCauseIsRead(t *testing.T) {
	e, got := full(), Escalation{}
	e.Cause = "of_a_newer_build"
	if err := store.Decode(store.Encode(nil, &e), &got); err != nil || got.Cause != e.Cause {
		t.Errorf("%+v, %v", got, err)
	}
}

// The largest escalation stays an ordinary value, which is durable before "escalated" is
// said (A-basic-rollback-g).
func TestLargestEscalationIsAnOrdinaryValue(t *testing.T) {
	long := strings.Repeat("ä", 1<<20)
	d := NewStore(memory.New(memory.Options{}), seal.Generate())
	e, err := d.Open(t.Context(), Opening{
		Key: long, Level: Stop, Cause: CauseOther, Summary: long, Workflow: long, Caller: long,
		Links: Links{long, long, long, long, long},
	})
	if err != nil {
		t.Fatal(err)
	}
	e.LastError = shorten(long, maxError)
	if n := len(store.Encode(nil, &e)); n > store.MaxValue/2 {
		t.Errorf("%d bytes", n)
	}
	if len(e.Summary) != maxSummary || strings.Trim(e.Summary, "ä") != "" {
		t.Errorf("the summary is cut to %d bytes", len(e.Summary))
	}
}

func TestShortenLeavesWholeCharacters(t *testing.T) {
	for in, want := range map[string]string{
		"abcdef": "abcd", "abcä": "abc", "äääa": "ää", "a\xff": "a\uFFFD", "": "", "a€b": "a€",
	} {
		if got := shorten(in, 4); got != want {
			t.Errorf("%q becomes %q instead of %q", in, got, want)
		}
	}
}

// A dispatcher leaves what another one has recorded while somebody was told.
func TestWhatIsRecordedMeanwhileStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewStore(memory.New(memory.Options{}), seal.Generate())
		opened, err := d.Open(t.Context(), Opening{Key: "k", Level: Stop, Cause: CauseOther, Summary: "s"})
		if err != nil {
			t.Fatal(err)
		}
		id := d.idOf("k")
		change := func(ctx context.Context, by func(*Escalation)) {
			old, version, err := d.read(ctx, id)
			if err != nil {
				t.Fatal(err)
			}
			e := *old
			by(&e)
			if _, err := d.store.Commit(ctx, d.put(id, old, &e, store.VersionIs(version))...); err != nil {
				t.Fatal(err)
			}
		}
		const decided = State("decided")
		ctx, cancel := context.WithCancel(t.Context())
		delivery := Delivery{Notify: func(ctx context.Context, _ Escalation) error {
			change(ctx, func(e *Escalation) { e.State = decided })
			return nil
		}}
		done := make(chan struct{})
		go func() { defer close(done); d.Deliver(ctx, delivery) }()
		synctest.Wait()
		cancel()
		<-done
		got, err := d.Get(t.Context(), opened.ID)
		if err != nil || got.State != decided {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// Whatever is read is written as it was read, and nothing panics.
func FuzzDecode(f *testing.F) {
	e := full()
	f.Add(store.Encode(nil, &e))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e, again Escalation
		if store.Decode(b, &e) != nil {
			return
		}
		if err := store.Decode(store.Encode(nil, &e), &again); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(store.Encode(nil, &again), store.Encode(nil, &e)) {
			t.Fatal("not stable")
		}
	})
}

// The vector that implementations of the Standard Webhooks specification share.
func TestStandardWebhooksVector(t *testing.T) {
	key, err := parseSecret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	if err != nil {
		t.Fatal(err)
	}
	got := sign([][]byte{key}, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`))
	if want := "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="; got != want {
		t.Errorf("%s instead of %s", got, want)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"": 0, "0": 0, "-1": 0, "1.5": 0, "soon": 0, "7": 7 * time.Second,
		"18446744073709551615": 24 * time.Hour, "99999999999999999999": 0,
		now.Add(time.Minute).Format(http.TimeFormat):      time.Minute,
		now.Add(-time.Minute).Format(http.TimeFormat):     0,
		now.Add(1000 * time.Hour).Format(http.TimeFormat): 24 * time.Hour,
	} {
		if got := retryAfter(value, now); got != want {
			t.Errorf("%q: %s instead of %s", value, got, want)
		}
	}
}

func FuzzRetryAfter(f *testing.F) {
	f.Add("7")
	f.Add("Fri, 20 Nov 2026 10:00:00 GMT")
	f.Fuzz(func(t *testing.T, value string) {
		if got := retryAfter(value, time.Unix(1_800_000_000, 0)); got < 0 || got > 24*time.Hour {
			t.Errorf("%q: %s", value, got)
		}
	})
}

// A record that opens and cannot be read is ErrUnreadable, and names the escalation.
func TestBrokenFields(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	d := NewStore(st, ring)
	opened, err := d.Open(t.Context(), Opening{Key: "k", Level: Stop, Cause: CauseOther, Summary: "s"})
	if err != nil {
		t.Fatal(err)
	}
	key := recordKey(uuid.MustParse(opened.ID))
	for name, b := range map[string][]byte{
		"nothing":          {},
		"half":             store.Encode(nil, &opened)[:40],
		"more than one":    append(store.Encode(nil, &opened), 0),
		"no record":        store.Encode(nil, "text"),
		"no level":         store.Encode(nil, &Escalation{State: Open, Status: Pending}),
		"no state":         store.Encode(nil, &Escalation{Level: Pause, Status: Pending}),
		"no status":        store.Encode(nil, &Escalation{Level: Pause, State: Open}),
		"a negative level": store.Encode(nil, map[string]int{"level": -1}),
		"a large level":    store.Encode(nil, map[string]int{"level": 256}),
		"endless texts":    []byte("\xa1\x65state\x7b\xff\xff\xff\xff\xff\xff\xff\xff"),
	} {
		if _, err := st.Commit(t.Context(), store.Write{Key: key, Value: ring.Seal(nil, b, key)}); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Get(t.Context(), opened.ID); !errors.Is(err, ErrUnreadable) || !strings.Contains(err.Error(), opened.ID) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
