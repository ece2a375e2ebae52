package call

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// The limit of Caddy's own directive is one too; a length that is announced it refuses
// itself.
func TestBodyOverTheSitesLimit(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "request_body {\n max_size 10\n}\nagent_proxy %s", u.Addr)
	for i, r := range []harness.Request{{Body: "more than ten"}, {Reader: harness.OnlyReader{Reader: strings.NewReader("more than ten")}}} {
		r.Path, r.Id = fmt.Sprint("/", i), "k"
		if got := g.Call(r); i == 0 && got.Status != 413 {
			t.Errorf("%d %q", got.Status, got.Body)
		} else if i > 0 {
			if doc := got.Terminal(t, 413, "body-too-large"); !strings.Contains(doc.Detail, "at most 10 bytes") {
				t.Errorf("%+v", doc) // the limit that counts, not ours
			}
		}
		u.Arrived(r.Path, 0)
	}
}

// A body that stops coming before its end is told so, as something that a retry can cure:
// nothing was sent. So is one that waits for an answer, which cannot be guarded (C4).
func TestBodyThatStandsStill(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "timeouts {\n read_timeout 300ms\n}\nagent_proxy %s", u.Addr)
	for name, client := range map[string]*http.Client{"1": g.Client, "2": g.H2cClient()} {
		body, end := io.Pipe()
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			_, _ = io.WriteString(end, "half") // and nothing more until the answer
		}()
		got := g.Call(harness.Request{Method: http.MethodPut, Path: "/" + name, Id: "k", Client: client, Reader: body})
		_ = end.Close()
		harness.Wait(t, sent, "the half")
		if doc := got.Retryable(t, 408, "body-timeout"); *doc.SafeNewKey || !strings.Contains(doc.Detail, "4 bytes") {
			t.Errorf("HTTP/%s: %+v", name, doc)
		}
		u.Arrived("/"+name, 0)
		g.Call(harness.Request{Method: http.MethodPut, Path: "/" + name, Id: "k", Client: client}).Want(t, 201, "arrival 1", "executed")
	}
}

// Step 2: a body that does not fit into memory arrives as it was sent, and is
// compared like any other.
func TestBodySpills(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
		fmt.Fprintf(w, "%x %d %v", sha256.Sum256([]byte(a.Body)), a.ContentLength, a.TransferEncoding)
	})
	noise := make([]byte, 5<<20+1)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(noise) // never fails
	want := fmt.Sprintf("%x %d []", sha256.Sum256(noise), len(noise))
	octets := harness.Headers{"Content-Type": "application/octet-stream"}
	g.Call(harness.Request{Path: "/x", Id: "k", Body: string(noise), Header: octets}).Want(t, 200, want, "executed")
	g.Call(harness.Request{Path: "/x", Id: "k", Reader: harness.OnlyReader{Reader: strings.NewReader(string(noise))}, Header: octets}).Want(t, 200, want, "replayed")
	noise[len(noise)-1]++
	g.Call(harness.Request{Path: "/x", Id: "k", Body: string(noise), Header: octets}).Terminal(t, 422, "fingerprint-mismatch")
	u.Arrived("/x", 1)
}

// Trap 21: a client that waits for 100 gets it, and the upstream, to which the body
// goes at once, is not asked.
func TestExpectContinue(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n max_body 1KiB\n}", u.Addr)
	conn := g.Dial()
	in := bufio.NewReader(conn)
	harness.Write(t, conn, "POST /x HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("%q %v", line, err)
	}
	if line, err := in.ReadString('\n'); err != nil || line != "\r\n" {
		t.Fatalf("%q %v", line, err)
	}
	harness.Write(t, conn, "hello")
	harness.Answers(t, in, http.MethodPost).Want(t, 201, "arrival 1", "executed")
	if last := u.Last("/x"); last.Body != "hello" || last.Header.Get("Expect") != "" {
		t.Errorf("%q, %v", last.Body, last.Header)
	}
	// One that is refused is not asked for, and the client not left waiting.
	for slug, head := range map[string]string{
		"body-too-large":  "Content-Length: 5000\r\n",
		"caller-unstable": "Content-Length: 5\r\nAuthorization: DPoP x\r\n",
	} {
		conn = g.Dial()
		harness.Write(t, conn, "POST /x HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\n"+head+"Expect: 100-continue\r\n\r\n")
		got := harness.Answers(t, bufio.NewReader(conn), http.MethodPost)
		got.Terminal(t, got.Status, slug)
	}
}

// A request that is broken off in its body was never whole: nothing is forwarded and
// its key is free.
func TestBrokenOffRequest(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	head := "POST /x HTTP/1.1\r\nHost: " + g.Addr + "\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\n"
	for _, rest := range []string{
		"Content-Length: 12\r\n\r\n{\"amo",
		"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"amo\r\n",
		"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
	} {
		conn := g.Dial()
		harness.Write(t, conn, head+rest)
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		got, err := io.ReadAll(conn)
		if err != nil || len(got) > 0 && !strings.HasPrefix(string(got), "HTTP/1.1 400 ") {
			t.Errorf("%q: %q %v", rest, got, err)
		}
	}
	u.Arrived("/x", 0)
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 201, "arrival 1", "executed")
}

// The same over HTTP/2, where a client resets its stream.
func TestBrokenOffStream(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	out, in := io.Pipe()
	leave := g.Leaving(harness.Request{Path: "/x", Id: "k", Reader: harness.OnlyReader{Reader: out}, Client: g.H2cClient()})
	harness.Write(t, in, `{"amo`)
	harness.Eventually(t, "the gateway reads the body", func() bool { return harness.Waiting("guard.(*Handler).readBody") == 1 })
	leave()
	_ = in.Close()
	harness.Eventually(t, "the call is over", func() bool { return harness.Waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	u.Arrived("/x", 0)
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 201, "arrival 1", "executed")
}

// A large answer is replayed as it was, from the embedded store too.
func TestLargeAnswerIsReplayed(t *testing.T) {
	u := harness.NewUpstream(t)
	for _, badger := range []bool{false, true} {
		g := harness.Launch(t, harness.Setup{Site: "agent_proxy " + u.Addr, Badger: badger})
		for _, size := range []int{500, 513, 256 << 10, 256<<10 + 1, 3<<20 + 7, 8 << 20} {
			noise := make([]byte, size)
			source := rand.NewChaCha8([32]byte{2})
			_, _ = source.Read(noise) // never fails
			r := harness.Request{Path: fmt.Sprintf("/%v/%d", badger, size), Id: "k"}
			u.On(r.Path, harness.Status(200, string(noise)))
			for _, execution := range []string{"executed", "replayed", "replayed"} {
				got := g.Call(r)
				if got.Cut || got.Body != string(noise) || got.Header.Get("Execution-Status") != execution {
					t.Errorf("%s: %d bytes, cut %v, %s; want %s", r.Path, len(got.Body), got.Cut, got.Header.Get("Execution-Status"), execution)
				}
			}
			u.Arrived(r.Path, 1)
		}
		harness.Stop(t)
	}
}

// P4: clients that stop in the middle of their uploads take disk, and no more memory than
// all bodies may take together.
func TestStalledUploads(t *testing.T) {
	const uploads, size = 40, 1 << 20
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{
		App:  "body_memory 4MiB",
		Site: "timeouts {\n read_timeout 5s\n}\nagent_proxy " + u.Addr,
	})
	payload := bytes.Repeat([]byte("x"), size-1) // one byte is missing
	before := inUse()
	var clients sync.WaitGroup
	held := make(chan int, uploads)
	for n := range uploads {
		conn := g.Dial()
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
