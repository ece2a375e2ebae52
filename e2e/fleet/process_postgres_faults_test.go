//go:build unix

package fleet

import (
	"strings"
	"syscall"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: a gateway's process is stopped for longer than its lease, with a call under way, and another gateway
// removes it: the call is in doubt. When the first goes on, its client is not answered as if the call were recorded.
// It opens the store again by itself, beside the other one, and then what it was answered settles the doubt.
func TestProcessPostgresStopped(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	site.Store = strings.Replace(site.Store, "lease 10s", "lease 2s", 1)
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
	if !first.Executed() {
		t.Fatalf("the first call: %v", first)
	}
	hold := upstream.Hold(t, "open")
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	open := gateway.Begin(t.Context(), client, harness.ProcCall{Id: "open"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "the call arrives")
	if err := gateway.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}

	other := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	other.App, other.Store = site.App, strings.Replace(other.Store, "node one", "node two", 1)
	next := other.Start(t)
	if a := next.Post(t, harness.ProcCall{Id: "two"}); !a.Executed() {
		t.Errorf("a call beside the gateway that is stopped: %v", a)
	}
	state := func() string {
		return harness.ProcDocument[struct{ Executions []struct{ State string } }](t,
			other.Operate(t, "executions", "list", "--id", "open", "-o", "json").Says(t)).Executions[0].State
	}
	harness.EventuallyWithin(t, harness.ProcBound, "what ran at the gateway that was stopped is in doubt", func() bool { return state() == "in_doubt" })

	if err := gateway.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	hold.Open()
	late := harness.WaitWithin(t, harness.ProcBound, open, "the end of the call that was under way")
	if late.Err == nil && late.Answer.Executed() {
		t.Errorf("P2: a call that is in doubt was answered as recorded: %v", late.Answer)
	}
	harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("removed it from the store"), "it says that it was removed")
	// On a slow machine it may be removed again.
	harness.EventuallyWithin(t, harness.ProcBound, "the gateway has the store again, without a restart", func() bool {
		again := gateway.Post(t, harness.ProcCall{Id: "one"})
		return again.Replayed() && again.Digest() == first.Digest()
	})
	harness.EventuallyWithin(t, harness.ProcBound, "the late answer settles the doubt", func() bool { return state() == "completed" })
	if a := next.Post(t, harness.ProcCall{Id: "open", Host: site.Addr}); !a.Replayed() {
		t.Errorf("what was in doubt: %v", a)
	}
	if n := upstream.Arrivals("open"); n != 1 {
		t.Errorf("P1: it was executed %d times", n)
	}
}

// The database's clock judges: a gateway whose own is an hour behind or ahead of it replays, answers
// who waits, and forgets when it should, over a kill too.
func TestProcessPostgresClockCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	site.Guard = "retain_result 10m\n\t\tretain_key 10m\n\t\tdeadline 5m"
	plain := site.Store
	all := [][2]string{{"behind", "+ interval '1 hour'"}, {"ahead", "- interval '1 hour'"}}
	for _, clock := range all[:min(len(all), harness.CrashRounds(t, 1))] {
		name, hour := clock[0], clock[1]
		// The session finds this clock before the server's own.
		if _, err := server.SQL(`create schema ` + name + `; create function ` + name + `.clock_timestamp() returns timestamptz
			language sql volatile as $$ select pg_catalog.clock_timestamp() ` + hour + ` $$`); err != nil {
			t.Fatal(err)
		}
		site.Env = append(site.Env, "TEST_DSN="+server.DSN()+" search_path="+name+",pg_catalog")
		site.Store = strings.Replace(plain, "lease 10s", "lease 10s\n\t\t\tschema guard_"+name, 1)
		gateway := site.Start(t)
		harness.EventuallyWithin(t, harness.ProcBound, "the store is open", func() bool { return !harness.Unavailable(t, gateway, harness.ProcCall{Id: name + "-zero"}) })
		first := gateway.Post(t, harness.ProcCall{Id: name + "-one"})
		if !first.Executed() {
			t.Fatalf("%s: %v", name, first)
		}
		harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: name + "-one"}))
		hold := upstream.Hold(t, name+"-open")
		begun := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: name + "-open"})
		harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "the call arrives")
		attached := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: name + "-open"})
		hold.Open()
		a, b := harness.WaitWithin(t, harness.ProcBound, begun, "an answer"), harness.WaitWithin(t, harness.ProcBound, attached, "an answer")
		if a.Err != nil || b.Err != nil || a.Answer.Digest() != b.Answer.Digest() || a.Answer.Problem() != "" {
			t.Errorf("%s: the call is answered with %v, and what waited for it with %v", name, a, b)
		}
		gateway.Kill()
		gateway = site.Start(t)
		harness.EventuallyWithin(t, harness.ProcBound, "the next gateway takes the store over", func() bool { return !harness.Unavailable(t, gateway, harness.ProcCall{Id: name + "-two"}) })
		harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: name + "-one"}))
		for _, id := range []string{name + "-one", name + "-open"} {
			if n := upstream.Arrivals(id); n != 1 {
				t.Errorf("P1: %s was executed %d times", id, n)
			}
		}
		// What is kept is kept for ten minutes by the database's clock.
		age, err := server.SQL(`select count(*) from guard_` + name + `.entries where expires < 9223372036854775807
			and abs(expires / 1000000 - extract(epoch from now() ` + hour + `) - 600) > 120 and substr(key, 1, 1) in ('x', 'r')`)
		if err != nil || age != "0" {
			t.Errorf("%s: %s records are kept for another time, %v", name, age, err)
		}
		gateway.End(t)
	}
}
