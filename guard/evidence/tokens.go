package evidence

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Use identifies what a token was presented for: an execution key, or the hash of a
// request that changes nothing.
type Use [sha256.Size]byte

const (
	// spaceUsed begins the store's keys of used tokens: a keyed hash of workflow and id. The
	// value is the hash of the token's bytes and its Use, and one byte more once it has acted.
	spaceUsed = 'j'
	// spaceLink begins the store's keys of executions: a keyed hash of workflow and id. The
	// value is the checkpoint and the caller.
	spaceLink = 'p'
	// hashed is the length of a keyed hash in a key.
	hashed = 16
)

// clockMargin is by how much a used token is remembered longer than it is accepted, so that
// a step of the clock does not make it acceptable again.
const clockMargin = time.Hour

func (e *Evidence) usedKey(t *ect.Token) []byte { return e.usedIn(t.Workflow(), t) }

func (e *Evidence) usedIn(workflow string, t *ect.Token) []byte {
	hash := store.Index(e.sealer, "token used", workflow, t.NodeID())
	return append(append(make([]byte, 0, 1+hashed), spaceUsed), hash[:hashed]...)
}

// UseWrite returns the write that records what a token is used for, on the condition that it
// is unused. In the claim's commit it keeps a token from claiming two keys, over restarts
// and nodes. It is kept until then, or for as long as the token is accepted.
func (e *Evidence) UseWrite(t *ect.Token, u Use, until time.Time) store.Write {
	if end := t.Expires().Add(ect.Skew + clockMargin); end.After(until) {
		until = end
	}
	digest := t.Digest()
	return store.Write{
		Key: e.usedKey(t), Value: append(append(make([]byte, 0, 2*sha256.Size), digest[:]...), u[:]...),
		If: store.Absent(), Expires: until,
	}
}

// UseWrites are the UseWrite and, for a token with a workflow, the condition that none without one has used its id:
// an id is unique in its workflow, and everywhere without one (ADR 0038).
func (e *Evidence) UseWrites(t *ect.Token, u Use, until time.Time) []store.Write {
	writes := []store.Write{e.UseWrite(t, u, until)}
	if t.Workflow() != "" { // else the ledger's own writes see to it
		writes = append(writes, store.Write{Key: e.usedIn("", t), Delete: true, If: store.Absent()})
	}
	return writes
}

// TokenStatus says whether a token was used, and for what.
type TokenStatus uint8

// The statuses of a token.
const (
	// Unused: the token and its id are unknown.
	Unused TokenStatus = iota
	// Same: the same bytes were used for the same Use: a retry.
	Same
	// Acted is Same where what the token asked for was done, see ActedWrite.
	Acted
	// Other: the id was used for another Use, or with other bytes.
	Other
)

// UseStatus looks up in the store whether a token was used.
func (e *Evidence) UseStatus(ctx context.Context, t *ect.Token, use Use) (TokenStatus, error) {
	item, err := e.store.Get(ctx, e.usedKey(t))
	if errors.Is(err, store.ErrNotFound) {
		return e.takenElsewhere(ctx, t) // used tokens are recorded in the ledger
	}
	if err != nil {
		return Unused, err
	}
	return statusOf(&item, t, use)
}

func statusOf(item *store.Entry, t *ect.Token, use Use) (TokenStatus, error) {
	const bound = 2 * sha256.Size
	if n := len(item.Value); n != bound && n != bound+1 {
		return Unused, fmt.Errorf("evidence: the record of a used token has %d bytes", n)
	}
	switch {
	case [sha256.Size]byte(item.Value) != t.Digest(), Use(item.Value[sha256.Size:bound]) != use:
		return Other, nil
	case len(item.Value) > bound:
		return Acted, nil
	default:
		return Same, nil
	}
}

// ActedWrite returns the write that records that what a bound token asked for was done, on the
// condition that it was not: a token acts once. It is kept until then, or for as long as the token
// is accepted. The error is an *ect.Error if the token is not bound to the use.
func (e *Evidence) ActedWrite(ctx context.Context, t *ect.Token, u Use, until time.Time) (store.Write, error) {
	item, err := e.store.Get(ctx, e.usedKey(t))
	if err != nil {
		return store.Write{}, err
	}
	status, err := statusOf(&item, t, u)
	if err != nil {
		return store.Write{}, err
	}
	if status == Other {
		return store.Write{}, &ect.Error{Code: ect.CodeReplayed}
	}
	w := e.UseWrite(t, u, until)
	w.Value, w.If = append(w.Value, 1), store.VersionIs(item.Version)
	if status == Acted {
		w.If = store.Absent() // and lose
	}
	return w, nil
}

// ActStatus is UseStatus for a request that acts, or that reads as the token's issuer. It is Other also
// for a proven token that stands in the ledger and is bound to nothing, such as a parent that came along
// with a call: whoever may read it there could present it.
func (e *Evidence) ActStatus(ctx context.Context, t *ect.Token, use Use) (TokenStatus, error) {
	recorded, err := e.LedgerStatus(ctx, t) // before its use, which is in the same commit
	if err != nil {
		return Unused, err
	}
	status, err := e.UseStatus(ctx, t, use)
	if err == nil && status == Unused && recorded == Same && t.Proven() {
		status = Other
	}
	return status, err
}

// RecordTokens records the tokens of a request that makes no other commit, and the use of
// those in own, in one commit. Tokens that are recorded already are left out. Tokens that are not in own
// can still be used once: see Spend.
//
// An *ect.Error says that a token was used for something else; after any other error nothing
// is known.
func (e *Evidence) RecordTokens(ctx context.Context, all, own []*ect.Token, use Use) error {
	for {
		missing, unbound, err := e.unrecorded(ctx, all, own, use)
		if err != nil || len(missing)+len(unbound) == 0 {
			return err
		}
		err = e.commitTokens(ctx, missing, unbound, use)
		if !errors.As(err, new(*store.Conflict)) {
			return err
		}
		if err := store.AwaitGroup(ctx); err != nil { // then retry
			return err
		}
	}
}

// Spend records the use of recorded tokens in one commit, all or none. It waits for nothing
// after that commit: a cancelled ctx never hides a recorded use.
//
// An *ect.Error says that a token was used for something else. After other errors the use is
// not recorded, unless it is a store.ErrUnknown.
func (e *Evidence) Spend(ctx context.Context, own []*ect.Token, use Use) error {
	return e.RecordTokens(ctx, nil, own, use)
}

// unrecorded returns the tokens that are not in the ledger, and those of own without a
// recorded use.
func (e *Evidence) unrecorded(ctx context.Context, all, own []*ect.Token, use Use) (missing, unbound []*ect.Token, err error) {
	unused := func(tokens []*ect.Token, statusOf func(t *ect.Token) (TokenStatus, error)) (found []*ect.Token, err error) {
		for _, t := range tokens {
			switch status, err := statusOf(t); {
			case err != nil:
				return nil, err
			case status == Other:
				return nil, &ect.Error{Code: ect.CodeReplayed}
			case status == Unused:
				found = append(found, t)
			}
		}
		return found, nil
	}
	if missing, err = unused(all, func(t *ect.Token) (TokenStatus, error) { return e.LedgerStatus(ctx, t) }); err != nil {
		return nil, nil, err
	}
	unbound, err = unused(own, func(t *ect.Token) (TokenStatus, error) { return e.UseStatus(ctx, t, use) })
	return missing, unbound, err
}

// commitTokens is the commit of RecordTokens and of Spend.
func (e *Evidence) commitTokens(ctx context.Context, missing, unbound []*ect.Token, use Use) error {
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	uses := make([]store.Write, 0, 3*len(unbound))
	for _, t := range unbound { // for a token's life also by the clock of the store, which may be another one
		writes := e.UseWrites(t, use, now.Add(t.Expires().Sub(t.IssuedAt())+clockMargin))
		uses = append(uses, writes...)
		if !slices.Contains(missing, t) { // else the ledger says so
			uses = append(uses, e.log.Given(t.Workflow(), t.NodeID(), writes[0].Expires))
		}
	}
	if len(missing) == 0 {
		_, err := e.store.Commit(ctx, uses...)
		return err
	}
	batch, err := e.NewBatch(now, missing)
	if err != nil {
		return err
	}
	batch.Add(uses...)
	return batch.Commit(ctx, e.store)
}

// remembered is how many values each half of recent holds; a node is a few hundred bytes.
const remembered = 8192

// scope is an id with the workflow that it is unique in.
type scope struct{ workflow, id string }

// recent is a cache of the values that were added last. Most parents are minutes old. When the younger half is full it
// replaces the older one.
type recent[T any] struct {
	mu             sync.Mutex
	younger, older map[scope]T
}

func newRecent[T any]() *recent[T] { return &recent[T]{younger: map[scope]T{}} }

func (r *recent[T]) add(name scope, v T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.younger) >= remembered {
		r.younger, r.older = make(map[scope]T, remembered), r.younger
	}
	r.younger[name] = v
}

func (r *recent[T]) find(workflow, id string) (T, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.younger[scope{workflow, id}]
	if !ok {
		v, ok = r.older[scope{workflow, id}]
	}
	return v, ok
}

// Seen remembers the tokens of requests that wrote nothing. Tokens that name them as parents
// are recorded together with them: see Unrecorded.
func (e *Evidence) Seen(tokens []*ect.Token) {
	for _, t := range tokens {
		e.seen.add(scope{t.Workflow(), t.NodeID()}, t)
	}
}

// Unrecorded returns the nearest ancestors of tokens that were passed to Seen and are not
// known to be recorded, at most limit, parents first.
func (e *Evidence) Unrecorded(tokens []*ect.Token, limit int) []*ect.Token {
	if len(tokens) == 0 {
		return nil
	}
	known := make(map[scope]bool, len(tokens))
	for _, t := range tokens {
		known[scope{t.Workflow(), t.NodeID()}] = true
	}
	var near []*ect.Token
	for todo := slices.Clone(tokens); len(todo) > 0; todo = todo[1:] {
		for _, id := range todo[0].Parents() {
			for _, workflow := range scopes(todo[0].Workflow()) {
				name := scope{workflow, id}
				if e.settled(name) || known[name] {
					break
				}
				parent, ok := e.seen.find(name.workflow, name.id)
				if !ok && e.unsigned.Load() {
					name.id = ect.UnprovenID(id)
					if e.settled(name) || known[name] {
						break
					}
					parent, ok = e.seen.find(name.workflow, name.id)
				}
				if !ok {
					continue
				}
				if len(near) < limit {
					known[name] = true
					near, todo = append(near, parent), append(todo, parent)
				}
				break
			}
		}
	}
	return parentsFirst(near)
}

// settled reports whether a token is known to be recorded.
func (e *Evidence) settled(name scope) bool {
	_, recorded := e.recent.find(name.workflow, name.id)
	return recorded
}

// scopes are the workflows in which a parent of a token is searched: its own, then none.
func scopes(workflow string) []string {
	if workflow == "" {
		return []string{""}
	}
	return []string{workflow, ""}
}

// presented returns the token that was passed to Seen under an id, in a workflow or without
// one, after at most limit of its ancestors. Recorded ones are left out.
func (e *Evidence) presented(ctx context.Context, workflow, id string, limit int) ([]*ect.Token, error) {
	t, ok := e.seen.find(workflow, id)
	if !ok {
		t, ok = e.seen.find("", id)
	}
	if !ok {
		return nil, nil
	}
	var all []*ect.Token
	for _, t := range append(e.Unrecorded([]*ect.Token{t}, limit), t) {
		// The cache does not have tokens that were recorded long ago.
		recorded, err := e.log.Has(ctx, t.Workflow(), t.NodeID())
		if err != nil {
			return nil, err
		}
		if !recorded {
			all = append(all, t)
		}
	}
	return all, nil
}

// parentsFirst orders tokens so that parents come first.
func parentsFirst(tokens []*ect.Token) []*ect.Token {
	ordered := make([]*ect.Token, 0, len(tokens))
	var put func(*ect.Token)
	put = func(t *ect.Token) {
		if slices.Contains(ordered, t) {
			return
		}
		for _, other := range tokens {
			if slices.Contains(scopes(t.Workflow()), other.Workflow()) && slices.Contains(t.Parents(), other.ID()) {
				put(other) // verified tokens have no cycles
			}
		}
		ordered = append(ordered, t)
	}
	for _, t := range tokens {
		put(t)
	}
	return ordered
}

// LedgerStatus looks up a token in the ledger: Same if it is recorded, Other if another token
// has its id.
func (e *Evidence) LedgerStatus(ctx context.Context, t *ect.Token) (TokenStatus, error) {
	n, ok, err := e.find(ctx, t.Workflow(), t.NodeID())
	if err != nil {
		return Unused, err
	}
	if !ok {
		return e.takenElsewhere(ctx, t)
	}
	same, err := e.same(ctx, &n, t)
	if err != nil {
		return Unused, err
	}
	if same {
		return Same, nil
	}
	return Other, nil
}

// same reports whether a recorded node is of this token, and then gives it the digest. Few
// nodes are ever compared, and a token that is signed when it is shown costs a signature.
func (e *Evidence) same(ctx context.Context, n *ect.Node, t *ect.Token) (bool, error) {
	if n.Digest != [sha256.Size]byte{} {
		return n.Digest == t.Digest(), nil
	}
	entry, err := e.log.Known(ctx, n.Workflow, n.ID)
	if err != nil || entry == nil || entry.Header != nil && !signs(t, entry) {
		return false, err
	}
	token, err := e.log.Token(ctx, entry)
	if errors.Is(err, ledger.ErrNoToken) {
		if entry.Header == nil {
			return false, nil
		}
		n.Digest = t.Digest() // its key is gone, and t was verified under the public part
		return true, nil
	}
	if err != nil {
		return false, err
	}
	n.Digest = sha256.Sum256(token)
	e.recent.add(scope{n.Workflow, n.ID}, *n)
	return n.Digest == t.Digest(), nil
}

// signs reports whether a token has a verified signature of the header and the payload of an
// entry.
func signs(t *ect.Token, entry *ledger.Entry) bool {
	if !t.Proven() || t.Level() < ect.L2 {
		return false
	}
	enc := base64.RawURLEncoding
	signed := append(enc.AppendEncode(nil, entry.Header), '.')
	signed = append(enc.AppendEncode(signed, entry.Payload), '.')
	return strings.HasPrefix(t.Raw(), string(signed))
}

// takenElsewhere is Other if the id is recorded or used elsewhere and either token has no workflow:
// the id of a token without a workflow is unique everywhere.
func (e *Evidence) takenElsewhere(ctx context.Context, t *ect.Token) (TokenStatus, error) {
	taken := false
	var err error
	if t.Workflow() != "" {
		_, err = e.store.Get(ctx, e.usedIn("", t))
		if taken = err == nil; errors.Is(err, store.ErrNotFound) {
			_, taken, err = e.find(ctx, "", t.NodeID())
		}
	} else if taken, err = e.log.IsGiven(ctx, t.NodeID()); err == nil && !taken {
		var entries []ledger.Entry
		entries, err = e.log.Find(ctx, t.NodeID())
		taken = slices.ContainsFunc(entries, func(e ledger.Entry) bool { return e.Workflow != "" })
	}
	if err != nil || !taken {
		return Unused, err
	}
	return Other, nil
}

// graph is the graph of recorded tokens as a token of one workflow sees it.
type graph struct {
	e        *Evidence
	workflow string
	// own is the token that is verified, if any. Its id is not searched in other workflows,
	// since an id is unique within its workflow only.
	own *ect.Token
}

// AcceptUnsigned includes unproven tokens (level L1) in lookups from now on.
func (e *Evidence) AcceptUnsigned() { e.unsigned.Store(true) }

// Graph is the graph of recorded tokens as those of a workflow see it; "" is no workflow.
func (e *Evidence) Graph(workflow string) ect.DAG { return graph{e: e, workflow: workflow} }

// GraphOf finds recorded tokens for one that is being verified. A false workflow finds the
// parents of another one, which are refused.
func (e *Evidence) GraphOf(t *ect.Token) ect.DAG { return graph{e, t.Workflow(), t} }

// GraphOfRollbackRequest is GraphOf for a token that asks for a rollback: altered parents
// count as present. The rollback itself reports that they were altered.
func (e *Evidence) GraphOfRollbackRequest(t *ect.Token) ect.DAG {
	return rollbackGraph{graph{e, t.Workflow(), t}, t.Parents()}
}

// rollbackGraph is the graph of a token that asks for a rollback.
type rollbackGraph struct {
	graph
	parents []string
}

func (g rollbackGraph) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	nodes, err := g.graph.Nodes(ctx, id)
	if errors.Is(err, ledger.ErrTampered) && slices.Contains(g.parents, id) {
		return []ect.Node{{ID: id, Workflow: g.workflow, Level: ect.L3}}, nil
	}
	return nodes, err
}

// Nodes implements ect.DAG. Unproven tokens count where no other has the id. Of the gateway's
// own tokens only that which is verified is sure to have its digest.
func (g graph) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	nodes, err := g.nodes(ctx, id)
	if g.own != nil && id == g.own.ID() {
		for i := 0; i < len(nodes) && err == nil; i++ {
			_, err = g.e.same(ctx, &nodes[i], g.own)
		}
	}
	if err == nil && len(nodes) == 0 && g.e.unsigned.Load() {
		return g.nodes(ctx, ect.UnprovenID(id))
	}
	return nodes, err
}

func (g graph) nodes(ctx context.Context, id string) ([]ect.Node, error) {
	if n, ok := g.e.recent.find(g.workflow, id); ok {
		return []ect.Node{n}, nil
	}
	if t, ok := g.e.seen.find(g.workflow, id); ok {
		return []ect.Node{t.Node()}, nil
	}
	n, ok, err := g.e.find(ctx, g.workflow, id)
	if err == nil && !ok && g.workflow != "" {
		n, ok, err = g.e.find(ctx, "", id)
	}
	if t, seen := g.e.seen.find("", id); seen && !ok && err == nil {
		return []ect.Node{t.Node()}, nil
	}
	switch {
	case err != nil:
		return nil, err
	case ok:
		return []ect.Node{n}, nil
	case g.workflow != "" && g.own != nil && id == g.own.ID():
		return nil, nil
	}
	entries, err := g.e.log.Find(ctx, id)
	if err != nil {
		return nil, err
	}
	nodes := make([]ect.Node, 0, len(entries))
	for i := range entries {
		nodes = append(nodes, nodeOf(&entries[i]))
	}
	return nodes, nil
}

// find finds the recorded token with an id in a workflow.
func (e *Evidence) find(ctx context.Context, workflow, id string) (ect.Node, bool, error) {
	if n, ok := e.recent.find(workflow, id); ok {
		return n, true, nil
	}
	entry, err := e.log.Known(ctx, workflow, id)
	if err != nil || entry == nil {
		return ect.Node{}, false, err
	}
	n := nodeOf(entry)
	e.recent.add(scope{n.Workflow, n.ID}, n)
	return n, true, nil
}

// nodeOf is the graph's node of an entry. Recorded tokens were verified before; signed ones
// are of level L3, since they are in the ledger. It has the digest only of a token that stands
// in the entry: see same.
func nodeOf(entry *ledger.Entry) ect.Node {
	n := ect.Node{
		ID: entry.ID, Workflow: entry.Workflow, IssuedAt: entry.Time, Parents: entry.Parents, Level: ect.L3,
	}
	if entry.Header == nil && !strings.Contains(string(entry.Payload), ".") {
		n.Level = ect.L1
	}
	if entry.Header == nil {
		n.Digest = sha256.Sum256(entry.Payload)
	}
	return n
}

// linkKey is the store's key of the checkpoint of an execution, for calls of the workflow that
// name the execution as their parent.
func (e *Evidence) linkKey(workflow, execution string) []byte {
	hash := store.Index(e.sealer, "execution parent", workflow, execution)
	return append(append(make([]byte, 0, 1+hashed), spaceLink), hash[:hashed]...)
}

// Link returns the write by which calls that name this execution as their parent find its
// checkpoint; nil if an execution that led to this call has the id already.
//
// The caller chooses the id. If two callers use the same one in a workflow, neither is found
// by it from then on: else one of them could see what the other caused (P3).
func (e *Evidence) Link(ctx context.Context, c *Call, execution, checkpoint string, expires time.Time) (*store.Write, error) {
	id := uuid.MustParse(checkpoint) // made by the gateway
	key := e.linkKey(c.Workflow, execution)
	item, err := e.store.Get(ctx, key)
	switch {
	case errors.Is(err, store.ErrNotFound):
	case err != nil:
		return nil, err
	default:
		before, caller, err := readLink(item.Value)
		if err != nil {
			return nil, err
		}
		if slices.Contains(c.Parents, before.String()) {
			return nil, nil
		}
		if caller != c.Caller || before == uuid.Nil {
			id = uuid.Nil
			if item.Expires.After(expires) {
				expires = item.Expires
			}
		}
	}
	return &store.Write{Key: key, Value: append(id[:], c.Caller[:]...), Expires: expires}, nil
}

func readLink(value []byte) (checkpoint uuid.UUID, caller execution.CallerHash, err error) {
	if len(value) != len(checkpoint)+len(caller) {
		return checkpoint, caller, fmt.Errorf("evidence: the checkpoint of an execution has %d bytes", len(value))
	}
	return uuid.UUID(value[:len(checkpoint)]), execution.CallerHash(value[len(checkpoint):]), nil
}

// Parent finds the checkpoint of the execution that a call without a token names as its
// parent; empty if there is none, or if several callers used the id.
func (e *Evidence) Parent(ctx context.Context, workflow, execution string) (string, error) {
	item, err := e.store.Get(ctx, e.linkKey(workflow, execution))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	id, _, err := readLink(item.Value)
	if err != nil || id == uuid.Nil {
		return "", err
	}
	return id.String(), nil
}

// WorkflowOf is the workflow of a recorded token; empty if it was pruned.
func (e *Evidence) WorkflowOf(ctx context.Context, id string) (string, error) {
	entries, err := e.log.Find(ctx, id)
	if err != nil || len(entries) == 0 {
		return "", err
	}
	return entries[0].Workflow, nil
}

// Known returns those of the ids that are recorded in a workflow or without one, in their
// order and without duplicates.
func (e *Evidence) Known(ctx context.Context, workflow string, ids []string) ([]string, error) {
	var known []string
	for _, id := range ids {
		if id == "" || slices.Contains(known, id) {
			continue
		}
		_, ok, err := e.find(ctx, workflow, id)
		if err == nil && !ok && workflow != "" {
			_, ok, err = e.find(ctx, "", id)
		}
		if err != nil {
			return nil, err
		}
		if ok {
			known = append(known, id)
		}
	}
	return known, nil
}
