package workflow

import "slices"

// undo is how far the rollback of a checkpoint has come.
type undo uint8

const (
	notUndone undo = iota
	undoAsked
	undone
	undoPartial
	undoEscalated
	undoFailed
)

var undoWords = map[string]undo{
	"completed": undone, "partial": undoPartial, "escalated": undoEscalated, "failed": undoFailed,
}

func (u undo) detail() Detail {
	switch u {
	case undoAsked:
		return RollbackRequested
	case undoPartial, undoEscalated:
		return CompensationRequired
	case undoFailed:
		return RollbackFailed
	}
	return ""
}

// rolling collects what is said about the rollback of one checkpoint.
type rolling struct {
	asked  int // when it was last asked for; -1 is never
	direct said
	// whole is the result of a rollback as a whole, which counts where none is direct: that
	// of others may have made it less than what this checkpoint's own was.
	whole said
	// byStart are results that name no checkpoint, so that only the start below which
	// they stand does. They may be of different agents (cascade, Figure 13): all count.
	byStart said
}

type said struct {
	at   int // when the last one that counts was recorded; -1 is never
	undo undo
	own  bool // the gateway says so
}

// rollbacks finds how far the rollback of every checkpoint has come, and tells the
// tasks that it was made for.
func (d *derivation) rollbacks() {
	all := make([]rolling, len(d.nodes)) // of every checkpoint
	for i := range all {
		all[i] = rolling{asked: -1, direct: said{at: -1}, whole: said{at: -1}, byStart: said{at: -1}}
	}
	for i := range d.nodes {
		if !d.asks(i) {
			continue
		}
		for _, c := range d.targets(i) {
			all[c].asked = max(all[c].asked, d.seq[i])
		}
	}
	for i := range d.nodes {
		d.result(i, all)
	}
	standing := make([]said, len(d.nodes))
	for c := range all {
		standing[c] = all[c].standing()
	}
	for i := range d.nodes {
		d.inherit(i, standing)
		d.history[i].undo = standing[i].undo
	}
	for i := range d.nodes {
		for _, t := range d.guards[i] {
			// Whose action it is, undoes it: an agent can make a checkpoint of another's.
			if !standing[i].own && !d.nodes[t].Own && !d.believed(i, t) {
				continue
			}
			d.history[t].undo = together(d.history[t].undo, d.history[i].undo)
		}
	}
}

// inherit tells what group i contains of its rollback, which is theirs too (ATD,
// "Hierarchical Checkpoints"). A group stands before them. One that an agent made of
// others' checkpoints says nothing about these, unless the gateway does.
func (d *derivation) inherit(i int, standing []said) {
	if !d.groups[i] || standing[i].undo == notUndone {
		return
	}
	for _, c := range d.parents[i] {
		if standing[c].undo == notUndone && (standing[i].own || d.believed(i, c)) {
			standing[c] = standing[i]
		}
	}
}

// together is what two checkpoints of one task say: nothing is undone that one of them
// says is not (P6).
func together(a, b undo) undo {
	switch {
	case a == notUndone || a == undone && b != notUndone:
		return b
	case b == notUndone || b == undone:
		return a
	}
	return max(a, b)
}

func (d *derivation) asks(i int) bool {
	return (d.nodes[i].Event == RollbackRequest || d.nodes[i].Event == RollbackStart) && !d.nodes[i].Stranger
}

// targets are the checkpoints that the event names: in its member, or as the parents of
// a request (ATD, "Basic Rollback").
func (d *derivation) targets(i int) []int {
	if c, ok := d.index[d.nodes[i].CheckpointID]; ok && d.nodes[c].isCheckpoint() {
		return []int{c}
	}
	if d.nodes[i].Event != RollbackRequest {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(d.parents[i]), func(p int) bool { return !d.nodes[p].isCheckpoint() })
}

// result takes what node i says about the end of a rollback. A compensation counts
// where it names its checkpoint and says how it ended.
func (d *derivation) result(i int, all []rolling) {
	node := &d.nodes[i]
	status, ok := undoWords[node.Status]
	if !ok || node.Event != RollbackComplete && node.Event != Compensate || node.Stranger {
		return
	}
	direct := d.targets(i)
	for _, c := range direct {
		if !d.believed(i, c) {
			continue
		}
		if node.Whole {
			all[c].whole.last(said{d.seq[i], status, node.Own})
			continue
		}
		all[c].direct.last(said{d.seq[i], status, node.Own})
	}
	if len(direct) > 0 || node.CheckpointID != "" || node.Event == Compensate {
		return
	}
	for _, p := range d.parents[i] {
		if !d.asks(p) {
			continue
		}
		for _, c := range d.targets(p) {
			if d.believed(i, c) {
				all[c].byStart.all(said{d.seq[i], status, node.Own})
			}
		}
	}
}

// believed reports whether node i may say what became of checkpoint c: the gateway may,
// and whoever made the checkpoint. A signature proves who said something, not that it
// is true.
func (d *derivation) believed(i, c int) bool {
	return d.nodes[i].Own || d.nodes[i].Issuer == d.nodes[c].Issuer
}

// last takes a result in place of those before it.
func (s *said) last(next said) {
	if next.at > s.at {
		*s = next
	}
}

// all takes a result beside the others: nothing is undone while one of them is not.
func (s *said) all(next said) {
	*s = said{max(next.at, s.at), together(s.undo, next.undo), next.own && (s.own || s.at < 0)}
}

func (r *rolling) standing() said {
	s := r.direct
	if s.at < 0 {
		s = r.whole
	}
	if s.at < 0 {
		s = r.byStart
	}
	if r.asked > s.at && s.undo != undone {
		return said{r.asked, undoAsked, false}
	}
	return s
}
