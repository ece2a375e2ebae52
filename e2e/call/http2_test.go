package call

import (
	"fmt"
	"net/http"
	"reflect"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// An answer and its replay are the same over HTTP/1 and HTTP/2, with and without
// TLS, whoever asked first; trailers too.
func TestVersionsOfHTTP(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/length", harness.Status(201, "hello", "Content-Length", "5", "X-Kept", "yes"))
	u.On("/trailers", trailers("hello"))
	ca := harness.NewAuthority(t)
	for _, scheme := range []string{"http", "https"} {
		t.Run(scheme, func(t *testing.T) {
			s := harness.Setup{Site: "agent_proxy " + u.Addr}
			if scheme == "https" {
				s.Address = func(port string) string { return "https://localhost:" + port }
				s.Site += "\ntls " + ca.Files(t, "localhost")
			}
			g := harness.Launch(t, s)
			one, two := g.NewClient(ca.Client(nil)), g.H2cClient()
			if scheme == "https" {
				two = g.H2Client(ca.Client(nil))
			}
			for i, clients := range [][2]*http.Client{{one, one}, {one, two}, {two, one}, {two, two}} {
				for _, path := range []string{"/length", "/trailers"} {
					r := harness.Request{Path: path, Id: fmt.Sprintf("k%d", i), Host: "localhost"}
					var answers [2]harness.Reply
					for j, status := range []string{"executed", "replayed"} {
						r.Client = clients[j]
						got := g.Call(r)
						if want := map[*http.Client]int{one: 1, two: 2}[clients[j]]; got.Proto != want {
							t.Errorf("HTTP/%d, want %d", got.Proto, want)
						}
						got.Want(t, 201, "hello", status)
						answers[j] = got
					}
					if !reflect.DeepEqual(answers[0].Trailer, answers[1].Trailer) {
						t.Errorf("%s: trailers %v, replayed %v", path, answers[0].Trailer, answers[1].Trailer)
					}
					if path == "/trailers" && answers[0].Trailer.Get("X-Announced") != "a" {
						t.Errorf("trailers %v", answers[0].Trailer)
					}
					if path == "/length" && answers[1].Header.Get("X-Kept") != "yes" {
						t.Errorf("header %v", answers[1].Header)
					}
				}
			}
		})
	}
}

// trailers answers with a body and trailers, announced and not.
func trailers(body string) func(http.ResponseWriter, *harness.Arrival) {
	return func(w http.ResponseWriter, a *harness.Arrival) {
		w.Header().Set("Trailer", "X-Announced")
		harness.Status(201, body)(w, a)
		w.Header().Set("X-Announced", "a")
		w.Header().Set(http.TrailerPrefix+"X-Unannounced", "u")
	}
}
