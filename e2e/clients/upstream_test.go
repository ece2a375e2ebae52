package clients

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// What the upstream does with an arrival. The number is the HTTP status of its answer.
type deed int

const (
	executes deed = iota // has the effect, and answers 200
	drops                // has the effect, and closes the connection
	holds                // waits until the cell is let go, then executes

	refuses409 deed = 409 // another call holds the lock: no effect
	refuses429 deed = 429 // too many calls: no effect
	fails500   deed = 500 // has the effect, and answers 500
	fails502   deed = 502 // has the effect, and something before it answers 502
	fails503   deed = 503
)

// cell is one call of one client, with what its upstream does: do[n] with arrival n, and
// execute after that. It is known by its Idempotency-Key.
type cell struct {
	key   string
	keeps bool // the upstream keeps keys, as Stripe does
	do    []deed

	arrived chan struct{} // closed when a held call is here
	letGo   chan struct{} // closed when it may go on

	mu       sync.Mutex
	arrivals int
	effects  int
	answers  map[string]kept // by the upstream's own key
}

// kept is an answer that the upstream gives again.
type kept struct {
	status int
	id     string
}

// upstream answers by script, over HTTP and gRPC.
type upstream struct {
	*httptest.Server
	plain *httptest.Server // the same, which lets no page call it
	cells sync.Map         // by key
}

func newUpstream(t *testing.T) *upstream {
	u := new(upstream)
	u.plain = httptest.NewServer(http.HandlerFunc(u.answer))
	t.Cleanup(u.plain.Close)
	u.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// For the browser: the upstream lets any page call it.
		w.Header().Set("Access-Control-Allow-Origin", "*")
		w.Header().Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Idempotency-Key")
		if r.Method == http.MethodOptions {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		u.answer(w, r)
	}))
	u.Config.Protocols = new(http.Protocols)
	u.Config.Protocols.SetHTTP1(true)
	u.Config.Protocols.SetUnencryptedHTTP2(true)
	u.Start()
	t.Cleanup(u.Close)
	return u
}

func (u *upstream) answer(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	found, ok := u.cells.Load(r.Header.Get("Idempotency-Key"))
	if !ok {
		http.Error(w, "no such cell", http.StatusNotFound)
		return
	}
	c := found.(*cell)
	c.mu.Lock()
	do := executes
	if c.arrivals < len(c.do) {
		do = c.do[c.arrivals]
	}
	c.arrivals++
	c.mu.Unlock()
	if do == holds {
		close(c.arrived)
		<-c.letGo
	}
	say := sayHTTP
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		say = sayGRPC
	}
	switch do {
	case refuses409, refuses429:
		say(w, int(do), "")
	case drops:
		c.execute(http.StatusOK)
		panic(http.ErrAbortHandler)
	case fails500:
		a := c.execute(http.StatusInternalServerError)
		say(w, a.status, a.id)
	case fails502, fails503:
		c.execute(http.StatusOK)
		say(w, int(do), "")
	default:
		a := c.execute(http.StatusOK)
		say(w, a.status, a.id)
	}
}

// execute has the effect, unless the upstream knows the key.
func (c *cell) execute(status int) kept {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a, ok := c.answers[c.key]; ok && c.keeps {
		return a
	}
	c.effects++
	a := kept{status, fmt.Sprint("effect-", c.effects)}
	c.answers = map[string]kept{c.key: a}
	return a
}

// had is how many effects there were.
func (c *cell) had() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.effects
}

// sayHTTP answers in a form that all SDKs here take.
func sayHTTP(w http.ResponseWriter, status int, id string) {
	if status == http.StatusBadGateway || status == http.StatusServiceUnavailable {
		http.Error(w, "upstream unreachable", status) // something before the API
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	var body any = map[string]any{"id": id, "object": "payment_intent", "choices": []any{}, "content": []any{}}
	switch status {
	case http.StatusConflict:
		body = failure("idempotency_error", "lock_timeout")
	case http.StatusTooManyRequests:
		body = failure("rate_limit_error", "rate_limit")
	case http.StatusInternalServerError:
		body = failure("api_error", "broken")
	}
	_ = json.NewEncoder(w).Encode(body)
}

func failure(kind, code string) map[string]any {
	return map[string]any{"error": map[string]string{"type": kind, "code": code, "message": "the upstream says " + code}}
}

// sayGRPC answers with the status of gRPC that means the same.
func sayGRPC(w http.ResponseWriter, status int, id string) {
	code := map[int]string{200: "0", 409: "10", 429: "8", 500: "13", 502: "14", 503: "14"}[status]
	w.Header().Set("Content-Type", "application/grpc")
	if code != "0" {
		w.Header().Set("Grpc-Status", code)
		w.Header().Set("Grpc-Message", "the upstream says so")
		w.WriteHeader(http.StatusOK)
		return
	}
	w.Header().Set("Trailer", "Grpc-Status")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(append([]byte{0, 0, 0, 0, byte(len(id))}, id...))
	w.Header().Set("Grpc-Status", code)
}
