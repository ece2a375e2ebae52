package execution

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// modelCall is what the obviously right model knows of one call.
type modelCall struct {
	call    Call
	open    *Execution // running here
	state   Status
	expires time.Time // of the result
	forgets time.Time // of the key
	effects int       // since its key was last free by right
}

// TestP1Model drives a guard through random histories, with deaths of its process
// and jumps of time, and compares every look-up with a slow model. It also holds
// that exactly the index entries of the living records are there.
func TestP1Model(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pass := func(d time.Duration) { time.Sleep(d) }
				runModel(t, rand.New(rand.NewPCG(seed, 1)), pass)
			})
		})
	}
}

func runModel(t *testing.T, rnd *rand.Rand, pass func(time.Duration)) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	open := func() *Guard {
		g, _, err := Open(ctx, mem, ring)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	g := open()
	calls := make([]*modelCall, 5)
	for i := range calls {
		c := Call{
			Scope: Scope{Caller: fmt.Sprint(i % 2), Path: "/", ID: fmt.Sprint(i)}, Workflow: []string{"", "w"}[i%2],
			Deadline: time.Minute, KeepResult: time.Hour, KeepKey: 3 * time.Hour, ResultCap: 1 << 20,
		}
		c.Key = g.Key(c.Scope)
		calls[i] = &modelCall{call: c}
	}
	for range 300 {
		m := calls[rnd.IntN(len(calls))]
		now := time.Now()
		if rnd.IntN(80) == 0 {
			modelUndo(t, g, m)
		}
		switch op := rnd.IntN(20); {
		case op < 8:
			modelClaim(t, g, m, rnd)
		case op < 16:
			if m.open != nil {
				modelSettle(t, m, rnd)
			}
		case op < 17:
			g = open() // the process died and came back
			for _, m := range calls {
				if m.open != nil {
					m.open, m.state = nil, Doubtful
				}
			}
		case op < 18: // the sealing key rotates, and running executions are not waited for
			modelRotate(t, g, ring)
			now = time.Now()
		default:
			pass(time.Duration(rnd.Int64N(int64(2 * time.Hour))))
			now = time.Now()
		}
		for _, m := range calls {
			if m.state == Replayable && !now.Before(m.expires) {
				m.state = ResultExpired
			}
			if m.state == ResultExpired && !now.Before(m.forgets) {
				m.state, m.effects = Free, 0
			}
			found, err := g.LookUp(ctx, m.call.Key, m.call.Fingerprint)
			if err != nil || found.Status != m.state {
				t.Fatalf("call %s: status %d, %v; the model says %d", m.call.Scope.ID, found.Status, err, m.state)
			}
			if m.effects > 1 {
				t.Fatalf("call %s: %d effects", m.call.Scope.ID, m.effects)
			}
		}
		checkIndex(t, g)
	}
}

func modelRotate(t *testing.T, g *Guard, ring *seal.Ring) {
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := ring.Adopt(next, nil, func(id uint32) error { return g.Keys().Hold(ctx, id) }); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Reseal(ctx, 0, nil); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// modelUndo undoes a call, or keeps it from running.
func modelUndo(t *testing.T, g *Guard, m *modelCall) {
	err := g.Undone(context.Background(), Undoing{
		Key: m.call.Key, Caller: g.Caller(m.call.Scope.Caller), Workflow: m.call.Workflow, ID: m.call.Scope.ID,
	})
	switch {
	case m.state == RunningHere && !errors.Is(err, errRunning), m.state != RunningHere && err != nil:
		t.Fatalf("call %s, which is %d, undone: %v", m.call.Scope.ID, m.state, err)
	case err == nil:
		m.state = RolledBack
	}
}

func modelClaim(t *testing.T, g *Guard, m *modelCall, rnd *rand.Rand) {
	found, err := g.LookUp(context.Background(), m.call.Key, m.call.Fingerprint)
	if err != nil {
		t.Fatal(err)
	}
	if m.state != Free && (m.state != Doubtful || rnd.IntN(3) > 0) {
		found = Finding{} // somebody who saw the key free long ago
	}
	e, err := g.Claim(context.Background(), &m.call, found)
	switch may := m.state == Free || found.Status == Doubtful; {
	case err == nil && !may:
		t.Fatalf("claimed a key that is %d", m.state)
	case err != nil && (may || !errors.Is(err, ErrTaken)):
		t.Fatal(err)
	case err == nil:
		if found.Status == Doubtful {
			m.effects = 0 // there was evidence that it was not applied
		}
		m.open, m.state = e, RunningHere
	}
}

func modelSettle(t *testing.T, m *modelCall, rnd *rand.Rand) {
	o := Outcome{Verdict: Verdict(1 + rnd.IntN(3)), Whole: rnd.IntN(2) == 0}
	m.open.Recording().Start(200, nil)
	m.open.Write(bytes.Repeat([]byte("x"), rnd.IntN(3)*400), false)
	if err := m.open.Settle(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	m.open = nil
	switch o.Verdict {
	case Completed:
		m.state, m.effects = Replayable, m.effects+1
		m.expires, m.forgets = time.Now().Add(time.Hour), time.Now().Add(3*time.Hour)
	case Released:
		m.state = Free
	case InDoubt:
		m.state, m.effects = Doubtful, m.effects+1
	}
}

// checkIndex compares the index entries with those that the records ask for.
func checkIndex(t *testing.T, g *Guard) {
	t.Helper()
	want, have := map[string]bool{}, map[string]bool{}
	accounts, found := map[string]string{}, map[string]string{}
	answers := map[Key]Record{}
	for entry, err := range g.store.Scan(context.Background(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		switch entry.Key[0] {
		case spaceResult: // before the records
			a, err := g.headPiece(context.Background(), entry.Key)
			if err != nil {
				t.Fatal(err)
			}
			answers[Key(entry.Key[1:])] = a.record
		case spaceRecord:
			r, _, err := g.load(context.Background(), Key(entry.Key[1:]))
			if err != nil {
				t.Fatal(err)
			}
			key := Key(entry.Key[1:])
			want[string(stateKey(r.State, r.Created, key))] = true
			if a, replayed := answers[key]; replayed != (r.State == StateCompleted && r.Result.beside() && time.Now().Before(r.Result.Expires)) ||
				replayed && (a.Claim != r.Claim || a.Fingerprint != r.Fingerprint || !a.Created.Equal(r.Created)) {
				t.Fatalf("a record in state %s, and an answer: %v, %+v", r.State, replayed, a)
			}
			if r.State.open() {
				continue
			}
			want[string(g.appendCallerKey(nil, r, key))] = true
			accounts[string(g.appendCallerKey(nil, r, key))] = string(accountOf(r, r.size()).appendTo(nil))
			if r.Workflow != "" {
				want[string(g.appendWorkflowKey(nil, r, key))] = true
			}
		case spaceCaller:
			found[string(entry.Key)] = string(entry.Value)
			have[string(entry.Key)] = true
		case spaceState, spaceWorkflow:
			have[string(entry.Key)] = true
		}
	}
	for k := range want {
		if !have[k] {
			t.Fatalf("an entry of index %q is missing", k[0])
		}
	}
	for k := range have {
		if !want[k] {
			t.Fatalf("an entry of index %q belongs to no record", k[0])
		}
	}
	if !maps.Equal(accounts, found) {
		t.Fatal("an account does not tell what its record does")
	}
}

// What may have been sent before a crash is in doubt; what another node runs is not
// touched.
func TestRecoveryOfThisNode(t *testing.T) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := Open(ctx, mem, ring)
	if err != nil {
		t.Fatal(err)
	}
	plant := func(id, node string, state State) Call {
		c := Call{Scope: Scope{ID: id}}
		c.Key = g.Key(c.Scope)
		r := g.newRecord(&c, g.Caller(c.Scope.Caller), time.Now())
		r.State, r.Node, r.Boot = state, node, "another life"
		if _, err := mem.Commit(ctx, g.put(c.Key, nil, &r, store.Absent())...); err != nil {
			t.Fatal(err)
		}
		return c
	}
	sending := plant("2", g.node, StateSending)
	foreign, undone := plant("3", "elsewhere", StateSending), plant("4", g.node, StateRolledBack)

	g, recovery, err := Open(ctx, mem, ring)
	if err != nil || recovery != (Recovery{InDoubt: 1}) {
		t.Fatalf("recovery %+v, %v", recovery, err)
	}
	for _, row := range []struct {
		call Call
		want Status
	}{{sending, Doubtful}, {foreign, RunningElsewhere}, {undone, RolledBack}} {
		found, err := g.LookUp(ctx, row.call.Key, row.call.Fingerprint)
		if err != nil || found.Status != row.want {
			t.Errorf("%s: status %d, %v, want %d", row.call.Scope.ID, found.Status, err, row.want)
		}
	}
	checkIndex(t, g)
}

// Another node's running execution holds the version of its record: it is left alone,
// and so the key stays in use. What an earlier life of this node left is nobody's.
func TestResealLeavesOtherNodesRunning(t *testing.T) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := Open(ctx, mem, ring)
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range []string{g.node, "elsewhere"} {
		c := Call{Scope: Scope{ID: node}}
		c.Key = g.Key(c.Scope)
		r := g.newRecord(&c, g.Caller(""), time.Now())
		r.Node = node
		if _, err := mem.Commit(ctx, g.put(c.Key, nil, &r, store.Absent())...); err != nil {
			t.Fatal(err)
		}
	}
	modelRotate(t, g, ring)
	var keys []uint32
	for entry, err := range mem.Scan(ctx, store.Prefix([]byte{spaceRecord})) {
		if err != nil {
			t.Fatal(err)
		}
		r, _, err := g.load(ctx, Key(entry.Key[1:]))
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, ring.KeyOf(entry.Value))
		if want := map[bool]uint32{true: 2, false: 1}[r.Node == g.node]; keys[len(keys)-1] != want {
			t.Errorf("the record of node %s is under key %d, want %d", r.Node, keys[len(keys)-1], want)
		}
	}
	uses, err := g.Keys().InUse(ctx)
	if err != nil || len(keys) != 2 || len(uses) != 2 || !uses[0].Until.IsZero() {
		t.Errorf("%d records; in use %+v, %v", len(keys), uses, err)
	}
}

func fullRecord() Record {
	at := time.Unix(1_800_000_000, 123).UTC()
	r := Record{
		State: StateCompleted, ID: "id", Origin: OriginMinted, Guard: "g", Action: "a", Host: "h", Method: "POST", Path: "/p",
		Workflow: "w", Checkpoint: "k", Node: "n", Boot: "b", Counts: "another", Created: at, First: at.Add(-1), Deadline: at.Add(1), Settled: at.Add(2), Cause: CauseStatus,
		Status: 201, Task: "t", KeepResult: time.Hour, KeepKey: 2 * time.Hour,
		Result: storedResult{Kept: true, Inline: []byte("inline"), Pieces: 3, Size: 4, Expires: at.Add(3)},
	}
	r.Claim[0], r.Fingerprint[1], r.Caller[2] = 1, 2, 3
	r.Sent[4] = 5
	r.Lot[6] = 8
	r.Group[5], r.Window, r.Count, r.Internal = 6, time.Minute, 7, true
	return r
}

func utc(r *Record) {
	for _, t := range []*time.Time{&r.Created, &r.First, &r.Deadline, &r.Settled, &r.Result.Expires} {
		*t = t.UTC()
	}
}

func TestRecordKeepsEveryField(t *testing.T) {
	full := fullRecord()
	v := reflect.ValueOf(full)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the test leaves %s empty", v.Type().Field(i).Name)
		}
	}
	got, err := decodeRecord(full.encode(nil))
	if err != nil {
		t.Fatal(err)
	}
	utc(got)
	if !reflect.DeepEqual(*got, full) {
		t.Errorf("got  %+v\nwant %+v", *got, full)
	}
}

// The largest record stays an ordinary value: what promises rest on is kept where
// a store sees the error of its sync (P2).
func TestP2LargestRecordIsAnOrdinaryValue(t *testing.T) {
	r := fullRecord()
	long := strings.Repeat("x", 1<<20)
	r.ID, r.Guard, r.Action = shorten(long, maxRecordedID), shorten(long, maxRecordedText), shorten(long, maxRecordedText)
	r.Method, r.Path, r.Workflow = r.Guard, r.Guard, r.Guard
	r.Result.Inline = make([]byte, maxInline)
	if n := len(r.encode(nil)); n > 4096 || n > store.MaxValue {
		t.Errorf("%d bytes", n)
	}
}

// Records that a newer build wrote can be read: unknown fields are skipped.
func TestRecordSkipsUnknownFields(t *testing.T) {
	full := fullRecord()
	e := store.Encoder{B: full.encode(nil)}
	e.String(200, "of a newer build")
	got, err := decodeRecord(e.B)
	if err != nil || got.ID != "id" {
		t.Errorf("%+v, %v", got, err)
	}
}

func FuzzDecodeRecord(f *testing.F) {
	full := fullRecord()
	f.Add(full.encode(nil))
	f.Add([]byte{})
	f.Add([]byte{tagState, 1, 2, tagID, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		again, err := decodeRecord(r.encode(nil))
		if err != nil {
			t.Fatal(err)
		}
		if string(again.encode(nil)) != string(r.encode(nil)) {
			t.Fatal("not stable")
		}
	})
}

func FuzzDecodeHead(f *testing.F) {
	h := Head{Status: 200, Size: 7, Header: map[string][]string{"A": {"", "b"}, "Gone": nil}, Trailer: map[string][]string{"T": {"x"}}}
	f.Add(h.encode(nil))
	var d Head
	if err := d.decode(h.encode(nil)); err != nil || !maps.EqualFunc(d.Header, h.Header, slices.Equal) || !maps.EqualFunc(d.Trailer, h.Trailer, slices.Equal) {
		f.Fatalf("%+v, %v", d, err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h, again Head
		if h.decode(b) != nil {
			return
		}
		delete(h.Header, "") // no Encoder writes an empty name, as no header has one
		delete(h.Trailer, "")
		err := again.decode(h.encode(nil))
		if err != nil || again.Status != h.Status || !maps.EqualFunc(again.Header, h.Header, slices.Equal) ||
			!maps.EqualFunc(again.Trailer, h.Trailer, slices.Equal) {
			t.Fatalf("%+v, %v", again, err)
		}
	})
}

// awaiting waits for key in the background of a bubble.
func awaiting(ctx context.Context, g *Guard, key Key) <-chan error {
	done := make(chan error, 1)
	go func() { done <- g.Await(ctx, key) }()
	return done
}

// over reports whether the wait is over, once nothing in the bubble moves any more.
func over(t *testing.T, done <-chan error) (bool, error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		return true, err
	default:
		return false, nil
	}
}

func awaitedCall(g *Guard, id string) *Call {
	c := &Call{Scope: Scope{ID: id}, Deadline: time.Minute, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 10}
	c.Key = g.Key(c.Scope)
	return c
}

// Section "Endpoints": a wait ends with the execution, however that ends, or with its
// own context; it does not begin where nothing runs.
func TestAwaitEndsWithTheExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, err := Open(t.Context(), memory.New(memory.Options{}), seal.Generate())
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range map[string]Outcome{
			"completed": {Verdict: Completed, Status: 201},
			"in doubt":  {Verdict: InDoubt, Cause: CauseLost},
			"released":  {Verdict: Released, Cause: CauseNotSent},
		} {
			c := awaitedCall(g, name)
			if err := g.Await(t.Context(), c.Key); err != nil {
				t.Errorf("%s: of nothing: %v", name, err)
			}
			e, err := g.Claim(t.Context(), c, Finding{})
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			first, second := awaiting(t.Context(), g, c.Key), awaiting(ctx, g, c.Key)
			if ended, err := over(t, first); ended {
				t.Fatalf("%s: over while it runs: %v", name, err)
			}
			leave()
			if ended, err := over(t, second); !ended || !errors.Is(err, context.Canceled) {
				t.Errorf("%s: who left: %v, %v", name, ended, err)
			}
			if err := e.Settle(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			if ended, err := over(t, first); !ended || err != nil {
				t.Errorf("%s: %v, %v", name, ended, err)
			}
			if err := g.Await(t.Context(), c.Key); err != nil {
				t.Errorf("%s: afterwards: %v", name, err)
			}
		}
	})
}

// What runs on another node is awaited by the store's watch.
func TestAwaitOfAnotherNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := memory.New(memory.Options{})
		g, _, err := Open(t.Context(), mem, seal.Generate())
		if err != nil {
			t.Fatal(err)
		}
		c := awaitedCall(g, "1")
		running := g.newRecord(c, g.Caller(c.Scope.Caller), time.Now())
		running.Node, running.Boot = "elsewhere", "another life"
		version, err := mem.Commit(t.Context(), g.put(c.Key, nil, &running, store.Absent())...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := awaiting(ctx, g, c.Key)
		touched := running
		touched.Boot = "yet another"
		if version, err = mem.Commit(t.Context(), g.put(c.Key, &running, &touched, store.VersionIs(version))...); err != nil {
			t.Fatal(err)
		}
		if ended, err := over(t, done); ended {
			t.Fatalf("over after a change that ends nothing: %v", err)
		}
		settled := touched
		settled.State, settled.Settled = StateCompleted, time.Now()
		if _, err := mem.Commit(t.Context(), g.put(c.Key, &touched, &settled, store.VersionIs(version))...); err != nil {
			t.Fatal(err)
		}
		if ended, err := over(t, done); !ended || err != nil {
			t.Errorf("%v, %v", ended, err)
		}
	})
}

// P4: a store that does not answer ends the wait with ErrStore.
func TestP4AwaitOfABrokenStore(t *testing.T) {
	mem := memory.New(memory.Options{})
	g, _, err := Open(t.Context(), mem, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	if err := mem.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Await(t.Context(), awaitedCall(g, "1").Key); !errors.Is(err, ErrStore) {
		t.Errorf("%v", err)
	}
}

func boundedCall(g *Guard, id string, q Quota) *Call {
	c := awaitedCall(g, id)
	c.Quota = q
	return c
}

// Whoever waits for an execution that is released unsent may run: the room that it had
// is free when it is told.
func TestQuotaMakesRoomBeforeFollowersWake(t *testing.T) {
	g, _, err := Open(t.Context(), memory.New(memory.Options{}), seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	c := boundedCall(g, "1", Quota{Open: 1})
	e, err := g.Claim(t.Context(), c, Finding{})
	if err != nil {
		t.Fatal(err)
	}
	e.flight.recording.mu.Lock() // holds the end up once the followers are told
	settled := make(chan error, 1)
	go func() { settled <- e.Settle(t.Context(), Outcome{Verdict: Released, Cause: CauseNotSent}) }()
	<-e.flight.Done()
	if _, err := g.Claim(t.Context(), c, Finding{}); err != nil {
		t.Errorf("who waited: %v", err)
	}
	e.flight.recording.mu.Unlock()
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
}

// leaving is a store in whose scans the client leaves.
type leaving struct {
	*memory.Store
	leave context.CancelFunc
	scans int
}

func (l *leaving) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	l.scans++
	if l.leave != nil {
		l.leave()
	}
	if err := ctx.Err(); err != nil {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, err) }
	}
	return l.Store.Scan(ctx, r)
}

// Counting what a caller holds takes long where that is much. It is not begun anew
// because a client's patience was shorter: else nobody's might ever do.
func TestQuotaCountOutlastsItsClient(t *testing.T) {
	st := &leaving{Store: memory.New(memory.Options{})}
	g, _, err := Open(t.Context(), st, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	st.leave, st.scans = cancel, 0
	if _, err := g.Claim(ctx, boundedCall(g, "1", Quota{Open: 1}), Finding{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("the claim of a client that has left: %v", err)
	}
	if _, err := g.Claim(t.Context(), boundedCall(g, "2", Quota{Open: 1}), Finding{}); err != nil {
		t.Fatal(err)
	}
	if st.scans != 1 {
		t.Errorf("counted %d times", st.scans)
	}
}

// SetReadAhead makes the recording's window smaller than readAhead.
func (r *Recording) SetReadAhead(bytes int64) { r.window = max(r.limit, bytes) }

// What stands in stores of earlier builds stays as it is, byte for byte.
func TestStoredBytes(t *testing.T) {
	full := fullRecord()
	full.Task, full.Internal, full.Lot, full.Counts = "", false, lotHash{}, "" // which earlier builds did not have
	head := Head{Status: 201, Size: 300, Header: map[string][]string{"A": {"", "b"}}, Trailer: map[string][]string{"Gone": nil}}
	keyed := full
	keyed.Group, keyed.Window, keyed.Count = groupHash{}, 0, 0
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"record":            {full.encode(nil), "01010602100100000000000000000000000000000003200002000000000000000000000000000000000000000000000000000000000000041000000300000000000000000000000000050269640601040701670801610904504f53540a022f700b01770c016e0d01620e09f681a0bbd29df1fa310f09f881a0bbd29df1fa311009fa81a0bbd29df1fa31110f757073747265616d5f737461747573120292031301021406696e6c696e651501061709fc81a0bbd29df1fa3118078080c58bc6d101190780808a978ca3031a01681b01081c016b1d09f481a0bbd29df1fa311e200000000005000000000000000000000000000000000000000000000000000000201000000000000600000000000000000000210680e0ba84bf0322010e"},
		"record with a key": {keyed.encode(nil), "01010602100100000000000000000000000000000003200002000000000000000000000000000000000000000000000000000000000000041000000300000000000000000000000000050269640601040701670801610904504f53540a022f700b01770c016e0d01620e09f681a0bbd29df1fa310f09f881a0bbd29df1fa311009fa81a0bbd29df1fa31110f757073747265616d5f737461747573120292031301021406696e6c696e651501061709fc81a0bbd29df1fa3118078080c58bc6d101190780808a978ca3031a01681b01081c016b1d09f481a0bbd29df1fa311e200000000005000000000000000000000000000000000000000000000000000000"},
		"sparse record":     {(&Record{State: StateSending, Created: full.Created}).encode(nil), "010104021000000000000000000000000000000000032000000000000000000000000000000000000000000000000000000000000000000410000000000000000000000000000000000e09f681a0bbd29df1fa31"},
		"account":           {accountOf(&full, 300).appendTo(nil), "0101060209f681a0bbd29df1fa310302d8040401080509fc81a0bbd29df1fa31"},
		"head":              {head.encode(nil), "010292030202d80403014104013d04023d620504476f6e65"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, c.want)
		}
	}
}

// What opens but cannot be read is errEncoding, whatever is wrong.
func TestBrokenFields(t *testing.T) {
	if want := "guard: a record in the store cannot be read by this build"; errEncoding.Error() != want {
		t.Errorf("%q, want %q", errEncoding, want)
	}
	for name, b := range map[string]string{
		"no length":         "\x01",
		"a length too long": "\x01\x02\x04",
		"an endless length": "\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"no number":         "\x01\x00",
		"half a number":     "\x01\x01\x80",
		"two numbers":       "\x01\x02\x04\x04",
		"half a claim":      "\x01\x01\x04\x02\x02ab",
		"no such state":     "\x01\x01\x02",
		"no state":          "",
	} {
		if _, err := decodeRecord([]byte(b)); err != errEncoding {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, b := range map[string]string{"no mark": "\x03\x01A\x04\x01x", "an empty value": "\x03\x01A\x04\x00", "cut": "\x03\x05A"} {
		if err := new(Head).decode([]byte(b)); err != errEncoding {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The errors of ids: callers see their texts.
var (
	ErrIDMissing      = errIDMissing
	ErrIDRepeated     = errIDRepeated
	ErrIDList         = errIDList
	ErrIDEmpty        = errIDEmpty
	ErrIDTooLong      = errIDTooLong
	ErrIDCharacter    = errIDCharacter
	ErrIDUnterminated = errIDUnterminated
	ErrIDEscape       = errIDEscape
	ErrIDTrailing     = errIDTrailing
)
