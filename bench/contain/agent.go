package contain

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Role is the name of the part that is one agent of the chain, or the tool at its end.
const Role = "agent"

// Faults are what an agent can be made to do, besides its work.
var Faults = []string{"fails", "hangs", "leaks", "nonsense"}

const (
	// work is what an agent does itself for each call, while it holds one of its workers.
	work = 5 * time.Millisecond
	// tries is how often an agent makes a call, as SDKs do: one call and two retries.
	tries = 3
	// backoff is the pause before the first retry; the next one is twice as long.
	backoff = 200 * time.Millisecond
	// longestPause is how long an agent waits at most because Retry-After says so.
	longestPause = 2 * time.Second
	// leaked is what a leaking agent keeps of each call, and slower by how much the next one is.
	leaked, slower = 256 << 10, 25 * time.Millisecond
	// maxLeaked bounds what a leaking agent keeps, in calls.
	maxLeaked = 1000
	// keyField has the id of the call, which an agent passes on.
	keyField = "Idempotency-Key"
)

// Run serves on a free port of the loopback until the process is ended. An agent does its work and
// passes the call on to the next one; without a next one it is the tool, whose effects are counted.
func Run(args []string) error {
	flags := flag.NewFlagSet(Role, flag.ContinueOnError)
	next := flags.String("next", "", "URL of what is called next; without it this is the tool")
	workers := flags.Int("workers", 16, "calls that are worked on at a time")
	timeout := flags.Duration("timeout", 0, "how long a call to the next one may take")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	a := &agent{
		next: *next, workers: make(chan struct{}, *workers), effects: map[string]int{}, healed: make(chan struct{}),
		client: &http.Client{Timeout: *timeout, Transport: &http.Transport{MaxIdleConnsPerHost: *workers}},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /control/fault", a.control)
	mux.HandleFunc("GET /control/state", a.show)
	mux.HandleFunc("POST /", a.serve)
	proc.Ready(l.Addr().String())
	return http.Serve(l, mux)
}

// state is what an agent says about itself.
type state struct {
	// Arrived are the calls that have come so far, Held those that are not answered yet.
	Arrived, Held int
	Goroutines    int
	// Items are the pieces of work that the tool has done, Repeated those that it did more than once.
	Items, Repeated int
}

type agent struct {
	next    string
	client  *http.Client
	workers chan struct{}

	mu      sync.Mutex
	state   state
	effects map[string]int
	fault   string
	calls   int           // since the fault began
	healed  chan struct{} // closed when the fault ends
	kept    [][]byte
}

// control makes the agent fail as the query says, or heals it.
func (a *agent) control(_ http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.healed)
	a.fault, a.calls, a.healed, a.kept = r.URL.Query().Get("is"), 0, make(chan struct{}), nil
}

func (a *agent) show(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	s := a.state
	s.Items = len(a.effects)
	for _, n := range a.effects {
		if n > 1 {
			s.Repeated++
		}
	}
	a.mu.Unlock()
	s.Goroutines = runtime.NumGoroutine()
	_ = json.NewEncoder(w).Encode(s) // who asks sees what is missing
}

// arrive counts a call. calls are those since the agent is at fault, which are bounded; healed is closed
// when that is over, and left counts the end of the call.
func (a *agent) arrive() (fault string, calls int, healed <-chan struct{}, left func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state.Arrived++
	a.state.Held++
	a.calls = min(a.calls+1, maxLeaked)
	if a.fault == "leaks" && a.calls < maxLeaked {
		a.kept = append(a.kept, make([]byte, leaked))
	}
	return a.fault, a.calls, a.healed, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.state.Held--
	}
}

// serve does one call. An agent that is at fault has its effect first, and then does not say so: whoever
// calls again on that account has it twice.
func (a *agent) serve(w http.ResponseWriter, r *http.Request) {
	fault, calls, healed, left := a.arrive()
	defer left()
	_, _ = io.Copy(io.Discard, r.Body)
	select {
	case a.workers <- struct{}{}:
		defer func() { <-a.workers }()
	case <-r.Context().Done():
		return
	}
	pause(r.Context(), nil, work)
	status, text := a.pass(r)
	switch fault {
	case "fails":
		status, text = http.StatusInternalServerError, `{"error":"failed"}`
	case "hangs":
		pause(r.Context(), healed, 0)
	case "leaks":
		pause(r.Context(), healed, time.Duration(calls)*slower)
	case "nonsense":
		if status != http.StatusOK {
			break
		}
		switch calls % 3 {
		case 0:
			text = `{"error":{"code":"internal"}}`
		case 1:
			text = `<html>It works!</html>`
		case 2: // and the connection ends before the answer does
			w.Header().Set("Content-Length", strconv.Itoa(2*len(text)))
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

const good = `{"ok":true}`

// pass makes the call of the next one, or has the effect. What it gets instead of a good answer is a
// failure of its own, as agents do that know of no gateway.
func (a *agent) pass(r *http.Request) (status int, text string) {
	if a.next == "" {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.effects[r.Header.Get(keyField)]++
		return http.StatusOK, good
	}
	if err := a.call(r); err != nil {
		return http.StatusBadGateway, fmt.Sprintf(`{"error":%q}`, err)
	}
	return http.StatusOK, good
}

func (a *agent) call(r *http.Request) (err error) {
	wait := backoff
	for try := range tries {
		if try > 0 && !pause(r.Context(), nil, wait) {
			return r.Context().Err()
		}
		again, after := false, time.Duration(0)
		if again, after, err = a.try(r); err == nil || !again || after > longestPause {
			return err
		}
		wait = max(after, backoff<<try)
	}
	return err
}

// errRefused is the error of an answer that is not good.
type errRefused struct{ status int }

func (e errRefused) Error() string { return "the next one answered " + strconv.Itoa(e.status) }

var errNonsense = errors.New("the next one answered what is no answer")

// try makes the call once. again says that an SDK would call again, after how long it is asked to wait.
func (a *agent) try(r *http.Request) (again bool, after time.Duration, err error) {
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, a.next+r.URL.Path, strings.NewReader(`{"do":"it"}`))
	if err != nil {
		return false, 0, err
	}
	for _, field := range []string{keyField, "Workflow-Id", "Authorization"} {
		req.Header.Set(field, r.Header.Get(field))
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := a.client.Do(req)
	if err != nil {
		return true, 0, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return true, 0, err
	}
	if res.StatusCode != http.StatusOK {
		seconds, _ := strconv.Atoi(res.Header.Get("Retry-After"))
		again = res.StatusCode >= 500 || res.StatusCode == http.StatusConflict || res.StatusCode == http.StatusTooManyRequests
		return again && res.Header.Get("X-Should-Retry") != "false", time.Duration(seconds) * time.Second, errRefused{res.StatusCode}
	}
	var answer struct{ Ok bool }
	if json.Unmarshal(body, &answer) != nil || !answer.Ok {
		return false, 0, errNonsense
	}
	return false, 0, nil
}

// pause waits, until over is closed at the longest; without a time until then. It reports whether the
// client is still there.
func pause(ctx context.Context, over <-chan struct{}, d time.Duration) bool {
	var after <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		after = timer.C
	}
	select {
	case <-after:
	case <-over:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
