//go:build unix

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/google/uuid"
	"go.uber.org/zap"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Name is what the upstream knows the call by.
func (c *ProcCall) Name() string {
	if c.Id != "" {
		return c.Id
	}
	return c.Header[ProcName]
}

// procLedger is what exported ledgers say, proved against their heads.
type procLedger struct {
	Checkpoints map[string]bool
	Outcomes    map[string][]string // by checkpoint
	Entries     int64
}

// LedgersOf reads the ledgers of gateways on one store: each has its own, and the outcome of a call may be
// in another one than its checkpoint.
func LedgersOf(t *testing.T, sites ...*ProcSite) procLedger {
	t.Helper()
	recorded := procLedger{Checkpoints: map[string]bool{}, Outcomes: map[string][]string{}}
	nodes := map[string][]string{}
	for _, s := range sites {
		recorded.Entries += s.Exported(t, func(token *ect.Unverified) {
			if token.Event() == ect.EventCheckpoint {
				recorded.Checkpoints[token.ID()] = true
			}
			if outcome, ok := token.Ext().Text("agent_guard.outcome"); ok {
				parents := token.Parents()
				checkpoint := parents[len(parents)-1]
				nodes[checkpoint] = append(nodes[checkpoint], outcome)
			}
		})
	}
	for checkpoint := range recorded.Checkpoints {
		recorded.Outcomes[checkpoint] = nodes[checkpoint]
	}
	return recorded
}

// Exported exports the gateway's ledger, proves it
// against its head, and has each of its tokens visited. It returns how many there are.
func (s *ProcSite) Exported(t *testing.T, visit func(*ect.Unverified)) int64 {
	t.Helper()
	head := ProcDocument[struct{ Origin, Key string }](t, s.Operate(t, "ledger", "head", "-o", "json").Says(t))
	s.Operate(t, "ledger", "check").Says(t)
	file := s.Path("ledger.export")
	_ = os.Remove(file)
	s.Operate(t, "ledger", "export", "--out", file).Says(t)
	from, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	verifier, err := note.NewVerifier(head.Key)
	if err != nil {
		t.Fatal(err)
	}
	exported, err := ledger.VerifyExport(from, head.Origin, note.VerifierList(verifier), func(e ledger.Entry) error {
		token, err := ect.ParseInsecure(string(e.Payload))
		if err == nil {
			visit(token)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return exported.Entries
}

// CrashRounds is how many kills are asked for; plain tests do a few.
func CrashRounds(t *testing.T, plain int) int {
	t.Helper()
	text := os.Getenv("AGENT_GUARD_CRASH_ROUNDS")
	if text == "" {
		return plain
	}
	rounds, err := strconv.Atoi(text)
	if err != nil || rounds < 1 {
		t.Fatalf("AGENT_GUARD_CRASH_ROUNDS is %q", text)
	}
	return rounds
}

// Watch has f called at each effect.
func (u *ProcUpstream) Watch(f func(n int)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen = f
}

// CrashRollback is a gateway that is killed in its rollbacks, again and again, over one
// store and one RestLab.
type CrashRollback struct {
	T       *testing.T
	Lab     *RestLab
	Stages  *ProcStages
	Site    *ProcSite
	A       *Agent
	Gateway *ProcGateway
	rounds  int
}

// crashSaga is what one round has done, and how it is undone.
type crashSaga struct {
	*Saga
	Asked   RollbackBody
	docs    [2]string
	charges [2]string
	effects int // in the lab's ledger when the rollback was asked for
	kills   int // since then
}

// Kill ends the gateway while it rolls s back.
func (c *CrashRollback) Kill(s *crashSaga) {
	s.kills++
	c.Gateway.Kill()
}

// Build makes a workflow of four calls, each a consequence of the one before: a document
// changes, money is taken, a document is made, money is taken.
func (c *CrashRollback) Build() *crashSaga {
	c.T.Helper()
	c.rounds++
	s := &crashSaga{Saga: c.Site.Gateway(c.T).Saga(c.A)}
	s.docs = [2]string{fmt.Sprintf("/docs/old-%d", c.rounds), fmt.Sprintf("/docs/new-%d", c.rounds)}
	c.Lab.Write(s.docs[0], `{"n":1}`)
	root := s.Do(Put(s.docs[0], `{"n":2}`))
	first := s.Do(Charge(1), root.Checkpoint)
	made := s.Do(Put(s.docs[1], `{"n":2}`), first.Checkpoint)
	second := s.Do(Charge(2), made.Checkpoint)
	s.charges = [2]string{first.Id(c.T), second.Id(c.T)}
	s.Asked = RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	s.effects = len(c.Lab.LedgerEffects())
	return s
}

// Begin asks for the rollback in the background: the gateway may die of it.
func (s *crashSaga) Begin() <-chan struct{} {
	r, done := s.G.Build(s.Asking(s.Asked)), make(chan struct{})
	go func() {
		defer close(done)
		if res, err := s.G.Client.Do(r); err == nil {
			Read(res)
		}
	}()
	return done
}

// Undone holds that a rollback goes on by itself to its end, that asking for it again
// gives the same, and that each effect was taken back once, the last one first.
//
// It reports whether the rollback was accepted before the kill: else nothing was undone.
func (c *CrashRollback) Undone(s *crashSaga) (accepted bool) {
	c.T.Helper()
	if got := s.Look(s.Asked.ID); got.Status < 300 {
		accepted = true
		s.Finished(s.Asked.ID) // nobody asks for it: it goes on by itself
	} else if got.Problem(c.T, http.StatusForbidden, "not-in-workflow"); len(c.Lab.LedgerEffects()) != s.effects {
		c.T.Error("something was undone by a rollback that nobody knows")
	}
	s.Back(s.Asked).Want(c.T, "completed")
	s.Back(s.Asked).Want(c.T, "completed")
	var got []string
	for _, e := range c.Lab.LedgerEffects()[s.effects:] {
		got = append(got, e.What+" "+e.Of)
	}
	want := []string{"refunded " + s.charges[1], "deleted " + s.docs[1], "refunded " + s.charges[0], "changed " + s.docs[0]}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		c.T.Errorf("P1, P5: the service has seen %q, want %q", got, want)
	}
	c.Lab.WantDoc(s.docs[0], `{"n":1}`)
	c.Lab.WantDoc(s.docs[1], "")
	// What was sent when the gateway died is sent once more, under its key, and nothing else.
	sent := -2 // the calls themselves
	for _, of := range slices.Concat(s.docs[:], s.charges[:]) {
		for _, route := range []string{"PUT " + of, "DELETE " + of, "POST /refunds"} {
			about := ""
			if route == "POST /refunds" {
				about = of
			}
			sent += len(c.Lab.All(route, about))
		}
	}
	if sent > 4+s.kills {
		c.T.Errorf("P1: four undos were sent %d times over %d kills", sent, s.kills)
	}
	return accepted
}

// WentOn is undone for a rollback that has had effects.
func (c *CrashRollback) WentOn(s *crashSaga) {
	c.T.Helper()
	if !c.Undone(s) {
		c.T.Error("P5: a rollback was forgotten that had undone something")
	}
}

// KillAtEffect kills the gateway at the nth effect of the rollback, before the service
// answers or as soon as it has.
func (c *CrashRollback) KillAtEffect(s *crashSaga, nth int, before bool) {
	c.T.Helper()
	hit, done := make(chan struct{}), make(chan struct{})
	seen := 0
	c.Lab.Watch(func(RestEffect) {
		if seen++; seen == nth {
			close(hit)
			if before {
				<-done
			}
		}
	})
	ended := s.Begin()
	WaitWithin(c.T, ProcBound, hit, "the effect")
	c.Kill(s)
	close(done)
	<-ended
	c.Lab.Watch(nil)
}

// procStagedStore is the Badger store of a gateway that is to be killed at a named
// point: before and after each commit it asks the test whether to go on. Only the
// child processes of this test know it.
type procStagedStore struct {
	caddymodule.BadgerStore

	// Where to ask.
	Control string `json:"control,omitempty"`
}

// procBadgerStore is the Badger store without its methods.
type procBadgerStore caddymodule.BadgerStore

// UnmarshalJSON reads Control too, which the store that is embedded does not know.
func (s *procStagedStore) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &struct {
		*procBadgerStore
		Control *string `json:"control"`
	}{(*procBadgerStore)(&s.BadgerStore), &s.Control})
}

// CaddyModule returns the Caddy module information.
func (*procStagedStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.staged", New: func() caddy.Module { return new(procStagedStore) }}
}

// UnmarshalCaddyfile reads: staged <path> <control>.
func (s *procStagedStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&s.Path, &s.Control) {
		return d.ArgErr()
	}
	return nil
}

// OpenStore opens the Badger store.
func (s *procStagedStore) OpenStore(logger *zap.Logger) (store.Store, error) {
	if err := procPass(s.Control, "before open"); err != nil {
		return nil, err
	}
	st, err := s.BadgerStore.OpenStore(logger)
	if err != nil {
		return nil, err
	}
	return procStagedCommits{st, s.Control}, procPass(s.Control, "after open")
}

type procStagedCommits struct {
	store.Store
	control string
}

// Commit stops before and after.
func (s procStagedCommits) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	point := procStage(batch)
	if err := procPass(s.control, "before "+point); err != nil {
		return 0, err
	}
	version, err := s.Store.Commit(ctx, batch...)
	if err != nil {
		return version, err
	}
	return version, procPass(s.control, "after "+point)
}

// procStage names a commit by its shape: values are sealed.
func procStage(batch []store.Write) string {
	first := batch[0]
	switch {
	case slices.ContainsFunc(batch, func(w store.Write) bool { return strings.HasPrefix(string(w.Key), "vm") }):
		return "marks"
	case slices.ContainsFunc(batch, func(w store.Write) bool { return strings.HasPrefix(string(w.Key), "hr") && !w.Delete }):
		return "hold" // participants have to hear of it
	case slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'y' && w.Delete }):
		return "workflow end"
	case slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'j' && len(w.Value) == 64 }) &&
		!slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'x' }):
		return "token" // it is bound, and has not acted
	case first.Key[0] == 'm':
		return "christening"
	case first.Key[0] == 'r':
		return "piece"
	case first.Delete:
		return "release"
	case !first.If.None() && first.If.Holds(nil):
		return "claim"
	default:
		return "outcome"
	}
}

// procPass asks the test whether to go on from the point; it waits for the answer.
func procPass(control, point string) error {
	resp, err := http.Post(control, "text/plain", strings.NewReader(point))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: status %d", point, resp.StatusCode)
	}
	return nil
}

// ProcStages is the test's side.
type ProcStages struct {
	Url string

	mu    sync.Mutex
	armed map[string]chan struct{}
	left  int           // points yet to pass before the one that was counted
	nth   chan struct{} // closed there; nil is none
	name  string        // of the point that was reached by counting
	over  chan struct{}
}

// ProcNewStages starts the server that gateways ask at each point at which they stop.
func ProcNewStages(t *testing.T) *ProcStages {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &ProcStages{
		Url: "http://" + l.Addr().String() + "/", armed: map[string]chan struct{}{}, over: make(chan struct{}),
	}
	server := &http.Server{Handler: s}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() {
		close(s.over)
		_ = server.Close()
	})
	return s
}

// Arm lets the gateway wait at the point when it comes there next; the channel is
// closed once it does.
func (s *ProcStages) Arm(point string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	reached := make(chan struct{})
	s.armed[point] = reached
	return reached
}

// Count lets the gateway wait at the nth point from now, whatever its name, counted from
// 0; the channel is closed once it does.
func (s *ProcStages) Count(n int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left, s.nth = n, make(chan struct{})
	return s.nth
}

// Disarm lets the gateway wait nowhere, and names the point that it was stopped at by
// counting; empty is none.
func (s *ProcStages) Disarm() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := s.name
	s.armed, s.nth, s.name = map[string]chan struct{}{}, nil, ""
	return name
}

// ServeHTTP holds up a gateway at a point that the test waits for.
func (s *ProcStages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	point, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	reached := s.armed[string(point)]
	delete(s.armed, string(point))
	if s.nth != nil {
		if s.left == 0 {
			reached, s.nth, s.name = s.nth, nil, string(point)
		}
		s.left--
	}
	s.mu.Unlock()
	if reached != nil {
		close(reached)
		select { // the gateway is killed now
		case <-r.Context().Done():
		case <-s.over:
		}
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
