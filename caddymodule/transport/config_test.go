package transport_test

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

	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

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
func TestCaddyfile(t *testing.T) {
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
func TestCaddyfileErrors(t *testing.T) {
	tests := []struct{ lines, want string }{
		{"keepalive_guarded", "Caddyfile:5"},
		{"keepalive_guarded 1s 2s", "Caddyfile:5"},
		{"keepalive_guarded soon", "keepalive_guarded must be off or a positive duration, not 'soon', at Caddyfile:5"},
		{"keepalive_guarded -1s", "keepalive_guarded must be off or a positive duration, not '-1s', at Caddyfile:5"},
		{"keepalive_guarded 1s\nkeepalive_guarded 2s", "keepalive_guarded is given twice, at Caddyfile:6"},
		{"keepalive_guarded 1s\nread_buffer 4k\nno_such_option", "unrecognized subdirective no_such_option, at Caddyfile:7"},
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
	tr := mod.(*transport.Transport)
	if tr.DialTimeout != caddy.Duration(7*time.Second) {
		t.Errorf("dial_timeout is %v", tr.DialTimeout)
	}
	if got := transport.Guarded(tr).IdleConnTimeout; got != 2*time.Minute {
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
	if got := mod.(*transport.Transport).KeepaliveGuarded; got != transport.DefaultKeepaliveGuarded {
		t.Errorf("keepalive_guarded is %v by default", got)
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
		theirs, ours := reflect.ValueOf(tr.HTTPTransport.Transport).Elem(), reflect.ValueOf(transport.Guarded(tr)).Elem()
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
		a, b := tr.HTTPTransport.Transport, transport.Guarded(tr)
		if (a.DialTLSContext == nil) != (b.DialTLSContext == nil) || len(a.TLSNextProto) != len(b.TLSNextProto) {
			t.Errorf("%s: TLS or HTTP/2 is set up in one of them only", versions)
		}
		if a.TLSClientConfig.ServerName != b.TLSClientConfig.ServerName ||
			!reflect.DeepEqual(a.TLSClientConfig.NextProtos, b.TLSClientConfig.NextProtos) {
			t.Errorf("%s: the TLS configuration differs", versions)
		}
	}
}
