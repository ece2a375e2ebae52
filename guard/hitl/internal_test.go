package hitl

import (
	"context"
	"encoding/hex"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// earlier is what builds without decisions have stored.
func earlier() Escalation {
	at := time.Unix(1_800_000_000, 123).UTC()
	return Escalation{
		Level: Stop, Cause: CauseTampered, Summary: "s", Workflow: "w", Caller: "c",
		Links: Links{Checkpoint: "k", Rollback: "r", Error: "e", Execution: "x", Upstream: "u"},
		State: Open, Opened: at, Changed: at.Add(1),
		Delivery: Delivery{Attempts: 3, LastError: "l", Next: at.Add(2)},
		unknown:  []byte{200, 2, 'h', 'i'},
	}
}

func full() Escalation {
	e := earlier()
	e.Status, e.Proposal, e.Role, e.Quorum, e.Requester = Denied, Proposal{Resume, "t", "h"}, "r", 2, "q"
	e.Final, e.Deadline, e.Held, e.Round, e.Token, e.Resolution = true, e.Opened.Add(3), true, 1, "t1", "t2"
	e.Unreachable = Unreachable{UnreachableEscalate, "n", time.Minute}
	e.Notice, e.Participants = true, []Participant{
		{Agent: "p", URI: "u", Confirmed: Lifted, At: e.Opened.Add(6), Since: e.Opened.Add(7), Reason: "y", Refused: true}, {Agent: "o"},
	}
	e.Delivery.Boot = "m"
	e.Decisions = []Decision{{By: "a", Approve: true, Reason: "b", At: e.Opened.Add(4), Round: 1, Token: "t3"}, {By: "c", At: e.Opened.Add(5)}}
	return e
}

func leaves(t *testing.T, v reflect.Value, name string) {
	if v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]() {
		for i := range v.NumField() {
			leaves(t, v.Field(i), name+"."+v.Type().Field(i).Name)
		}
	} else if v.IsZero() && name != ".ID" && name != ".Page" {
		t.Errorf("the test leaves %s empty", name)
	}
}

func TestEscalationKeepsEveryField(t *testing.T) {
	want := full()
	leaves(t, reflect.ValueOf(want), "")
	got, err := decode(want.encode(nil))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("got  %+v\nwant %+v", *got, want)
	}
}

// A cause that this build does not know stays as it is: the set is open when read.
func TestUnknownCauseIsRead(t *testing.T) {
	e := full()
	e.Cause = "of_a_newer_build"
	if got, err := decode(e.encode(nil)); err != nil || got.Cause != e.Cause {
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
	e.Delivery.LastError = shorten(long, maxError)
	if n := len(e.encode(nil)); n > store.MaxValue/2 {
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

// A dispatcher of this build leaves what a newer one has decided while somebody was told,
// and what it has added to the record.
func TestDecisionOfANewerBuildStays(t *testing.T) {
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
		const decided = State(4)
		ctx, cancel := context.WithCancel(t.Context())
		dispatcher := NewDispatcher(d, NotifierFunc(func(ctx context.Context, _ Escalation) error {
			change(ctx, func(e *Escalation) { e.State, e.unknown = decided, []byte{99, 1, 'a'} })
			return nil
		}), DispatcherOptions{})
		done := make(chan struct{})
		go func() { defer close(done); dispatcher.Run(ctx) }()
		synctest.Wait()
		cancel()
		<-done
		got, err := d.Get(t.Context(), opened.ID)
		if err != nil || got.State != decided || string(got.unknown) != "\x63\x01a" {
			t.Errorf("%+v, %v", got, err)
		}
		change(t.Context(), func(e *Escalation) { e.Changed = e.Changed.Add(time.Second) })
		if got, err = d.Get(t.Context(), opened.ID); err != nil || string(got.unknown) != "\x63\x01a" {
			t.Errorf("after another change: %+v, %v", got, err)
		}
	})
}

func FuzzDecode(f *testing.F) {
	e := full()
	f.Add(e.encode(nil))
	f.Add([]byte{})
	f.Add([]byte{tagState, 1, 2, tagLevel, 1, 2, 0, 0})
	f.Add([]byte{tagState, 1, 2, tagSummary, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decode(b)
		if err != nil {
			return
		}
		again, err := decode(e.encode(nil))
		if err != nil {
			t.Fatal(err)
		}
		if string(again.encode(nil)) != string(e.encode(nil)) {
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

// What stands in stores of earlier builds stays as it is, byte for byte.
func TestStoredBytes(t *testing.T) {
	e := earlier()
	for name, c := range map[string]struct {
		e    Escalation
		want string
	}{
		"full":   {e, "0101060213636865636b706f696e745f74616d706572656403017304017705016306016b0701720801650901780a01750b01020c09f681a0bbd29df1fa310d09f881a0bbd29df1fa310e01060f016c1009fa81a0bbd29df1fa31c8026869"},
		"sparse": {Escalation{Level: Pause, State: Open, Opened: e.Opened}, "0101020b01020c09f681a0bbd29df1fa31"},
	} {
		if got := hex.EncodeToString(c.e.encode(nil)); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, c.want)
		}
		b, _ := hex.DecodeString(c.want)
		if got, err := decode(b); err != nil || got.Status != Pending || got.Held || got.Proposal != (Proposal{}) {
			t.Errorf("%s: read as %+v, %v", name, got, err)
		}
	}
}

// What opens but cannot be read is errEncoding, whatever is wrong.
func TestBrokenFields(t *testing.T) {
	if want := "hitl: the encoding of an escalation is broken"; errEncoding.Error() != want {
		t.Errorf("%q, want %q", errEncoding, want)
	}
	for name, b := range map[string]string{
		"no length":         "\x01",
		"a length too long": "\x02\x02a",
		"an endless length": "\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"no number":         "\x01\x00",
		"half a number":     "\x01\x01\x80",
		"two numbers":       "\x01\x02\x04\x04",
		"a negative level":  "\x01\x01\x01\x0b\x01\x02",
		"a large state":     "\x01\x01\x02\x0b\x02\x80\x04",
		"fewer than none":   "\x01\x01\x02\x0b\x01\x02\x0e\x01\x01",
		"no level":          "\x0b\x01\x02",
		"no state":          "\x01\x01\x02",
	} {
		if _, err := decode([]byte(b)); err != errEncoding {
			t.Errorf("%s: %v", name, err)
		}
	}
}
