package call

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P7: each event passes at once, although it is recorded; the replay is the whole
// stream.
func TestEventsPassAtOnce(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for name, header := range map[string]string{"sse": "text/event-stream", "chunked": "application/x-ndjson"} {
		t.Run(name, func(t *testing.T) {
			next := make(chan struct{})
			u.On("/"+name, func(w http.ResponseWriter, a *harness.Arrival) {
				w.Header().Set("Content-Type", header)
				control := http.NewResponseController(w)
				_ = control.Flush()
				for i := range 3 {
					harness.Wait(t, next, "the client's signal")
					fmt.Fprintf(w, "data: %d\n", i)
					_ = control.Flush()
				}
			})
			r := harness.Request{Path: "/" + name, Id: "k"}
			res, err := g.Send(r)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			in := bufio.NewReader(res.Body)
			for i := range 3 {
				next <- struct{}{}
				if line, err := in.ReadString('\n'); err != nil || line != fmt.Sprintf("data: %d\n", i) {
					t.Fatalf("%q %v", line, err)
				}
			}
			if rest, err := io.ReadAll(in); err != nil || len(rest) != 0 {
				t.Errorf("%q %v", rest, err)
			}
			got := g.Call(r)
			got.Want(t, 200, "data: 0\ndata: 1\ndata: 2\n", "replayed")
			if got.Header.Get("Content-Type") != header {
				t.Errorf("header %v", got.Header)
			}
			u.Arrived(r.Path, 1)
		})
	}
}

// Informational answers pass, and are no answer.
func TestEarlyHintsPass(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "header X-Outer o\nagent_proxy %s", u.Addr)
	u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		hold.Pass()
		harness.Status(200, "done", "X-Final", "f")(w, a)
	})
	hints := make(chan string, 1)
	req := g.Build(harness.Request{Path: "/x", Id: "k"})
	req = req.WithContext(httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			hints <- fmt.Sprint(code, " ", header.Get("Link"))
			return nil
		},
	}))
	done := make(chan harness.Reply, 1)
	go func() {
		res, err := g.Client.Do(req)
		if err != nil {
			close(done)
			return
		}
		done <- harness.Read(res)
	}()
	if got := harness.Wait(t, hints, "the hints"); got != "103 </style.css>; rel=preload" {
		t.Errorf("hints %q", got)
	}
	hold.Open()
	live := harness.Wait(t, done, "the answer")
	live.Want(t, 200, "done", "executed")
	again := g.Call(harness.Request{Path: "/x", Id: "k"})
	again.Want(t, 200, "done", "replayed")
	for name, got := range map[string]harness.Reply{"live": live, "replayed": again} {
		if got.Header.Get("X-Final") != "f" || got.Header.Get("X-Outer") != "o" || got.Header.Get("Link") != "" {
			t.Errorf("%s: %v", name, got.Header)
		}
	}
}

// Trailers pass live, replayed and attached, announced or not.
func TestResponseTrailers(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for name, row := range map[string]struct {
		answer func(http.ResponseWriter, *harness.Arrival)
		want   http.Header
	}{
		"announced": {func(w http.ResponseWriter, a *harness.Arrival) {
			w.Header().Set("Trailer", "X-Sum, X-Other")
			harness.Flushed("body")(w, a)
			w.Header().Set("X-Sum", "1")
			w.Header().Set("X-Other", "2")
		}, http.Header{"X-Sum": {"1"}, "X-Other": {"2"}}},
		"unannounced": {func(w http.ResponseWriter, a *harness.Arrival) {
			harness.Flushed("body")(w, a)
			w.Header().Set(http.TrailerPrefix+"X-Late", "1")
		}, http.Header{"X-Late": {"1"}}},
		"both": {trailers("body"), http.Header{"X-Announced": {"a"}, "X-Unannounced": {"u"}}},
		"no body": {func(w http.ResponseWriter, a *harness.Arrival) {
			w.Header().Set("Trailer", "X-Sum")
			_ = http.NewResponseController(w).Flush()
			w.Header().Set("X-Sum", "1")
		}, http.Header{"X-Sum": {"1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			hold := harness.NewGate(t)
			r := harness.Request{Path: "/" + strings.ReplaceAll(name, " ", "-"), Id: "k"}
			u.On(r.Path, func(w http.ResponseWriter, a *harness.Arrival) {
				hold.Pass()
				row.answer(w, a)
			})
			owner := g.Begin(r)
			harness.Wait(t, hold.Arrived, "the call")
			follower := g.Begin(r)
			harness.Followers(t, 1)
			hold.Open()
			all := map[string]harness.Reply{"live": owner.Answer(), "attached": follower.Answer(), "replayed": g.Call(r)}
			for kind, got := range all {
				if got.Cut || !reflect.DeepEqual(got.Trailer, row.want) {
					t.Errorf("%s: %v, want %v", kind, got.Trailer, row.want)
				}
			}
			u.Arrived(r.Path, 1)
		})
	}
}

// Trailers of a request reach the upstream, over HTTP/1 and HTTP/2, with and without
// a body.
func TestRequestTrailers(t *testing.T) {
	for name, u := range map[string]*harness.Upstream{"h1": harness.NewUpstream(t), "h2c": harness.NewH2CUpstream(t)} {
		to := u.Addr
		if name == "h2c" {
			to = "h2c://" + to
		}
		g := harness.Start(t, "agent_proxy %s", to)
		for _, body := range []string{"body", ""} {
			r := harness.Request{
				Path: "/" + name + body, Id: "k", Reader: harness.OnlyReader{Reader: strings.NewReader(body)},
				Trailer: http.Header{"X-Sum": {"1"}},
			}
			g.Call(r).Want(t, 201, "arrival 1", "executed")
			last := u.Last(r.Path)
			if last.Body != body || last.Trailer.Get("X-Sum") != "1" {
				t.Errorf("%s: body %q, trailer %v", r.Path, last.Body, last.Trailer)
			}
		}
		harness.Stop(t)
	}
}

// Trap 17: who did not ask for gzip gets none, whoever asked first; the codings that
// a replay could not undo are not asked for.
func TestGzip(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, strings.Repeat("hello ", 1000)) // a buffer takes everything
	_ = z.Close()
	hold := harness.NewGate(t)
	hold.Open()
	answer := func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		if !strings.Contains(a.Header.Get("Accept-Encoding"), "gzip") {
			harness.Status(200, strings.Repeat("hello ", 1000))(w, a)
			return
		}
		harness.Status(200, packed.String(), "Content-Encoding", "gzip", "Etag", `"e"`, "Vary", "Accept-Encoding",
			"Content-Length", fmt.Sprint(packed.Len()))(w, a)
	}
	plain := strings.Repeat("hello ", 1000)
	asks := harness.Headers{"Accept-Encoding": "br;q=1.0, gzip;q=0.8, *;q=0.1"}
	t.Run("replayed", func(t *testing.T) {
		u.On("/replayed", answer)
		r := harness.Request{Path: "/replayed", Id: "k", Header: asks}
		g.Call(r).Want(t, 200, packed.String(), "executed")
		if got := u.Last(r.Path).Header["Accept-Encoding"]; !reflect.DeepEqual(got, []string{"gzip"}) {
			t.Errorf("the upstream was asked for %q", got)
		}
		verbatim := g.Call(r)
		verbatim.Want(t, 200, packed.String(), "replayed")
		if verbatim.Header.Get("Content-Encoding") != "gzip" || verbatim.Length != int64(packed.Len()) || verbatim.Header.Get("Etag") != `"e"` {
			t.Errorf("verbatim: %v", verbatim.Header)
		}
		for _, h := range []harness.Headers{nil, {"Accept-Encoding": "identity"}, {"Accept-Encoding": "gzip;q=0, br"}} {
			r.Header = h
			decoded := g.Call(r)
			decoded.Want(t, 200, plain, "replayed")
			if decoded.Header.Get("Content-Encoding") != "" || decoded.Header.Get("Etag") != `W/"e"` || decoded.Header.Get("Vary") == "" {
				t.Errorf("decoded: %v", decoded.Header)
			}
		}
	})
	t.Run("attached", func(t *testing.T) {
		hold = harness.NewGate(t)
		u.On("/attached", answer)
		r := harness.Request{Path: "/attached", Id: "k", Header: asks}
		owner := g.Begin(r)
		harness.Wait(t, hold.Arrived, "the call")
		r.Header = nil
		follower := g.Begin(r)
		harness.Followers(t, 1)
		hold.Open()
		owner.Answer().Want(t, 200, packed.String(), "executed")
		got := follower.Answer()
		if got.Cut || got.Body != plain || got.Header.Get("Content-Encoding") != "" {
			t.Errorf("%d bytes, cut %v, %v", len(got.Body), got.Cut, got.Header)
		}
	})
	t.Run("not asked for", func(t *testing.T) {
		u.On("/plain", answer)
		r := harness.Request{Path: "/plain", Id: "k", Header: harness.Headers{"Accept-Encoding": "br, zstd"}}
		g.Call(r).Want(t, 200, plain, "executed")
		if got := u.Last(r.Path).Header.Get("Accept-Encoding"); got != "identity" {
			t.Errorf("the upstream was asked for %q", got)
		}
		r.Header = asks
		g.Call(r).Want(t, 200, plain, "replayed")
	})
	t.Run("caddy encodes", func(t *testing.T) {
		harness.Stop(t)
		g := harness.Start(t, "encode gzip\nagent_proxy %s", u.Addr)
		u.On("/encoded", harness.Status(200, plain, "Content-Type", "text/plain"))
		r := harness.Request{Path: "/encoded", Id: "k", Header: harness.Headers{"Accept-Encoding": "br"}}
		g.Call(r).Want(t, 200, plain, "executed")
		r.Header = harness.Headers{"Accept-Encoding": "gzip"}
		got := g.Call(r)
		in, err := gzip.NewReader(strings.NewReader(got.Body))
		if err != nil {
			t.Fatalf("%v: %q", err, got.Body)
		}
		if all, err := io.ReadAll(in); err != nil || string(all) != plain || got.Header.Get("Execution-Status") != "replayed" {
			t.Errorf("%d bytes, %v, %v", len(all), err, got.Header)
		}
	})
}
