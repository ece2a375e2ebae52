//go:build unix

package e2e

import (
	"strings"
	"syscall"
	"testing"
)

// P1: a gateway's process is stopped for longer than its lease, with a call under way, and another gateway
// removes it: the call is in doubt. When the first goes on, its client is not answered as if the call were recorded.
// It opens the store again by itself, beside the other one, and then what it was answered settles the doubt.
func TestProcessPostgresStopped(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	site.store = strings.Replace(site.store, "lease 10s", "lease 2s", 1)
	gateway := site.start(t)
	first := gateway.post(t, procCall{id: "one"})
	if !first.executed() {
		t.Fatalf("the first call: %v", first)
	}
	hold := upstream.hold(t, "open")
	client := procDial()
	defer client.CloseIdleConnections()
	open := gateway.begin(t.Context(), client, procCall{id: "open"})
	waitWithin(t, procBound, hold.arrived, "the call arrives")
	if err := gateway.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}

	other := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	other.app, other.store = site.app, strings.Replace(other.store, "node one", "node two", 1)
	next := other.start(t)
	if a := next.post(t, procCall{id: "two"}); !a.executed() {
		t.Errorf("a call beside the gateway that is stopped: %v", a)
	}
	state := func() string {
		return procDocument[struct{ Executions []struct{ State string } }](t,
			other.operate(t, "executions", "list", "--id", "open", "-o", "json").says(t)).Executions[0].State
	}
	eventuallyWithin(t, procBound, "what ran at the gateway that was stopped is in doubt", func() bool { return state() == "in_doubt" })

	if err := gateway.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	hold.open()
	late := waitWithin(t, procBound, open, "the end of the call that was under way")
	if late.err == nil && late.answer.executed() {
		t.Errorf("P2: a call that is in doubt was answered as recorded: %v", late.answer)
	}
	waitWithin(t, procBound, gateway.log.when("removed it from the store"), "it says that it was removed")
	// On a slow machine it may be removed again.
	eventuallyWithin(t, procBound, "the gateway has the store again, without a restart", func() bool {
		again := gateway.post(t, procCall{id: "one"})
		return again.replayed() && again.digest() == first.digest()
	})
	eventuallyWithin(t, procBound, "the late answer settles the doubt", func() bool { return state() == "completed" })
	if a := next.post(t, procCall{id: "open", host: site.addr}); !a.replayed() {
		t.Errorf("what was in doubt: %v", a)
	}
	if n := upstream.arrivals("open"); n != 1 {
		t.Errorf("P1: it was executed %d times", n)
	}
}

// The database's clock judges: a gateway whose own is an hour behind or ahead of it replays, answers
// who waits, and forgets when it should, over a kill too.
func TestProcessPostgresClockCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	site.guard = "retain_result 10m\n\t\tretain_key 10m\n\t\tdeadline 5m"
	plain := site.store
	all := [][2]string{{"behind", "+ interval '1 hour'"}, {"ahead", "- interval '1 hour'"}}
	for _, clock := range all[:min(len(all), crashRounds(t, 1))] {
		name, hour := clock[0], clock[1]
		// The session finds this clock before the server's own.
		if _, err := server.SQL(`create schema ` + name + `; create function ` + name + `.clock_timestamp() returns timestamptz
			language sql volatile as $$ select pg_catalog.clock_timestamp() ` + hour + ` $$`); err != nil {
			t.Fatal(err)
		}
		site.env = append(site.env, "TEST_DSN="+server.DSN()+" search_path="+name+",pg_catalog")
		site.store = strings.Replace(plain, "lease 10s", "lease 10s\n\t\t\tschema guard_"+name, 1)
		gateway := site.start(t)
		eventuallyWithin(t, procBound, "the store is open", func() bool { return !unavailable(t, gateway, procCall{id: name + "-zero"}) })
		first := gateway.post(t, procCall{id: name + "-one"})
		if !first.executed() {
			t.Fatalf("%s: %v", name, first)
		}
		wantProcReplay(t, first, gateway.post(t, procCall{id: name + "-one"}))
		hold := upstream.hold(t, name+"-open")
		begun := gateway.begin(t.Context(), procDial(), procCall{id: name + "-open"})
		waitWithin(t, procBound, hold.arrived, "the call arrives")
		attached := gateway.begin(t.Context(), procDial(), procCall{id: name + "-open"})
		hold.open()
		a, b := waitWithin(t, procBound, begun, "an answer"), waitWithin(t, procBound, attached, "an answer")
		if a.err != nil || b.err != nil || a.answer.digest() != b.answer.digest() || a.answer.problem() != "" {
			t.Errorf("%s: the call is answered with %v, and what waited for it with %v", name, a, b)
		}
		gateway.kill()
		gateway = site.start(t)
		eventuallyWithin(t, procBound, "the next gateway takes the store over", func() bool { return !unavailable(t, gateway, procCall{id: name + "-two"}) })
		wantProcReplay(t, first, gateway.post(t, procCall{id: name + "-one"}))
		for _, id := range []string{name + "-one", name + "-open"} {
			if n := upstream.arrivals(id); n != 1 {
				t.Errorf("P1: %s was executed %d times", id, n)
			}
		}
		// What is kept is kept for ten minutes by the database's clock.
		age, err := server.SQL(`select count(*) from guard_` + name + `.entries where expires < 9223372036854775807
			and abs(expires / 1000000 - extract(epoch from now() ` + hour + `) - 600) > 120 and substr(key, 1, 1) in ('x', 'r')`)
		if err != nil || age != "0" {
			t.Errorf("%s: %s records are kept for another time, %v", name, age, err)
		}
		gateway.end(t)
	}
}
