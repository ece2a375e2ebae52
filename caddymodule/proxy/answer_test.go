package proxy_test

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
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

// C-3.2.1-a: the table of docs/caddyfile.md says of each status of HTTP and of gRPC how it counts.
func TestStatusesThatCount(t *testing.T) {
	addr, client := overHTTP2(t, true, func(w http.ResponseWriter, r *http.Request) {
		if code := r.Header.Get("X-Grpc"); code != "" {
			grpc("", "Grpc-Status", code)(w, r)
			return
		}
		code, _ := strconv.Atoi(r.Header.Get("X-Status"))
		w.WriteHeader(code)
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {"min_volume": 1000}}, "upstreams": [{"dial": "%s"}]}`, client, addr)
	found := map[string]string{}
	for field, codes := range map[string][2]int{"X-Status": {200, 599}, "X-Grpc": {0, 17}} {
		for code := codes[0]; code <= codes[1]; code++ {
			before := statusOf(t, addr)
			r := request("GET", "")
			r.Header.Set(field, strconv.Itoa(code))
			if err := unguarded(p, r); err != nil {
				t.Fatal(err)
			}
			after := statusOf(t, addr)
			counts := fmt.Sprint(after.Calls-before.Calls, after.Failures-before.Failures, after.RateLimited-before.RateLimited)
			found[field+" "+counts] = appendRange(found[field+" "+counts], code)
		}
	}
	page, err := os.ReadFile("../../docs/caddyfile.md")
	if err != nil {
		t.Fatal(err)
	}
	for counts, word := range map[string]string{"1 1 0": "a failure", "1 0 0": "good", "0 0 1": "no failure, but fails a probe", "0 0 0": "nothing"} {
		row := fmt.Sprintf("| %s | %s | %s |", word, found["X-Status "+counts], found["X-Grpc "+counts])
		if !strings.Contains(string(page), row) {
			t.Errorf("docs/caddyfile.md has no row %s", row)
		}
	}
	if len(found) != 8 {
		t.Errorf("%v", found)
	}
}

// appendRange adds the next number to a list like "1 to 3, 5".
func appendRange(list string, n int) string {
	at := strings.LastIndexAny(list, " ") + 1
	switch last := strconv.Itoa(n - 1); {
	case list == "":
		return strconv.Itoa(n)
	case list[at:] != last:
		return fmt.Sprintf("%s, %d", list, n)
	case strings.HasSuffix(list[:at], "to "):
		return fmt.Sprintf("%s%d", list[:at], n)
	}
	return fmt.Sprintf("%s to %d", list, n)
}

// firstMessage is a frame of gRPC: five bytes, and what they announce. Requests here have none:
// the wrapper that reverse_proxy puts around a body does not bear HTTP/2's closing it while
// it is read.
const firstMessage = "\x00\x00\x00\x00\x02ok"

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
		{name: "good", do: grpc(firstMessage, "Grpc-Status", "0"), want: "1 0 0"},
		{name: "good without a message", do: grpc("", "Grpc-Status", "0"), want: "1 0 0"},
		{name: "a fault of the call", do: grpc("", "Grpc-Status", "5"), want: "1 0 0"},
		{name: "unavailable in the trailer", do: grpc(firstMessage, "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "unavailable in the header", do: grpc("", "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "internal in the trailer", do: grpc(firstMessage, "Grpc-Status", "13"), want: "1 1 0", cause: "grpc-status 13 (INTERNAL)"},
		{name: "a status that nobody knows", do: grpc(firstMessage, "Grpc-Status", "99"), want: "1 1 0", cause: "grpc-status 99"},
		{name: "a method that there is not", do: grpc("", "Grpc-Status", "12"), want: "1 0 0"},
		{name: "a limit in the trailer", do: grpc(firstMessage, "Grpc-Status", "8"), want: "0 0 1"},
		{name: "a limit in the header", do: grpc("", "Grpc-Status", "8"), want: "0 0 1"},
		{name: "called off", do: grpc("", "Grpc-Status", "1"), want: "0 0 0"},
		{name: "called off in the trailer", do: grpc(firstMessage, "Grpc-Status", "1"), want: "0 0 0"},
		{name: "a deadline of the upstream's own", do: grpc(firstMessage, "Grpc-Status", "4"), want: "1 1 0", cause: "grpc-status 4 (DEADLINE_EXCEEDED)"},
		{name: "a deadline before the caller's", timeout: "1H", do: grpc("", "Grpc-Status", "4"), want: "1 1 0", cause: "grpc-status 4 (DEADLINE_EXCEEDED)"},
		{name: "the caller's deadline", timeout: "1n", do: grpc("", "Grpc-Status", "4"), want: "0 0 0"},
		{name: "another status in the caller's time", timeout: "1n", do: grpc("", "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "one option rules both", settings: `"failure_status": [500]`, do: grpc(firstMessage, "Grpc-Status", "14"), want: "1 0 0"},
		{name: "a status that is named", settings: `"failure_status": [503]`,
			do: grpc("", "Grpc-Status", "14"), want: "1 1 0", cause: "grpc-status 14 (UNAVAILABLE)"},
		{name: "the refusal of a gateway behind", do: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Execution-Status", "refused")
			grpc("", "Grpc-Status", "14")(w, r)
		}, want: "0 0 0"},
		{name: "no status", do: grpc(firstMessage), want: "1 0 0"},
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
func (changes) Slow(string, bool)               {}
func (changes) Probe(context.Context, breaker.Key, time.Duration) (func(), time.Time, bool) {
	return nil, time.Time{}, true
}

// hear receives every change until the end of the test.
func hear(t *testing.T) changes {
	t.Helper()
	heard := make(changes, 16)
	m := proxy.Join()
	t.Cleanup(m.Leave)
	m.Listen(heard)
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
func halfOpen(t *testing.T, p *testProxy, upstream string) {
	t.Helper()
	setMode(t, p, upstream, breaker.ForcedOpen)
	setMode(t, p, upstream, breaker.Auto)
}

// setMode does what an operator does.
func setMode(t *testing.T, p *testProxy, upstream string, mode breaker.Mode) {
	t.Helper()
	p.transport(t).Refusal("POST", nil) // which makes the breaker
	m := proxy.Join()
	defer m.Leave()
	if !m.SetMode(breaker.Key{Upstream: upstream}, mode) {
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
		"good":                         {do: grpc(firstMessage, "Grpc-Status", "0"), state: breaker.Closed},
		"good without a message":       {do: grpc("", "Grpc-Status", "0"), state: breaker.Closed},
		"unavailable in the header":    {do: grpc("", "Grpc-Status", "14"), state: breaker.Open, cause: "grpc-status 14 (UNAVAILABLE)"},
		"a limit":                      {do: grpc("", "Grpc-Status", "8"), state: breaker.Open, cause: "grpc-status 8 (RESOURCE_EXHAUSTED)"},
		"called off":                   {do: grpc("", "Grpc-Status", "1"), state: breaker.HalfOpen},
		"unavailable after the header": {do: late("14"), state: breaker.Open, cause: "grpc-status 14 (UNAVAILABLE)"},
		"good after the header":        {do: late("0"), state: breaker.Closed},
	} {
		t.Run(name, func(t *testing.T) {
			addr, client := overHTTP2(t, true, test.do)
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {"cooldown": "10h"}}, "upstreams": [{"dial": "%s"}]}`, client, addr)
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
	for kind, first := range map[string]string{"application/grpc": firstMessage, "application/grpc-web": ""} {
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
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s, "breaker": {}}, "upstreams": [{"dial": "%s"}]}`, client, addr)
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
	addr, client := overHTTP2(t, true, grpc(firstMessage, "Grpc-Status", "0"))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s}, "upstreams": [{"dial": "%s"}], "handle_response": [
		{"routes": [{"handle": [{"handler": "static_response", "status_code": 204}]}]}]}`, client, addr)
	if err := unguarded(p, request("POST", "")); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, addr); s.Calls != 1 || s.Failures != 0 {
		t.Errorf("%+v", s)
	}
}

// What in an event stream is an error, and when a stream has turned out good.
func TestEvents(t *testing.T) {
	for _, tt := range []struct {
		stream string
		fault  bool
		good   bool
	}{
		{"data: 1\n\n", false, true},
		{"data: 1\r\n\r\n", false, true},
		{"data: 1\r\r", false, true},
		{"data: 1\r\n", false, false},
		{": keep-alive\n\n", false, false},
		{"\n\n\n", false, false},
		{"event: error\n\n", true, false},
		{"event:error\r\n", true, false},
		{"event: errors\n\n", false, true},
		{"data: 1\n\nevent: error\n", true, true},
		{`data: {"error":{"code":529}}` + "\n", true, false},
		{`data:{ "error" : "overloaded"}` + "\n", true, false},
		{`data: {"error":null,"id":1}` + "\n\n", false, true},
		{`data: {"errors":[]}` + "\n\n", false, true},
		{`data: {"id":1,"error":"late"}` + "\n\n", false, true},
		{"data: event: error\n\n", false, true},
	} {
		for step := 1; step <= len(tt.stream); step++ {
			fault, good := proxy.SeeEvents([]byte(tt.stream), step)
			if (fault != "") != tt.fault || good != tt.good {
				t.Errorf("%q in steps of %d: fault %q, good %v", tt.stream, step, fault, good)
			}
		}
	}
}

// frame is one frame of a WebSocket.
func frame(opcode byte, masked bool, payload []byte) []byte {
	b := []byte{0x80 | opcode}
	mask := byte(0)
	if masked {
		mask = 0x80
	}
	switch n := len(payload); {
	case n < 126:
		b = append(b, mask|byte(n))
	case n <= 0xffff:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(n))
	}
	if !masked {
		return append(b, payload...)
	}
	key := []byte{1, 2, 3, 4}
	b = append(b, key...)
	for i, c := range payload {
		b = append(b, c^key[i%4])
	}
	return b
}

// Section 7.1: the close code of a WebSocket is found behind frames of every size,
// however the bytes come.
func TestFrames(t *testing.T) {
	away := binary.BigEndian.AppendUint16(nil, 1012)
	for _, tt := range []struct {
		name string
		last []byte
		want int
	}{
		{"none", nil, 0},
		{"close", frame(8, false, append(away, "bye"...)), 1012},
		{"close without a reason", frame(8, false, away), 1012},
		{"masked close", frame(8, true, append(away, "bye"...)), 1012},
		{"close without a code", frame(8, false, nil), 1005},
		{"masked close without a code", frame(8, true, nil), 1005},
	} {
		var stream []byte
		for _, size := range []int{0, 1, 125, 126, 0xffff, 0x10000} {
			stream = append(stream, frame(2, false, make([]byte, size))...)
			stream = append(stream, frame(1, true, make([]byte, size))...)
		}
		stream = append(stream, tt.last...)
		for _, step := range []int{1, 2, 3, 7, 1000, len(stream)} {
			if got := proxy.SeeFrames(stream, step); got != tt.want {
				t.Errorf("%s in steps of %d: code %d, want %d", tt.name, step, got, tt.want)
			}
		}
	}
}

// Whatever an upstream sends, and however it is cut, is read alike.
func FuzzLook(f *testing.F) {
	f.Add([]byte("data: {\"error\":1}\r\n\r\nevent: error\n\n"), 3)
	f.Add(append(frame(1, false, make([]byte, 200)), frame(8, true, []byte{3, 243})...), 1)
	f.Add([]byte{0x88, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4, 5, 6}, 2)
	f.Add([]byte("8\xff00000000\x03\x0300\x03\x030"), 1) // a close code of 0 behind a mask
	f.Fuzz(func(t *testing.T, stream []byte, step int) {
		step = max(1, step)
		if a, b := proxy.SeeFrames(stream, step), proxy.SeeFrames(stream, len(stream)+1); a != b {
			t.Errorf("close code %d and %d", a, b)
		}
		a, good := proxy.SeeEvents(stream, step)
		b, also := proxy.SeeEvents(stream, len(stream)+1)
		if a != b || a == "" && good != also {
			t.Errorf("events: %q %v and %q %v", a, good, b, also)
		}
	})
}

// Each status of gRPC has one of HTTP, by which `failure` judges it.
func TestGRPCStatus(t *testing.T) {
	for text, want := range map[string]string{
		"0":  "200 grpc-status 0 (OK)",
		"1":  "499 grpc-status 1 (CANCELLED)",
		"2":  "500 grpc-status 2 (UNKNOWN)",
		"3":  "400 grpc-status 3 (INVALID_ARGUMENT)",
		"4":  "504 grpc-status 4 (DEADLINE_EXCEEDED)",
		"5":  "404 grpc-status 5 (NOT_FOUND)",
		"6":  "409 grpc-status 6 (ALREADY_EXISTS)",
		"7":  "403 grpc-status 7 (PERMISSION_DENIED)",
		"8":  "429 grpc-status 8 (RESOURCE_EXHAUSTED)",
		"9":  "400 grpc-status 9 (FAILED_PRECONDITION)",
		"10": "409 grpc-status 10 (ABORTED)",
		"11": "400 grpc-status 11 (OUT_OF_RANGE)",
		"12": "501 grpc-status 12 (UNIMPLEMENTED)",
		"13": "500 grpc-status 13 (INTERNAL)",
		"14": "503 grpc-status 14 (UNAVAILABLE)",
		"15": "500 grpc-status 15 (DATA_LOSS)",
		"16": "401 grpc-status 16 (UNAUTHENTICATED)",
		"17": "500 grpc-status 17", "4294967295": "500 grpc-status 4294967295",
		"": "500 grpc-status 2 (UNKNOWN)", "x": "500 grpc-status 2 (UNKNOWN)", "-1": "500 grpc-status 2 (UNKNOWN)",
		"4294967296": "500 grpc-status 2 (UNKNOWN)",
	} {
		s, ok := proxy.GRPCStatus(http.Header{"Grpc-Status": {text}})
		if got := fmt.Sprint(s.HTTP(), " ", s); !ok || got != want {
			t.Errorf("%q: %s, %v; want %s", text, got, ok, want)
		}
	}
	if _, ok := proxy.GRPCStatus(http.Header{}); ok {
		t.Error("there is a status where there is none")
	}
}

// What gRPC is, is in the Content-Type alone.
func TestIsGRPC(t *testing.T) {
	for kind, want := range map[string]string{
		"application/grpc": "true false", "Application/GRPC+proto": "true false", "application/grpc; charset=utf-8": "true false",
		"application/grpc-web": "true true", "application/grpc-web-text+proto": "true true",
		"application/grpcish": "false false", "application/json": "false false", "": "false false",
	} {
		is, web := proxy.IsGRPC(http.Header{"Content-Type": {kind}})
		if got := fmt.Sprint(is, web); got != want {
			t.Errorf("%q: %s, want %s", kind, got, want)
		}
	}
}

// The time that callers of gRPC give.
func TestParseGRPCTimeout(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"5S": 5 * time.Second, "100m": 100 * time.Millisecond, "1u": time.Microsecond, "99999999n": 99999999, "2H": 2 * time.Hour, "3M": 3 * time.Minute,
		"": 0, "S": 0, "0S": 0, "5": 0, "5s": 0, "-1S": 0, "123456789S": 0, "99999999H": 0,
	} {
		if got, ok := guard.ParseGRPCTimeout(text); got != want || ok != (want > 0) {
			t.Errorf("%q: %v, %v; want %v", text, got, ok, want)
		}
	}
}
