package execution

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Retries of calls that another member of a shared store runs or has run (ADR 0131). The table of each member has what
// its own calls are for a retry. A member that has claimed a call of a group has an entry that says so, until a retry
// could find nothing any more. Who has to decide about a call of the group asks these members, and reads what is stored
// of those that are gone.

const (
	kindGroup = 'g' // v g group 0 boot: a member knows calls of the group; v g group 1 key: who has taken that execution
	kindAsk   = 'q' // v q group boot: a member asks what the others know of the group; the value is random
	kindSays  = 'a' // v a group boot boot: what one member says to another one's question, sealed
	kindMarks = 'm' // v m boot: up to when a process has written its marks
)

const (
	ofMember = 0
	ofKey    = 1
)

const (
	// markHeld: the client of a retry waits for the answer.
	markHeld = 'w'
	// askTime is how long the others are waited for. Who does not answer and is not gone leaves open what it knows.
	askTime = 3 * time.Second
	// askKept is how long questions and answers are kept.
	askKept = time.Minute
	// groupKept is how much longer than a call may take, and is recognised, its member is asked.
	groupKept = 10 * time.Minute
	// marksKept is how long the marks of a member are known that is gone.
	marksKept = 30 * 24 * time.Hour
)

func liveKey(kind byte, parts ...string) []byte {
	b := []byte{spaceLive, kind}
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func takenKey(group groupHash, key Key) []byte {
	return liveKey(kindGroup, string(group[:]), string([]byte{ofKey}), string(key[:]))
}

// errGone: who was asked is gone; its rows say what it knew.
var errGone = errors.New("guard: the member that was asked is gone")

// taken is who has taken an execution as a retry.
type taken struct {
	boot    string
	mark    byte // markHeld, or how its last attempt has ended
	gone    bool // the member
	version store.Version
}

// others is what is known elsewhere of a group.
type others struct {
	known []*known
	said  int // how many of known their members have said; the others are stored
	taken map[Key]taken
}

// elsewhere asks what is known of a group elsewhere; nil if that is nothing.
func (t *groups) elsewhere(ctx context.Context, group groupHash, window time.Duration) (*others, error) {
	m := &t.g.members
	o := &others{taken: map[Key]taken{}}
	var living []string
	rows := false
	for entry, err := range m.store.Scan(ctx, store.Prefix(liveKey(kindGroup, string(group[:])))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		rest := entry.Key[2+len(group):]
		if rest[0] == ofKey {
			if len(rest) != 1+keySize || len(entry.Value) < 1 {
				return nil, unreadable(errEncoding)
			}
			by := taken{boot: string(entry.Value[1:]), mark: entry.Value[0], version: entry.Version}
			var err error
			if by.gone, err = m.left(ctx, by.boot); err != nil {
				return nil, err
			}
			by.gone = by.gone && by.boot != t.g.boot
			o.taken[Key(rest[1:])] = by
			if by.mark == markHeld && !by.gone && by.boot != t.g.boot && !slices.Contains(living, by.boot) {
				living = append(living, by.boot) // only it knows whether an attempt holds the execution
			}
			continue
		}
		boot := string(rest[1:])
		if boot == t.g.boot {
			continue
		}
		gone, err := m.left(ctx, boot)
		if err != nil {
			return nil, err
		}
		if !gone {
			living = append(living, boot)
			continue
		}
		rows = true
		if _, err := m.sweep(ctx, boot); err != nil { // what it has left open gets its rows
			return nil, err
		}
	}
	for _, boot := range living {
		said, all, err := t.ask(ctx, group, boot)
		if errors.Is(err, errGone) {
			return t.elsewhere(ctx, group, window)
		}
		if err != nil {
			return nil, err
		}
		rows = rows || !all
		for _, k := range said {
			k.group, k.boot = group, boot
			o.known = append(o.known, k)
		}
	}
	o.said = len(o.known)
	if !rows {
		if len(living) == 0 && len(o.taken) == 0 {
			return nil, nil
		}
		return o, nil
	}
	stored, err := t.read(ctx, group, window)
	if err != nil {
		return nil, err
	}
	for _, k := range stored {
		if !slices.ContainsFunc(o.known, func(said *known) bool { return said.key == k.key }) {
			k.foreign = true
			o.known = append(o.known, k)
		}
	}
	return o, nil
}

// left reports whether a boot is gone.
func (m *members) left(ctx context.Context, boot string) (bool, error) {
	if m.store == nil {
		return boot != m.g.boot, nil
	}
	return m.orphaned(ctx, &Record{Boot: boot})
}

// ask asks a member what it knows of a group. all says that it knows all that it has run.
func (t *groups) ask(ctx context.Context, group groupHash, boot string) (said []*known, all bool, err error) {
	m := &t.g.members
	nonce := newClaim()
	now, err := m.store.Now(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	// Each question has an entry of its own, since several calls may ask at once.
	id := string(group[:]) + string(nonce[:])
	question := store.Write{Key: liveKey(kindAsk, id), Value: []byte(boot), Expires: now.Add(askKept)}
	name := liveKey(kindSays, id)
	late := time.NewTimer(askTime)
	defer late.Stop()
	for asked := false; ; {
		changed, cancel := m.store.Watch(name)
		out := m.store.Left()
		if !asked {
			if _, err := m.store.Commit(ctx, question); err != nil {
				cancel()
				return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
			}
			asked = true
		}
		row, err := table[reply](t.g).Get(ctx, name)
		if err == nil && row.Record != nil {
			cancel()
			return row.Record.read(time.Now()), row.Record.All, nil
		}
		if err == nil {
			var gone bool
			if gone, err = m.left(ctx, boot); gone {
				err = errGone
			}
		}
		if err != nil {
			cancel()
			return nil, false, err
		}
		select {
		case <-changed:
		case <-out:
		case <-late.C:
			err = fmt.Errorf("%w: another node does not say what it knows of equal calls", ErrStore)
		case <-ctx.Done():
			err = ctx.Err()
		}
		cancel()
		if err != nil {
			return nil, false, err
		}
	}
}

// say answers a question of another member, or all that are open where it is nil.
func (t *groups) say(ctx context.Context, question []byte) {
	m := &t.g.members
	if question == nil {
		for entry, err := range m.store.Scan(ctx, store.Prefix([]byte{spaceLive, kindAsk})) {
			if err == nil {
				t.say(ctx, entry.Key)
			}
		}
		return
	}
	entry, err := m.store.Get(ctx, question)
	id := question[2:]
	if err != nil || string(entry.Value) != t.g.boot || len(id) < len(groupHash{}) {
		return // it is another member's
	}
	defer t.g.writers.Enter()()
	w := table[reply](t.g).Put(liveKey(kindSays, string(id)), t.said(groupHash(id)), store.Condition{}, entry.Expires)
	w.Bulk = true
	_, _ = m.store.Commit(ctx, w) // else the one who asks does not go on
}

// said is what this member knows of a group.
func (t *groups) said(group groupHash) *reply {
	s := t.shard(group)
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	r := &reply{All: !s.shrunk || now.Sub(s.since) > 24*time.Hour}
	if g := s.of[group]; g != nil {
		r.All = r.All && g.forgot.IsZero()
		for _, k := range g.listed {
			if !k.foreign || k.holder != nil || k.pending {
				r.Known = append(r.Known, k.reported(now))
			}
		}
	} else {
		r.All = r.All && s.forgot.IsZero()
	}
	return r
}

// reply is what a member knows of a group.
type reply struct {
	Known []report
	All   bool // it knows all that it has run
}

// report is what a member knows of an execution; the names are those of known.
type report struct {
	Key          Key
	ID           string
	Began, Ended time.Duration // how long ago; Ended is 0 while it has not
	Window       time.Duration
	Count        int
	State        State
	Expires      time.Time

	Waits, Unanswered, Released, Retriable, Internal, Learned, Taken, Asked, Held, Elsewhere bool
}

func (k *known) reported(now time.Time) report {
	r := report{
		Key: k.key, ID: k.id, Began: max(now.Sub(k.began), 0), Window: k.window, Count: k.count, State: k.state,
		Expires: k.expires, Waits: k.holder != nil && k.holder.waits(), Unanswered: k.deserted(), Released: k.released,
		Retriable: k.retriable, Internal: k.internal, Learned: k.learned, Taken: k.taken, Asked: k.asked,
		Held: k.foreign || k.held, Elsewhere: k.elsewhere,
	}
	if !k.ended.IsZero() {
		r.Ended = max(now.Sub(k.ended), 0)
	}
	return r
}

// read is what another member knows. What runs is never too old.
func (r *reply) read(now time.Time) (all []*known) {
	for _, of := range r.Known {
		all = append(all, &known{
			foreign: true, key: of.Key, id: of.ID, began: now.Add(-of.Began), ended: now.Add(-of.Ended), window: of.Window,
			count: of.Count, state: of.State, expires: of.Expires, away: of.Waits, unanswered: of.Unanswered,
			released: of.Released, retriable: of.Retriable, internal: of.Internal, learned: of.Learned, taken: of.Taken,
			asked: of.Asked, held: of.Held, elsewhere: of.Elsewhere,
		})
	}
	return all
}

// enlist has the group know what is known elsewhere, until dismiss.
func (t *groups) enlist(s *groupShard, group groupHash, o *others) {
	views := map[Key]*known{} // of who has taken an execution
	for i, k := range o.known {
		own, by := s.keys[member{group, k.key}], o.taken[k.key]
		if by.boot == k.boot && k.boot != "" && (k.held || own != nil || by.mark == markHeld && i < o.said) {
			views[k.key] = k
		}
	}
	for _, held := range []bool{false, true} { // the owner knows more of it than who has taken it
		for _, k := range o.known {
			if k.held == held && k.in == nil && s.keys[member{group, k.key}] == nil {
				k.foreign, k.held, k.holder = true, false, nil // what has taken it is no retry of this member
				t.add(s, k)
			}
		}
	}
	for key, by := range o.taken {
		k := s.keys[member{group, key}]
		if k == nil || by.boot == t.g.boot && (k.held || k.holder != nil || by.mark == markHeld && !k.foreign) {
			continue
		}
		switch view := views[key]; {
		case k.released:
			k.taken = true
		case view != nil:
			k.away, k.unanswered, k.learned, k.began, k.count = view.away, view.unanswered, view.learned, view.began, view.count
			k.retriable, k.internal, k.ended = k.retriable || view.retriable, k.internal || view.internal, view.ended
			if k.state == StateInDoubt && k.runner == nil && view.state == StateCompleted { // it was settled
				k.state, k.unrecorded = StateCompleted, false
				if !k.foreign && !k.elsewhere && !k.held { // as Guard.put has marked it
					k.mark = markUnanswered
				}
			}
		case by.mark == markAnswered:
			k.away, k.unanswered, k.learned = false, false, true
		default:
			// The entry may say "held" while its member, asked later, reports no attempt that holds it. Then either the
			// entry has changed, and a taking by the version read here conflicts; or the outcome of writing it was unknown
			// (store.ErrUnknown), and the attempt has ended without an answer.
			k.away, k.unanswered, k.learned = false, true, false
		}
	}
}

// dismiss forgets what enlist has added, but for what an attempt of this member has taken: whoever decides next asks
// anew.
func (t *groups) dismiss(s *groupShard, group groupHash) {
	g := s.of[group]
	if g == nil {
		return
	}
	for _, k := range slices.Clone(g.listed) {
		if k.foreign && k.holder == nil && k.runner == nil && !k.pending {
			t.drop(s, k)
		}
	}
	s.tidy(group, g)
}

// take has an attempt be the one retry over all nodes that has taken its execution. The error is a *store.Conflict
// if another one was first.
func (t *groups) take(ctx context.Context, a *Attempt, o *others) error {
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	condition := store.Absent()
	if o != nil {
		if before, ok := o.taken[a.Key]; ok {
			condition = store.VersionIs(before.version)
		}
	}
	w := heldBy(t.g.boot, a.group, a.Key, markHeld, now.Add(a.window+groupKept+time.Hour))
	w.If = condition
	if _, err := t.g.store.Commit(ctx, w, t.knows(a.group, now.Add(a.window+groupKept+time.Hour))); err != nil {
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.known.held, a.known.mark = true, markHeld
	t.note(s, a.known)
	return nil
}

// takeSettled writes that this member's client gets the answer of a call whose doubt was settled while it waited.
// Other members may still have the call in doubt; they learn from the entry that the answer is taken. An error is
// dropped: the other members then act as if the client had got no answer.
func (t *groups) takeSettled(ctx context.Context, a *Attempt) {
	o := &others{taken: map[Key]taken{}}
	entry, err := t.g.store.Get(ctx, takenKey(a.group, a.Key))
	switch {
	case err == nil && (len(entry.Value) < 1 || entry.Value[0] == markHeld && string(entry.Value[1:]) != t.g.boot):
		return // a retry elsewhere holds it
	case err == nil:
		o.taken[a.Key] = taken{version: entry.Version}
	case !errors.Is(err, store.ErrNotFound):
		return
	}
	if t.take(ctx, a, o) != nil {
		return
	}
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.known.foreign = false // it is kept, since its own member does not know that it was settled
}

// giveUp has an attempt not have taken its execution.
func (t *groups) giveUp(a *Attempt) {
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if a.unwatch != nil {
		a.unwatch()
		a.unwatch = nil
	}
	k := a.known
	if k.in != nil && k.in.unwatched == a {
		k.in.unwatched = nil
	}
	if k.holder == a && k.in != nil {
		k.holder, k.count, k.began, k.order = a.was.holder, a.was.count, a.was.began, a.was.order
		k.unanswered, k.retriable, k.learned = a.was.unanswered, a.was.retriable, a.was.learned
		t.note(s, k)
	}
}

// heldBy is the entry of an execution that a retry has taken.
func heldBy(boot string, group groupHash, key Key, mark byte, until time.Time) store.Write {
	return store.Write{Key: takenKey(group, key), Value: append([]byte{mark}, boot...), Expires: until}
}

// knows is the entry that this member is asked about a group.
func (t *groups) knows(group groupHash, until time.Time) store.Write {
	return store.Write{Key: liveKey(kindGroup, string(group[:]), string([]byte{ofMember}), t.g.boot), Expires: until}
}

// unwritten reports that a process which is gone may not have written the mark of an execution that has settled then:
// it has not ended in order, and its marks were last written before.
func (t *groups) unwritten(ctx context.Context, boot string, settled time.Time) (bool, error) {
	if gone, err := t.g.members.left(ctx, boot); err != nil || !gone {
		return false, err
	}
	entry, err := t.g.store.Get(ctx, liveKey(kindMarks, boot))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	case len(entry.Value) != 9:
		return false, unreadable(errEncoding)
	}
	upTo := time.Unix(0, int64(binary.BigEndian.Uint64(entry.Value)))
	return entry.Value[8] == 0 && !settled.Before(upTo), nil
}

// marksWritten is the entry that unwritten reads, of this process. last says that it ends in order.
func (t *groups) marksWritten(upTo time.Time, last bool) store.Write {
	value := append(appendTime(nil, upTo), 0)
	if last {
		value[8] = 1
	}
	return store.Write{Key: liveKey(kindMarks, t.g.boot), Value: value, Expires: upTo.Add(marksKept)}
}

// shared reports that other members use the store.
func (t *groups) shared() bool { return t.g != nil && t.g.members.store != nil }
