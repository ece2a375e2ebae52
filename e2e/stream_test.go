package e2e

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
)

// P7: each event passes at once, although it is recorded; the replay is the whole
// stream.
func TestEventsPassAtOnce(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for name, header := range map[string]string{"sse": "text/event-stream", "chunked": "application/x-ndjson"} {
		t.Run(name, func(t *testing.T) {
			next := make(chan struct{})
			u.on("/"+name, func(w http.ResponseWriter, a *arrival) {
				w.Header().Set("Content-Type", header)
				control := http.NewResponseController(w)
				_ = control.Flush()
				for i := range 3 {
					wait(t, next, "the client's signal")
					fmt.Fprintf(w, "data: %d\n", i)
					_ = control.Flush()
				}
			})
			r := request{path: "/" + name, id: "k"}
			res, err := g.send(r)
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
			got := g.call(r)
			got.want(t, 200, "data: 0\ndata: 1\ndata: 2\n", "replayed")
			if got.header.Get("Content-Type") != header {
				t.Errorf("header %v", got.header)
			}
			u.arrived(r.path, 1)
		})
	}
}

// Informational answers pass, and are no answer.
func TestEarlyHintsPass(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "header X-Outer o\nagent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		hold.pass()
		status(200, "done", "X-Final", "f")(w, a)
	})
	hints := make(chan string, 1)
	req := g.build(request{path: "/x", id: "k"})
	req = req.WithContext(httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			hints <- fmt.Sprint(code, " ", header.Get("Link"))
			return nil
		},
	}))
	done := make(chan reply, 1)
	go func() {
		res, err := g.client.Do(req)
		if err != nil {
			close(done)
			return
		}
		done <- read(res)
	}()
	if got := wait(t, hints, "the hints"); got != "103 </style.css>; rel=preload" {
		t.Errorf("hints %q", got)
	}
	hold.open()
	live := wait(t, done, "the answer")
	live.want(t, 200, "done", "executed")
	again := g.call(request{path: "/x", id: "k"})
	again.want(t, 200, "done", "replayed")
	for name, got := range map[string]reply{"live": live, "replayed": again} {
		if got.header.Get("X-Final") != "f" || got.header.Get("X-Outer") != "o" || got.header.Get("Link") != "" {
			t.Errorf("%s: %v", name, got.header)
		}
	}
}

// Trailers pass live, replayed and attached, announced or not.
func TestResponseTrailers(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for name, row := range map[string]struct {
		answer func(http.ResponseWriter, *arrival)
		want   http.Header
	}{
		"announced": {func(w http.ResponseWriter, a *arrival) {
			w.Header().Set("Trailer", "X-Sum, X-Other")
			flushed("body")(w, a)
			w.Header().Set("X-Sum", "1")
			w.Header().Set("X-Other", "2")
		}, http.Header{"X-Sum": {"1"}, "X-Other": {"2"}}},
		"unannounced": {func(w http.ResponseWriter, a *arrival) {
			flushed("body")(w, a)
			w.Header().Set(http.TrailerPrefix+"X-Late", "1")
		}, http.Header{"X-Late": {"1"}}},
		"both": {trailers("body"), http.Header{"X-Announced": {"a"}, "X-Unannounced": {"u"}}},
		"no body": {func(w http.ResponseWriter, a *arrival) {
			w.Header().Set("Trailer", "X-Sum")
			_ = http.NewResponseController(w).Flush()
			w.Header().Set("X-Sum", "1")
		}, http.Header{"X-Sum": {"1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			hold := newGate(t)
			r := request{path: "/" + strings.ReplaceAll(name, " ", "-"), id: "k"}
			u.on(r.path, func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				row.answer(w, a)
			})
			owner := g.begin(r)
			wait(t, hold.arrived, "the call")
			follower := g.begin(r)
			followers(t, 1)
			hold.open()
			all := map[string]reply{"live": owner.answer(), "attached": follower.answer(), "replayed": g.call(r)}
			for kind, got := range all {
				if got.cut || !reflect.DeepEqual(got.trailer, row.want) {
					t.Errorf("%s: %v, want %v", kind, got.trailer, row.want)
				}
			}
			u.arrived(r.path, 1)
		})
	}
}

// Trailers of a request reach the upstream, over HTTP/1 and HTTP/2, with and without
// a body.
func TestRequestTrailers(t *testing.T) {
	for name, u := range map[string]*upstream{"h1": newUpstream(t), "h2c": newH2CUpstream(t)} {
		to := u.addr
		if name == "h2c" {
			to = "h2c://" + to
		}
		g := start(t, "agent_proxy %s", to)
		for _, body := range []string{"body", ""} {
			r := request{
				path: "/" + name + body, id: "k", reader: onlyReader{strings.NewReader(body)},
				trailer: http.Header{"X-Sum": {"1"}},
			}
			g.call(r).want(t, 201, "arrival 1", "executed")
			last := u.last(r.path)
			if last.body != body || last.trailer.Get("X-Sum") != "1" {
				t.Errorf("%s: body %q, trailer %v", r.path, last.body, last.trailer)
			}
		}
		stop(t)
	}
}

// Trap 17: who did not ask for gzip gets none, whoever asked first; the codings that
// a replay could not undo are not asked for.
func TestGzip(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, strings.Repeat("hello ", 1000)) // a buffer takes everything
	_ = z.Close()
	hold := newGate(t)
	hold.open()
	answer := func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		if !strings.Contains(a.Header.Get("Accept-Encoding"), "gzip") {
			status(200, strings.Repeat("hello ", 1000))(w, a)
			return
		}
		status(200, packed.String(), "Content-Encoding", "gzip", "Etag", `"e"`, "Vary", "Accept-Encoding",
			"Content-Length", fmt.Sprint(packed.Len()))(w, a)
	}
	plain := strings.Repeat("hello ", 1000)
	asks := headers{"Accept-Encoding": "br;q=1.0, gzip;q=0.8, *;q=0.1"}
	t.Run("replayed", func(t *testing.T) {
		u.on("/replayed", answer)
		r := request{path: "/replayed", id: "k", header: asks}
		g.call(r).want(t, 200, packed.String(), "executed")
		if got := u.last(r.path).Header["Accept-Encoding"]; !reflect.DeepEqual(got, []string{"gzip"}) {
			t.Errorf("the upstream was asked for %q", got)
		}
		verbatim := g.call(r)
		verbatim.want(t, 200, packed.String(), "replayed")
		if verbatim.header.Get("Content-Encoding") != "gzip" || verbatim.length != int64(packed.Len()) || verbatim.header.Get("Etag") != `"e"` {
			t.Errorf("verbatim: %v", verbatim.header)
		}
		for _, h := range []headers{nil, {"Accept-Encoding": "identity"}, {"Accept-Encoding": "gzip;q=0, br"}} {
			r.header = h
			decoded := g.call(r)
			decoded.want(t, 200, plain, "replayed")
			if decoded.header.Get("Content-Encoding") != "" || decoded.header.Get("Etag") != `W/"e"` || decoded.header.Get("Vary") == "" {
				t.Errorf("decoded: %v", decoded.header)
			}
		}
	})
	t.Run("attached", func(t *testing.T) {
		hold = newGate(t)
		u.on("/attached", answer)
		r := request{path: "/attached", id: "k", header: asks}
		owner := g.begin(r)
		wait(t, hold.arrived, "the call")
		r.header = nil
		follower := g.begin(r)
		followers(t, 1)
		hold.open()
		owner.answer().want(t, 200, packed.String(), "executed")
		got := follower.answer()
		if got.cut || got.body != plain || got.header.Get("Content-Encoding") != "" {
			t.Errorf("%d bytes, cut %v, %v", len(got.body), got.cut, got.header)
		}
	})
	t.Run("not asked for", func(t *testing.T) {
		u.on("/plain", answer)
		r := request{path: "/plain", id: "k", header: headers{"Accept-Encoding": "br, zstd"}}
		g.call(r).want(t, 200, plain, "executed")
		if got := u.last(r.path).Header.Get("Accept-Encoding"); got != "identity" {
			t.Errorf("the upstream was asked for %q", got)
		}
		r.header = asks
		g.call(r).want(t, 200, plain, "replayed")
	})
	t.Run("caddy encodes", func(t *testing.T) {
		stop(t)
		g := start(t, "encode gzip\nagent_proxy %s", u.addr)
		u.on("/encoded", status(200, plain, "Content-Type", "text/plain"))
		r := request{path: "/encoded", id: "k", header: headers{"Accept-Encoding": "br"}}
		g.call(r).want(t, 200, plain, "executed")
		r.header = headers{"Accept-Encoding": "gzip"}
		got := g.call(r)
		in, err := gzip.NewReader(strings.NewReader(got.body))
		if err != nil {
			t.Fatalf("%v: %q", err, got.body)
		}
		if all, err := io.ReadAll(in); err != nil || string(all) != plain || got.header.Get("Execution-Status") != "replayed" {
			t.Errorf("%d bytes, %v, %v", len(all), err, got.header)
		}
	})
}
