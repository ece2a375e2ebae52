package call

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Section "Outcome of a forwarded request": what a status means. The answer itself
// always goes to the caller.
func TestOutcomeByStatus(t *testing.T) {
	type row struct {
		code   int
		header []string
		preset map[string]harness.Outcome // those that differ from the default
		want   harness.Outcome
	}
	acp := map[string]harness.Outcome{"acp": harness.Released}
	strict := func(more harness.Outcome) map[string]harness.Outcome {
		return map[string]harness.Outcome{"strict": harness.InDoubt, "acp": harness.Released, "stripe": more}
	}
	rows := []row{
		{code: 200, want: harness.Completed},
		{code: 201, want: harness.Completed},
		{code: 302, header: []string{"Location", "/elsewhere"}, want: harness.Completed},
		{code: 400, want: harness.Completed, preset: map[string]harness.Outcome{"stripe": harness.Released}},
		{code: 401, want: harness.Released},
		{code: 403, want: harness.Released},
		{code: 404, want: harness.Completed},
		{code: 407, want: harness.Released},
		{code: 408, want: harness.InDoubt, preset: map[string]harness.Outcome{"stripe": harness.Resent}},
		{code: 409, want: harness.Completed, preset: map[string]harness.Outcome{"stripe": harness.Released}},
		{code: 421, want: harness.Released},
		{code: 422, want: harness.Completed},
		{code: 425, want: harness.Released},
		{code: 429, want: harness.Released},
		{code: 529, want: harness.Released, preset: map[string]harness.Outcome{"strict": harness.InDoubt}}, // overloaded, as LLM APIs say
		{code: 429, header: []string{"Retry-After", "7"}, want: harness.Released},
		{code: 499, want: harness.InDoubt, preset: map[string]harness.Outcome{"stripe": harness.Resent}},
		{code: 500, want: harness.Completed, preset: strict(harness.Completed)},
		{code: 501, want: harness.Completed, preset: strict(harness.Completed)},
		{code: 502, want: harness.InDoubt, preset: strict(harness.Resent)},
		{code: 503, want: harness.InDoubt, preset: strict(harness.Resent)},
		{code: 503, header: []string{"Retry-After", "7"}, want: harness.Released, preset: map[string]harness.Outcome{"strict": harness.InDoubt}},
		{code: 504, want: harness.InDoubt, preset: strict(harness.Resent)},
		{code: 520, want: harness.Completed, preset: map[string]harness.Outcome{"acp": acp["acp"], "strict": harness.InDoubt}},
	}
	for _, preset := range []string{"default", "stripe", "acp", "strict"} {
		t.Run(preset, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Start(t, "agent_proxy %s {\n preset %s\n}", u.Addr, preset)
			for i, row := range rows {
				want, differs := row.preset[preset]
				if !differs {
					want = row.want
				}
				r := harness.Request{Path: fmt.Sprintf("/%d/%d", row.code, i), Id: "k"}
				u.On(r.Path, first(harness.Status(row.code, "the answer", row.header...)))
				got := g.Call(r)
				got.Want(t, row.code, "the answer", want.Status())
				for j := 0; j < len(row.header); j += 2 {
					if v := got.Header.Get(row.header[j]); v != row.header[j+1] {
						t.Errorf("%d lost its %s: %q", row.code, row.header[j], v)
					}
				}
				if want == harness.InDoubt {
					got.NoRetry(t)
				}
				g.Check(u, r, got, want)
			}
		})
	}
}

// Section "Outcome of a forwarded request": a connection that is lost after a byte
// was sent, and answers that are not whole, are in doubt (traps 3, 16; P6).
func TestOutcomeOfBrokenAnswers(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, row := range []struct {
		name   string
		answer func(http.ResponseWriter, *harness.Arrival)
		// header is whether the client sees the header of the broken answer.
		header bool
		cause  string
	}{
		{name: "reset", answer: harness.Reset, cause: "connection_lost"},
		{name: "closed", answer: harness.Raw(""), cause: "connection_lost"},
		{name: "half-header", answer: harness.Raw("HTTP/1.1 200 OK\r\nContent-Le"), cause: "connection_lost"},
		{name: "garbage", answer: harness.Raw("220 smtp ready\r\n"), cause: "connection_lost"},
		{name: "no-final", answer: harness.Raw("HTTP/1.1 103 Early Hints\r\n\r\n"), cause: "connection_lost"},
		{name: "unasked-upgrade", answer: harness.Raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), cause: "no_answer"},
		{name: "refused-but-short", answer: harness.Raw("HTTP/1.1 429 Slow Down\r\nContent-Length: 9\r\n\r\npart"), header: true, cause: "answer_truncated"},
		{name: "short-length", answer: harness.Raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), header: true, cause: "answer_truncated"},
		{name: "no-body-yet", answer: harness.Raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"), header: true, cause: "answer_truncated"},
		{name: "short-chunk", answer: harness.Raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\npart"), header: true, cause: "answer_truncated"},
		{name: "no-last-chunk", answer: harness.Raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n"), header: true, cause: "answer_truncated"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := harness.Request{Path: "/" + row.name, Id: "k"}
			u.On(r.Path, first(row.answer))
			got := g.Call(r)
			if row.header {
				if got.Status != 200 && got.Status != 429 || !got.Cut || got.Header.Get("Execution-Status") != "executed" {
					t.Errorf("got %d %q, cut %v", got.Status, got.Body, got.Cut)
				}
			} else {
				doc := got.Terminal(t, 409, "in-doubt")
				if !strings.Contains(doc.Detail, row.cause) {
					t.Errorf("the cause is not told: %s", got.Body)
				}
				if s := got.Header.Get("Execution-Status"); s != "in_doubt" {
					t.Errorf("Execution-Status is %q", s)
				}
			}
			g.Check(u, r, got, harness.InDoubt)
			if again := g.Call(r); !strings.Contains(again.Body, row.cause) {
				t.Errorf("the record does not tell %s: %s", row.cause, again.Body)
			}
		})
	}
}

// P6: a status that is none says nothing of what was done.
func TestOutcomeOfNoStatus(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, code := range []string{"000", "099"} {
		r := harness.Request{Path: "/" + code, Id: "k"}
		u.On(r.Path, first(harness.Raw("HTTP/1.1 "+code+" X\r\nContent-Length: 0\r\n\r\n")))
		g.Broken(r)
		g.Check(u, r, harness.Reply{}, harness.InDoubt)
	}
}

// Section "Sent or not": a body that is framed by nothing but the end of its
// connection may be cut: in doubt.
func TestOutcomeUnframed(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for name, text := range map[string]string{
		"1.0":   "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it",
		"1.1":   "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it",
		"empty": "HTTP/1.0 200 OK\r\n\r\n",
	} {
		r := harness.Request{Path: "/" + name, Id: "k"}
		u.On(r.Path, first(harness.Raw(text)))
		got := g.Call(r)
		_, body, _ := strings.Cut(text, "\r\n\r\n")
		got.Want(t, 200, body, "in_doubt")
		g.Check(u, r, got, harness.InDoubt)
	}
	// A refusal says so in its status, however its body ends.
	r := harness.Request{Path: "/refused", Id: "k"}
	u.On(r.Path, first(harness.Raw("HTTP/1.0 429 Too Many Requests\r\n\r\nlater")))
	got := g.Call(r)
	got.Want(t, 429, "later", "executed")
	g.Check(u, r, got, harness.Released)
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
			g := harness.Start(t, "route {\n agent_guard\n e2e_do %s\n}", row.do)
			r := harness.Request{Path: "/x", Id: "k"}
			if row.answer {
				g.Call(r).Terminal(t, 409, "in-doubt")
			} else if res, err := g.Send(r); err == nil {
				if got := harness.Read(res); !got.Cut {
					t.Errorf("answered %d %q", got.Status, got.Body)
				}
			}
			g.Call(r).Terminal(t, 409, "in-doubt")
		})
	}
	g := harness.Start(t, "route {\n agent_guard\n e2e_do nothing\n}")
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 200, "", "executed")
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 200, "", "replayed")
}

// The retentions are apart: a result that is no longer kept does not free its key,
// a key that is no longer kept does. What is in doubt stays (promise P1).
func TestRetention(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n retain_result 1h\n retain_key 2h\n}", u.Addr)
	u.On("/doubt", harness.Reset)
	r, doubt := harness.Request{Path: "/x", Id: "k"}, harness.Request{Path: "/doubt", Id: "k"}
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Call(doubt).Terminal(t, 409, "in-doubt")

	g.Store.Pass(59 * time.Minute)
	g.Call(r).Want(t, 201, "arrival 1", "replayed")
	g.Store.Pass(2 * time.Minute)
	doc := g.Call(r).Terminal(t, 409, "result-expired")
	if doc.State != "completed" || *doc.SafeNewKey {
		t.Errorf("%+v", doc)
	}
	g.Store.Pass(time.Hour)
	g.Call(r).Want(t, 201, "arrival 2", "executed")
	g.Store.Pass(24 * 365 * time.Hour)
	g.Call(doubt).Terminal(t, 409, "in-doubt")
	u.Arrived("/doubt", 1)
}
