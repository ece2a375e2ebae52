package caddymodule

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// undoWay is a running configuration with a guard "g" whose own requests go to upstream,
// and the sender over it. The guard's chain has a guard of the same name and the endpoints
// on the way, which must let an undo by.
func undoWay(t *testing.T, upstream, transport, members string) (*App, *undoSender) {
	t.Helper()
	dir := t.TempDir()
	return undoWayIn(t, dir, upstream, transport, members)
}

func undoWayIn(t *testing.T, dir, upstream, transport, members string) (*App, *undoSender) {
	t.Helper()
	app := loadedApp(t, fmt.Sprintf(`{
		"store": {"module": "badger", "path": %q}%s
	}`, filepath.Join(dir, "store"), members), fmt.Sprintf(`{"servers": {"site": {
		"listen": ["127.0.0.1:0"], "automatic_https": {"disable": true}, "routes": [{"handle": [
			{"handler": "agent_guard", "name": "g", "actions": [{"name": "pay"}], "upstream": [
				{"handler": "agent_guard_endpoints"},
				{"handler": "agent_guard", "name": "inner", "require_ect": false},
				{"handler": "reverse_proxy", "transport": {"protocol": "agent_guard"%s}, "upstreams": [{"dial": %q}],
				 "load_balancing": {"retries": 3, "retry_match": [{"method": ["POST", "PUT"]}]}}
			]},
			{"handler": "static_response"}
		]}]
	}}}`, transport, upstream))
	return app, newUndoSender(app.held)
}

// loadedApp starts the app agent_guard of a configuration with these two apps. The servers
// do not listen.
func loadedApp(t *testing.T, guard, web string) *App {
	t.Helper()
	var config caddy.Config
	if err := json.Unmarshal([]byte(fmt.Sprintf(`{"admin": {"disabled": true}, "apps": {"agent_guard": %s, "http": %s}}`, guard, web)), &config); err != nil {
		t.Fatal(err)
	}
	ctx, err := caddy.ProvisionContext(&config)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := ctx.App("agent_guard")
	if err != nil {
		t.Fatal(err)
	}
	app := loaded.(*App)
	t.Cleanup(func() { cleanUp(t, app) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	return app
}

// refund is a request of an undo for the call of the action pay.
func refund() *rollback.Outgoing {
	return &rollback.Outgoing{
		Method: "POST", URL: "/v1/refunds?full=1", Header: http.Header{"Content-Type": {"application/json"}},
		Body: []byte(`{"charge":"c1"}`), Host: "pay.example.com", Guard: "g", Action: "pay",
		Rollback: "r1", Checkpoint: "c1", Workflow: "w1",
	}
}

// asError is the error of an undo that was not sent, or may have been.
func asError(t *testing.T, err error) *rollback.SendError {
	t.Helper()
	var e *rollback.SendError
	if !errors.As(err, &e) {
		t.Fatalf("%v is no SendError", err)
	}
	return e
}

// An undo comes to the upstream of its call as it was made, under its own key, past what
// stands on the way, and its answer comes back as it is.
func TestUndoReachesTheUpstreamOfItsCall(t *testing.T) {
	type arrival struct {
		*http.Request
		body string
	}
	arrived := make(chan arrival, 1)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		arrived <- arrival{r, string(body)}
		w.Header().Set("ETag", `"7"`)
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, "no")
	}))
	defer up.Close()
	_, s := undoWay(t, up.Listener.Addr().String(), "", "")
	answer, err := s.Send(t.Context(), refund())
	if err != nil {
		t.Fatal(err)
	}
	if answer.Status != 409 || string(answer.Body) != "no" || answer.Header.Get("ETag") != `"7"` || answer.Cut {
		t.Errorf("%+v", answer)
	}
	r := <-arrived
	if r.Method != "POST" || r.RequestURI != "/v1/refunds?full=1" || r.Host != "pay.example.com" || r.body != `{"charge":"c1"}` {
		t.Errorf("%s %s at %s: %s", r.Method, r.RequestURI, r.Host, r.body)
	}
	for name, want := range map[string]string{
		"Idempotency-Key": "r1:c1", "Workflow-Id": "w1", "Content-Type": "application/json", "X-Forwarded-For": "127.0.0.1",
		"X-Forwarded-Proto": "http", "Execution-Parent": "", "Authorization": "", "Accept-Encoding": "identity",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	// A look at what there is must not be answered with what there was.
	look := refund()
	look.Method, look.Body = "GET", nil
	if _, err := s.Send(t.Context(), look); err != nil {
		t.Error(err)
	}
	if r := <-arrived; r.Header.Get("Idempotency-Key") != "" {
		t.Errorf("a GET goes under the key %q", r.Header.Get("Idempotency-Key"))
	}
}

// The well-known paths below the guard are the gateway's for callers; an undo whose path
// is one of them is for the upstream.
func TestUndoIsNobodysCall(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path) }))
	defer up.Close()
	app, s := undoWay(t, up.Listener.Addr().String(), "", "")
	for _, path := range []string{"/.well-known/cascade/policy", "/.well-known/cascade/rollback", "//double"} {
		o := refund()
		o.URL = path
		if answer, err := s.Send(t.Context(), o); err != nil || string(answer.Body) != path {
			t.Errorf("%s: %+v, %v", path, answer, err)
		}
	}
	page, err := app.held.calls.Executions.List(t.Context(), execution.Filter{}, "", 10)
	if err != nil || len(page.Executions) != 0 {
		t.Errorf("an undo was taken for a call: %+v, %v", page, err)
	}
}

// While the upstream's breaker is open, an undo goes through, and is the only one.
func TestUndoIsSentPastAnOpenBreaker(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer up.Close()
	addr := up.Listener.Addr().String()
	_, s := undoWay(t, addr, "", "")
	circuits, err := proxy.Open(proxy.Settings{}, []string{addr}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer circuits.Close()
	circuits.Breaker(addr).SetMode(breaker.ForcedOpen)
	if answer, err := s.Send(t.Context(), refund()); err != nil || answer.Status != 200 {
		t.Errorf("%+v, %v", answer, err)
	}
	m := proxy.Join()
	defer m.Leave()
	for _, b := range m.Status() {
		if b.Key.Upstream == addr && (b.Calls != 0 || b.Rejected != 0) {
			t.Errorf("%+v", b)
		}
	}
}

// Where it is proven that not a byte was sent the error says so, and nowhere else; and
// nothing on the way sends an undo twice (P1).
func TestP1UndoIsSentOnceOrProvenUnsent(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\n"
	for _, tt := range []struct {
		name    string
		answers string // of the upstream; it hangs up then
		unsent  bool
		cut     bool
		ok      bool
	}{
		{name: "hangs up"},
		{name: "cut in its header", answers: head + "Content-"},
		{name: "cut in a body of known length", answers: head + "Content-Length: 9\r\n\r\nabc"},
		{name: "cut in a chunk", answers: head + "Transfer-Encoding: chunked\r\n\r\n9\r\nabc"},
		{name: "ended by nothing but the connection", answers: head + "\r\nabc", ok: true, cut: true},
		{name: "whole", answers: head + "Content-Length: 3\r\n\r\nabc", ok: true},
	} {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/direct=%v", tt.name, direct), func(t *testing.T) {
				addr, count := rawUpstream(t, tt.answers)
				_, s := undoWay(t, addr, "", "")
				arrivals := 1
				o := refund()
				if direct {
					o.URL = "http://" + addr + o.URL
				}
				if tt.cut { // who looks must not take a part for the whole
					look := *o
					look.Method, look.Body = "GET", nil
					_, err := s.Send(t.Context(), &look)
					if e := asError(t, err); e.NotSent || !errors.Is(err, errCutShort) {
						t.Errorf("a look is answered with what may be cut: %+v", e)
					}
					arrivals++
				}
				answer, err := s.Send(t.Context(), o)
				if tt.ok {
					if err != nil || answer.Cut != tt.cut || string(answer.Body) != "abc" {
						t.Errorf("%+v, %v", answer, err)
					}
				} else if e := asError(t, err); e.NotSent || e.Reason != "" {
					t.Errorf("it arrived, and is said not to be sent: %+v", e)
				}
				if n := count(); n != arrivals {
					t.Errorf("%d arrivals of %d requests", n, arrivals)
				}
			})
		}
	}
	t.Run("refused", func(t *testing.T) {
		_, s := undoWay(t, "127.0.0.1:2", "", "")
		for _, target := range []string{"/x", "http://127.0.0.1:2/x"} {
			o := refund()
			o.URL = target
			_, err := s.Send(t.Context(), o)
			if e := asError(t, err); !e.NotSent || e.Reason != "" {
				t.Errorf("%s: %+v", target, e)
			}
		}
	})
	t.Run("too late", func(t *testing.T) {
		up := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		defer up.Close()
		_, s := undoWay(t, up.Listener.Addr().String(), "", "")
		for _, target := range []string{"/x", up.URL + "/x"} {
			ctx, cancel := context.WithCancel(t.Context())
			o := refund()
			o.URL = target
			time := make(chan struct{})
			go func() { <-time; cancel() }()
			up.Config.Handler = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.ReadAll(r.Body)
				close(time)
				<-r.Context().Done()
			})
			_, err := s.Send(ctx, o)
			if e := asError(t, err); e.NotSent || !errors.Is(err, context.Canceled) && target == "/x" {
				t.Errorf("%s: %+v", target, e)
			}
			cancel()
			// What is over before it begins was not sent.
			if _, err = s.Send(ctx, o); err == nil {
				t.Errorf("%s is sent after its time", target)
			}
		}
	})
}

// rawUpstream reads one request on each connection, writes answer, and hangs up. count is
// how many came.
func rawUpstream(t *testing.T, answer string) (addr string, count func() int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	n := 0
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			buf := make([]byte, 4096)
			for got := ""; !strings.Contains(got, "\r\n\r\n") || strings.HasPrefix(got, "POST") && !strings.HasSuffix(got, "}"); {
				m, err := c.Read(buf)
				if err != nil {
					break
				}
				if got == "" {
					mu.Lock()
					n++
					mu.Unlock()
				}
				got += string(buf[:m])
			}
			_, _ = io.WriteString(c, answer)
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return l.Addr().String(), func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

// Answers are kept up to a limit, and say where they were cut.
func TestUndoAnswerIsBounded(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(rollback.MaxAnswer+2))
		_, _ = w.Write(make([]byte, rollback.MaxAnswer+2))
	}))
	defer up.Close()
	_, s := undoWay(t, up.Listener.Addr().String(), "", "")
	for _, target := range []string{"/x", up.URL + "/x"} {
		o := refund()
		o.URL = target
		answer, err := s.Send(t.Context(), o)
		if err != nil || !answer.Cut || len(answer.Body) != rollback.MaxAnswer {
			t.Errorf("%s: %v", target, err)
		}
	}
}

// P8: what the configuration does not lead to any more is not guessed, and recorded
// credentials go to no other upstream than the call's.
func TestP8UndoGoesNowhereElse(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("something was sent") }))
	defer up.Close()
	_, s := undoWay(t, up.Listener.Addr().String(), "", "")
	recorded := refund()
	recorded.Recorded, recorded.Spec = true, &rollback.Spec{Reach: rollback.Reach{Addresses: []string{"http://127.0.0.1:1"}}}
	elsewhere := refund()
	elsewhere.Recorded, elsewhere.URL = true, up.URL+"/x"
	for name, tt := range map[string]struct {
		o    *rollback.Outgoing
		want rollback.Reason
	}{
		"another upstream":           {recorded, rollback.ReasonOtherUpstream},
		"a whole URL":                {elsewhere, rollback.ReasonNoCredentials},
		"no such guard":              {with(func(o *rollback.Outgoing) { o.Guard = "h" }), rollback.ReasonNoUpstream},
		"a guard without a way":      {with(func(o *rollback.Outgoing) { o.Guard, o.Action = "inner", "default" }), rollback.ReasonNoUpstream},
		"neither path nor URL":       {with(func(o *rollback.Outgoing) { o.URL = "v1/x" }), rollback.ReasonNoUpstream},
		"another scheme":             {with(func(o *rollback.Outgoing) { o.URL = "ftp://example.com/x" }), rollback.ReasonNoUpstream},
		"a delegate without a token": {with(func(o *rollback.Outgoing) { o.URL, o.Delegated = up.URL+"/rollback", true }), rollback.ReasonNoCredentials},
	} {
		_, err := s.Send(t.Context(), tt.o)
		if e := asError(t, err); !e.NotSent || e.Reason != tt.want {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func with(change func(*rollback.Outgoing)) *rollback.Outgoing {
	o := refund()
	change(o)
	return o
}

// A redirect is an answer: nothing follows it, with its credentials or without. And a
// certificate that nobody vouches for ends the request.
func TestUndoTrustsNoStranger(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect is followed") }))
	defer other.Close()
	up := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer up.Close()
	_, s := undoWay(t, up.Listener.Addr().String(), "", "")
	for _, target := range []string{"/x", up.URL + "/x"} {
		o := refund()
		o.URL = target
		if answer, err := s.Send(t.Context(), o); err != nil || answer.Status != 307 {
			t.Errorf("%s: %+v, %v", target, answer, err)
		}
	}
	secure := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a stranger is trusted") }))
	secure.Config.ErrorLog = nil
	secure.StartTLS()
	defer secure.Close()
	o := refund()
	o.URL = secure.URL + "/x"
	_, err := s.Send(t.Context(), o)
	if e := asError(t, err); e.NotSent || !errors.As(err, new(*tls.CertificateVerificationError)) {
		t.Errorf("%v", err)
	}
}

// An agent that is asked to roll back knows who asks, for what, and a repetition by its
// bytes, also after a restart of the gateway.
func TestDelegateIsAskedWithAToken(t *testing.T) {
	var tokens []string
	agent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		tokens = append(tokens, r.Header.Get(ect.FieldName))
		if key := r.Header.Get("Idempotency-Key"); key == "" {
			t.Error("no key")
		}
	}))
	defer agent.Close()
	dir := t.TempDir()
	identity := withIdentity(filepath.Join(dir, "identity"), "")
	checkpoint := "6ba7b810-9dad-41d1-80b4-00c04fd430c8"
	o := with(func(o *rollback.Outgoing) {
		o.URL, o.Delegated, o.Checkpoint, o.Rollback = agent.URL+"/rollback", true, checkpoint, "r1"
	})
	for range 2 {
		t.Run("", func(t *testing.T) {
			_, s := undoWayIn(t, dir, agent.Listener.Addr().String(), "", identity)
			for range 2 {
				if answer, err := s.Send(t.Context(), o); err != nil || answer.Status != 200 {
					t.Fatalf("%+v, %v", answer, err)
				}
			}
		})
	}
	if len(tokens) != 4 || tokens[0] == "" || tokens[1] != tokens[0] || tokens[2] != tokens[0] || tokens[3] != tokens[0] {
		t.Fatalf("repetitions are not known by their tokens: %q", tokens)
	}
	_, s := undoWayIn(t, dir, agent.Listener.Addr().String(), "", identity)
	o.Rollback = "r2"
	if _, err := s.Send(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if tokens[4] == tokens[0] {
		t.Error("another rollback asks with the same token")
	}
	claims, err := ect.ParseInsecure(tokens[0])
	if err != nil {
		t.Fatal(err)
	}
	reason, _ := claims.Ext().Text(ect.MemberRollbackID)
	if claims.Event() != ect.EventRollbackRequest || len(claims.Lacks()) > 0 || len(claims.Parents()) != 1 || claims.Parents()[0] != checkpoint ||
		claims.Issuer() != gatewayName || len(claims.Audience()) != 1 || claims.Audience()[0] != agent.URL || reason != "urn:uuid:r1" {
		t.Errorf("%+v", claims)
	}
}

// The call's own upstream tells ways apart, whatever guard they are of; where it is gone, an
// undo is not sent to whatever else there is (P6), but where the guard was named, and moved.
func TestUndoGuessesNoUpstream(t *testing.T) {
	reach := func(fields string, addresses ...string) rollback.Reach {
		return rollback.Reach{Addresses: addresses, Host: "h", Rewrite: "m", Fields: fields}
	}
	guard := func(name string) *Handler { return &Handler{Settings: guard.Settings{Name: name}} }
	way := func(r rollback.Reach, own bool, guards ...*Handler) passage {
		return passage{reach: r, own: own, guards: guards}
	}
	g, other, unnamed := guard("g"), guard("other"), guard(defaultGuard)
	a, b := reach("", "http://a:1"), reach("", "http://b:1")
	rewritten, hosted := a, a
	rewritten.Rewrite, hosted.Host = "n", "i"
	for name, tt := range map[string]struct {
		all      []passage
		guard    string
		recorded bool
		want     int
		err      error
	}{
		"the call's own":                     {[]passage{way(b, true, g), way(a, true, g)}, "g", true, 1, nil},
		"its guard goes first":               {[]passage{way(a, true, other), way(a, true, g)}, "g", true, 1, nil},
		"under another guard's name":         {[]passage{way(b, true, g), way(a, true, other)}, "g", true, 1, nil},
		"without a guard":                    {[]passage{way(b, true, g), way(a, false)}, "g", true, 1, nil},
		"a pool that has grown":              {[]passage{way(reach("", "http://a:1", "http://c:1"), true, unnamed)}, defaultGuard, true, 0, nil},
		"the same name with another header":  {[]passage{way(reach("x", "http://a:1"), true, g)}, "g", true, 0, nil},
		"several of the name, other headers": {[]passage{way(reach("x", "http://a:1"), true, g), way(reach("y", "http://a:1"), true, g)}, "g", false, -1, errManyGuards},
		"another name with another header":   {[]passage{way(reach("x", "http://a:1"), true, other)}, "g", false, -1, errNoGuard},
		"another path at the same address":   {[]passage{way(rewritten, true, unnamed)}, defaultGuard, false, -1, errNoGuard},
		"another host at the same address":   {[]passage{way(hosted, true, unnamed)}, defaultGuard, false, -1, errNoGuard},
		"a named guard that has moved":       {[]passage{way(b, true, g), way(b, false, g)}, "g", false, 0, nil},
		"the same with credentials":          {[]passage{way(b, true, g)}, "g", true, -1, errOtherWay},
		"a guard without a name has moved":   {[]passage{way(b, true, unnamed)}, defaultGuard, false, -1, errNoGuard},
		"moved to several":                   {[]passage{way(b, true, g), way(reach("", "http://c:1"), true, g)}, "g", false, -1, errManyGuards},
		"none":                               {nil, "g", false, -1, errNoGuard},
	} {
		app := new(App)
		app.passagesOnce.Do(func() { app.knownPassages = tt.all })
		got, err := app.find(&rollback.Outgoing{Guard: tt.guard, Recorded: tt.recorded, Spec: &rollback.Spec{Reach: a}})
		if !errors.Is(err, tt.err) || tt.want >= 0 && got != &app.knownPassages[tt.want] || tt.want < 0 && got != nil {
			t.Errorf("%s: %+v %v", name, got, err)
		}
	}
}

// P6, P8: what decides where a request arrives is the address with its TLS name, the Host and the URI; header fields count for
// other guards.
func TestWhereHandlersLead(t *testing.T) {
	plain := func() *reverseproxy.Handler {
		return &reverseproxy.Handler{Upstreams: reverseproxy.UpstreamPool{{Dial: "a:1"}}, Transport: new(reverseproxy.HTTPTransport)}
	}
	request := func(ops headers.HeaderOps) *reverseproxy.Handler {
		h := plain()
		h.Headers = &headers.Handler{Request: &ops}
		return h
	}
	secure, named, rewriting := plain(), plain(), plain()
	secure.Transport = &reverseproxy.HTTPTransport{TLS: new(reverseproxy.TLSConfig)}
	named.Transport = &reverseproxy.HTTPTransport{TLS: &reverseproxy.TLSConfig{ServerName: "pay.example.com"}}
	rewriting.Rewrite = &rewrite.Rewrite{URI: "/v1{uri}"}
	balanced := plain()
	balanced.LoadBalancing = &reverseproxy.LoadBalancing{Retries: 3}
	several, dynamic := plain(), plain()
	dynamic.Upstreams, dynamic.DynamicUpstreams = nil, new(reverseproxy.MultiUpstreams)
	several.DynamicUpstreams = new(reverseproxy.MultiUpstreams)
	some := func(h *reverseproxy.Handler) any {
		return &caddyhttp.Subroute{Routes: caddyhttp.RouteList{{MatcherSets: caddyhttp.MatcherSets{{}}, Handlers: []caddyhttp.MiddlewareHandler{h}}}}
	}
	all := func(h *reverseproxy.Handler) any {
		return &caddyhttp.Subroute{Routes: caddyhttp.RouteList{{Handlers: []caddyhttp.MiddlewareHandler{h}}}}
	}
	for name, c := range map[string]struct {
		handlers    []any
		leads       bool // where the plain proxy leads
		credentials bool // with the same header
	}{
		"the same":                  {[]any{plain()}, true, true},
		"balanced otherwise":        {[]any{balanced}, true, true},
		"in a subroute":             {[]any{all(plain())}, true, true},
		"past guards and endpoints": {[]any{new(Endpoints), &Handler{Settings: guard.Settings{Name: "inner"}}, plain()}, true, true},
		"with TLS":                  {[]any{secure}, false, true},
		"with TLS and a name":       {[]any{named}, false, true},
		"another Host":              {[]any{request(headers.HeaderOps{Set: http.Header{"Host": {"b"}}})}, false, false},
		"a rewritten URI":           {[]any{rewriting}, false, true},
		"a rewrite before it":       {[]any{&rewrite.Rewrite{StripPathPrefix: "/v1"}, plain()}, false, true},
		"credentials":               {[]any{request(headers.HeaderOps{Set: http.Header{"Authorization": {"secret"}}})}, true, false},
		"credentials before it":     {[]any{&headers.Handler{Request: &headers.HeaderOps{Set: http.Header{"Authorization": {"secret"}}}}, plain()}, true, false},
		"some requests":             {[]any{some(plain())}, false, true},
		"no proxy":                  {[]any{&caddyhttp.StaticResponse{}}, false, true},
		"more addresses":            {[]any{several}, true, true},
	} {
		of, is := reachOf([]any{plain()}, "s"), reachOf(c.handlers, "s")
		if of.Leads(&is) != c.leads || (of.Fields == is.Fields) != c.credentials {
			t.Errorf("%s: %+v", name, is)
		}
		if text := fmt.Sprint(is); strings.Contains(text, "secret") {
			t.Errorf("P8: %s: %s", name, text)
		}
		if again := reachOf(c.handlers, "s"); !is.Leads(&again) {
			t.Errorf("%s: not the same again: %+v", name, again)
		}
	}
	sources := func(text string) rollback.Reach {
		return reachOf([]any{dynamic}, dynamicOf([]json.RawMessage{json.RawMessage(`{"dynamic_upstreams": {"source": "multi", "sources": [` + text + `]}}`)}))
	}
	unknown, a, again, b := reachOf([]any{dynamic}, ""), sources(`"a"`), sources(`"a"`), sources(`"b"`)
	if !a.Leads(&again) || a.Leads(&b) || a.Leads(&unknown) || unknown.Leads(&unknown) {
		t.Errorf("dynamic upstreams: %+v, %+v, %+v", unknown, a, b)
	}
}
