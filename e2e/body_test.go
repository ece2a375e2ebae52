package e2e

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// The limit of Caddy's own directive is one too; a length that is announced it refuses
// itself.
func TestBodyOverTheSitesLimit(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "request_body {\n max_size 10\n}\nagent_proxy %s", u.addr)
	for i, r := range []request{{body: "more than ten"}, {reader: onlyReader{strings.NewReader("more than ten")}}} {
		r.path, r.id = fmt.Sprint("/", i), "k"
		if got := g.call(r); i == 0 && got.status != 413 {
			t.Errorf("%d %q", got.status, got.body)
		} else if i > 0 {
			if doc := got.terminal(t, 413, "body-too-large"); !strings.Contains(doc.Detail, "at most 10 bytes") {
				t.Errorf("%+v", doc) // the limit that counts, not ours
			}
		}
		u.arrived(r.path, 0)
	}
}

// A body that stops coming before its end is told so, as something that a retry can cure:
// nothing was sent. So is one that waits for an answer, which cannot be guarded (C4).
func TestBodyThatStandsStill(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "timeouts {\n read_timeout 300ms\n}\nagent_proxy %s", u.addr)
	for name, client := range map[string]*http.Client{"1": g.client, "2": g.h2cClient()} {
		body, end := io.Pipe()
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			_, _ = io.WriteString(end, "half") // and nothing more until the answer
		}()
		got := g.call(request{method: http.MethodPut, path: "/" + name, id: "k", client: client, reader: body})
		_ = end.Close()
		wait(t, sent, "the half")
		if doc := got.retryable(t, 408, "body-timeout"); *doc.SafeNewKey || !strings.Contains(doc.Detail, "4 bytes") {
			t.Errorf("HTTP/%s: %+v", name, doc)
		}
		u.arrived("/"+name, 0)
		g.call(request{method: http.MethodPut, path: "/" + name, id: "k", client: client}).want(t, 201, "arrival 1", "executed")
	}
}

// Step 2: a body that does not fit into memory arrives as it was sent, and is
// compared like any other.
func TestBodySpills(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		fmt.Fprintf(w, "%x %d %v", sha256.Sum256([]byte(a.body)), a.ContentLength, a.TransferEncoding)
	})
	noise := make([]byte, 5<<20+1)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(noise) // never fails
	want := fmt.Sprintf("%x %d []", sha256.Sum256(noise), len(noise))
	octets := headers{"Content-Type": "application/octet-stream"}
	g.call(request{path: "/x", id: "k", body: string(noise), header: octets}).want(t, 200, want, "executed")
	g.call(request{path: "/x", id: "k", reader: onlyReader{strings.NewReader(string(noise))}, header: octets}).want(t, 200, want, "replayed")
	noise[len(noise)-1]++
	g.call(request{path: "/x", id: "k", body: string(noise), header: octets}).terminal(t, 422, "fingerprint-mismatch")
	u.arrived("/x", 1)
}

// Trap 21: a client that waits for 100 gets it, and the upstream, to which the body
// goes at once, is not asked.
func TestExpectContinue(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n max_body 1KiB\n}", u.addr)
	conn := g.dial()
	in := bufio.NewReader(conn)
	write(t, conn, "POST /x HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("%q %v", line, err)
	}
	if line, err := in.ReadString('\n'); err != nil || line != "\r\n" {
		t.Fatalf("%q %v", line, err)
	}
	write(t, conn, "hello")
	answers(t, in, http.MethodPost).want(t, 201, "arrival 1", "executed")
	if last := u.last("/x"); last.body != "hello" || last.Header.Get("Expect") != "" {
		t.Errorf("%q, %v", last.body, last.Header)
	}
	// One that is refused is not asked for, and the client not left waiting.
	for slug, head := range map[string]string{
		"body-too-large":  "Content-Length: 5000\r\n",
		"caller-unstable": "Content-Length: 5\r\nAuthorization: DPoP x\r\n",
	} {
		conn = g.dial()
		write(t, conn, "POST /x HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\n"+head+"Expect: 100-continue\r\n\r\n")
		got := answers(t, bufio.NewReader(conn), http.MethodPost)
		got.terminal(t, got.status, slug)
	}
}

// A request that is broken off in its body was never whole: nothing is forwarded and
// its key is free.
func TestBrokenOffRequest(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	head := "POST /x HTTP/1.1\r\nHost: " + g.addr + "\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\n"
	for _, rest := range []string{
		"Content-Length: 12\r\n\r\n{\"amo",
		"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"amo\r\n",
		"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
	} {
		conn := g.dial()
		write(t, conn, head+rest)
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		got, err := io.ReadAll(conn)
		if err != nil || len(got) > 0 && !strings.HasPrefix(string(got), "HTTP/1.1 400 ") {
			t.Errorf("%q: %q %v", rest, got, err)
		}
	}
	u.arrived("/x", 0)
	g.call(request{path: "/x", id: "k"}).want(t, 201, "arrival 1", "executed")
}

// The same over HTTP/2, where a client resets its stream.
func TestBrokenOffStream(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	out, in := io.Pipe()
	leave := g.leaving(request{path: "/x", id: "k", reader: onlyReader{out}, client: g.h2cClient()})
	write(t, in, `{"amo`)
	eventually(t, "the gateway reads the body", func() bool { return waiting("guard.(*Call).readBody") == 1 })
	leave()
	_ = in.Close()
	eventually(t, "the call is over", func() bool { return waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	u.arrived("/x", 0)
	g.call(request{path: "/x", id: "k"}).want(t, 201, "arrival 1", "executed")
}

// A large answer is replayed as it was, from the embedded store too.
func TestLargeAnswerIsReplayed(t *testing.T) {
	u := newUpstream(t)
	for _, badger := range []bool{false, true} {
		g := launch(t, setup{site: "agent_proxy " + u.addr, badger: badger})
		for _, size := range []int{500, 513, 256 << 10, 256<<10 + 1, 3<<20 + 7, 8 << 20} {
			noise := make([]byte, size)
			source := rand.NewChaCha8([32]byte{2})
			_, _ = source.Read(noise) // never fails
			r := request{path: fmt.Sprintf("/%v/%d", badger, size), id: "k"}
			u.on(r.path, status(200, string(noise)))
			for _, execution := range []string{"executed", "replayed", "replayed"} {
				got := g.call(r)
				if got.cut || got.body != string(noise) || got.header.Get("Execution-Status") != execution {
					t.Errorf("%s: %d bytes, cut %v, %s; want %s", r.path, len(got.body), got.cut, got.header.Get("Execution-Status"), execution)
				}
			}
			u.arrived(r.path, 1)
		}
		stop(t)
	}
}

// P4: clients that stop in the middle of their uploads take disk, and no more memory than
// all bodies may take together.
func TestStalledUploads(t *testing.T) {
	const uploads, size = 75, 1 << 20
	u := newUpstream(t)
	g := launch(t, setup{
		app:  "body_memory 4MiB",
		site: "timeouts {\n read_timeout 10s\n}\nagent_proxy " + u.addr,
	})
	payload := bytes.Repeat([]byte("x"), size-1) // one byte is missing
	before := inUse()
	var clients sync.WaitGroup
	held := make(chan int, uploads)
	for n := range uploads {
		conn := g.dial()
		clients.Go(func() {
			_, _ = fmt.Fprintf(conn, "POST /%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n", n, size)
			_, _ = conn.Write(payload) // all from one place in memory: io.WriteString would copy it
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Error(err)
				return
			}
			var doc struct{ Type, Detail string }
			err = json.NewDecoder(res.Body).Decode(&doc)
			var came int
			if _, scanErr := fmt.Sscanf(doc.Detail, "%d bytes", &came); err != nil || scanErr != nil || res.StatusCode != 408 {
				t.Errorf("%d %+v %v %v", res.StatusCode, doc, err, scanErr)
			}
			held <- came
		})
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		clients.Wait()
		close(held)
	}()
	var taken int64 // when all that has come stands, and nothing moves
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for waiting := true; waiting; {
		select {
		case <-look.C:
			if now := inUse(); len(held) == 0 {
				taken = now - before
			}
		case <-answered:
			waiting = false
		}
	}
	total := 0
	for came := range held {
		total += came
	}
	if total < uploads*size/2 {
		t.Errorf("only %d bytes have come; this proves nothing", total)
	}
	// What each connection takes by itself is far below a body.
	if taken > int64(total)/2 {
		t.Errorf("%d bytes of memory for %d bytes of bodies", taken, total)
	}
}
