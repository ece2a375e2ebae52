package cascades

import (
	"bytes"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Where several gateways share a store, each looks at what all of them record, and one acts on what is found:
// the member that joined first. So a failure that spreads over nodes is one cascade, with one alert and one
// question, and whoever acts next knows what is spreading (ADR 0138).

// peers are what a watch knows of the other nodes. Its fleet is nil where there are none. Only the goroutine of
// the watch uses it.
type peers struct {
	fleet    *fleet.Fleet
	stored   store.Table[answer]
	unfollow func()
	left     <-chan struct{}
	acts     bool                 // this node acts
	found    map[string]time.Time // when this node has found what it leaves to the one that acts
	answers  map[string]answer    // of the others, by node
	said     answer               // what this node has published
	logged   []ledger.Entry       // what was recorded, until the same is heard of all nodes
	hearing  int                  // how many of logged have been waited for, at the front
	since    time.Time            // and since when; zero if nothing is waited for
	asked    int                  // how often
}

// answer counts the good answers that a node has had since its boot: what fails is judged against those of all.
type answer struct {
	Node string `json:"node"`
	Boot string `json:"boot"`
	// Upstreams counts those of each upstream, and Targets those about what calls change.
	Upstreams map[string]uint64 `json:"upstreams,omitempty"`
	Targets   map[string]uint64 `json:"targets,omitempty"` // see Upstreams
}

// answerMemory is how long an answer is stored that nobody renews.
const answerMemory = time.Hour

// join begins to follow the others.
func (w *Watch) join() {
	p := &w.peers
	p.fleet = fleet.Of(w.o.Store)
	if p.acts = p.fleet == nil; p.acts {
		return
	}
	self := p.fleet.Self()
	p.stored = store.Table[answer]{
		Store: p.fleet, Sealer: w.o.Sealer, Prefix: string([]byte{evidence.SpaceCascade, kindAnswers}), Unreadable: errUnreadable,
	}
	p.answers, p.found = map[string]answer{}, map[string]time.Time{}
	p.said = answer{Node: self.Node, Boot: self.Boot, Targets: map[string]uint64{}}
	p.unfollow = p.fleet.Follow([]byte{evidence.SpaceCascade}, func(key []byte) {
		if len(key) > 1 && key[1] != kindCascade && key[1] != kindAnswers {
			return
		}
		key = bytes.Clone(key)
		w.later(func(ctx context.Context) []cascade.Change {
			w.hear(ctx, key)
			return nil
		})
	})
}

// choose finds out whether this node acts, where members have left since the last time.
func (w *Watch) choose(ctx context.Context) {
	p := &w.peers
	if p.fleet == nil {
		return
	}
	if p.left != nil {
		select {
		case <-p.left:
		default:
			return
		}
	}
	left := p.fleet.Left() // before the look, so that no leaving is missed
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	first, err := p.fleet.First(ctx)
	if err != nil {
		return // the next look tries again
	}
	p.left, p.acts = left, first
	if p.acts {
		w.hear(ctx, nil) // what the one before has recorded
	}
}

// overdue records what could not be recorded before, or was another node's to record, which is gone. What that has
// not recorded in time this node does, as it may not have seen it.
func (w *Watch) overdue(ctx context.Context) {
	for id, c := range w.pending {
		if p := &w.peers; !p.acts && (time.Since(p.found[id]) < grace || w.kept.of(&c.Finding).Size > 0) {
			continue
		}
		if err := w.settle(ctx, c); err == nil {
			delete(w.pending, id)
			delete(w.peers.found, id)
		}
	}
}

// grace is how long a finding is left to the node that acts.
const grace = 5 * time.Second

// hear reads what another node has written; nil is anything.
func (w *Watch) hear(ctx context.Context, key []byte) {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	k := w.kept
	failed := func(err error) {
		if ctx.Err() == nil {
			w.o.Log.Warn("what another node has found of cascades cannot be read", slog.Any("error", err))
		}
	}
	rest := func(prefix string) []byte { return bytes.TrimPrefix(key, []byte(prefix)) }
	if key == nil || strings.HasPrefix(string(key), k.Prefix) {
		there := false
		for row, err := range k.All(ctx, rest(k.Prefix)) {
			if there = true; err != nil {
				failed(err)
			} else {
				w.obey(row)
			}
		}
		if key != nil && !there && ctx.Err() == nil { // one of too many
			k.mu.Lock()
			maps.DeleteFunc(k.all, func(id string, _ *record) bool { return bytes.Equal(k.key(id), key) })
			k.mu.Unlock()
		}
	}
	answers := &w.peers.stored
	if key == nil || strings.HasPrefix(string(key), answers.Prefix) {
		for row, err := range answers.All(ctx, rest(answers.Prefix)) {
			if err != nil {
				failed(err)
			} else {
				w.answeredThere(row.Record)
			}
		}
	}
}

// obey notes a record that the node that acts has written, and has this node's breakers do what that has its own
// do.
func (w *Watch) obey(row store.Row[record]) {
	now := row.Record
	d, before := &now.Doc, w.kept.take(row)
	shared := before != nil && before.Doc.State == "open" && before.Doc.OneProbe
	if is := d.State == "open" && d.OneProbe; is != shared {
		w.o.Circuits.ShareProbes(d.Downstream, is)
	}
	if before == nil && d.State == "open" && now.Tokens > 0 && w.settings.Do == TripRoot && d.Root != nil && time.Since(d.Last) < cascade.Quiet {
		w.trip(d.Root.Upstream, d.Root.Agent)
	}
}

// trip opens the breakers before the root of a cascade, and returns their upstreams.
func (w *Watch) trip(root ...string) (opened []string) {
	for _, downstream := range root {
		if downstream != "" && opened == nil {
			opened = w.o.Circuits.Trip(downstream)
		}
	}
	return opened
}

// sorted gives the detector what was recorded in the logs of all nodes, in the order of its time, once all has been
// heard that was recorded before: of a failure that goes over several nodes, that of the caller may be heard first.
// What cannot be heard within the grace period comes late; the detector places it then.
func (w *Watch) sorted(ctx context.Context) (changes []cascade.Change) {
	p := &w.peers
	if late := !p.since.IsZero() && time.Since(p.since) >= grace; late || len(p.logged) >= maxInput {
		p.hearing = len(p.logged)
		return w.heard(ctx)
	}
	rec, ok := w.o.Recorder()
	if len(p.logged) == 0 || !p.since.IsZero() || !ok {
		return nil
	}
	p.hearing, p.since = len(p.logged), time.Now()
	p.asked++
	asked := p.asked
	rec.Evidence.Heard(func() {
		w.later(func(ctx context.Context) []cascade.Change {
			if p.asked != asked || p.since.IsZero() {
				return nil // it was too late
			}
			changes := w.heard(ctx)
			return append(changes, w.sorted(ctx)...)
		})
	})
	return nil
}

// heard gives the detector what was waited for, with what has become known before it.
func (w *Watch) heard(ctx context.Context) (changes []cascade.Change) {
	p := &w.peers
	var until time.Time
	for i := range p.logged[:p.hearing] {
		if at := p.logged[i].Recorded; at.After(until) {
			until = at
		}
	}
	slices.SortStableFunc(p.logged, func(a, b ledger.Entry) int { return a.Recorded.Compare(b.Recorded) })
	n := 0
	for n < len(p.logged) && !p.logged[n].Recorded.After(until) {
		n++
	}
	now := slices.Clone(p.logged[:n])
	p.logged, p.hearing, p.since = slices.Delete(p.logged, 0, n), 0, time.Time{}
	for i := range now {
		changes = append(changes, w.take(ctx, &now[i])...)
	}
	return changes
}

// answeredThere gives the detector what another node was answered well since it said so last.
func (w *Watch) answeredThere(a *answer) {
	p := &w.peers
	if a.Boot == p.said.Boot {
		return
	}
	before, known := p.answers[a.Node]
	p.answers[a.Node] = *a
	if !known || before.Boot != a.Boot {
		return // it may be of long ago
	}
	now := time.Now()
	for upstream, n := range a.Upstreams {
		if more := n - min(before.Upstreams[upstream], n); more > 0 {
			for _, guard := range w.at().Guards[upstream] {
				w.detector.Answered(now, guard, upstream, int(more))
			}
		}
	}
	for target, n := range a.Targets {
		if more := n - min(before.Targets[target], n); more > 0 {
			w.detector.AnsweredAbout(now, target, int(more))
		}
	}
}

// publish says how many good answers this node has had, where that has changed. targets are those since the last
// time.
func (w *Watch) publish(ctx context.Context, targets map[string]int) {
	p := &w.peers
	if p.fleet == nil || len(targets) == 0 && maps.Equal(w.answered, p.said.Upstreams) {
		return
	}
	for name, n := range targets {
		if _, there := p.said.Targets[name]; !there && len(p.said.Targets) >= maxTargets {
			name = ""
		}
		p.said.Targets[name] += uint64(n)
	}
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	now, err := w.o.Store.Now(ctx)
	if err != nil {
		return
	}
	said := p.said
	said.Upstreams = w.answered
	name := w.o.Sealer.Index("cascade", string(kindAnswers), said.Node)
	write := p.stored.Put(p.stored.Key(name[:16]), &said, store.Condition{}, now.Add(answerMemory))
	if _, err = w.o.Store.Commit(ctx, write); err == nil {
		p.said.Upstreams = w.answered // else it is said with what comes next
	}
}

// maxTargets is how many targets a node counts apart for the others: those of more count for all.
const maxTargets = 256

// CircuitAt notes the state of a breaker on another node. It never waits.
func (w *Watch) CircuitAt(node string, s breaker.Snapshot) {
	if s.Reason == breaker.ByOperator || s.Reason == breaker.ByCascade || s.Reason == breaker.PeerFailed {
		return
	}
	w.opened(node, breaker.Key{Upstream: s.Upstream, Class: s.Class}, s.Reference, "", s.State == breaker.Open)
}
