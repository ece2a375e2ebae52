package execution

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
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
	return m.commit(ctx, m.Store, batch)
}

func (m *measured) commit(ctx context.Context, st store.Store, batch []store.Write) (store.Version, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return 0, store.ErrFull
	}
	v, err := st.Commit(ctx, batch...)
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
		e.Write(bytes.Repeat([]byte{'x'}, n), false)
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
			if err := g.Undone(ctx, Undoing{Key: c.Key, Caller: g.Caller("a"), ID: id}); err != nil && !errors.Is(err, errRunning) {
				t.Fatal(err)
			}
		case op == 3 && found.Status == Doubtful:
			if err := g.SettleDoubt(ctx, Recorded{Key: c.Key, Finding: found}, Resolution{By: ByProbe, Applied: true, Answer: &Head{Status: 200}, Body: make([]byte, min(size, pieceSize))}); err != nil {
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

// measuredMember is a gateway that shares the store with others.
type measuredMember struct {
	*memory.Member
	m       *measured
	g       *Guard
	running map[string]*Execution
	away    atomic.Int64 // if positive, the store says its time once less often, and then is away
}

func (d *measuredMember) Now(ctx context.Context) (time.Time, error) {
	if d.away.Load() > 0 && d.away.Add(-1) == 0 {
		return time.Time{}, store.ErrUnavailable
	}
	return d.Member.Now(ctx)
}

func (d *measuredMember) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	return d.m.commit(ctx, d.Member, batch)
}

func (m *measured) join(name string) *measuredMember {
	m.t.Helper()
	d := &measuredMember{Member: m.Store.(*memory.Store).Join(name), m: m, running: map[string]*Execution{}}
	g, _, err := Open(context.Background(), d, m.ring)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = g.Close(context.Background()) }) // one that was removed cannot write
	g.LimitWorkflows(m.most)
	d.g = g
	return d
}

// ADR 0137: what the calls of a workflow have stored is never more than the limit at all gateways together, whatever
// becomes of the calls and of the gateways; and when it has expired there is room again, at each of them.
func TestFleetWorkflowsStoreNoMoreThanTheyMay(t *testing.T) {
	var refused int
	var most int64
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) {
			m := &measured{Store: memory.New(memory.Options{}), t: t, ring: seal.Generate(), most: 2 << 20, has: map[string]kept{}}
			nodes := []*measuredMember{m.join("a"), m.join("b"), m.join("c")}
			refused += storesOverNodes(t, m, nodes, rand.New(rand.NewPCG(seed, 7)))
			m.mu.Lock() // members go on in the background
			defer m.mu.Unlock()
			most = max(most, m.seen)
		})
		synctest.Test(t, func(t *testing.T) {
			m := &measured{Store: memory.New(memory.Options{}), t: t, ring: seal.Generate(), most: 2 << 20, has: map[string]kept{}}
			m.fillsUp([]*measuredMember{m.join("a"), m.join("b"), m.join("c")}, rand.New(rand.NewPCG(seed, 8)))
		})
	}
	if refused < 100 || most < 1<<20 {
		t.Errorf("%d refused, %d bytes at most: the limit was not reached", refused, most)
	}
}

func storesOverNodes(t *testing.T, m *measured, nodes []*measuredMember, rnd *rand.Rand) (refused int) {
	ctx := context.Background()
	sizes := []int{0, 100, 3_000, 40_000, 60_000, 90_000, 200_000, 300_000, 700_000, 1_500_000}
	for i := range 300 {
		n := rnd.IntN(len(nodes))
		d := nodes[n]
		id := fmt.Sprint(rnd.IntN(100))
		c := ofWorkflow(d.g, "a", id, true)
		found, err := d.g.LookUp(ctx, c.Key, c.Fingerprint)
		if err != nil {
			t.Fatal(err)
		}
		size := sizes[rnd.IntN(len(sizes))]
		e := d.running[id]
		switch op := rnd.IntN(12); {
		case op == 0 && i%4 == 0:
			<-time.After(time.Duration(rnd.Int64N(int64(90 * time.Minute))))
		case op == 1 && i%5 == 0:
			for _, e := range d.running { // which would wait for more
				if e.keeper != nil {
					e.keeper.finish()
				}
			}
			d.Remove()
			nodes[n] = m.join(fmt.Sprint("later ", i))
		case op == 2:
			err := d.g.Undone(ctx, Undoing{Key: c.Key, Caller: d.g.Caller("a"), ID: id})
			if err != nil && !errors.Is(err, errRunning) {
				t.Fatal(err)
			}
		case op == 3 && found.Status == Doubtful:
			if err := d.g.SettleDoubt(ctx, Recorded{Key: c.Key, Finding: found}, Resolution{By: ByProbe, Applied: true, Answer: &Head{Status: 200}, Body: make([]byte, min(size, pieceSize))}); err != nil {
				t.Fatal(err)
			}
		case e != nil:
			delete(d.running, id)
			switch {
			case op < 6:
				ends(t, e, size, Outcome{Verdict: InDoubt, Cause: CauseLost})
			case op < 8:
				ends(t, e, size, Outcome{Verdict: Released})
			default:
				ends(t, e, size, wholeAnswer)
			}
		case found.Status == Free || found.Status == Doubtful:
			if e = claimed(t, d.g, c); e != nil {
				d.running[id] = e
			} else if refused++; found.Status == Doubtful {
				t.Fatal("a doubt is not run again")
			}
		}
		if t.Failed() {
			t.Fatalf("after %d changes", i)
		}
	}
	for _, d := range nodes {
		for _, e := range d.running {
			ends(t, e, 0, Outcome{Verdict: Released})
		}
	}
	<-time.After(4 * time.Hour)
	for i, d := range nodes {
		for tries := 0; claimed(t, d.g, ofWorkflow(d.g, "a", fmt.Sprint("last ", i), true)) == nil; tries++ {
			if tries > 20 {
				t.Fatal("what the workflow had stored has expired, and it finds no room")
			}
			<-time.After(2 * time.Second)
		}
	}
	return refused
}

// fillsUp has members store as much as they may, and again after each event that leaves them more room or less. It is
// never too much, and never much less: the next call of any of them has no room.
func (m *measured) fillsUp(nodes []*measuredMember, rnd *rand.Rand) {
	id := 0
	claim := func(d *measuredMember) (*Call, *Execution) {
		id++
		c := ofWorkflow(d.g, "a", fmt.Sprint("fill ", id), true)
		return c, claimed(m.t, d.g, c)
	}
	surely := func(d *measuredMember) (*Call, *Execution) {
		for range 10 {
			if c, e := claim(d); e != nil {
				return c, e
			}
			<-time.After(2 * time.Second) // what others do not use is given back
		}
		m.t.Fatal("no room")
		return nil, nil
	}
	full := func(when string) {
		m.t.Helper()
		for _, n := range []int{1, 2, 0} { // the first one last: it uses what it has set aside, and need not ask
			for {
				_, e := claim(nodes[n])
				if e == nil {
					break
				}
				ends(m.t, e, 1+rnd.IntN(usualAnswer), wholeAnswer)
			}
		}
		for refused := 0; refused < 5; {
			some := false
			for _, d := range nodes {
				if _, e := claim(d); e != nil {
					ends(m.t, e, 1+rnd.IntN(usualAnswer), wholeAnswer)
					some = true
				}
			}
			if refused++; some {
				refused = 0
			}
			<-time.After(2 * time.Second) // what members do not use is given back
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if n := m.stored(); n < m.most-usualAnswer-8<<10 {
			m.t.Errorf("%s: %d bytes are stored, and there is no room for more; at most %d", when, n, m.most)
		}
	}
	outcome := func(d *measuredMember, size int, o Outcome) *Call {
		c, e := surely(d)
		ends(m.t, e, size, o)
		return c
	}
	full("at first")

	<-time.After(time.Hour + 3*usageWindow) // the answers have expired, and the keys have not
	doubts := make([]*Call, 12)
	for i := range doubts {
		doubts[i] = outcome(nodes[0], 0, Outcome{Verdict: InDoubt, Cause: CauseLost})
	}
	for i, c := range doubts { // each is settled at another member, and counts there
		d := nodes[1+i%2]
		found, err := d.g.LookUp(context.Background(), c.Key, c.Fingerprint)
		if err == nil {
			err = d.g.SettleDoubt(context.Background(), Recorded{Key: c.Key, Finding: found}, Resolution{By: ByProbe, Applied: true, Answer: &Head{Status: 200}, Body: make([]byte, 60_000)})
		}
		if err != nil {
			m.t.Fatal(err)
		}
	}
	full("with doubts that others have settled")

	<-time.After(time.Hour + 3*usageWindow)
	for range 8 {
		outcome(nodes[0], 60_000, wholeAnswer)
	}
	c, e := surely(nodes[2]) // an answer whose outcome cannot be recorded, and its pieces are stored
	e.Recording().Start(200, nil)
	e.Write(make([]byte, 2*pieceSize), false)
	synctest.Wait()
	m.refuse(true)
	if err := e.Settle(context.Background(), wholeAnswer); !errors.Is(err, ErrUnrecorded) {
		m.t.Fatal(err)
	}
	m.refuse(false)
	full("with an outcome that is not recorded")
	found, err := nodes[2].g.LookUp(context.Background(), c.Key, c.Fingerprint)
	if err == nil {
		err = nodes[2].g.SettleDoubt(context.Background(), Recorded{Key: c.Key, Finding: found}, Resolution{By: ByProbe, Applied: true})
	}
	if err != nil {
		m.t.Fatal(err)
	}

	<-time.After(2*time.Hour + 3*usageWindow) // also the pieces
	_, e = surely(nodes[0])                   // an answer under way, of which pieces are stored
	e.Recording().Start(200, nil)
	e.Write(make([]byte, 2*pieceSize), false)
	e.keeper.finish()
	nodes[0].Remove()
	nodes[0] = m.join(fmt.Sprint("after ", id))
	full("where a member has gone")
}

func (m *measured) refuse(all bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.full = all
}

// P7: where a member cannot ask how much room there is, the answer that its client has seen is not given up: the call is in
// doubt.
func TestRoomForAnAnswerWhereTheStoreIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &measured{Store: memory.New(memory.Options{}), t: t, ring: seal.Generate(), most: 2 << 20, has: map[string]kept{}}
		d := m.join("a")
		for n := 1; ; n++ {
			c := ofWorkflow(d.g, "a", fmt.Sprint(n), true)
			e := claimed(t, d.g, c)
			e.Recording().Start(200, nil)
			e.Write(make([]byte, 3000), false)
			d.away.Store(int64(n))
			err := e.Settle(t.Context(), wholeAnswer)
			asked := d.away.Swap(0) == 0
			want := Doubtful
			if !asked {
				want = Replayable
			}
			if found, lookUp := d.g.LookUp(t.Context(), c.Key, c.Fingerprint); lookUp != nil || found.Status != want || (err == nil) == asked {
				t.Errorf("away at the question %d: %v, status %d, %v", n, err, found.Status, lookUp)
			}
			if !asked {
				if n < 3 {
					t.Error("it is not asked how much room there is")
				}
				break
			}
		}
	})
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
					e.Write(make([]byte, 40_000), false)
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
	r.Lot = g.quotas.lotOf(c, r.Caller)
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
		decided := Resolution{By: ByOperator, Applied: true, Operator: "o", Reason: "r"}
		with := decided
		with.Answer, with.Body = &Head{Status: 200}, make([]byte, 230_000)
		if err := g.SettleDoubt(ctx, found, with); !errors.As(err, &over) {
			t.Fatalf("resolved with an answer that has no room: %v", err)
		}
		if err := g.SettleDoubt(ctx, found, decided); err != nil {
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
		e.Write(make([]byte, pieces*pieceSize+10), false)
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
	e.Write(make([]byte, 3*pieceSize), false)
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
