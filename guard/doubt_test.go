package guard_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// says answers with a status, a body and header fields given as name, value, name, value...
func says(status int, body string, fields ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(fields); i += 2 {
			w.Header().Set(fields[i], fields[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// silent gives no answer until the call's deadline.
func silent(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// acting is a bed with one action, before an upstream that gives these answers in turn, each
// after 10 s, and then charges. It gets the same request each time.
func acting(t *testing.T, a guard.Action, answers ...http.HandlerFunc) *bed {
	first := ""
	b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		sent := fmt.Sprint(r.Method, r.URL, r.Header, string(body), err)
		if n == 1 {
			first = sent
		} else if sent != first {
			t.Errorf("first %s, then %s", first, sent)
		}
		if n > int64(len(answers)) {
			charge(n, w, r)
			return
		}
		<-time.After(10 * time.Second)
		answers[n-1](w, r)
	})
	a.Name = "default"
	b.config.Actions = []*guard.Action{&a}
	b.start()
	return b
}

// sees makes a call and compares what its caller sees: status, Execution-Status, and the body
// or the problem with the state that it names. "final" stands behind what no SDK may send
// again, "again" behind what it shall. A new key is safe after none of it.
func (b *bed) sees(r *http.Request, want ...string) http.Header {
	b.Helper()
	w := httptest.NewRecorder()
	b.serve(w, r)
	words := []string{fmt.Sprint(w.Code), w.Header().Get("Execution-Status")}
	var doc struct {
		Type, State string
		Safe        bool `json:"safe_new_key"`
	}
	if w.Header().Get("Content-Type") == "application/problem+json" {
		if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil || doc.Safe {
			b.Errorf("%v: %s", err, w.Body)
		}
		words = append(words, path.Base(doc.Type), doc.State)
	} else {
		words = append(words, w.Body.String())
	}
	switch h := w.Header(); {
	case h.Get("X-Should-Retry") == "false" && h.Get("Stripe-Should-Retry") == "false":
		words = append(words, "final")
	case h.Get("X-Should-Retry") == "" && h.Get("Stripe-Should-Retry") == "true":
		words = append(words, "again")
	}
	if got := strings.Join(words, " "); !slices.Contains(want, got) {
		b.Errorf("got %q, want %q (%s)", got, want, w.Body)
	}
	return w.Header()
}

const (
	inDoubt = "409 in_doubt in-doubt in_doubt final"
	open    = "409 in_doubt in-doubt in_doubt again"
)

var stripe = guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownResend, Preset: execution.PresetStripe}}

// probing asks a function about calls in doubt; an answer of 0 is none.
func probing(useAnswer bool, answer func() int) guard.Action {
	is := func(status int) func(*guard.InternalAnswer) bool {
		return func(a *guard.InternalAnswer) bool { return a.Status == status }
	}
	return guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownProbe}, Probe: &guard.Probe{
		Ask: func(*http.Request, *guard.InternalRequest) (*guard.InternalAnswer, error) {
			status := answer()
			if status == 0 {
				return nil, errors.New("lost")
			}
			return &guard.InternalAnswer{Status: status, Header: http.Header{"Set-Cookie": {"a=b"}}, Body: []byte("it is done")}, nil
		},
		Applied: is(200), NotApplied: is(404), UseAnswer: useAnswer,
	}}
}

// P1, P6: what `on_unknown` makes of later calls, where one is in doubt. Neither what an
// upstream has refused of an attempt, nor a conflict, says what became of one before it.
func TestOnUnknown(t *testing.T) {
	bad, later := says(502, "bad"), says(429, "later")
	asked := 0
	status := func(code int) func() int { return func() int { asked++; return code } }
	const unavailable = "409 refused result-unavailable completed final"
	for name, c := range map[string]struct {
		action  guard.Action
		answers []http.HandlerFunc
		want    []string // of each call
		called  int64
		asked   int
	}{
		"block":              {guard.Action{}, []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", inDoubt, inDoubt}, 1, 0},
		"retry":              {guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}, []http.HandlerFunc{silent, bad, later}, []string{open, "502 in_doubt bad", "429 in_doubt later", "200 executed charge 4", "200 replayed charge 4"}, 4, 0},
		"resend":             {stripe, []http.HandlerFunc{silent, bad, says(409, "locked")}, []string{open, "502 in_doubt bad", "409 in_doubt locked", "200 executed charge 4", "200 replayed charge 4"}, 4, 0},
		"resend to a guard":  {stripe, []http.HandlerFunc{says(409, "runs", "Execution-Status", "refused")}, []string{"409 in_doubt runs", "200 executed charge 2"}, 2, 0},
		"probe: applied":     {probing(false, status(200)), []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", unavailable, unavailable}, 1, 1},
		"probe: its answer":  {probing(true, status(200)), []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", "200 replayed it is done", "200 replayed it is done"}, 1, 1},
		"probe: not applied": {probing(false, status(404)), []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", "200 executed charge 2", "200 replayed charge 2"}, 2, 1},
		"probe: neither":     {probing(false, status(202)), []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", inDoubt, inDoubt}, 1, 2},
		"probe: no answer":   {probing(false, status(0)), []http.HandlerFunc{bad}, []string{"502 in_doubt bad final", inDoubt, inDoubt}, 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked = 0
				b := acting(t, c.action, c.answers...)
				for _, want := range c.want {
					if h := b.sees(b.post(""), want); h.Get("Set-Cookie") != "" {
						t.Errorf("an answer that is replayed sets a cookie: %v", h)
					}
				}
				b.was(c.called)
				if asked != c.asked {
					t.Errorf("the upstream was asked %d times, want %d", asked, c.asked)
				}
			})
		})
	}
}

// P6: what a named gateway behind this one has held up was not sent; its caller comes again. Nobody else
// is believed, nor is what it says of another call, and of an attempt before it says nothing.
func TestHeldUpByTheNextGateway(t *testing.T) {
	refusal := func(more ...string) http.HandlerFunc {
		return says(409, "wait", append([]string{"Execution-Status", "refused", "Execution-Problem", "workflow-paused", "Execution-Safe-New-Key", "true"}, more...)...)
	}
	const doubt, goesOn, replayed = "409 in_doubt wait final", "200 executed charge 2", "200 replayed charge 2"
	for name, c := range map[string]struct {
		answers []http.HandlerFunc
		unnamed bool
		retry   bool
		want    []string
	}{
		"paused":              {[]http.HandlerFunc{refusal()}, false, false, []string{"409 refused wait", goesOn, replayed}},
		"to be approved":      {[]http.HandlerFunc{refusal("Execution-Problem", "approval-required")}, false, false, []string{"409 refused wait", goesOn, replayed}},
		"of this call":        {[]http.HandlerFunc{refusal("Execution-Id", "k")}, false, false, []string{"409 refused wait", goesOn, replayed}},
		"no identity":         {[]http.HandlerFunc{refusal()}, true, false, []string{doubt, inDoubt}},
		"of another call":     {[]http.HandlerFunc{refusal("Execution-Id", "other")}, false, false, []string{doubt, inDoubt}},
		"it may have run":     {[]http.HandlerFunc{refusal("Execution-Safe-New-Key", "false")}, false, false, []string{doubt, inDoubt}},
		"rolled back":         {[]http.HandlerFunc{refusal("Execution-Problem", "rolled-back")}, false, false, []string{doubt, inDoubt}},
		"no problem":          {[]http.HandlerFunc{refusal("Execution-Problem", "")}, false, false, []string{doubt, inDoubt}},
		"no guard's":          {[]http.HandlerFunc{refusal("Execution-Status", "executed")}, false, false, []string{"409 executed wait", "409 replayed wait"}},
		"after a lost answer": {[]http.HandlerFunc{silent, refusal()}, false, true, []string{open, "409 in_doubt wait", "200 executed charge 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var a guard.Action
				if c.retry {
					a.OnUnknown = guard.OnUnknownRetry
				}
				b := acting(t, a, c.answers...)
				if !c.unnamed {
					b.config.UpstreamIdentity = "spiffe://example.com/b"
				}
				b.start()
				for _, want := range c.want {
					b.sees(b.post(""), want)
				}
			})
		})
	}
}

// The same of a message, whose refusal has the status 200.
func TestMessageHeldUpByTheNextGateway(t *testing.T) {
	const refusal = `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,"message":"m","data":{"type":"/.well-known/cascade/problems/workflow-paused","status":409}}}`
	for identity, want := range map[string][]string{"spiffe://example.com/b": {"200 refused", "200 executed"}, "": {"200 executed", "200 in_doubt"}} {
		b := newBed(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
			if n > 1 {
				says(200, `{"jsonrpc":"2.0","id":1,"result":{"content":[]}}`, "Content-Type", "application/json")(w, nil)
				return
			}
			says(200, refusal, "Content-Type", "application/json", "Execution-Status", "refused", "Execution-Problem", "workflow-paused", "Execution-Safe-New-Key", "true")(w, nil)
		})
		b.config.Protocol, b.config.UpstreamIdentity = protocol.MCP, identity
		b.start()
		for _, want := range want {
			r := httptest.NewRequest("POST", "/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay"}}`))
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Idempotency-Key", "k")
			w := httptest.NewRecorder()
			b.serve(w, r)
			if got := fmt.Sprint(w.Code, " ", w.Header().Get("Execution-Status")); got != want {
				t.Errorf("%q: %s, want %s: %s", identity, got, want, w.Body)
			}
		}
	}
}

// Trap 15: many retries of one call in doubt make one probe, and at most one further
// execution. P7: who asks and leaves does not waste the answer for the others.
func TestManyRetriesOfADoubt(t *testing.T) {
	for name, c := range map[string]struct {
		action func(answer func() int) guard.Action
		status int
		want   []string
		called int64
		leaves bool // who has come first
	}{
		"retry": {func(func() int) guard.Action {
			return guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}
		}, 0, []string{"200 executed again", "200 attached again"}, 2, false},
		"applied":             {nil, 200, []string{"409 refused result-unavailable completed final"}, 1, false},
		"applied, one leaves": {nil, 200, []string{"409 refused result-unavailable completed final"}, 1, true},
		"not applied":         {nil, 404, []string{"200 executed again", "200 attached again"}, 2, false},
		"neither":             {nil, 202, []string{inDoubt}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked atomic.Int64
				ask := func() int { asked.Add(1); <-time.After(10 * time.Second); return c.status }
				action := probing(false, ask)
				if c.action != nil {
					action = c.action(ask)
				}
				b := acting(t, action, says(502, "bad"), says(200, "again"))
				b.serve(httptest.NewRecorder(), b.post(""))
				ctx, leave := context.WithCancel(t.Context())
				var all sync.WaitGroup
				if c.leaves {
					all.Go(func() { b.serve(httptest.NewRecorder(), b.post("").WithContext(ctx)) })
					synctest.Wait()
				}
				for range 50 {
					all.Go(func() { b.sees(b.post(""), c.want...) })
				}
				synctest.Wait()
				leave()
				all.Wait()
				b.was(c.called)
				if n := asked.Load(); n != min(int64(c.status), 1) {
					t.Errorf("the upstream was asked %d times", n)
				}
			})
		})
	}
}

// P6: who made a call that went into doubt, who is attached to it and who comes later see that
// it did, and are to send it again or not, whatever the upstream's status is and says of retries.
func TestDoubtIsShownInOneWay(t *testing.T) {
	for name, c := range map[string]struct {
		action guard.Action
		answer http.HandlerFunc
		want   string
	}{
		"502":                   {guard.Action{}, says(502, "bad"), "502 in_doubt bad final"},
		"503 that says retry":   {guard.Action{}, says(503, "bad", "X-Should-Retry", "true", "Stripe-Should-Retry", "true"), "503 in_doubt bad final"},
		"504 without a body":    {guard.Action{}, says(504, ""), "504 in_doubt  final"},
		"500 under strict":      {guard.Action{Policy: guard.Policy{Preset: execution.PresetStrict}}, says(500, "bad"), "500 in_doubt bad final"},
		"408":                   {guard.Action{}, says(408, "bad"), "408 in_doubt bad final"},
		"another guard's doubt": {guard.Action{}, says(500, "bad", "Execution-Status", "in_doubt"), "500 in_doubt bad final"},
		"another guard refuses": {guard.Action{}, says(409, "bad", "Execution-Status", "refused"), "409 in_doubt bad final"},
		"by a rule": {guard.Action{Rule: func(status int, _ http.Header) (execution.Verdict, bool) { return execution.InDoubt, status == 202 }},
			says(202, "later"), "202 in_doubt later final"},
		"no answer": {guard.Action{}, silent, inDoubt},
		"run again": {guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}, silent, open},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, c.action, c.answer)
				b.config.AttachWait = jsontime.Duration(time.Hour)
				b.start()
				var all sync.WaitGroup
				for range 3 {
					all.Go(func() { b.sees(b.post(""), c.want) })
				}
				all.Wait()
				b.was(1) // whoever waited for it does not run in its turn
				if c.want == open {
					b.sees(b.post(""), "200 executed charge 2")
					return
				}
				b.sees(b.post(""), inDoubt)
				b.was(1)
			})
		})
	}
}

// P1: past the time for which the upstream keeps keys, counted from the first attempt, the call
// is in doubt for good: time is no evidence.
func TestResendEndsWithTheUpstreamsKey(t *testing.T) {
	for set, limit := range map[time.Duration]time.Duration{0: 23 * time.Hour, time.Hour: time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			a := stripe
			a.ResendFor, a.Deadline = jsontime.Duration(set), jsontime.Duration(time.Second)
			b := acting(t, a, silent, silent)
			began := time.Now()
			b.sees(b.post(""), open)
			<-time.After(limit - time.Second - time.Since(began))
			b.sees(b.post(""), open)
			b.was(2)
			for range 2 {
				b.sees(b.post(""), inDoubt)
			}
			b.was(2)
		})
	}
}

// P1: what the upstream would not know again by its key is not sent again.
func TestResendNeedsTheSameKeyAndBytes(t *testing.T) {
	call := func(b *bed, field, key, body string) *http.Request {
		r := b.post("")
		r.Header.Del("Idempotency-Key")
		r.Header.Set(field, key)
		r.Header.Set("Content-Type", "application/json")
		r.Body = io.NopCloser(strings.NewReader(body))
		return r
	}
	const key, body = "Idempotency-Key", `{"a":1,"b":2}`
	for name, c := range map[string]struct {
		first, then [3]string // field, id and body
		keyed       bool      // the first attempt could be sent again as it was
	}{
		"another field":    {[3]string{"Execution-Id", "k", body}, [3]string{"Execution-Id", "k", body}, false},
		"quoted":           {[3]string{key, "k", body}, [3]string{key, `"k"`, body}, true},
		"other bytes":      {[3]string{key, "k", body}, [3]string{key, "k", `{"b":2, "a":1}`}, true},
		"beside the field": {[3]string{key, "k", body}, [3]string{"Execution-Id", "k", body}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, stripe, silent)
				b.sees(call(b, c.first[0], c.first[1], c.first[2]), map[bool]string{true: open, false: inDoubt}[c.keyed])
				b.sees(call(b, c.then[0], c.then[1], c.then[2]), inDoubt)
				b.was(1)
				if c.keyed {
					b.sees(call(b, c.first[0], c.first[1], c.first[2]), "200 executed charge 2")
				}
			})
		})
	}
}

// Stripe-Should-Retry of an upstream that keeps keys goes before its status, and passes.
func TestUpstreamsAdviceOnRetries(t *testing.T) {
	const again, replayed = "200 executed charge 2", "replayed"
	for _, c := range []struct {
		code                  int
		advice, status, retry string
	}{
		{400, "", "executed", again}, {409, "", "executed", again}, {402, "", "executed", replayed}, {500, "", "executed", replayed},
		{402, "true", "executed", again}, {409, "true", "executed", again}, {500, "true", "in_doubt", again}, {503, "true", "in_doubt", again},
		{400, "false", "executed", replayed}, {409, "false", "executed", replayed}, {500, "false", "executed", replayed},
		{502, "false", "executed", replayed}, {429, "false", "executed", again},
	} {
		t.Run(fmt.Sprint(c.code, c.advice), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var fields []string
				if c.advice != "" {
					fields = []string{"Stripe-Should-Retry", c.advice}
				}
				b := acting(t, stripe, says(c.code, "no", fields...))
				w := httptest.NewRecorder()
				b.serve(w, b.post(""))
				if h := w.Header(); w.Code != c.code || h.Get("Execution-Status") != c.status || h.Get("Stripe-Should-Retry") != c.advice {
					t.Errorf("%d %v", w.Code, h)
				}
				if c.retry == replayed {
					c.retry = fmt.Sprint(c.code, " replayed")
				}
				b.do(b.post(""), c.retry)
			})
		})
	}
}

// P6: of what a guard behind this one refuses as a conflict nobody knows whether it was executed,
// over gRPC as over HTTP.
func TestGRPCRefusalOfAnotherGuard(t *testing.T) {
	for code, want := range map[string]string{"9": "in-doubt", "6": "in-doubt", "14": "in-doubt", "3": "replayed", "7": "executed"} {
		synctest.Test(t, func(t *testing.T) {
			b := acting(t, guard.Action{Policy: guard.Policy{GRPC: guard.GRPCUnary}}, says(200, "", "Content-Type", "application/grpc", "Grpc-Status", code, "Execution-Status", "refused"))
			var h http.Header
			for range 2 {
				r, w := b.post(""), httptest.NewRecorder()
				r.ProtoMajor, r.Body = 2, http.NoBody
				r.Header.Set("Content-Type", "application/grpc")
				r.Header.Set("Te", "trailers")
				b.serve(w, r)
				h = w.Header()
			}
			if got := cmp.Or(h.Get("Execution-Problem"), h.Get("Execution-Status")); got != want {
				t.Errorf("%s: %s, want %s (%v)", code, got, want, h)
			}
		})
	}
}

// What an upstream says in the guard's own fields is not said by the guard.
func TestUpstreamCannotSpeakForTheGuard(t *testing.T) {
	lies := []string{"Execution-Id", "lie", "Execution-Status", "attached", "Idempotent-Replayed", "true", "Execution-Checkpoint", "lie"}
	for status, want := range map[int][]string{
		201: {"201 executed ", "201 replayed "}, 204: {"204 executed ", "204 replayed "}, 429: {"429 executed ", "200 executed charge 2"},
		504: {"504 in_doubt  final", inDoubt},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := acting(t, guard.Action{}, says(status, "", lies...))
			for _, want := range want {
				h := b.sees(b.post(""), want)
				if got := fmt.Sprint(h["Execution-Id"], h["Execution-Checkpoint"], len(h["Execution-Status"])); got != "[k] [] 1" ||
					(h.Get("Idempotent-Replayed") != "") != strings.Contains(want, "replayed") {
					t.Errorf("%d: %v", status, h)
				}
			}
		})
	}
}

// What an attempt has left in the header is not in the problem, and what others have is.
func TestProblemsHaveNoHeadersOfAnAttempt(t *testing.T) {
	var b *bed
	b = newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
		b.disk.broken.Store(true)
		says(204, "", "X-Upstream", "u", "Etag", "e")(w, r)
	})
	w := httptest.NewRecorder()
	w.Header().Set("X-Outer", "o")
	b.serve(w, b.post(""))
	if h := w.Header(); w.Code != 409 || h.Get("Execution-Status") != "in_doubt" || h.Get("X-Upstream") != "" || h.Get("Etag") != "" || h.Get("X-Outer") != "o" {
		t.Errorf("%d %v", w.Code, h)
	}
}

// Step 2: a body over the cap is refused before anything is claimed or forwarded, whether its
// length is announced or not.
func TestBodyTooLarge(t *testing.T) {
	b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	b.config.MaxBody = 10
	b.start()
	send := func(size int, announced bool, want string) {
		t.Helper()
		r := b.post("")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(strings.Repeat("x", size))), -1
		if announced {
			r.ContentLength = int64(size)
		}
		b.sees(r, want)
	}
	for _, announced := range []bool{true, false} {
		send(11, announced, "413 refused body-too-large  final")
		send(1000, announced, "413 refused body-too-large  final")
	}
	b.was(0)
	send(10, false, "200 executed xxxxxxxxxx")
	send(10, true, "200 replayed xxxxxxxxxx")
}
