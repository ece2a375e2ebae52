package transport_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// overHTTP2 runs an HTTP/2 server, and returns its address and the options of a transport
// that calls it.
func overHTTP2(t *testing.T, h2c bool, handler http.HandlerFunc) (addr, client string) {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.Protocols = new(http.Protocols)
	if server.EnableHTTP2 = !h2c; h2c {
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		server.Start()
		client = `"versions": ["h2c"]`
	} else {
		server.Config.Protocols.SetHTTP2(true)
		server.StartTLS()
		client = fmt.Sprintf(`"tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}}`,
			base64.StdEncoding.EncodeToString(server.Certificate().Raw))
	}
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.Listener.Addr().String(), client
}

// grpc answers a call with a message, if there is one, and the fields of a trailer after
// it; without a message all is in the header.
func grpc(message string, fields ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		prefix := ""
		if message != "" {
			prefix = http.TrailerPrefix
			_, _ = w.Write([]byte(message))
		}
		for i := 0; i < len(fields); i += 2 {
			w.Header().Set(prefix+fields[i], fields[i+1])
		}
	}
}

// message is a frame of gRPC: five bytes, and what they announce. Requests here have none:
// the wrapper that reverse_proxy puts around a body does not bear HTTP/2's closing it while
// it is read.
const message = "\x00\x00\x00\x00\x02ok"

// Section 7.1: an answer of gRPC fails by its status, which is not that of HTTP: in the
// trailer, or in the header of an answer that has nothing else.
func TestGRPCOutcomes(t *testing.T) {
	tests := []struct {
		name     string
		settings string
		do       http.HandlerFunc
		timeout  string // of the request
		want     string // calls failures rate-limited
		cause    string
	}{
		{name: "good", do: grpc(message, "Grpc-Status", "0"), want: "1 0 0"},
		{name: "good without a message", do: grpc("", "Grpc-Status", "0"), want: "1 0 0"},
		{name: "a fault of the call", do: grpc("", "Grpc-Status", "5"), want: "1 0 0"},
		{name: "unavailable in the trailer", do: grpc(message, "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "unavailable in the header", do: grpc("", "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "internal in the trailer", do: grpc(message, "Grpc-Status", "13"), want: "1 1 0", cause: "grpc-status 13 (INTERNAL)"},
		{name: "a status that nobody knows", do: grpc(message, "Grpc-Status", "99"), want: "1 1 0", cause: "grpc-status 99"},
		{name: "a method that there is not", do: grpc("", "Grpc-Status", "12"), want: "1 0 0"},
		{name: "a method that there is not, which is named", settings: `"failure_status": [501]`,
			do: grpc("", "Grpc-Status", "12"), want: "1 1 0", cause: "grpc-status 12 (UNIMPLEMENTED)"},
		{name: "a limit in the trailer", do: grpc(message, "Grpc-Status", "8"), want: "0 0 1"},
		{name: "a limit in the header", do: grpc("", "Grpc-Status", "8"), want: "0 0 1"},
		{name: "called off", do: grpc("", "Grpc-Status", "1"), want: "0 0 0"},
		{name: "called off in the trailer", do: grpc(message, "Grpc-Status", "1"), want: "0 0 0"},
		{name: "called off, which is named", settings: `"failure_status": [499]`,
			do: grpc(message, "Grpc-Status", "1"), want: "1 1 0", cause: "grpc-status 1 (CANCELLED)"},
		{name: "a deadline of the upstream's own", do: grpc(message, "Grpc-Status", "4"), want: "1 1 0", cause: "grpc-status 4 (DEADLINE_EXCEEDED)"},
		{name: "a deadline before the caller's", timeout: "1H", do: grpc("", "Grpc-Status", "4"), want: "1 1 0", cause: "grpc-status 4 (DEADLINE_EXCEEDED)"},
		{name: "the caller's deadline", timeout: "1n", do: grpc("", "Grpc-Status", "4"), want: "0 0 0"},
		{name: "another status in the caller's time", timeout: "1n", do: grpc("", "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "one option rules both", settings: `"failure_status": [501]`, do: grpc(message, "Grpc-Status", "14"), want: "1 0 0"},
		{name: "a status that is named", settings: `"failure_status": [5, 401]`,
			do: grpc("", "Grpc-Status", "16"), want: "1 1 0", cause: "grpc-status 16 (UNAUTHENTICATED)"},
		{name: "the refusal of a gateway behind", do: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Execution-Status", "refused")
			grpc("", "Grpc-Status", "14")(w, r)
		}, want: "0 0 0"},
		{name: "no status", do: grpc(message), want: "1 0 0"},
		{name: "not gRPC", do: func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Grpc-Status", "14") }, want: "1 0 0"},
		{name: "a status of HTTP", do: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.WriteHeader(502)
		}, want: "1 1 0", cause: "status 502"},
		{name: "gRPC-Web, in the header", do: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/grpc-web+proto")
			w.Header().Set("Grpc-Status", "14")
		}, want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
	}
	for _, h2c := range []bool{false, true} {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("h2c=%v/%s", h2c, tt.name), func(t *testing.T) {
				addr, client := overHTTP2(t, h2c, tt.do)
				p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {%s}}, "upstreams": [{"dial": "%s"}]}`, client, tt.settings, addr)
				r := request("POST", "")
				r.Header.Set("Content-Type", "application/grpc")
				if tt.timeout != "" {
					r.Header.Set("Grpc-Timeout", tt.timeout)
				}
				if err := unguarded(p, r); err != nil {
					t.Fatal(err)
				}
				s := statusOf(t, addr)
				if got := fmt.Sprint(s.Calls, s.Failures, s.RateLimited); got != tt.want || s.Overdue != 0 || s.Cause != tt.cause {
					t.Errorf("calls, failures, rate-limited: %s, want %s; overdue %d; cause %q, want %q", got, tt.want, s.Overdue, s.Cause, tt.cause)
				}
			})
		}
	}
}

// changes hears of the changes of breakers' states.
type changes chan breaker.Event

func (c changes) Transition(e breaker.Event)    { c <- e }
func (changes) PermanentlyOpen(e breaker.Event) {}
func (changes) Dropped([]breaker.Status)        {}

// hear hears of every change until the end of the test.
func hear(t *testing.T) changes {
	t.Helper()
	heard := make(changes, 16)
	m := circuits.Join()
	t.Cleanup(m.Leave)
	m.Hear(heard)
	return heard
}

// want waits until an upstream's breaker has come into a state.
func (c changes) want(t *testing.T, upstream string, state breaker.State) {
	t.Helper()
	bound := time.After(20 * time.Second)
	for {
		select {
		case e := <-c:
			if e.Key.Upstream == upstream && e.To == state {
				return
			}
		case <-bound:
			t.Fatalf("the breaker of %s did not become %v", upstream, state)
		}
	}
}

// halfOpen lets the next call to an upstream be the probe.
func halfOpen(t *testing.T, p *proxy, upstream string) {
	t.Helper()
	p.transport(t).Refusal("GET", nil) // which makes the breaker
	m := circuits.Join()
	defer m.Leave()
	key := breaker.Key{Upstream: upstream}
	if !m.SetMode(key, breaker.ForcedOpen) || !m.SetMode(key, breaker.Auto) {
		t.Fatalf("%s has no breaker", upstream)
	}
}

// A probe is judged by its status, which may come after the header.
func TestGRPCProbe(t *testing.T) {
	for name, test := range map[string]struct {
		do    http.HandlerFunc
		state breaker.State
		cause string
	}{
		"good":                         {do: grpc(message, "Grpc-Status", "0"), state: breaker.Closed},
		"good without a message":       {do: grpc("", "Grpc-Status", "0"), state: breaker.Closed},
		"unavailable in the header":    {do: grpc("", "Grpc-Status", "14"), state: breaker.Open, cause: "grpc-status 14 (UNAVAILABLE)"},
		"a limit":                      {do: grpc("", "Grpc-Status", "8"), state: breaker.Open, cause: "grpc-status 8 (RESOURCE_EXHAUSTED)"},
		"called off":                   {do: grpc("", "Grpc-Status", "1"), state: breaker.HalfOpen},
		"unavailable after the header": {do: late("14"), state: breaker.Open, cause: "grpc-status 14 (UNAVAILABLE)"},
		"good after the header":        {do: late("0"), state: breaker.Closed},
	} {
		t.Run(name, func(t *testing.T) {
			addr, client := overHTTP2(t, true, test.do)
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {"probe_prefer": -1, "cooldown": "10h"}}, "upstreams": [{"dial": "%s"}]}`, client, addr)
			halfOpen(t, p, addr)
			if err := unguarded(p, request("POST", "")); err != nil {
				t.Fatal(err)
			}
			if s := statusOf(t, addr); s.State != test.state || s.Probing || !strings.Contains(s.Cause, test.cause) {
				t.Errorf("%+v, want %v, %q", s, test.state, test.cause)
			}
		})
	}
}

// late answers with a header, and then with a trailer and no message between.
func late(status string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		_ = http.NewResponseController(w).Flush()
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", status)
	}
}

// A stream that goes on closes the breaker with its first message. One of gRPC-Web has
// its status where nobody looks, and is judged by its header.
func TestGRPCStreamDoesNotHoldTheProbe(t *testing.T) {
	for kind, first := range map[string]string{"application/grpc": message, "application/grpc-web": ""} {
		t.Run(kind, func(t *testing.T) {
			end := make(chan struct{})
			addr, client := overHTTP2(t, true, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", kind)
				_, _ = w.Write([]byte(first))
				_ = http.NewResponseController(w).Flush()
				select {
				case <-end:
				case <-r.Context().Done(): // the test has failed
				}
				w.Header().Set(http.TrailerPrefix+"Grpc-Status", "13")
			})
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {"probe_prefer": -1}}, "upstreams": [{"dial": "%s"}]}`, client, addr)
			halfOpen(t, p, addr)
			heard := hear(t)
			done := make(chan error, 1)
			go func() { done <- unguarded(p, request("POST", "")) }()
			heard.want(t, addr, breaker.Closed)
			close(end)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if s := statusOf(t, addr); s.Calls != 1 || s.Failures != 1 || s.Cause != "grpc-status 13 (INTERNAL)" {
				t.Errorf("the status at the end does not count: %+v", s)
			}
		})
	}
}

// A call that is no probe has been answered with the header, whoever reads on.
func TestGRPCAnswerThatIsNotRead(t *testing.T) {
	addr, client := overHTTP2(t, true, grpc(message, "Grpc-Status", "0"))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s}, "upstreams": [{"dial": "%s"}], "handle_response": [
		{"routes": [{"handle": [{"handler": "static_response", "status_code": 204}]}]}]}`, client, addr)
	if err := unguarded(p, request("POST", "")); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, addr); s.Calls != 1 || s.Failures != 0 {
		t.Errorf("%+v", s)
	}
}
