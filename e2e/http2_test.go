package e2e

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"reflect"
	"testing"
)

// h2cClient speaks HTTP/2 without TLS.
func (g *gateway) h2cClient() *http.Client {
	client := g.newClient(nil)
	transport := client.Transport.(recorded).Transport
	transport.DisableKeepAlives = false
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
	return client
}

// h2Client speaks HTTP/2 over TLS.
func (g *gateway) h2Client(config *tls.Config) *http.Client {
	client := g.newClient(config)
	transport := client.Transport.(recorded).Transport
	transport.DisableKeepAlives = false
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP2(true)
	return client
}

// An answer and its replay are the same over HTTP/1 and HTTP/2, with and without
// TLS, whoever asked first; trailers too.
func TestVersionsOfHTTP(t *testing.T) {
	u := newUpstream(t)
	u.on("/length", status(201, "hello", "Content-Length", "5", "X-Kept", "yes"))
	u.on("/trailers", trailers("hello"))
	ca := newAuthority(t)
	for _, scheme := range []string{"http", "https"} {
		t.Run(scheme, func(t *testing.T) {
			s := setup{site: "agent_proxy " + u.addr}
			if scheme == "https" {
				s.address = func(port string) string { return "https://localhost:" + port }
				s.site += "\ntls " + ca.files(t, "localhost")
			}
			g := launch(t, s)
			one, two := g.newClient(ca.client(nil)), g.h2cClient()
			if scheme == "https" {
				two = g.h2Client(ca.client(nil))
			}
			for i, clients := range [][2]*http.Client{{one, one}, {one, two}, {two, one}, {two, two}} {
				for _, path := range []string{"/length", "/trailers"} {
					r := request{path: path, id: fmt.Sprintf("k%d", i), host: "localhost"}
					var answers [2]reply
					for j, status := range []string{"executed", "replayed"} {
						r.client = clients[j]
						got := g.call(r)
						if want := map[*http.Client]int{one: 1, two: 2}[clients[j]]; got.proto != want {
							t.Errorf("HTTP/%d, want %d", got.proto, want)
						}
						got.want(t, 201, "hello", status)
						answers[j] = got
					}
					if !reflect.DeepEqual(answers[0].trailer, answers[1].trailer) {
						t.Errorf("%s: trailers %v, replayed %v", path, answers[0].trailer, answers[1].trailer)
					}
					if path == "/trailers" && answers[0].trailer.Get("X-Announced") != "a" {
						t.Errorf("trailers %v", answers[0].trailer)
					}
					if path == "/length" && answers[1].header.Get("X-Kept") != "yes" {
						t.Errorf("header %v", answers[1].header)
					}
				}
			}
		})
	}
}

// trailers answers with a body and trailers, announced and not.
func trailers(body string) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, a *arrival) {
		w.Header().Set("Trailer", "X-Announced")
		status(201, body)(w, a)
		w.Header().Set("X-Announced", "a")
		w.Header().Set(http.TrailerPrefix+"X-Unannounced", "u")
	}
}
