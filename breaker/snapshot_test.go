package breaker_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// restart makes a breaker from another one's snapshot, as it stands in a store.
func restart(t *testing.T, b *breaker.Breaker, s breaker.Settings, hook breaker.Hook) *breaker.Breaker {
	t.Helper()
	return restore(t, b.Snapshot(), s, hook)
}

func restore(t *testing.T, snapshot breaker.Snapshot, s breaker.Settings, hook breaker.Hook) *breaker.Breaker {
	t.Helper()
	data, err := json.Marshal(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err = decode(data)
	if err != nil {
		t.Fatal(err)
	}
	b, err := breaker.Restored(snapshot, mustRules(t, s), hook)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// OPEN stays OPEN, with the same deadline, and everything that its tokens need.
func TestOpenSurvivesARestart(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		old := newBreaker(t, breaker.Settings{}, nil)
		trip(t, old)
		pass(30 * time.Second)
		calls(t, old, 1, failed)
		old.Keep(4, "open-2")
		pass(20 * time.Second)
		snapshot := old.Snapshot()
		pass(15 * time.Second) // the gateway is down
		hook := &recorder{}
		b := restore(t, snapshot, breaker.Settings{}, hook)
		before := old.Status()
		equal(t, "openings of the process before", before.Openings, 2)
		before.Openings = 0
		equal(t, "status", b.Status(), before)
		refused(t, b, breaker.Op{Safe: true})
		pass(25*time.Second - 1)
		want(t, b, breaker.Open)
		pass(1)
		want(t, b, breaker.HalfOpen)
		calls(t, b, 1, ok)
		e := hook.last(t)
		equal(t, "to", e.To, breaker.Closed)
		equal(t, "reference", e.Reference, "open-2")
		equal(t, "total", e.TotalCooldown, 90*time.Second)
		equal(t, "failed probes", e.FailedProbes, 1)
		equal(t, "generation", e.Generation, 6)
	})
}

// Failed probes before and after a restart are in one row, and so is the cooldown.
func TestProbesInARowSurviveARestart(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		trip(t, b)
		for _, seconds := range []time.Duration{30, 60, 120} {
			pass(seconds * time.Second)
			calls(t, b, 1, failed)
			b = restart(t, b, breaker.Settings{}, hook)
		}
		equal(t, "reports", len(hook.permanent), 1)
		equal(t, "cooldown", hook.last(t).Cooldown, 240*time.Second)
	})
}

// A probe that was under way when the process died is lost; the next call is one.
func TestHalfOpenSurvivesARestart(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		old := halfOpen(t, breaker.Settings{}, nil, pass)
		acquire(t, old)
		b := restart(t, old, breaker.Settings{}, nil)
		want(t, b, breaker.HalfOpen)
		refused(t, b, breaker.Op{})
		acquire(t, b).Done(failed)
		equal(t, "cooldown", b.Status().Cooldown, time.Minute)
	})
}

// A closed breaker keeps how long it opens when it relapses, and for how long it has
// been healthy; not its window.
func TestRelapseSurvivesARestart(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		calls(t, b, 1, failed)
		pass(time.Minute)
		calls(t, b, 1, ok)
		calls(t, b, 5, failed)
		pass(8 * time.Minute)
		b = restart(t, b, breaker.Settings{}, nil)
		want(t, b, breaker.Closed)
		pass(119 * time.Second)
		relapsed := restart(t, b, breaker.Settings{}, nil)
		trip(t, relapsed)
		equal(t, "cooldown", relapsed.Status().Cooldown, time.Minute)
		pass(time.Second)
		trip(t, b)
		equal(t, "cooldown", b.Status().Cooldown, 30*time.Second)
	})
}

func TestForcedModesSurviveARestart(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		b.SetMode(breaker.ForcedOpen)
		b = restart(t, b, breaker.Settings{}, nil)
		pass(time.Hour)
		equal(t, "mode", refused(t, b, breaker.Op{Safe: true}).Mode, breaker.ForcedOpen)
		b.SetMode(breaker.ForcedClosed)
		b = restart(t, b, breaker.Settings{}, nil)
		calls(t, b, 100, failed)
	})
}

// A clock that was set while the process was down neither keeps a breaker open for
// longer than its cooldown nor breaks it.
func TestRestoreDistrustsTheClock(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		old := newBreaker(t, breaker.Settings{}, nil)
		trip(t, old)
		pass(10 * time.Second)
		s := old.Snapshot()
		for _, c := range []struct {
			name string
			down time.Duration // how long the process was down, by the clock
			left time.Duration
		}{
			{"on time", 5 * time.Second, 15 * time.Second},
			{"set back", -24 * 365 * time.Hour, 20 * time.Second},
			{"set ahead", 24 * 365 * time.Hour, 0},
		} {
			s.At = time.Now().Round(0).Add(-c.down)
			s.Since, s.Until = s.At.Add(-10*time.Second), s.At.Add(20*time.Second)
			b := restore(t, s, breaker.Settings{}, nil)
			equal(t, c.name, b.Status().CooldownRemaining, c.left)
			pass(c.left)
			want(t, b, breaker.HalfOpen)
		}
		// A snapshot that is wrong in itself is bounded by the rules.
		s.At = time.Now().Round(0)
		s.Until = s.At.Add(1000 * time.Hour)
		b := restore(t, s, breaker.Settings{}, nil)
		equal(t, "left", b.Status().CooldownRemaining, 5*time.Minute)
	})
}

func TestSnapshotIsStable(t *testing.T) {
	at := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	s := breaker.Snapshot{
		Version: 1, Upstream: "localhost:9001", Class: "write", State: breaker.Open, Generation: 4, Outage: 2,
		At: at, Since: at.Add(-time.Second), Until: at.Add(59 * time.Second),
		Cooldown: time.Minute, TotalCooldown: 90 * time.Second, FailedProbes: 1, Calls: 10, Failures: 8,
		Reason: breaker.ProbeFailed, Cause: "reset", Evidence: "error-3", Reference: "open-2",
	}
	const text = `{"v":1,"upstream":"localhost:9001","class":"write","state":"open","mode":"auto","generation":4,` +
		`"outage":2,"at":"2026-11-20T12:00:00Z","since":"2026-11-20T11:59:59Z","until":"2026-11-20T12:00:59Z",` +
		`"cooldown_ns":60000000000,"total_cooldown_ns":90000000000,"failed_probes":1,"calls":10,"failures":8,` +
		`"reason":"probe_failed","cause":"reset","evidence":"error-3","reference":"open-2"}`
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", string(data), text)
	got, err := decode([]byte(strings.Replace(text, `"v":1`, `"v":1,"later":[1]`, 1)))
	if err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, c := range []struct{ from, to, want string }{
		{`"v":1`, `"v":2`, `breaker: snapshot of "localhost:9001": v is 2; it has to be 1`},
		{`"open"`, `"ajar"`, `breaker: "ajar" is no state; it is one of [closed open half_open]`},
		{`"auto"`, `"auto2"`, `breaker: "auto2" is no mode`},
		{`"auto"`, `"forced_closed"`, `state is open; it has to be closed in mode forced_closed`},
		{`"generation":4`, `"generation":0`, `generation is 0; it has to be positive`},
		{`"outage":2`, `"outage":5`, `outage is 5; it has to be no later than the generation`},
		{`"failures":8`, `"failures":11`, `failures is 11; it has to be from 0 to calls`},
		{`60000000000`, `-1`, `cooldown_ns is -1ns; it has to be 0 or more`},
		{`90000000000`, `-1`, `total_cooldown_ns is -1ns; it has to be 0 or more`},
		{`"failed_probes":1`, `"failed_probes":-1`, `failed_probes is -1; it has to be 0 or more`},
	} {
		_, err := decode([]byte(strings.Replace(text, c.from, c.to, 1)))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.to, err, c.want)
		}
	}
	if _, err := json.Marshal(breaker.Snapshot{State: 9}); err == nil {
		t.Error("a state that does not exist was written")
	}
	if _, err := breaker.Restored(breaker.Snapshot{}, mustRules(t, breaker.Settings{}), nil); err == nil {
		t.Error("an empty snapshot was restored")
	}
}

// decode reads a stored snapshot as its keeper does.
func decode(data []byte) (s breaker.Snapshot, err error) {
	if err = json.Unmarshal(data, &s); err == nil {
		err = s.Check()
	}
	return s, err
}

// Whatever is read as a snapshot is written as the same again, and makes a breaker
// that comes to let a call through.
func FuzzSnapshot(f *testing.F) {
	f.Add([]byte(`{"v":1,"upstream":"a","state":"open","mode":"auto","generation":2,"outage":2,` +
		`"at":"2026-11-20T12:00:00Z","since":"2026-11-20T12:00:00Z","until":"2026-11-20T12:00:30Z","cooldown_ns":30000000000}`))
	f.Add([]byte(`{"v":1,"state":"half_open","mode":"observe","generation":3,"at":"0001-01-01T00:00:00Z","since":"9999-12-31T00:00:00Z"}`))
	f.Add([]byte(`{"v":1,"state":"closed","mode":"forced_closed","generation":18446744073709551615,"cooldown_ns":9223372036854775807}`))
	rules := mustRules(f, breaker.Settings{MaxCooldown: jsontime.Duration(time.Minute)})
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := decode(data)
		if err != nil {
			return
		}
		again, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		s2, err := decode(again)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(s2)
		if err != nil || string(text) != string(again) {
			t.Fatalf("%s became %s, %v", again, text, err)
		}
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			b, err := breaker.Restored(s, rules, nil)
			if err != nil {
				t.Fatal(err)
			}
			if left := b.Status().CooldownRemaining; left > time.Minute {
				t.Fatalf("cooldown of %v", left)
			}
			pass(time.Minute + 5*time.Second) // the longest cooldown, and the time in which only safe calls are probes
			p, err := b.Acquire(breaker.Op{})
			if err == nil {
				p.Done(ok)
			} else if s.Mode != breaker.ForcedOpen {
				t.Fatal(err)
			}
		})
	})
}
