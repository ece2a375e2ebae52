package workflow

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P7, "awaited": the end of an answer leaves after the outcome is recorded, and
// nothing but the end waits for it. So whoever saw the end can rely on the record.
func TestTheEndWaitsForTheRecord(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n consequential {\n  method HEAD\n }\n}", u.Addr)
	for i, row := range harness.Endings {
		t.Run(row.Name, func(t *testing.T) {
			path := fmt.Sprintf("/%d", i)
			commits, answered := harness.NewGate(t), make(chan struct{})
			u.On(path, func(w http.ResponseWriter, a *harness.Arrival) {
				g.Store.HoldCommits(commits) // of the claim is none of them any more
				row.Answer(w, a)
				close(answered)
			})
			t.Cleanup(func() { g.Store.OnCommit(nil) })
			method := row.Method
			if method == "" {
				method = http.MethodPost
			}
			conn := g.Dial()
			harness.Write(t, conn, method+" "+path+" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: k\r\n\r\n")
			harness.Wait(t, commits.Arrived, "the outcome's commit")
			harness.Wait(t, answered, "the upstream's end")

			before := whatComes(t, conn, func(seen string) bool {
				got, _ := parse(seen, method)
				return len(got.Body) >= row.Early
			})
			if got, err := parse(before, method); err == nil && !got.Cut {
				t.Errorf("the end came before the record: %d %q", got.Status, got.Body)
			}
			g.Store.OnCommit(nil)
			commits.Open()
			got := harness.Answers(t, bufio.NewReader(io.MultiReader(strings.NewReader(before), conn)), method)
			if got.Body != row.Body || got.Cut || got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("after the record: %d %q, cut %v", got.Status, got.Body, got.Cut)
			}
			again := g.Call(harness.Request{Method: method, Path: path, Id: "k", Reader: harness.OnlyReader{Reader: strings.NewReader("")}, Header: harness.Headers{"Content-Type": ""}, Host: "x"})
			again.Want(t, got.Status, row.Body, "replayed")
			u.Arrived(path, 1)
		})
	}
}

// whatComes reads from conn until enough says so, and then what else there is now.
func whatComes(t *testing.T, conn net.Conn, enough func(string) bool) string {
	t.Helper()
	var seen []byte
	buf := make([]byte, 64<<10)
	for last := false; !last; {
		limit := harness.Patience
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
	_ = conn.SetReadDeadline(time.Now().Add(harness.Patience))
	return string(seen)
}

// parse reads what has come of an answer so far. The error is of its header.
func parse(seen, method string) (harness.Reply, error) {
	res, err := http.ReadResponse(bufio.NewReader(strings.NewReader(seen)), &http.Request{Method: method})
	if err != nil {
		return harness.Reply{}, err
	}
	return harness.Read(res), nil
}

// P7: the end waits for the record at a client of HTTP/1.0 and of HTTP/2 as well.
func TestTheEndWaitsInOtherVersions(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	t.Run("1.0", func(t *testing.T) {
		commits := harness.NewGate(t)
		u.On("/1.0", func(w http.ResponseWriter, a *harness.Arrival) {
			g.Store.HoldCommits(commits)
			harness.Flushed("hello")(w, a)
		})
		conn := g.Dial()
		harness.Write(t, conn, "POST /1.0 HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
		harness.Wait(t, commits.Arrived, "the outcome's commit")
		before := whatComes(t, conn, func(seen string) bool { return strings.HasSuffix(seen, "hello") })
		g.Store.OnCommit(nil)
		commits.Open()
		after, err := io.ReadAll(conn)
		if err != nil || len(after) != 0 {
			t.Errorf("%q, then %q %v", before, after, err)
		}
		got, err := parse(before, http.MethodPost)
		if err != nil || got.Header.Get("Execution-Status") != "executed" || got.Header.Get("Transfer-Encoding") != "" {
			t.Errorf("%q", before)
		}
		replay := g.Raw("POST /1.0 HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
		if !strings.HasSuffix(replay, "\r\n\r\nhello") || !strings.Contains(replay, "Execution-Status: replayed") {
			t.Errorf("replay: %q", replay)
		}
	})
	for name, answer := range map[string]func(http.ResponseWriter, *harness.Arrival){
		"2-length": harness.Status(200, "hello", "Content-Length", "5"), "2-flushed": harness.Flushed("hello"), "2-204": harness.Status(204, ""),
	} {
		t.Run(name, func(t *testing.T) {
			commits := harness.NewGate(t)
			u.On("/"+name, func(w http.ResponseWriter, a *harness.Arrival) {
				g.Store.HoldCommits(commits)
				answer(w, a)
			})
			r := harness.Request{Path: "/" + name, Id: "k", Client: g.H2cClient()}
			call := g.Begin(r)
			harness.Wait(t, commits.Arrived, "the outcome's commit")
			call.Unanswered("before the record")
			g.Store.OnCommit(nil)
			commits.Open()
			got := call.Answer()
			if got.Proto != 2 || got.Cut || got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("%+v", got)
			}
			g.Call(r).Want(t, got.Status, got.Body, "replayed")
		})
	}
}
