package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// endings are answers, by how they end.
var endings = []struct {
	name   string
	method string
	answer func(http.ResponseWriter, *arrival)
	body   string
	// early is how much of the body must come before its end may.
	early int
}{
	{name: "length", answer: status(200, "hello", "Content-Length", "5"), body: "hello"},
	{name: "one byte", answer: status(200, "x", "Content-Length", "1"), body: "x"},
	// A server keeps a few KiB back to fill its packets.
	{name: "large", answer: status(200, strings.Repeat("x", 100_000), "Content-Length", "100000"), body: strings.Repeat("x", 100_000), early: 90_000},
	{name: "chunked", answer: flushed("hello"), body: "hello", early: 5},
	{name: "no content", answer: status(204, "")},
	{name: "not modified", answer: status(304, "")},
	{name: "length 0", answer: status(200, "", "Content-Length", "0")},
	{name: "head", method: http.MethodHead, answer: status(200, "", "Content-Length", "5")},
	{name: "error", answer: status(500, "broken", "Content-Length", "6"), body: "broken"},
}

func flushed(text string) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, _ *arrival) {
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, text)
		_ = http.NewResponseController(w).Flush()
	}
}

// P7, "awaited": the end of an answer leaves after the outcome is recorded, and
// nothing but the end waits for it. So whoever saw the end can rely on the record.
func TestTheEndWaitsForTheRecord(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n consequential {\n  method HEAD\n }\n}", u.addr)
	for i, row := range endings {
		t.Run(row.name, func(t *testing.T) {
			path := fmt.Sprintf("/%d", i)
			commits, answered := newGate(t), make(chan struct{})
			u.on(path, func(w http.ResponseWriter, a *arrival) {
				g.store.holdCommits(commits) // of the claim is none of them any more
				row.answer(w, a)
				close(answered)
			})
			t.Cleanup(func() { g.store.onCommit(nil) })
			method := row.method
			if method == "" {
				method = http.MethodPost
			}
			conn := g.dial()
			write(t, conn, method+" "+path+" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: k\r\n\r\n")
			wait(t, commits.arrived, "the outcome's commit")
			wait(t, answered, "the upstream's end")

			before := whatComes(t, conn, func(seen string) bool {
				got, _ := parse(seen, method)
				return len(got.body) >= row.early
			})
			if got, err := parse(before, method); err == nil && !got.cut {
				t.Errorf("the end came before the record: %d %q", got.status, got.body)
			}
			g.store.onCommit(nil)
			commits.open()
			got := answers(t, bufio.NewReader(io.MultiReader(strings.NewReader(before), conn)), method)
			if got.body != row.body || got.cut || got.header.Get("Execution-Status") != "executed" {
				t.Errorf("after the record: %d %q, cut %v", got.status, got.body, got.cut)
			}
			again := g.call(request{method: method, path: path, id: "k", reader: onlyReader{strings.NewReader("")}, header: headers{"Content-Type": ""}, host: "x"})
			again.want(t, got.status, row.body, "replayed")
			u.arrived(path, 1)
		})
	}
}

// whatComes reads from conn until enough says so, and then what else there is now.
func whatComes(t *testing.T, conn net.Conn, enough func(string) bool) string {
	t.Helper()
	var seen []byte
	buf := make([]byte, 64<<10)
	for last := false; !last; {
		limit := patience
		if last = enough(string(seen)); last {
			// Nothing is on its way that would come later: the gateway waits. To
			// look longer would find a fault more surely.
			limit = 30 * time.Millisecond
		}
		_ = conn.SetReadDeadline(time.Now().Add(limit))
		n, err := conn.Read(buf)
		seen = append(seen, buf[:n]...)
		if err != nil && !(last && errors.Is(err, os.ErrDeadlineExceeded)) {
			t.Fatalf("got %q, then %v", seen, err) // an ended connection is an end too
		}
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	return string(seen)
}

// parse reads what has come of an answer so far. The error is of its header.
func parse(seen, method string) (reply, error) {
	res, err := http.ReadResponse(bufio.NewReader(strings.NewReader(seen)), &http.Request{Method: method})
	if err != nil {
		return reply{}, err
	}
	return read(res), nil
}

// P7: the end waits for the record at a client of HTTP/1.0 and of HTTP/2 as well.
func TestTheEndWaitsInOtherVersions(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	t.Run("1.0", func(t *testing.T) {
		commits := newGate(t)
		u.on("/1.0", func(w http.ResponseWriter, a *arrival) {
			g.store.holdCommits(commits)
			flushed("hello")(w, a)
		})
		conn := g.dial()
		write(t, conn, "POST /1.0 HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
		wait(t, commits.arrived, "the outcome's commit")
		before := whatComes(t, conn, func(seen string) bool { return strings.HasSuffix(seen, "hello") })
		g.store.onCommit(nil)
		commits.open()
		after, err := io.ReadAll(conn)
		if err != nil || len(after) != 0 {
			t.Errorf("%q, then %q %v", before, after, err)
		}
		got, err := parse(before, http.MethodPost)
		if err != nil || got.header.Get("Execution-Status") != "executed" || got.header.Get("Transfer-Encoding") != "" {
			t.Errorf("%q", before)
		}
		replay := g.raw("POST /1.0 HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
		if !strings.HasSuffix(replay, "\r\n\r\nhello") || !strings.Contains(replay, "Execution-Status: replayed") {
			t.Errorf("replay: %q", replay)
		}
	})
	for name, answer := range map[string]func(http.ResponseWriter, *arrival){
		"2-length": status(200, "hello", "Content-Length", "5"), "2-flushed": flushed("hello"), "2-204": status(204, ""),
	} {
		t.Run(name, func(t *testing.T) {
			commits := newGate(t)
			u.on("/"+name, func(w http.ResponseWriter, a *arrival) {
				g.store.holdCommits(commits)
				answer(w, a)
			})
			r := request{path: "/" + name, id: "k", client: g.h2cClient()}
			call := g.begin(r)
			wait(t, commits.arrived, "the outcome's commit")
			call.unanswered("before the record")
			g.store.onCommit(nil)
			commits.open()
			got := call.answer()
			if got.proto != 2 || got.cut || got.header.Get("Execution-Status") != "executed" {
				t.Errorf("%+v", got)
			}
			g.call(r).want(t, got.status, got.body, "replayed")
		})
	}
}
