package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// outcome is what a retry of a forwarded call finds.
type outcome int

const (
	released  outcome = iota // it runs again
	completed                // it gets the first answer again
	inDoubt                  // it is refused
	resent                   // it is in doubt, and sent again under the upstream's key
)

// status is the Execution-Status of the answer that leads to the outcome.
func (o outcome) status() string {
	if o == inDoubt || o == resent {
		return "in_doubt"
	}
	return "executed"
}

// check makes the call again and holds the outcome.
func (g *gateway) check(u *upstream, r request, first reply, want outcome) {
	g.t.Helper()
	again := g.call(r)
	switch want {
	case released, resent:
		again.want(g.t, 201, "arrival 2", "executed")
		u.arrived(r.path, 2)
	case completed:
		again.want(g.t, first.status, first.body, "replayed")
		u.arrived(r.path, 1)
	case inDoubt:
		doc := again.terminal(g.t, 409, "in-doubt")
		if doc.State != "in_doubt" || doc.ExecutionID != r.id || *doc.SafeNewKey {
			g.t.Errorf("in doubt: %s", again.body)
		}
		if got := again.header.Get("Execution-Id"); got != r.id {
			g.t.Errorf("Execution-Id is %q", got)
		}
		u.arrived(r.path, 1)
	}
}

// Section "Outcome of a forwarded request": what a status means. The answer itself
// always goes to the caller.
func TestOutcomeByStatus(t *testing.T) {
	type row struct {
		code   int
		header []string
		preset map[string]outcome // those that differ from the default
		want   outcome
	}
	acp := map[string]outcome{"acp": released}
	strict := func(more outcome) map[string]outcome {
		return map[string]outcome{"strict": inDoubt, "acp": released, "stripe": more}
	}
	rows := []row{
		{code: 200, want: completed},
		{code: 201, want: completed},
		{code: 302, header: []string{"Location", "/elsewhere"}, want: completed},
		{code: 400, want: completed, preset: map[string]outcome{"stripe": released}},
		{code: 401, want: released},
		{code: 403, want: released},
		{code: 404, want: completed},
		{code: 407, want: released},
		{code: 408, want: inDoubt, preset: map[string]outcome{"stripe": resent}},
		{code: 409, want: completed, preset: map[string]outcome{"stripe": released}},
		{code: 421, want: released},
		{code: 422, want: completed},
		{code: 425, want: released},
		{code: 429, want: released},
		{code: 529, want: released, preset: map[string]outcome{"strict": inDoubt}}, // overloaded, as LLM APIs say
		{code: 429, header: []string{"Retry-After", "7"}, want: released},
		{code: 499, want: inDoubt, preset: map[string]outcome{"stripe": resent}},
		{code: 500, want: completed, preset: strict(completed)},
		{code: 501, want: completed, preset: strict(completed)},
		{code: 502, want: inDoubt, preset: strict(resent)},
		{code: 503, want: inDoubt, preset: strict(resent)},
		{code: 503, header: []string{"Retry-After", "7"}, want: released, preset: map[string]outcome{"strict": inDoubt}},
		{code: 504, want: inDoubt, preset: strict(resent)},
		{code: 520, want: completed, preset: map[string]outcome{"acp": acp["acp"], "strict": inDoubt}},
	}
	for _, preset := range []string{"default", "stripe", "acp", "strict"} {
		t.Run(preset, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s {\n preset %s\n}", u.addr, preset)
			for i, row := range rows {
				want, differs := row.preset[preset]
				if !differs {
					want = row.want
				}
				r := request{path: fmt.Sprintf("/%d/%d", row.code, i), id: "k"}
				u.on(r.path, first(status(row.code, "the answer", row.header...)))
				got := g.call(r)
				got.want(t, row.code, "the answer", want.status())
				for j := 0; j < len(row.header); j += 2 {
					if v := got.header.Get(row.header[j]); v != row.header[j+1] {
						t.Errorf("%d lost its %s: %q", row.code, row.header[j], v)
					}
				}
				if want == inDoubt {
					got.noRetry(t)
				}
				g.check(u, r, got, want)
			}
		})
	}
}

// Section "Outcome of a forwarded request": a connection that is lost after a byte
// was sent, and answers that are not whole, are in doubt (traps 3, 16; P6).
func TestOutcomeOfBrokenAnswers(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, row := range []struct {
		name   string
		answer func(http.ResponseWriter, *arrival)
		// header is whether the client sees the header of the broken answer.
		header bool
		cause  string
	}{
		{name: "reset", answer: reset, cause: "connection_lost"},
		{name: "closed", answer: raw(""), cause: "connection_lost"},
		{name: "half-header", answer: raw("HTTP/1.1 200 OK\r\nContent-Le"), cause: "connection_lost"},
		{name: "garbage", answer: raw("220 smtp ready\r\n"), cause: "connection_lost"},
		{name: "no-final", answer: raw("HTTP/1.1 103 Early Hints\r\n\r\n"), cause: "connection_lost"},
		{name: "unasked-upgrade", answer: raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), cause: "no_answer"},
		{name: "refused-but-short", answer: raw("HTTP/1.1 429 Slow Down\r\nContent-Length: 9\r\n\r\npart"), header: true, cause: "answer_truncated"},
		{name: "short-length", answer: raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), header: true, cause: "answer_truncated"},
		{name: "no-body-yet", answer: raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"), header: true, cause: "answer_truncated"},
		{name: "short-chunk", answer: raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\npart"), header: true, cause: "answer_truncated"},
		{name: "no-last-chunk", answer: raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n"), header: true, cause: "answer_truncated"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := request{path: "/" + row.name, id: "k"}
			u.on(r.path, first(row.answer))
			got := g.call(r)
			if row.header {
				if got.status != 200 && got.status != 429 || !got.cut || got.header.Get("Execution-Status") != "executed" {
					t.Errorf("got %d %q, cut %v", got.status, got.body, got.cut)
				}
			} else {
				doc := got.terminal(t, 409, "in-doubt")
				if !strings.Contains(doc.Detail, row.cause) {
					t.Errorf("the cause is not told: %s", got.body)
				}
				if s := got.header.Get("Execution-Status"); s != "in_doubt" {
					t.Errorf("Execution-Status is %q", s)
				}
			}
			g.check(u, r, got, inDoubt)
			if again := g.call(r); !strings.Contains(again.body, row.cause) {
				t.Errorf("the record does not tell %s: %s", row.cause, again.body)
			}
		})
	}
}

// P6: a status that is none says nothing of what was done.
func TestOutcomeOfNoStatus(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, code := range []string{"000", "099"} {
		r := request{path: "/" + code, id: "k"}
		u.on(r.path, first(raw("HTTP/1.1 "+code+" X\r\nContent-Length: 0\r\n\r\n")))
		g.broken(r)
		g.check(u, r, reply{}, inDoubt)
	}
}

// Section "Sent or not": a body that is framed by nothing but the end of its
// connection may be cut: in doubt.
func TestOutcomeUnframed(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for name, text := range map[string]string{
		"1.0":   "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it",
		"1.1":   "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it",
		"empty": "HTTP/1.0 200 OK\r\n\r\n",
	} {
		r := request{path: "/" + name, id: "k"}
		u.on(r.path, first(raw(text)))
		got := g.call(r)
		_, body, _ := strings.Cut(text, "\r\n\r\n")
		got.want(t, 200, body, "in_doubt")
		g.check(u, r, got, inDoubt)
	}
	// A refusal says so in its status, however its body ends.
	r := request{path: "/refused", id: "k"}
	u.on(r.path, first(raw("HTTP/1.0 429 Too Many Requests\r\n\r\nlater")))
	got := g.call(r)
	got.want(t, 429, "later", "executed")
	g.check(u, r, got, released)
}

// P1: a handler of somebody else's proves nothing, whatever it returns (trap 3).
func TestOutcomeOfOtherHandlers(t *testing.T) {
	for _, row := range []struct {
		do     string
		answer bool // an answer comes
	}{
		{"error", true}, {"panic", false}, {"late_panic", false}, {"late_error", false}, {"short", false},
	} {
		t.Run(row.do, func(t *testing.T) {
			g := start(t, "route {\n agent_guard\n e2e_do %s\n}", row.do)
			r := request{path: "/x", id: "k"}
			if row.answer {
				g.call(r).terminal(t, 409, "in-doubt")
			} else if res, err := g.send(r); err == nil {
				if got := read(res); !got.cut {
					t.Errorf("answered %d %q", got.status, got.body)
				}
			}
			g.call(r).terminal(t, 409, "in-doubt")
		})
	}
	g := start(t, "route {\n agent_guard\n e2e_do nothing\n}")
	g.call(request{path: "/x", id: "k"}).want(t, 200, "", "executed")
	g.call(request{path: "/x", id: "k"}).want(t, 200, "", "replayed")
}

// The retentions are apart: a result that is no longer kept does not free its key,
// a key that is no longer kept does. What is in doubt stays (promise P1).
func TestRetention(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n retain_result 1h\n retain_key 2h\n}", u.addr)
	u.on("/doubt", reset)
	r, doubt := request{path: "/x", id: "k"}, request{path: "/doubt", id: "k"}
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(doubt).terminal(t, 409, "in-doubt")

	g.store.pass(59 * time.Minute)
	g.call(r).want(t, 201, "arrival 1", "replayed")
	g.store.pass(2 * time.Minute)
	doc := g.call(r).terminal(t, 409, "result-expired")
	if doc.State != "completed" || *doc.SafeNewKey {
		t.Errorf("%+v", doc)
	}
	g.store.pass(time.Hour)
	g.call(r).want(t, 201, "arrival 2", "executed")
	g.store.pass(24 * 365 * time.Hour)
	g.call(doubt).terminal(t, 409, "in-doubt")
	u.arrived("/doubt", 1)
}
