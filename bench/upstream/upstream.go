// Package upstream is what stands behind the gateways: a server that answers at once,
// and one that keeps a ledger of what it did.
package upstream

import (
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Role is the name of the part.
const Role = "upstream"

// AnswerSize is the length of an answer's body, in bytes.
const AnswerSize = 1 << 10

// Run serves on a free port of the loopback until the process is ended. With
// -ledger it writes every execution into a file before it answers.
func Run(args []string) error {
	flags := flag.NewFlagSet(Role, flag.ContinueOnError)
	path := flags.String("ledger", "", "file to write executions to")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: http.HandlerFunc(plain)}
	if *path != "" {
		f, err := os.OpenFile(*path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		server.Handler = &keeper{file: f}
		// Longer than the gateway keeps a connection for guarded calls, short
		// enough that an idle gateway's connections are gone soon.
		server.IdleTimeout = 5 * time.Second
	}
	proc.Ready(l.Addr().String())
	return server.Serve(l)
}

// Body is the body of every plain answer.
var Body = `{"id":"ch_1","note":"` + strings.Repeat("x", AnswerSize-len(`{"id":"ch_1","note":""}`)) + `"}`

// plain answers 200 with Body, without think time; at some paths it fails, or answers with a stream.
func plain(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	if strings.HasSuffix(r.URL.Path, "/stream") {
		stream(w)
		return
	}
	w.Header()["Content-Type"] = []string{"application/json"}
	w.Header()["Content-Length"] = []string{strconv.Itoa(len(Body))}
	if strings.HasSuffix(r.URL.Path, "/fails") {
		w.WriteHeader(http.StatusInternalServerError)
	}
	_, _ = io.WriteString(w, Body)
}

// stream answers a message of MCP with two events, and some time between them.
func stream(w http.ResponseWriter) {
	w.Header()["Content-Type"] = []string{"text/event-stream"}
	_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{\"level\":\"info\",\"data\":\"begun\"}}\n\n")
	_ = http.NewResponseController(w).Flush()
	time.Sleep(eventsApart)
	_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"content\":[]}}\n\n")
}

// eventsApart is the time between the events of a stream.
const eventsApart = 10 * time.Millisecond

// keeper executes: each request that came whole is one line of the ledger, written
// before the answer. The file is the only truth about what was executed: gateways
// come and go.
type keeper struct {
	mu      sync.Mutex
	file    *os.File
	effects int
}

// EffectHeader carries the number of the execution that an answer is of.
const EffectHeader = "Effect"

// ServeHTTP executes the request.
func (k *keeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return // not a whole request: nothing is done
	}
	effect, err := k.execute(r.Header.Get("Idempotency-Key"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "the run is worth nothing without its ledger:", err)
		os.Exit(1)
	}
	w.Header().Set(EffectHeader, strconv.Itoa(effect))
	plain(w, r)
}

// execute writes the line. The upstream is not killed, so what the system has taken
// is there at the end.
func (k *keeper) execute(id string) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.effects++
	_, err := fmt.Fprintf(k.file, "%d %s\n", k.effects, id)
	return k.effects, err
}
