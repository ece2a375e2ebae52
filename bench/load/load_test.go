package load_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/load"
)

// seen is a server that remembers what it was asked.
type seen struct {
	mu     sync.Mutex
	keys   map[string]int
	tokens map[string]int
	bodies map[string]int
	status int
}

func (s *seen) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys[r.Header.Get("Idempotency-Key")]++
	s.tokens[r.Header.Get("Execution-Context")]++
	s.bodies[string(body)]++
	w.Header().Set("Mark", "yes")
	w.WriteHeader(s.status)
	_, _ = io.WriteString(w, strings.Repeat("x", 1<<10))
}

func serve(t *testing.T, status int) (*seen, string) {
	t.Helper()
	s := &seen{keys: map[string]int{}, tokens: map[string]int{}, bodies: map[string]int{}, status: status}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, server.Listener.Addr().String()
}

// Every request of a round has a key of its own, and the round's limit holds; each
// connection makes one more, before the clock starts.
func TestFreshKeys(t *testing.T) {
	s, addr := serve(t, 201)
	request := load.Payment(200)
	request.Keys = load.Fresh
	result, err := load.Run(t.Context(), load.Job{
		Addr: addr, Request: request, Conns: 4, For: time.Minute, Limit: 100, Status: 201, Line: "mark: yes",
	})
	if err != nil {
		t.Fatal(err)
	}
	if result.Requests != 100 || len(result.Latencies) != 100 || result.Rate() <= 0 {
		t.Errorf("got %d requests, %d latencies, %f/s", result.Requests, len(result.Latencies), result.Rate())
	}
	if len(s.keys) != 104 {
		t.Errorf("%d different keys of 104 requests", len(s.keys))
	}
	for key := range s.keys {
		if len(key) != 36 {
			t.Errorf("the key %q has not the length of a UUID", key)
		}
	}
	for body := range s.bodies {
		if len(body) != 200 {
			t.Errorf("a body of %d bytes: %s", len(body), body)
		}
	}
}

// What the server has put off is done before the clock starts, and at the end on the
// clock: what the calls of before left behind is not counted, what those of the round
// leave behind is.
func TestOneKey(t *testing.T) {
	s, addr := serve(t, 200)
	request := load.Payment(200)
	request.Key = load.NewKey()
	if _, err := load.Run(t.Context(), load.Job{
		Addr: addr, Request: request, Conns: 2, For: time.Minute, Limit: 10, Status: 200,
	}); err != nil {
		t.Fatal(err)
	}
	if len(s.keys) != 1 || s.keys[request.Key] != 12 {
		t.Errorf("keys %v, want %s 12 times", s.keys, request.Key)
	}
}

// A round in which something else was measured than what was meant is no round.
func TestUnexpectedAnswersEndTheRound(t *testing.T) {
	_, addr := serve(t, 503)
	job := load.Job{Addr: addr, Request: load.Request{Method: "GET", Path: "/"}, Conns: 2, For: time.Minute, Limit: 10, Status: 200}
	if _, err := load.Run(t.Context(), job); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("another status: %v", err)
	}
	job.Status, job.Line = 503, "Execution-Status: replayed"
	if _, err := load.Run(t.Context(), job); err == nil || !strings.Contains(err.Error(), "replayed") {
		t.Errorf("a missing line: %v", err)
	}
}

// A least number of requests does not lift the limit of a round.
func TestLeast(t *testing.T) {
	_, addr := serve(t, 200)
	request := load.Payment(200)
	request.Keys = load.Fresh
	result, err := load.Run(t.Context(), load.Job{
		Addr: addr, Request: request, Conns: 4, For: time.Minute, Limit: 50, Least: 100, Status: 200,
	})
	if err != nil || result.Requests != 50 {
		t.Errorf("%d requests under a limit of 50, %v", result.Requests, err)
	}
}

// Keys in turn are all keys of the range, and any key is one of them.
func TestNumberedKeys(t *testing.T) {
	const prefix, n = "5ec04ded-0000-4000-8000-", 5
	each, seen := load.Each(prefix, n), map[string]int{}
	for range 2 * n {
		seen[string(each(nil))]++
	}
	if len(seen) != n {
		t.Errorf("%d keys, want %d", len(seen), n)
	}
	for key, times := range seen {
		if times != 2 || len(key) != load.KeyLength {
			t.Errorf("%q came %d times", key, times)
		}
	}
	anyOf := load.AnyOf(prefix, n)
	for range 20 {
		if key := string(anyOf(nil)); seen[key] == 0 {
			t.Errorf("%q is none of them", key)
		}
	}
}
