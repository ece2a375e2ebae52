//go:build unix

package harness

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// ProcUpstream is a tool server that does something for every request that arrives,
// and writes it into a ledger, on disk, before it answers. The ledger is the only
// truth about what was executed: gateways come and go.
type ProcUpstream struct {
	Addr   string
	server *http.Server
	path   string

	mu      sync.Mutex
	ledger  *os.File
	effects int
	count   map[string]int
	scripts map[string]ProcScript
	seen    func(n int) // called with the number of effects, once each is in the ledger
}

// ProcScript answers one execution instead of the usual answer.
type ProcScript func(w http.ResponseWriter, r *http.Request, effect int)

// ProcNewUpstream starts an upstream that outlives gateways.
func ProcNewUpstream(t *testing.T) *ProcUpstream {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ProcServeUpstream(t, l, new(http.Server))
}

// ProcServeUpstream starts an upstream with a server of its own.
func ProcServeUpstream(t *testing.T, l net.Listener, server *http.Server) *ProcUpstream {
	t.Helper()
	u := &ProcUpstream{
		Addr: l.Addr().String(), server: server, path: filepath.Join(t.TempDir(), "ledger"),
		count: map[string]int{}, scripts: map[string]ProcScript{},
	}
	var err error
	if u.ledger, err = os.OpenFile(u.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		t.Fatal(err)
	}
	server.Handler = u
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() {
		_ = server.Close()
		u.Audit(t)
		_ = u.ledger.Close()
	})
	return u
}

// Script sets what becomes of the next execution of id.
func (u *ProcUpstream) Script(id string, s ProcScript) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.scripts[id] = s
}

// Arrivals is how often id was executed.
func (u *ProcUpstream) Arrivals(id string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.count[id]
}

// Total is how many effects there are.
func (u *ProcUpstream) Total() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.effects
}

// ServeHTTP notes each request in the ledger, and answers it.
func (u *ProcUpstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.ReadAll(r.Body); err != nil {
		return // not a whole request: nothing is done
	}
	id := cmp.Or(r.Header.Get(ProcName), r.Header.Get("Idempotency-Key"))
	effect, script, seen := u.execute(id)
	if seen != nil {
		seen(effect)
	}
	if script == nil {
		script = procAnswerAsAsked
	}
	script(w, r, effect)
}

// execute has the effect: it is on disk when execute returns.
func (u *ProcUpstream) execute(id string) (int, ProcScript, func(int)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.effects++
	if _, err := fmt.Fprintf(u.ledger, "%d %s\n", u.effects, id); err != nil {
		panic(err)
	}
	if err := u.ledger.Sync(); err != nil {
		panic(err)
	}
	u.count[id]++
	script := u.scripts[id]
	delete(u.scripts, id)
	return u.effects, script, u.seen
}

// The request's fields by which a client asks for a shape of the answer.
const (
	ProcSize    = "X-Answer-Size"    // bytes that follow the effect's number
	ProcStatus  = "X-Answer-Status"  // default 201
	ProcChunked = "X-Answer-Chunked" // without Content-Length
	ProcName    = "X-Call-Name"      // the id in the ledger, of calls that the gateway gives one
)

func procAnswerAsAsked(w http.ResponseWriter, r *http.Request, effect int) {
	status := http.StatusCreated
	if text := r.Header.Get(ProcStatus); text != "" {
		status, _ = strconv.Atoi(text)
	}
	size, _ := strconv.Atoi(r.Header.Get(ProcSize))
	body := ProcBody(effect, size)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Effect", strconv.Itoa(effect))
	if r.Header.Get(ProcChunked) == "" && status != http.StatusNoContent {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(status)
	if status != http.StatusNoContent {
		_, _ = io.WriteString(w, body)
	}
}

// ProcBody is the answer of an effect.
func ProcBody(effect, size int) string {
	return fmt.Sprintf(`{"effect":%d,"note":"%s"}`, effect, strings.Repeat(strconv.Itoa(effect%10), size))
}

// Audit reads the ledger from its file and fails where an id stands in it twice
// (P1). It returns how often each id stands there.
func (u *ProcUpstream) Audit(t *testing.T) map[string]int {
	t.Helper()
	f, err := os.Open(u.path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	count := map[string]int{}
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		number, id, ok := strings.Cut(lines.Text(), " ")
		if !ok || number != strconv.Itoa(n) {
			t.Fatalf("line %d of the ledger is %q", n, lines.Text())
		}
		count[id]++
		if count[id] > 1 && !strings.HasPrefix(id, ProcTwice) {
			t.Errorf("P1: %q was executed %d times", id, count[id])
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return count
}

// ProcTwice begins the ids of calls that may run again: a test's upstream refuses
// them first.
const ProcTwice = "refused-"

// Hold lets the next execution of id wait, after its effect and before its answer.
func (u *ProcUpstream) Hold(t *testing.T, id string) *Gate {
	h := NewGate(t)
	u.Script(id, func(w http.ResponseWriter, r *http.Request, effect int) {
		h.Pass()
		procAnswerAsAsked(w, r, effect)
	})
	return h
}
