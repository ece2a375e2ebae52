package proxy_test

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

func parse(text string) (proxy.Settings, error) {
	d := caddyfile.NewTestDispenser("transport { " + text + "\n}")
	d.Next()
	return proxy.ParseBreaker(d)
}

// Every option of the block, as JSON.
func TestCaddyfile(t *testing.T) {
	s, err := parse(`breaker {
		verify_probe
		window 30s
		threshold 40%
		min_volume 20
		consecutive 5
		slow 2s 80%
		cooldown 10s 2m
		probe_scope fleet
		failure 5xx 202
		in_band json /error/type overloaded*
		in_band header X-Failed
		in_band sse_error
		downstream localhost:9001 spiffe://example.com/a
		downstream unix//run/b.sock spiffe://example.com/b
	}`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"window":30000000000,"threshold":0.4,"min_volume":20,"consecutive":5,"slow_call":2000000000,` +
		`"slow_threshold":0.8,"cooldown":10000000000,"max_cooldown":120000000000,"probe_scope":"fleet","failure_status":[5,202],` +
		`"in_band":[{"json":"/error/type","value":"overloaded*"},{"header":"X-Failed"},{"sse_error":true}],` +
		`"downstream":{"localhost:9001":"spiffe://example.com/a","unix//run/b.sock":"spiffe://example.com/b"},"verify_probe":true,"written_at":"Testfile:2"}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if s, err := parse("breaker off"); err != nil || !s.Off {
		t.Errorf("off: %+v, %v", s, err)
	}
}

// An error names the option, what is wrong, what would be right, and the line.
func TestCaddyfileErrors(t *testing.T) {
	for line, want := range map[string]string{
		"window 0s":                              `breaker: window: "0s" is no time at all; it must be positive, at Testfile:2`,
		"window 2h":                              "breaker: window is 2h0m0s; it has to be from 1s to 1h, at Testfile:2",
		"threshold 50":                           `breaker: threshold: "50" is no share (like 50%) above 0% and below 100%`,
		"threshold 100%":                         `"100%" is no share`,
		"min_volume none":                        `breaker: min_volume: "none" is no count (like 100); it must be at least 1`,
		"slow 1s 20% 3s":                         "breaker: slow: wrong number of arguments; the syntax is `slow <duration> [<percent>]`",
		"cooldown 30s 10s":                       "breaker: cooldown (longest) is 10s; it has to be no shorter than cooldown, at most 24h",
		"cooldown 25h":                           "breaker: cooldown (longest) is 25h0m0s; it has to be no shorter than cooldown, at most 24h, at Testfile:2",
		"failure 5x":                             `"5x" is no final status; use 200 to 599, or a class from 2xx to 5xx`,
		"failure 199":                            `failure: "199" is no final status; use 200 to 599, or a class from 2xx to 5xx`,
		"failure 5xx\nfailure 404":               "breaker: failure stands twice; it stands on line 2 already, at Testfile:3",
		"failure 5xx 501":                        "breaker: failure: 501 never counts, since any caller can provoke it; use other statuses of 5xx, at Testfile:2",
		"failure 404":                            "breaker: failure: 404 never counts, since any caller can provoke it; use other statuses of 5xx, at Testfile:2",
		"failure 4xx":                            "breaker: failure: 4xx never counts, since any caller can provoke it; use other statuses of 5xx, at Testfile:2",
		"in_band json error":                     `breaker: in_band: json "error"`,
		"in_band header no:field":                `"no:field" is no name of a header field`,
		"in_band sse_error x":                    "use json <pointer> [<value>], header <field> [<value>] or sse_error",
		"downstream a:1 no-uri":                  "breaker: downstream a:1: ",
		"downstream a:1 u:a\ndownstream a:1 u:b": "breaker: downstream: a:1 is named twice, at Testfile:3",
		"window 1s\nwindow 2s":                   "breaker: window stands twice; it stands on line 2 already, at Testfile:3",
		"verify_probe":                           "breaker: verify_probe: there is no identity to hold answers to; name the upstreams' with downstream, at Testfile:2",
		"verify_probe no":                        "the syntax is `verify_probe`",
		"by_operation":                           `breaker has no option "by_operation"; it has consecutive,`,
		"treshold 50%":                           `breaker has no option "treshold"; it has consecutive,`,
	} {
		_, err := parse("breaker {\n" + line + "\n}")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\nwant %s", line, err, want)
		}
	}
	for _, text := range []string{"breaker on", "breaker off off", "breaker off {\nwindow 1s\n}"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

// JSON is held to what the Caddyfile is.
func TestValidate(t *testing.T) {
	for want, s := range map[string]proxy.Settings{
		"":                               {},
		"window: -1s is negative":        {Settings: breaker.Settings{Window: jsontime.Duration(-time.Second)}},
		"threshold is 1.5":               {Settings: breaker.Settings{Threshold: 1.5}},
		"failure: 700":                   {FailureStatus: []int{700}},
		"a rule names 2 places":          {InBand: []proxy.InBand{{JSON: "/a", SSEError: true}}},
		"a rule names 0 places":          {InBand: []proxy.InBand{{Value: "x"}}},
		"sse_error takes no value":       {InBand: []proxy.InBand{{Value: "x", SSEError: true}}},
		"downstream: ":                   {Downstream: map[string]string{"host:x": "spiffe://example.com/a"}},
		"verify_probe: there is no ":     {VerifyProbe: true},
		"downstream a:1: \"\" is no URI": {Downstream: map[string]string{"a:1": ""}},
	} {
		err := s.Validate()
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Which answers failed, by status, header and body.
func TestFaults(t *testing.T) {
	c := open(t, proxy.Settings{FailureStatus: []int{5, 202}, InBand: []proxy.InBand{
		{Header: "X-Status", Value: "fail*"}, {Header: "X-Broken"},
		{JSON: "/error"}, {JSON: "/state", Value: "*down"}, {JSON: "/code", Value: "*9*"},
	}}, nil, true)
	for status, want := range map[int]bool{200: false, 202: true, 404: false, 408: false, 409: false, 500: true, 501: false, 503: true, 505: false} {
		if c.FailedStatus(status) != want {
			t.Errorf("%d: failed is %v", status, !want)
		}
	}
	for value, want := range map[string]string{"failed": "header X-Status", "ok": "", "unfailed": ""} {
		if got := c.HeaderFault(http.Header{"X-Status": {"fine", value}}); got != want {
			t.Errorf("X-Status %s: %q", value, got)
		}
	}
	if got := c.HeaderFault(http.Header{"X-Broken": {""}}); got != "header X-Broken" {
		t.Errorf("X-Broken: %q", got)
	}
	for body, want := range map[string]string{
		`{"error":{"type":"overloaded"}}`: "json /error", `{"error":true}`: "json /error", `{"error":"x"}`: "json /error",
		`{"error":null}`: "", `{"state":"shut down"}`: "json /state", `{"state":"down, up"}`: "",
		`{"code":194}`: "json /code", `{"code":18}`: "", `{"error":`: "", ``: "",
	} {
		if got := c.BodyFault([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	if json, events := c.InspectedBodies(); !json || events {
		t.Errorf("looks into JSON %v, into events %v", json, events)
	}
}

func open(t *testing.T, s proxy.Settings, upstreams []string, more bool) *proxy.Circuits {
	t.Helper()
	c, err := proxy.Open(s, upstreams, more)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// trip opens a breaker.
func trip(t *testing.T, b *breaker.Breaker) {
	t.Helper()
	for range 10 {
		p, err := b.Acquire(breaker.Op{})
		if err != nil {
			t.Fatal(err)
		}
		p.Done(breaker.Outcome{Class: breaker.Failure, Cause: "connection refused"})
	}
	if b.Refusal() == nil {
		t.Fatal("ten failures did not open the breaker")
	}
}

// adapt turns a Caddyfile into the JSON of its first transport.
func adapt(t *testing.T, source string) (string, error) {
	t.Helper()
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	out, _, err := adapter.Adapt([]byte(source), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "", err
	}
	var config any
	if err := json.Unmarshal(out, &config); err != nil {
		t.Fatal(err)
	}
	found, err := json.Marshal(find(config, "transport"))
	return string(found), err
}

func find(v any, key string) any {
	switch v := v.(type) {
	case map[string]any:
		if found, ok := v[key]; ok {
			return found
		}
		for _, inner := range v {
			if found := find(inner, key); found != nil {
				return found
			}
		}
	case []any:
		for _, inner := range v {
			if found := find(inner, key); found != nil {
				return found
			}
		}
	}
	return nil
}

// Our options are ours, and all others the HTTP transport's, in any order.
func TestTransportCaddyfile(t *testing.T) {
	tests := []struct{ name, source, want string }{
		{"bare", `reverse_proxy localhost:9001 {
			transport agent_guard
		}`, `{"protocol":"agent_guard"}`},
		{"empty block", `reverse_proxy localhost:9001 {
			transport agent_guard {
			}
		}`, `{"protocol":"agent_guard"}`},
		{"ours", `reverse_proxy localhost:9001 {
			transport agent_guard {
				keepalive_guarded 300ms
			}
		}`, `{"keepalive_guarded":300000000,"protocol":"agent_guard"}`},
		{"off", `reverse_proxy localhost:9001 {
			transport agent_guard {
				keepalive_guarded off
			}
		}`, `{"keepalive_guarded":-1,"protocol":"agent_guard"}`},
		{"both, with a block and a quoted end", `reverse_proxy localhost:9001 {
			transport agent_guard {
				dial_timeout 1s
				tls_trust_pool inline {
					trust_der AAAA
				}
				keepalive_guarded 1s
				keepalive 5s
				tls_server_name "example.com"
			}
		}`, `{"dial_timeout":1000000000,"keep_alive":{"idle_timeout":5000000000},"keepalive_guarded":1000000000,"protocol":"agent_guard","tls":{"ca":{"provider":"inline","trusted_ca_certs":["AAAA"]},"server_name":"example.com"}}`},
		{"an empty block", `reverse_proxy localhost:9001 {
			transport agent_guard {
				dial_timeout 1s
				breaker {
				}
				keepalive_guarded 1s
			}
		}`, `{"breaker":{},"dial_timeout":1000000000,"keepalive_guarded":1000000000,"protocol":"agent_guard"}`},
		{"https address", `reverse_proxy https://example.com {
			transport agent_guard {
				keepalive_guarded 1s
			}
		}`, `{"keepalive_guarded":1000000000,"protocol":"agent_guard","tls":{}}`},
		{"h2c address", `reverse_proxy h2c://localhost:9001 {
			transport agent_guard
		}`, `{"protocol":"agent_guard","versions":["h2c","2"]}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := adapt(t, ":8080 {\n"+tt.source+"\n}")
			if err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// The block may come from a snippet.
func TestCaddyfileImported(t *testing.T) {
	got, err := adapt(t, `(guarded) {
		transport agent_guard {
			keepalive_guarded 1s
			dial_timeout {args[0]}
		}
	}
	:8080 {
		reverse_proxy localhost:9001 {
			import guarded 7s
		}
	}`)
	if want := `{"dial_timeout":7000000000,"keepalive_guarded":1000000000,"protocol":"agent_guard"}`; err != nil || got != want {
		t.Errorf("%s, %v", got, err)
	}
}

// An error names the option and its line.
func TestTransportCaddyfileErrors(t *testing.T) {
	tests := []struct{ lines, want string }{
		{"keepalive_guarded", "Caddyfile:5"},
		{"keepalive_guarded 1s 2s", "Caddyfile:5"},
		{"keepalive_guarded soon", `keepalive_guarded: "soon" is no duration (like 30s, 5m, 24h or 7d), at Caddyfile:5`},
		{"keepalive_guarded -1s", "keepalive_guarded: -1s is negative; it must be positive, at Caddyfile:5"},
		{"keepalive_guarded 1s\nkeepalive_guarded 2s", "keepalive_guarded stands twice; it stands on line 5 already, at Caddyfile:6"},
		{"keepalive_guarded 1s\nread_buffer 4k\nno_such_option", "unrecognized subdirective no_such_option, at Caddyfile:7"},
		{"dial_timeout 1s\nkeepalive_guard 1s", `unrecognized subdirective keepalive_guard; did you mean "keepalive_guarded"?, at Caddyfile:6`},
		{"breaker\nno_such_option", "unrecognized subdirective no_such_option, at Caddyfile:6"},
		{"keepalive_guarded 1s\ndial_timeout soon", "bad timeout value 'soon'"},
	}
	for _, tt := range tests {
		_, err := adapt(t, ":8080 {\nreverse_proxy localhost:9001 {\n# a comment\ntransport agent_guard {\n"+tt.lines+"\n}\n}\n}")
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v", tt.lines, err)
		}
	}
	if _, err := adapt(t, ":8080 {\nreverse_proxy localhost:9001 {\ntransport agent_guard fast {\n}\n}\n}"); err == nil {
		t.Error("an argument that means nothing was taken")
	}
	if _, err := adapt(t, ":8080 {\nreverse_proxy http://localhost:9001 {\ntransport agent_guard {\ntls\n}\n}\n}"); err == nil {
		t.Error("an http address was taken together with tls")
	}
}

// The fields of the HTTP transport stand beside ours, and no others do.
func TestJSON(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	defer cancel()
	const id = "http.reverse_proxy.transport.agent_guard"
	mod, err := ctx.LoadModuleByID(id, json.RawMessage(`{"keepalive_guarded": "5m", "dial_timeout": "7s"}`))
	if err != nil {
		t.Fatal(err)
	}
	tr := mod.(*proxy.Transport)
	if tr.DialTimeout != caddy.Duration(7*time.Second) {
		t.Errorf("dial_timeout is %v", tr.DialTimeout)
	}
	if got := proxy.Guarded(tr).IdleConnTimeout; got != 2*time.Minute {
		t.Errorf("keepalive_guarded lengthens idle_timeout to %v", got)
	}
	if _, err := ctx.LoadModuleByID(id, json.RawMessage(`{"keepalive_gaurded": "1s"}`)); err == nil {
		t.Error("an unknown field was taken")
	}
	if _, err := ctx.LoadModuleByID(id, json.RawMessage(`{"versions": ["4"]}`)); err == nil {
		t.Error("an unknown version was taken")
	}
	mod, err = ctx.LoadModuleByID(id, json.RawMessage(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := mod.(*proxy.Transport).KeepaliveGuarded; got != proxy.DefaultKeepaliveGuarded {
		t.Errorf("keepalive_guarded is %v by default", got)
	}
	for config, want := range map[string]int{`{}`: 256, `{"keep_alive": {"max_idle_conns_per_host": 9}}`: 9, `{"keep_alive": {"max_idle_conns": 5}}`: 256} {
		if mod, err = ctx.LoadModuleByID(id, json.RawMessage(config)); err != nil {
			t.Fatal(err)
		}
		tr := mod.(*proxy.Transport)
		if got := proxy.Guarded(tr).MaxIdleConnsPerHost; got != want {
			t.Errorf("%s: %d idle connections of guarded requests to one upstream, want %d", config, got, want)
		}
		if got := tr.Transport.MaxIdleConnsPerHost; got != 32 && got != want {
			t.Errorf("%s: %d idle connections of other requests", config, got)
		}
	}
}

// What reverse_proxy asks its transport for is answered as Caddy's own answers it.
func TestReverseProxyKnowsTheTransport(t *testing.T) {
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {}, "proxy_protocol": "v2"}, "upstreams": [{"dial": "127.0.0.1:1"}]}`)
	var rt http.RoundTripper = p.transport(t)
	if tt, ok := rt.(reverseproxy.TLSTransport); !ok || !tt.TLSEnabled() {
		t.Error("TLS is not known")
	}
	if pt, ok := rt.(reverseproxy.ProxyProtocolTransport); !ok || !pt.ProxyProtocolEnabled() {
		t.Error("the PROXY protocol is not known")
	}
	if ht, ok := rt.(reverseproxy.RequestHeaderOpsTransport); !ok || ht.RequestHeaderOps() == nil {
		t.Error("the Host header is not set for TLS upstreams")
	}
}

// The twin differs from Caddy's transport only in what makes it a twin. A field
// that Caddy or Go adds shows here.
func TestTwinIsConfiguredAlike(t *testing.T) {
	differ := map[string]bool{
		"DialContext": true, "DialTLSContext": true, "IdleConnTimeout": true,
		"TLSClientConfig": true, "TLSNextProto": true, // compared below
	}
	for _, versions := range []string{`["1.1"]`, `["1.1", "2"]`, `["h2c", "2"]`, `["3"]`} {
		p := newProxy(t, `{"transport": {
			"protocol": "agent_guard", "versions": %s, "max_conns_per_host": 3, "compression": false,
			"response_header_timeout": "1s", "expect_continue_timeout": "2s", "max_response_header_size": 4,
			"read_buffer_size": 5, "write_buffer_size": 6, "forward_proxy_url": "http://proxy.example",
			"tls": {"server_name": "{http.request.host}", "handshake_timeout": "7s"},
			"keep_alive": {"max_idle_conns": 8, "max_idle_conns_per_host": 9}
		}, "upstreams": [{"dial": "127.0.0.1:1"}]}`, versions)
		tr := p.transport(t)
		theirs, ours := reflect.ValueOf(tr.HTTPTransport.Transport).Elem(), reflect.ValueOf(proxy.Guarded(tr)).Elem()
		for i := range theirs.NumField() {
			field := theirs.Type().Field(i)
			if !field.IsExported() || differ[field.Name] {
				continue
			}
			a, b := theirs.Field(i), ours.Field(i)
			if field.Type.Kind() == reflect.Func {
				if a.Pointer() != b.Pointer() {
					t.Errorf("%s: %s is another function", versions, field.Name)
				}
			} else if !reflect.DeepEqual(a.Interface(), b.Interface()) {
				t.Errorf("%s: %s is %v, not %v", versions, field.Name, b, a)
			}
		}
		a, b := tr.HTTPTransport.Transport, proxy.Guarded(tr)
		if (a.DialTLSContext == nil) != (b.DialTLSContext == nil) || len(a.TLSNextProto) != len(b.TLSNextProto) {
			t.Errorf("%s: TLS or HTTP/2 is set up in one of them only", versions)
		}
		if a.TLSClientConfig.ServerName != b.TLSClientConfig.ServerName ||
			!reflect.DeepEqual(a.TLSClientConfig.NextProtos, b.TLSClientConfig.NextProtos) {
			t.Errorf("%s: the TLS configuration differs", versions)
		}
	}
}
