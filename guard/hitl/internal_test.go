package hitl

import (
	"context"
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

func full() Escalation {
	at := time.Unix(1_800_000_000, 123).UTC()
	return Escalation{
		Level: Stop, Cause: CauseTampered, Summary: "s", Workflow: "w", Caller: "c",
		Links: Links{Checkpoint: "k", Rollback: "r", Error: "e", Execution: "x", Upstream: "u"},
		State: Open, Opened: at, Changed: at.Add(1),
		Delivery: Delivery{Attempts: 3, LastError: "l", Next: at.Add(2)},
		unknown:  []byte{200, 2, 'h', 'i'},
	}
}

func leaves(t *testing.T, v reflect.Value, name string) {
	if v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]() {
		for i := range v.NumField() {
			leaves(t, v.Field(i), name+"."+v.Type().Field(i).Name)
		}
	} else if v.IsZero() && name != ".ID" {
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
	d := NewStore(memory.New(memory.Options{}), seal.Generate(), 0)
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
		d := NewStore(memory.New(memory.Options{}), seal.Generate(), 0)
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
			change(ctx, func(e *Escalation) { e.State, e.unknown = decided, []byte{32, 1, 'a'} })
			return nil
		}), DispatcherOptions{})
		done := make(chan struct{})
		go func() { defer close(done); dispatcher.Run(ctx) }()
		synctest.Wait()
		cancel()
		<-done
		got, err := d.Get(t.Context(), opened.ID)
		if err != nil || got.State != decided || string(got.unknown) != "\x20\x01a" {
			t.Errorf("%+v, %v", got, err)
		}
		change(t.Context(), func(e *Escalation) { e.Changed = e.Changed.Add(time.Second) })
		if got, err = d.Get(t.Context(), opened.ID); err != nil || string(got.unknown) != "\x20\x01a" {
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
