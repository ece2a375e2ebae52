package transport_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// frames is the end of an HTTP/2 connection that does only what a test tells it.
type frames struct {
	*http2.Framer
	conn *serverConn
}

// stream is called with each request's HEADERS; n counts them from 1 over all
// connections. It returns whether the connection goes on.
type stream func(f *frames, id uint32, n int) bool

// speakHTTP2 makes an answer of do. An arrival is a HEADERS frame.
func speakHTTP2(arrived func() int, do stream) answer {
	return func(c *serverConn, _ int) bool {
		preface := make([]byte, len(http2.ClientPreface))
		if _, err := io.ReadFull(c.in, preface); err != nil || !bytes.Equal(preface, []byte(http2.ClientPreface)) {
			return false
		}
		f := &frames{Framer: http2.NewFramer(c, c.in), conn: c}
		if f.WriteSettings() != nil {
			return false
		}
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return false
			}
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if !frame.IsAck() && f.WriteSettingsAck() != nil {
					return false
				}
			case *http2.HeadersFrame:
				if !do(f, frame.StreamID, arrived()) {
					return false
				}
			}
		}
	}
}

func (f *frames) ok(id uint32) bool {
	var b bytes.Buffer
	_ = hpack.NewEncoder(&b).WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
	return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: b.Bytes(), EndHeaders: true, EndStream: true}) == nil
}

// Section "Sent or not": HTTP/2 re-sends what the server refused or went away
// from, and reverse_proxy what was lost. Over TLS and over cleartext.
func TestHTTP2IsNotSentAgain(t *testing.T) {
	lost := map[string]stream{
		"refused":      func(f *frames, id uint32, _ int) bool { return f.WriteRSTStream(id, http2.ErrCodeRefusedStream) == nil },
		"reset":        func(f *frames, id uint32, _ int) bool { return f.WriteRSTStream(id, http2.ErrCodeInternal) == nil },
		"went away":    func(f *frames, _ uint32, _ int) bool { _ = f.WriteGoAway(0, http2.ErrCodeNo, nil); return false },
		"disconnected": func(f *frames, _ uint32, _ int) bool { return f.conn.reset() },
	}
	for _, protocol := range transports {
		for _, h2c := range []bool{false, true} {
			for name, lose := range lost {
				for _, body := range []string{"", "amount=1"} {
					t.Run(fmt.Sprintf("%s/h2c=%v/%s/%s", protocol, h2c, name, body), func(t *testing.T) {
						up, config := newHTTP2Upstream(t, h2c, func(f *frames, id uint32, n int) bool {
							if n == 1 {
								return f.ok(id)
							}
							return lose(f, id, n)
						})
						p := newProxy(t, config, protocol, up.addr)
						if o := forward(p, request("POST", "")); o.status != 200 || o.NotSent() {
							t.Fatalf("the first request: %v", o)
						}
						o := forward(p, request("POST", body))
						p.end()
						if got := up.total(); got != 2 {
							t.Errorf("%d requests arrived, not 2", got)
						}
						if o.NotSent() {
							t.Errorf("P1: %v, but it was sent", o)
						}
					})
				}
			}
		}
	}
}

func TestHTTP2IsSentAgainWithoutTheFuse(t *testing.T) {
	for _, h2c := range []bool{false, true} {
		up, config := newHTTP2Upstream(t, h2c, func(f *frames, id uint32, n int) bool {
			if n < 3 {
				return f.WriteRSTStream(id, http2.ErrCodeRefusedStream) == nil
			}
			return f.ok(id)
		})
		p := newProxy(t, config, "http", up.addr)
		if err := unguarded(p, request("POST", "")); err != nil {
			t.Error(err)
		}
		p.end()
		if got := up.total(); got != 3 {
			t.Errorf("h2c=%v: %d requests arrived, not 3; the trap is gone", h2c, got)
		}
	}
}

// newHTTP2Upstream returns an HTTP/2 upstream and a proxy configuration for it,
// with retries on a POST.
func newHTTP2Upstream(t *testing.T, h2c bool, do stream) (*http2Upstream, string) {
	t.Helper()
	// The body is buffered because the wrapper that reverse_proxy otherwise puts
	// around it does not bear HTTP/2's closing it while it is read.
	const config = `{
		"transport": {"protocol": "%%s", %s}, "request_buffers": 1024,
		"load_balancing": {"retries": 1, "retry_match": [{"method": ["POST"]}]},
		"upstreams": [{"dial": "%%s"}]
	}`
	tlsConfig := &tls.Config{Certificates: []tls.Certificate{certificate(t)}, NextProtos: []string{"h2"}}
	client := `"tls": {"insecure_skip_verify": true}`
	if h2c {
		tlsConfig, client = nil, `"versions": ["h2c"]`
	}
	// upstream would count the preface of each connection; what counts is HEADERS.
	var arrived atomic.Int64
	serve := speakHTTP2(func() int { return int(arrived.Add(1)) }, do)
	up := listen(t, tlsConfig, serve)
	return &http2Upstream{upstream: up, arrived: &arrived}, fmt.Sprintf(config, client)
}

type http2Upstream struct {
	*upstream
	arrived *atomic.Int64
}

func (u *http2Upstream) total() int {
	u.upstream.total()
	return int(u.arrived.Load())
}

// A request that is kept from being sent again does not take the connection along
// on which others wait for their answers.
func TestHTTP2ConnectionOutlivesTheFuse(t *testing.T) {
	for _, protocol := range transports {
		for _, h2c := range []bool{false, true} {
			held, lost := make(chan uint32, 1), make(chan struct{})
			up, config := newHTTP2Upstream(t, h2c, func(f *frames, id uint32, n int) bool {
				switch n {
				case 1: // stays open while the second is lost
					held <- id
					return true
				case 2:
					if f.WriteRSTStream(id, http2.ErrCodeRefusedStream) != nil {
						return false
					}
					<-lost
					return f.ok(<-held)
				default:
					return f.ok(id)
				}
			})
			p := newProxy(t, config, protocol, up.addr)
			first := make(chan outcome)
			go func() { first <- forward(p, request("POST", "")) }()
			held <- <-held
			if o := forward(p, request("POST", "")); o.NotSent() {
				t.Errorf("%s, h2c=%v: P1: %v, but it was sent", protocol, h2c, o)
			}
			close(lost)
			if o := <-first; o.status != 200 {
				t.Errorf("%s, h2c=%v: the other request on the connection: %v", protocol, h2c, o)
			}
			p.end()
			if got := up.total(); got != 2 {
				t.Errorf("%s, h2c=%v: %d requests arrived, not 2", protocol, h2c, got)
			}
		}
	}
}

// Guarded requests share connections with each other, and with no others.
func TestHTTP2ConnectionsAreApart(t *testing.T) {
	for _, h2c := range []bool{false, true} {
		conns := make(map[*serverConn]bool) // the requests come one after another
		up, config := newHTTP2Upstream(t, h2c, func(f *frames, id uint32, _ int) bool {
			conns[f.conn] = true
			return f.ok(id)
		})
		p := newProxy(t, config, "agent_guard", up.addr)
		for range 2 {
			if err := unguarded(p, request("POST", "")); err != nil {
				t.Fatal(err)
			}
			if o := forward(p, request("POST", "")); o.status != 200 {
				t.Fatal(o)
			}
		}
		p.end()
		up.total()
		if len(conns) != 2 {
			t.Errorf("h2c=%v: %d connections, not 2", h2c, len(conns))
		}
	}
}

// Section "Sent or not": HTTP/3 works and proves nothing.
func TestHTTP3(t *testing.T) {
	cert := certificate(t)
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	executed := make(chan string, 8)
	server := &http3.Server{
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{cert}}),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			executed <- r.URL.Path
			if r.Header.Get("X-Lose") != "" {
				panic(http.ErrAbortHandler)
			}
		}),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(udp) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
		_ = udp.Close()
	})
	for _, protocol := range transports {
		p := newProxy(t, `{
			"transport": {"protocol": "%s", "versions": ["3"], "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}}},
			"load_balancing": {"retries": 2, "retry_match": [{"method": ["POST"]}]},
			"upstreams": [{"dial": "%s"}]
		}`, protocol, base64.StdEncoding.EncodeToString(leaf.Raw), udp.LocalAddr())
		if o := forward(p, request("POST", "x")); o.status != 200 || o.Reason != sent.Unknown {
			t.Errorf("%s: answered: %v", protocol, o)
		}
		lose := request("POST", "")
		lose.Header.Set("X-Lose", "1")
		if o := forward(p, lose); o.NotSent() {
			t.Errorf("%s: P1: %v, but it was sent", protocol, o)
		}
		p.end()
		if got := len(executed); got != 2 {
			t.Errorf("%s: %d requests arrived, not 2", protocol, got)
		}
		for range len(executed) {
			<-executed
		}
	}
}
