package execution

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// measured is a store that looks after each commit at how many bytes of records and answers there are, before
// they are sealed.
type measured struct {
	store.Store
	t    *testing.T
	ring *seal.Ring
	most int64
	mu   sync.Mutex
	has  map[string]kept
	seen int64 // the most that there was
	full bool  // nothing can be committed
}

type kept struct {
	expires time.Time
	bytes   int64
}

func (m *measured) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return 0, store.ErrFull
	}
	v, err := m.Store.Commit(ctx, batch...)
	if err != nil {
		return v, err
	}
	for _, w := range batch {
		if w.Delete {
			delete(m.has, string(w.Key))
		} else if w.Key[0] == spaceRecord || w.Key[0] == spaceResult {
			m.has[string(w.Key)] = kept{w.Expires, int64(len(w.Value) - len(m.ring.Seal(nil, nil, w.Key)))}
		}
	}
	n := m.stored()
	if m.seen = max(m.seen, n); n > m.most {
		m.t.Errorf("%d bytes are stored, at most %d", n, m.most)
	}
	return v, err
}

func (m *measured) stored() (n int64) {
	for _, w := range m.has {
		if w.expires.IsZero() || time.Now().Before(w.expires) {
			n += w.bytes
		}
	}
	return n
}

func newMeasured(t *testing.T, most int64) (*measured, *Guard) {
	m := &measured{Store: memory.New(memory.Options{}), t: t, ring: seal.Generate(), most: most, has: map[string]kept{}}
	return m, m.open()
}

func (m *measured) open() *Guard {
	m.t.Helper()
	g, _, err := Open(context.Background(), m, m.ring)
	if err != nil {
		m.t.Fatal(err)
	}
	g.LimitWorkflows(m.most)
	return g
}

func ofWorkflow(g *Guard, caller, id string, proven bool) *Call {
	c := &Call{
		Scope: Scope{Caller: caller, Path: "/", ID: id}, Workflow: "w", Proven: proven, Deadline: time.Minute,
		KeepResult: time.Hour, KeepKey: 3 * time.Hour, ResultCap: 8 << 20,
	}
	c.Key = g.Key(c.Scope)
	return c
}

// claimed claims a call that is free or in doubt; nil where its workflow has no room.
func claimed(t *testing.T, g *Guard, c *Call) *Execution {
	t.Helper()
	found, err := g.LookUp(context.Background(), c.Key, c.Fingerprint)
	if err != nil {
		t.Fatal(err)
	}
	e, err := g.Claim(context.Background(), c, found)
	if over := (*QuotaError)(nil); errors.As(err, &over) && over.Workflow > 0 {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// ends settles a call with an answer of so many bytes.
func ends(t *testing.T, e *Execution, size int, o Outcome) {
	t.Helper()
	e.Recording().Start(200, nil)
	for size > 0 {
		n := min(size, 50_000)
		e.Write(bytes.Repeat([]byte{'x'}, n))
		size -= n
	}
	if err := e.Settle(context.Background(), o); err != nil {
		t.Fatal(err)
	}
}

var wholeAnswer = Outcome{Verdict: Completed, Status: 200, Whole: true}

// C-3.3.3-d: what the calls of a workflow have stored is never more than the limit, whatever becomes of them, over
// restarts, and whatever was not kept.
func TestWorkflowsStoreNoMoreThanTheyMay(t *testing.T) {
	var refused, most int
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) {
			m, g := newMeasured(t, 1<<20)
			refused += storesAtRandom(t, m, g, rand.New(rand.NewPCG(seed, 7)), func(d time.Duration) { time.Sleep(d) })
			most = max(most, int(m.seen))
		})
	}
	if refused < 100 || most < 512<<10 {
		t.Errorf("%d refused, %d bytes at most: the limit was not reached", refused, most)
	}
}

func storesAtRandom(t *testing.T, m *measured, g *Guard, rnd *rand.Rand, pass func(time.Duration)) (refused int) {
	ctx := context.Background()
	running := map[string]*Execution{}
	sizes := []int{0, 100, 3_000, 40_000, 60_000, 90_000, 200_000, 300_000, 700_000, 1_500_000}
	for i := range 300 {
		id := fmt.Sprint(rnd.IntN(100))
		c := ofWorkflow(g, "a", id, true)
		found, err := g.LookUp(ctx, c.Key, c.Fingerprint)
		if err != nil {
			t.Fatal(err)
		}
		size := sizes[rnd.IntN(len(sizes))]
		e := running[id]
		switch op := rnd.IntN(12); {
		case op == 0 && i%4 == 0:
			pass(time.Duration(rnd.Int64N(int64(90 * time.Minute))))
		case op == 1 && i%5 == 0: // the process dies
			g = m.open()
			running = map[string]*Execution{}
		case op == 2 && i%2 == 0:
			if err := g.Undone(ctx, Undoing{Key: c.Key, Caller: g.Caller("a"), ID: id}); err != nil && !errors.Is(err, ErrRunning) {
				t.Fatal(err)
			}
		case op == 3 && found.Status == Doubtful:
			if err := g.Applied(ctx, c.Key, found, &Head{Status: 200}, make([]byte, min(size, pieceSize))); err != nil {
				t.Fatal(err)
			}
		case e != nil:
			delete(running, id)
			switch {
			case op < 6:
				ends(t, e, size, Outcome{Verdict: InDoubt, Cause: CauseLost})
			case op < 8:
				ends(t, e, size, Outcome{Verdict: Released})
			default:
				ends(t, e, size, wholeAnswer)
			}
		case found.Status == Free || found.Status == Doubtful:
			if e = claimed(t, g, c); e != nil {
				running[id] = e
			} else {
				refused++
				if found.Status == Doubtful {
					t.Fatal("a doubt is not run again")
				}
			}
		}
		if t.Failed() {
			t.Fatalf("after %d changes", i)
		}
	}
	return refused
}

// The same with many at once: none of them finds room that another one has taken.
func TestWorkflowsStoreNoMoreAtOnce(t *testing.T) {
	m, g := newMeasured(t, 2<<20)
	var all sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for i := range 24 {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 3))
			for j := range 4 {
				c := ofWorkflow(g, fmt.Sprint("caller ", i), fmt.Sprint(j), true)
				e, err := g.Claim(context.Background(), c, Finding{})
				if err != nil {
					if !errors.As(err, new(*QuotaError)) {
						t.Error(err)
					}
					mu.Lock()
					refused++
					mu.Unlock()
					continue
				}
				e.Recording().Start(200, nil)
				for range rnd.IntN(10) {
					e.Write(make([]byte, 40_000))
				}
				if err := e.Settle(context.Background(), wholeAnswer); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if refused == 0 || m.seen < m.most/2 {
		t.Errorf("%d refused, %d bytes at most", refused, m.seen)
	}
}

// Of many claims at a time exactly as many get through as there is room for: not one more.
func TestWorkflowRoomIsTakenOnce(t *testing.T) {
	_, g := newMeasured(t, 1<<20)
	c := ofWorkflow(g, "a", "00", true)
	r := g.newRecord(c, g.Caller("a"), time.Now())
	r.Lot = g.lots.of(c, r.Caller)
	const room = 7
	g.LimitWorkflows(room * (charged(&r).record + usualAnswer))
	var all sync.WaitGroup
	var mu sync.Mutex
	claims := 0
	for i := range 50 {
		all.Go(func() {
			_, err := g.Claim(context.Background(), ofWorkflow(g, "a", fmt.Sprintf("%02d", i), true), Finding{})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				claims++
			} else if !errors.As(err, new(*QuotaError)) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if claims != room {
		t.Errorf("%d claims, there is room for %d", claims, room)
	}
}

// An answer that finds no room is not kept, with its pieces; its key is, and what follows is refused until the
// answers before it have expired. A doubt can run again and be settled all the same.
func TestAnswersWithoutRoomAreNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		m, g := newMeasured(t, 1<<20)
		status := func(c *Call, want Status) Finding {
			t.Helper()
			found, err := g.LookUp(ctx, c.Key, c.Fingerprint)
			if err != nil || found.Status != want {
				t.Fatalf("status %d, %v, want %d", found.Status, err, want)
			}
			return found
		}
		doubt := ofWorkflow(g, "a", "doubt", true)
		ends(t, claimed(t, g, doubt), 0, Outcome{Verdict: InDoubt, Cause: CauseLost})
		first, second := ofWorkflow(g, "a", "1", true), ofWorkflow(g, "a", "2", true)
		ends(t, claimed(t, g, first), 600_000, wholeAnswer)
		status(first, Replayable)
		ends(t, claimed(t, g, second), 500_000, wholeAnswer)
		status(second, ResultUnavailable)
		third, more := ofWorkflow(g, "a", "3", true), ofWorkflow(g, "a", "more", true)
		ends(t, claimed(t, g, third), 250_000, wholeAnswer)
		status(third, Replayable)
		_, err := g.Claim(ctx, more, status(more, Free))
		over := (*QuotaError)(nil)
		if !errors.As(err, &over) || over.Workflow != 1<<20 || over.Retry.IsZero() || time.Until(over.Retry) > time.Hour+2*usageWindow {
			t.Fatalf("%v %+v", err, over)
		}
		again := claimed(t, g, doubt)
		if again == nil {
			t.Fatal("a doubt cannot be run again")
		}
		ends(t, again, 200_000, Outcome{Verdict: InDoubt, Cause: CauseLost})
		found, err := g.Get(ctx, doubt.Key)
		if err != nil {
			t.Fatal(err)
		}
		decided := Resolution{Applied: true, Operator: "o", Reason: "r"}
		if err := g.Resolve(ctx, found, decided, &Head{Status: 200}, make([]byte, 230_000)); !errors.As(err, &over) {
			t.Fatalf("resolved with an answer that has no room: %v", err)
		}
		if err := g.Resolve(ctx, found, decided, nil, nil); err != nil {
			t.Fatal(err)
		}
		g = m.open() // counted from the store
		for i := 0; claimed(t, g, ofWorkflow(g, "a", fmt.Sprint("later ", i), true)) != nil; i++ {
			if i > 3 {
				t.Fatal("the next process has forgotten what is stored")
			}
		}
		time.Sleep(2 * time.Hour)
		if claimed(t, g, more) == nil {
			t.Error("the answers have expired, and there is no room")
		}
	})
}

// What a process leaves behind of an answer is deleted by the next one.
func TestPiecesOfADeadProcessAreDeleted(t *testing.T) {
	for _, pieces := range []int{0, 1, 2, 3, 5, 8} {
		m, g := newMeasured(t, 8<<20)
		c := ofWorkflow(g, "a", "1", true)
		e := claimed(t, g, c)
		e.Recording().Start(200, nil)
		e.Write(make([]byte, pieces*pieceSize+10))
		if e.keeper != nil {
			e.keeper.finish()
		}
		if n := m.seen; n < int64(pieces)*pieceSize {
			t.Fatalf("%d bytes are stored", n)
		}
		g = m.open()
		if n := m.stored(); n > 4<<10 {
			t.Errorf("of %d pieces, %d bytes are left", pieces, n)
		}
		if found, err := g.LookUp(context.Background(), c.Key, c.Fingerprint); err != nil || found.Status != Doubtful {
			t.Errorf("%+v %v", found, err)
		}
	}
}

// P3: a workflow that nobody proves is its caller's own: others who know its name take nothing from it.
func TestWorkflowRoomOfStrangers(t *testing.T) {
	m, g := newMeasured(t, 1<<20)
	m.most *= 3
	fill := func(caller string, proven bool) (n int) {
		for ; ; n++ {
			e := claimed(t, g, ofWorkflow(g, caller, fmt.Sprint(n, proven), proven))
			if e == nil {
				return n
			}
			ends(t, e, 200_000, wholeAnswer)
		}
	}
	if n := fill("mallory", false); n == 0 {
		t.Error("nothing fits")
	}
	if n := fill("ann", false); n == 0 {
		t.Error("a stranger has used up the room of another caller")
	}
	if n := fill("agent", true); n == 0 {
		t.Error("strangers have used up the room of a proven workflow")
	}
	if n := fill("another agent", true); n != 0 {
		t.Errorf("%d more fit in a proven workflow that is full, for another of its agents", n)
	}
}

// A change that the store does not take counts as what is still there.
func TestWorkflowRoomOfWhatIsNotRecorded(t *testing.T) {
	m, g := newMeasured(t, 1<<20)
	c := ofWorkflow(g, "a", "1", true)
	e := claimed(t, g, c)
	e.Recording().Start(200, nil)
	e.Write(make([]byte, 3*pieceSize))
	e.keeper.finish()
	e.keeper = &keeper{e: e, stop: make(chan struct{}), done: e.keeper.done, pieces: e.keeper.pieces}
	m.full = true
	if err := e.Settle(context.Background(), wholeAnswer); !errors.Is(err, ErrUnrecorded) {
		t.Fatal(err)
	}
	m.full = false
	for i := range 8 {
		if e := claimed(t, g, ofWorkflow(g, "a", fmt.Sprint("more ", i), true)); e != nil {
			ends(t, e, 200_000, wholeAnswer)
		}
	}
	if n := m.stored(); n < 3*pieceSize {
		t.Errorf("%d bytes: the pieces are gone", n)
	}
}
