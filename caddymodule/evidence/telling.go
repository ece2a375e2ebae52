package evidence

import (
	"context"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Telling is evidence on its way into a commit.
type Telling struct {
	e       *Evidence
	pending *ledger.Pending
	nodes   []ect.Node
	links   []store.Write
}

// Tell takes tokens that callers have presented into the ledger, parents first, and
// behind them drafts of our own, in their order. keep is the time before which they are not pruned.
func (e *Evidence) Tell(keep time.Time, tokens []*ect.Token, drafts ...*ect.Draft) (*Telling, error) {
	t := &Telling{e: e, nodes: make([]ect.Node, 0, len(tokens)+len(drafts))}
	if len(tokens) > 1 {
		tokens = parentsFirst(tokens)
	}
	events := make([]ledger.Event, 0, len(tokens)+len(drafts))
	for _, token := range tokens {
		events = append(events, eventOf(token, keep))
		t.nodes = append(t.nodes, recorded(token))
	}
	for _, d := range drafts {
		events = append(events, ledger.Event{
			ID: d.ID(), Workflow: d.Workflow(), Action: d.Action(), Issuer: d.Issuer(), Parents: d.Parents(),
			Time: d.IssuedAt(), KeepUntil: keep, Payload: []byte(d.Payload()), Unsigned: true, Draft: d,
		})
		t.nodes = append(t.nodes, e.node(d))
	}
	var err error
	if t.pending, err = e.log.Record(events...); err != nil {
		return nil, err
	}
	return t, nil
}

func eventOf(token *ect.Token, keep time.Time) ledger.Event {
	// A pruned id could be presented again.
	for _, until := range []time.Time{token.Expires().Add(ect.Skew + clockMargin), promised(token)} {
		if until.After(keep) {
			keep = until
		}
	}
	return ledger.Event{ // P3: without an issuer where nobody is proven to have issued it
		ID: token.NodeID(), Workflow: token.Workflow(), Action: token.Action(), Issuer: token.Author(), Parents: token.Parents(),
		Time: token.IssuedAt(), KeepUntil: keep, Payload: []byte(token.Raw()),
	}
}

// longestPromise bounds what somebody else's checkpoint can ask of the ledger.
const longestPromise = 366 * 24 * time.Hour

// promised is until when a checkpoint of an agent's says that it is kept (cascade 4.2.2).
func promised(token *ect.Token) time.Time {
	seconds, ok := token.Ext().Number(ect.MemberTTL)
	if token.Event() != ect.EventCheckpoint || !ok || seconds <= 0 {
		return time.Time{}
	}
	return token.IssuedAt().Add(time.Duration(min(seconds, longestPromise.Seconds()) * float64(time.Second)))
}

// recorded is a presented token as the graph knows it from its commit on.
func recorded(t *ect.Token) ect.Node {
	n := t.Node()
	if n.Level < ect.L2 {
		return n
	}
	if n.Level = ect.L3; n.Weakest > 0 {
		n.Weakest = t.Lineage().Weakest
	}
	return n
}

// node is a draft as the graph knows it, before it is signed.
func (e *Evidence) node(d *ect.Draft) ect.Node {
	n := ect.Node{ID: d.ID(), Workflow: d.Workflow(), IssuedAt: d.IssuedAt(), Parents: d.Parents(), Level: ect.L3, Weakest: ect.L3}
	for _, id := range n.Parents {
		parent, ok := e.recent.find(n.Workflow, id)
		if !ok || parent.Weakest == 0 {
			n.Ancestors, n.Weakest = 0, 0 // somebody has to walk
			return n
		}
		n.Ancestors += parent.Ancestors + 1
		n.Weakest = min(n.Weakest, parent.Weakest)
	}
	return n
}

// Writes are the riders of the commit. A Telling that is nil has none.
func (t *Telling) Writes() []store.Write {
	if t == nil {
		return nil
	}
	return append(t.pending.Writes(), t.links...)
}

// Ride adds a write of another kind to the riders.
func (t *Telling) Ride(w store.Write) { t.links = append(t.links, w) }

// Done tells what came of the commit, and returns err, as ledger.ErrDuplicate where a
// token is recorded already. It must be called once. A Telling that is nil has nothing
// to say.
func (t *Telling) Done(err error) error {
	if t == nil {
		return err
	}
	err = t.pending.Done(err)
	if err == nil {
		for _, n := range t.nodes {
			t.e.recent.add(scope{n.Workflow, n.ID}, n)
		}
	}
	return err
}

// Append records tokens and drafts by a commit of their own.
func (e *Evidence) Append(ctx context.Context, keep time.Time, tokens []*ect.Token, drafts ...*ect.Draft) error {
	t, err := e.Tell(keep, tokens, drafts...)
	if err != nil {
		return err
	}
	_, err = e.store.Commit(ctx, t.Writes()...)
	return t.Done(err)
}
