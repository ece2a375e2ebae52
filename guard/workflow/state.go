package workflow

import (
	"cmp"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// history is what a node's state depends on. Events are ordered by recording: the times in tokens
// have whole seconds and come from different clocks.
type history struct {
	settled  int // when the last settlement was recorded; -1 is never
	outcome  Outcome
	claimed  int // when the last claim that is still open was recorded; -1 is never
	blame    blame
	followed bool // a task follows from it
	undo     undo
}

// derivation finds the states of all nodes.
type derivation struct {
	*Graph
	history []history
}

// derive fills in the states of the nodes.
func derive(g *Graph) {
	d := &derivation{Graph: g, history: make([]history, len(g.nodes))}
	for i := range d.history {
		d.history[i] = history{settled: -1, claimed: -1, blame: blame{own: -1, escalated: g.nodes[i].Escalated}}
	}
	d.settlements()
	d.claims()
	d.errors()
	d.followers()
	d.rollbacks()
	for i := range g.nodes {
		if g.nodes[i].IsTask() {
			g.nodes[i].State, g.nodes[i].Detail = d.history[i].task()
		}
	}
	for i := range g.nodes {
		if g.nodes[i].IsCheckpoint() {
			g.nodes[i].State, g.nodes[i].Detail = d.checkpoint(i)
		}
		g.nodes[i].Called = d.history[i].settled >= 0 || d.history[i].claimed >= 0
	}
}

// settlements sets every task's outcome. The last one counts: a call that was not executed can be
// made again, and a doubt settled later.
func (d *derivation) settlements() {
	last := make(map[int]int) // checkpoint -> the last settlement of its claim
	for i := range d.nodes {
		if !d.nodes[i].settlement() {
			continue
		}
		d.settle(i, i)
		for _, t := range d.announced(i) {
			d.settle(t, i)
		}
		for _, p := range d.parents[i] {
			if before, ok := last[p]; d.claimOf(i, p) && (!ok || d.seq[i] > d.seq[before]) {
				last[p] = i
			}
		}
	}
	for c, by := range last {
		for _, i := range d.children[c] {
			if d.claimOf(i, c) {
				d.settle(i, by)
			}
		}
	}
	for _, all := range d.executions {
		by := slices.MaxFunc(all, func(a, b int) int { return d.seq[a] - d.seq[b] })
		for _, i := range all {
			d.settle(i, by)
		}
	}
}

func (d *derivation) settle(task, by int) {
	if h := &d.history[task]; d.seq[by] > h.settled {
		h.settled, h.outcome = d.seq[by], d.nodes[by].Outcome
	}
}

// claims finds the calls under way: the gateway's checkpoint is recorded with the claim (P2), and
// nothing has settled it.
func (d *derivation) claims() {
	for i := range d.nodes {
		node := &d.nodes[i]
		if !node.IsCheckpoint() || !node.Own ||
			slices.ContainsFunc(d.children[i], func(c int) bool { return d.claimOf(c, i) }) {
			continue
		}
		d.claim(i, i)
		for _, s := range d.executions[node.Execution] {
			d.claim(s, i)
		}
		for _, t := range d.announced(i) {
			d.claim(t, i)
		}
		for _, p := range d.parents[i] {
			if d.nodes[p].IsCheckpoint() && !d.nodes[p].Own {
				d.claim(p, i) // the agent's own, for this call
			}
		}
	}
}

func (d *derivation) claim(node, by int) {
	h := &d.history[node]
	h.claimed = max(h.claimed, d.seq[by])
}

// followers finds the tasks that others follow from, also through a checkpoint, which counts as
// its own action. A settlement does not follow from what it settles, and nothing follows from
// itself, however wrong the graph.
func (d *derivation) followers() {
	passed := make(map[int][]int) // checkpoint -> two of the tasks that follow from it
	for i := range d.nodes {
		if !d.nodes[i].IsTask() {
			continue
		}
		for _, p := range d.parents[i] {
			switch {
			case d.settles(i, p):
			case d.nodes[p].IsTask():
				d.history[p].followed = true
			case !d.nodes[p].IsCheckpoint():
			case d.nodes[i].settlement():
				d.follow(p, d.announced(i))
			case len(passed[p]) < 2:
				passed[p] = append(passed[p], i)
			}
		}
	}
	for c, by := range passed {
		var except []int
		if len(by) == 1 {
			except = by
		}
		d.follow(c, except)
	}
}

// follow marks the tasks before checkpoint c, with exceptions.
func (d *derivation) follow(c int, except []int) {
	for _, p := range d.parents[c] {
		if d.nodes[p].IsTask() && !slices.Contains(except, p) {
			d.history[p].followed = true
		}
	}
}

// task is the state of a task.
func (h *history) task() (State, Detail) {
	open := h.claimed > h.settled
	unfinished := h.settled >= 0 && h.outcome != Completed
	failed := h.failed() || unfinished && !open
	state := Running
	switch {
	case h.undo == undone:
		state = RolledBack
	case h.undo == undoEscalated || h.blame.escalated && failed:
		state = Escalated
	case failed:
		state = Failed
	case open:
	case h.settled >= 0 || h.followed:
		state = Done
	}
	return state, h.detail(state)
}

func (h *history) detail(s State) Detail {
	if d := h.undo.detail(); d != "" {
		return d
	}
	if s == Failed || s == Escalated {
		switch {
		case h.settled < 0 || h.claimed > h.settled:
		case h.outcome == InDoubt:
			return DetailInDoubt
		case h.outcome == Released:
			return DetailReleased
		}
	}
	return ""
}

// checkpoint is the state of a checkpoint: its own, or else that of its last task. Without a task
// it stands for an action that has no token yet.
func (d *derivation) checkpoint(i int) (State, Detail) {
	h := &d.history[i]
	last := -1
	for _, t := range d.guards[i] {
		if last < 0 || d.seq[t] > d.seq[last] {
			last = t
		}
	}
	detail := h.undo.detail()
	switch {
	case h.undo == undone:
		return RolledBack, detail
	case h.undo == undoEscalated:
		return Escalated, detail
	case last >= 0:
		task := d.history[last]
		if !d.nodes[i].Own {
			// P6: another checkpoint of the task was undone, by whoever made that. Of this one
			// nobody has said so.
			task.undo = notUndone
		}
		state, of := task.task()
		return state, cmp.Or(detail, of)
	case h.failed() && h.blame.escalated:
		return Escalated, detail
	case h.failed():
		return Failed, detail
	case d.nodes[i].Group:
		return "", detail
	case d.nodes[i].Own, h.claimed >= 0:
		return Running, detail
	}
	return Pending, detail
}

// blame is the sum of errors about one node.
type blame struct {
	others    bool // an agent's error refers to it
	own       int  // when the gateway's last error of it was recorded; -1 is never
	worst     string
	critical  string // an agent's critical error
	escalated bool   // a human was notified
}

func (b *blame) add(more blame) {
	b.others = b.others || more.others
	b.own = max(b.own, more.own)
	b.worst = worse(b.worst, more.worst)
	b.critical = cmp.Or(b.critical, more.critical)
	b.escalated = b.escalated || more.escalated
}

// errors gives every node the errors that refer to it as a parent, or to its
// checkpoint (ATD and AERR, "Error ECT").
func (d *derivation) errors() {
	for i := range d.nodes {
		e := &d.nodes[i]
		if e.Event != ect.EventError || e.Own && e.Attempt || e.Stranger {
			continue
		}
		found := blame{others: !e.Own, own: -1, worst: e.Severity, escalated: e.Escalated}
		if e.Own {
			found.own = d.seq[i]
		} else if e.Severity == Critical {
			found.critical = e.ID
		}
		for _, p := range d.culprits(i) {
			d.blame(p, found)
		}
		if c, ok := d.index[e.CheckpointID]; ok && d.nodes[c].IsCheckpoint() {
			d.blame(c, found)
		}
	}
	// A checkpoint was made for settlements and tasks, and a settlement is of a task.
	for _, of := range []func(*Node) bool{(*Node).IsCheckpoint, (*Node).settlement} {
		for i := range d.nodes {
			if !of(&d.nodes[i]) {
				continue
			}
			for _, subject := range d.subjects(i) {
				if subject != i {
					d.blame(subject, d.history[i].blame)
				}
			}
		}
	}
	for i := range d.nodes {
		d.nodes[i].Worst, d.nodes[i].CriticalError = d.history[i].blame.worst, d.history[i].blame.critical
	}
}

func (d *derivation) blame(node int, found blame) {
	if d.nodes[node].IsTask() || d.nodes[node].IsCheckpoint() {
		d.history[node].blame.add(found)
	}
}

// failed reports whether an error stands. The gateway's own is about one call: a later call, or a
// settlement of the doubt, supersedes it. Errors of others stand.
func (h *history) failed() bool {
	answered := h.claimed
	if h.outcome == Completed {
		answered = max(answered, h.settled)
	}
	return h.blame.others || h.blame.own > answered
}

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

// rollbackReports collects the reports on the rollback of one checkpoint.
type rollbackReports struct {
	asked  int // when it was last asked for; -1 is never
	direct report
	// whole is the result of a whole rollback, which counts only without a direct one: others'
	// checkpoints may have made it worse than this one's own.
	whole report
	// byStart are results that name no checkpoint, only their start. They may be of different
	// agents (cascade, Figure 13): all count.
	byStart report
}

type report struct {
	at   int // when the last one that counts was recorded; -1 is never
	undo undo
	own  bool // the gateway says so
}

// rollbacks finds how far the rollback of every checkpoint and its tasks has come.
func (d *derivation) rollbacks() {
	reports := func(n Node) bool {
		return n.Event == ect.EventRollbackComplete || n.Event == ect.EventCompensate || n.Event == ect.EventRollbackRequest || n.Event == ect.EventRollbackStart
	}
	if !slices.ContainsFunc(d.nodes, reports) {
		return
	}
	all := make([]rollbackReports, len(d.nodes)) // of every checkpoint
	for i := range all {
		all[i] = rollbackReports{asked: -1, direct: report{at: -1}, whole: report{at: -1}, byStart: report{at: -1}}
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
	latest := make([]report, len(d.nodes))
	for c := range all {
		latest[c] = all[c].latest()
	}
	for i := range d.nodes {
		d.inherit(i, latest)
		d.history[i].undo = latest[i].undo
	}
	for i := range d.nodes {
		for _, t := range d.guards[i] {
			// The action's owner undoes it: an agent can make a checkpoint of another's action.
			if !latest[i].own && !d.nodes[t].Own && !d.mayReport(i, t) {
				continue
			}
			d.history[t].undo = together(d.history[t].undo, d.history[i].undo)
		}
	}
}

// inherit applies the rollback of a group to its members (ATD, "Hierarchical Checkpoints"). An
// agent's group has no effect on others' checkpoints.
func (d *derivation) inherit(i int, latest []report) {
	if !d.nodes[i].Group || latest[i].undo == notUndone {
		return
	}
	for _, c := range d.parents[i] {
		if latest[c].undo == notUndone && (latest[i].own || d.mayReport(i, c)) {
			latest[c] = latest[i]
		}
	}
}

// together combines two checkpoints of one task: nothing is undone if one of them says that it is
// not (P6).
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
	return (d.nodes[i].Event == ect.EventRollbackRequest || d.nodes[i].Event == ect.EventRollbackStart) && !d.nodes[i].Stranger
}

// targets are the checkpoints that the event names: in its member, or as the parents of
// a request (ATD, "Basic Rollback").
func (d *derivation) targets(i int) []int {
	if c, ok := d.index[d.nodes[i].CheckpointID]; ok && d.nodes[c].IsCheckpoint() {
		return []int{c}
	}
	if d.nodes[i].Event != ect.EventRollbackRequest {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(d.parents[i]), func(p int) bool { return !d.nodes[p].IsCheckpoint() })
}

// result reads node i's report on the end of a rollback. A compensation counts if it names its
// checkpoint and its result.
func (d *derivation) result(i int, all []rollbackReports) {
	node := &d.nodes[i]
	status, ok := undoWords[node.Status]
	if !ok || node.Event != ect.EventRollbackComplete && node.Event != ect.EventCompensate || node.Stranger {
		return
	}
	direct := d.targets(i)
	for _, c := range direct {
		if !d.mayReport(i, c) {
			continue
		}
		if node.Whole {
			all[c].whole.last(report{d.seq[i], status, node.Own})
			continue
		}
		all[c].direct.last(report{d.seq[i], status, node.Own})
	}
	if len(direct) > 0 || node.CheckpointID != "" || node.Event == ect.EventCompensate {
		return
	}
	for _, p := range d.parents[i] {
		if !d.asks(p) {
			continue
		}
		for _, c := range d.targets(p) {
			if d.mayReport(i, c) {
				all[c].byStart.all(report{d.seq[i], status, node.Own})
			}
		}
	}
}

// mayReport reports whether node i may report on checkpoint c: it is the gateway's, or by the
// same issuer. A signature proves who said something, not that it is true.
func (d *derivation) mayReport(i, c int) bool {
	return d.nodes[i].Own || d.nodes[i].Issuer == d.nodes[c].Issuer
}

// last replaces earlier results.
func (s *report) last(next report) {
	if next.at > s.at {
		*s = next
	}
}

// all combines results: nothing is undone while one of them is not.
func (s *report) all(next report) {
	*s = report{max(next.at, s.at), together(s.undo, next.undo), next.own && (s.own || s.at < 0)}
}

func (r *rollbackReports) latest() report {
	s := r.direct
	if s.at < 0 {
		s = r.whole
	}
	if s.at < 0 {
		s = r.byStart
	}
	if r.asked > s.at && s.undo != undone {
		return report{r.asked, undoAsked, false}
	}
	return s
}

// Status is the state of a whole workflow: running, or one of ATD's terminal words.
type Status string

// The states of a workflow.
const (
	// StatusRunning: nothing has begun, something runs or is in doubt, or something failed that can
	// still be undone.
	StatusRunning Status = "running"
	// statusSuccess: everything that is recorded is done.
	statusSuccess Status = "success"
	// statusPartial: some of it is done, and some was undone or has failed.
	statusPartial Status = "partial"
	// statusFailed: something failed and there is no way back, and nothing is done.
	statusFailed Status = "failed"
	// statusRolledBack: everything was undone.
	statusRolledBack Status = "rolled_back"
	// statusEscalated: a human has to decide.
	statusEscalated Status = "escalated"
)

// Summary is the state of a workflow.
type Summary struct {
	// Status follows from the states of the tasks. It is final only while nothing more is
	// recorded.
	Status Status
	// Stated is the terminal status in the workflow's own last token, if any. It is a claim:
	// Status need not agree.
	Stated string
	// Tasks counts the tasks by state. A guarded call is one task, however many tokens record it;
	// a checkpoint without a task stands for one.
	Tasks map[State]int
}

// Summary counts. What failed and could be undone leaves a workflow running until its end is recorded.
func (g *Graph) Summary() Summary {
	s := Summary{Status: StatusRunning, Tasks: make(map[State]int)}
	lost, last := false, -1
	var ending Ending
	for i := range g.nodes {
		node := &g.nodes[i]
		if node.Event == ect.EventWorkflowComplete && !node.Stranger && g.seq[i] > last {
			last, s.Stated = g.seq[i], node.Status
		}
	}
	for _, i := range g.Tasks() {
		state := g.nodes[i].State
		s.Tasks[state]++
		ending.Add(state, g.nodes[i].Detail)
		lost = lost || state == Failed && !g.reversible(i)
	}
	n, status := s.Tasks, ending.Status()
	switch {
	case n[Escalated] > 0:
		s.Status = statusEscalated
	case status == StatusRunning && lost:
		s.Status = statusFailed
	case n[Failed] == 0 || lost || g.Ended() == ByGateway:
		s.Status = status
	}
	return s
}

// span is when a task began and when its outcome was recorded; zero where that is not known.
type span struct{ Begun, Ended time.Time }

// Times are the spans of all nodes that are tasks, by their places: from the first of a task's tokens and its
// checkpoints to the last settlement of its call.
func (g *Graph) Times() []span {
	all := make([]span, len(g.nodes))
	begin := func(i int, at time.Time) {
		if b := &all[i].Begun; b.IsZero() || !at.IsZero() && at.Before(*b) {
			*b = at.UTC()
		}
	}
	end := func(i int, at time.Time) {
		if e := &all[i].Ended; at.After(*e) {
			*e = at.UTC()
		}
	}
	for i := range g.nodes {
		node := &g.nodes[i]
		if begin(i, node.Time); node.IsCheckpoint() {
			for _, t := range g.guards[i] {
				begin(t, node.Time)
			}
		}
		if !node.settlement() {
			continue
		}
		end(i, node.Time)
		for _, id := range node.Settles {
			end(g.index[id], node.Time)
		}
	}
	return all
}

// Ending finds how a workflow has ended, from the states of its parts: its tasks, or the nodes of its
// plan. The zero value has none.
type Ending struct {
	open, missing bool
	n             map[State]int
}

// Add adds a part. One that runs, is in doubt or is being undone is open: it may still become anything. One
// that was not executed is missing.
func (e *Ending) Add(s State, d Detail) {
	if d == DetailReleased {
		e.Miss()
		return
	}
	if e.n == nil {
		e.n = make(map[State]int)
	}
	e.n[s]++
	e.Await(s, d)
}

// Await adds what does not count as a part of its own, and is waited for while it is open.
func (e *Ending) Await(s State, d Detail) {
	e.open = e.open || s == Running || s == Pending || d == DetailInDoubt || d == RollbackRequested
}

// Miss adds a part that was never begun, and never will be.
func (e *Ending) Miss() { e.missing = true }

// Status is running while a part is open, or without any. Else it is how the workflow has ended: never more
// than all its parts together are (P6).
func (e *Ending) Status() Status {
	n := e.n
	switch all := n[Failed] == 0 && n[RolledBack] == 0 && !e.missing; {
	case e.open, len(n) == 0 && !e.missing:
		return StatusRunning
	case n[Escalated] > 0:
		return statusEscalated
	case all:
		return statusSuccess
	case n[Done] > 0:
		return statusPartial
	case n[Failed] == 0 && n[RolledBack] > 0:
		return statusRolledBack
	}
	return statusFailed
}

// EndedBy says who has recorded the end of a workflow.
type EndedBy uint8

// Who has recorded it; zero is nobody.
const (
	ByAgent EndedBy = iota + 1 // and not the gateway
	ByGateway
)

// Ended says who has recorded the end of the workflow. Nothing that comes later takes it back.
func (g *Graph) Ended() (by EndedBy) {
	for i := range g.nodes {
		switch node := &g.nodes[i]; {
		case node.Stranger || node.Event != ect.EventWorkflowComplete:
		case node.Own:
			return ByGateway
		default:
			by = ByAgent
		}
	}
	return by
}

// Tasks are the places of the tasks, in topological order. A guarded call is one task, however many
// tokens record it, and a checkpoint without a task stands for one.
func (g *Graph) Tasks() []int {
	return slices.DeleteFunc(from(0, len(g.nodes)), func(i int) bool { return !g.counts(i) })
}

func (g *Graph) counts(i int) bool {
	node := &g.nodes[i]
	if node.IsCheckpoint() {
		if node.Own && len(g.executions[node.Execution]) > 0 {
			return false // called again
		}
		called := func(c int) bool { return g.nodes[c].IsCheckpoint() && g.nodes[c].Own }
		return len(g.guards[i]) == 0 && !g.nodes[i].Group && (node.Own || !slices.ContainsFunc(g.children[i], called))
	}
	return node.IsTask() && len(node.Settles) == 0 && !g.repeated(i)
}

// repeated reports whether node i is a settlement of a claim that a later one has settled again.
func (g *Graph) repeated(i int) bool {
	if !g.nodes[i].settlement() {
		return false
	}
	if slices.ContainsFunc(g.executions[g.nodes[i].Execution], func(c int) bool { return g.seq[c] > g.seq[i] }) {
		return true
	}
	for _, p := range g.parents[i] {
		if !g.claimOf(i, p) {
			continue
		}
		for _, c := range g.children[p] {
			if g.claimOf(c, p) && g.seq[c] > g.seq[i] {
				return true
			}
		}
	}
	return false
}

// reversible reports whether a checkpoint of task i, or i itself where it is one, can be undone.
func (g *Graph) reversible(i int) bool {
	return g.nodes[i].IsCheckpoint() && g.nodes[i].Reversible || g.undoable[i]
}

// RecoveryPoints are the checkpoints that the workflow can go back to (cascade, "Recovery
// Point"), the most recent first. Each can be undone, has not expired, was not rolled back, and
// its call was made and has ended; and so it is with every checkpoint that follows from it, since
// otherwise going back would leave effects of what never was. Whether the snapshots are still
// good only a rollback's preparation can tell.
func (g *Graph) RecoveryPoints(now time.Time) []string {
	final := make([]bool, len(g.nodes)) // nodes that something final follows from
	for i := len(g.nodes) - 1; i >= 0; i-- {
		final[i] = i >= g.ordered || g.final(i, now) ||
			slices.ContainsFunc(g.down[i], func(c int) bool { return final[c] })
	}
	points := []int{}
	blocked := slices.Clone(final)
	for i := len(g.nodes) - 1; i >= 0; i-- {
		if !g.nodes[i].IsCheckpoint() {
			continue
		}
		for _, t := range g.guards[i] {
			blocked[i] = blocked[i] || slices.ContainsFunc(g.down[t], func(c int) bool { return c != i && final[c] })
		}
		if g.nodes[i].Group {
			blocked[i] = blocked[i] || slices.ContainsFunc(g.parents[i], func(c int) bool { return blocked[c] })
		}
		if !blocked[i] && g.stands(i) {
			points = append(points, i)
		}
	}
	slices.SortFunc(points, func(a, b int) int { return cmp.Compare(g.seq[b], g.seq[a]) })
	return g.ids(points)
}

// stands reports whether checkpoint i has something to undo.
func (g *Graph) stands(i int) bool {
	return g.nodes[i].State != RolledBack && g.nodes[i].Detail != DetailReleased
}

// final reports whether node i is a checkpoint that nobody can go back behind.
func (g *Graph) final(i int, now time.Time) bool {
	node := &g.nodes[i]
	if !node.IsCheckpoint() || !g.stands(i) {
		return false
	}
	expired := !node.Expires.IsZero() && !now.Before(node.Expires)
	return !node.Reversible || expired || node.Own && node.State == Running
}
