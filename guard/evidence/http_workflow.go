package evidence

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// maxRecoveryPoints is the largest number of recovery points in a document.
const maxRecoveryPoints = 16

// Workflow describes a workflow by its tokens. Its members are an API.
type Workflow struct {
	// ID is the workflow's id in tokens.
	ID string `json:"wid"`
	// Status and the nodes' states are left out if not all of the workflow was read: the
	// rest could change them (P6).
	Status workflow.Status `json:"status,omitempty"`
	// Stated is the terminal status in the last workflow_complete.
	Stated string `json:"stated_status,omitempty"`
	// Truncated says that not all of it was read.
	Truncated bool `json:"truncated,omitempty"`
	// LeftOut is how many more tokens were read than stand in Nodes. Roots, Leaves, Unordered and Edges
	// are those among Nodes.
	LeftOut int `json:"left_out,omitempty"`

	// Holds are the escalations that participants of the workflow are told of.
	Holds []holdDocument `json:"holds,omitempty"`

	// Tasks counts the tasks by state.
	Tasks map[workflow.State]int `json:"tasks,omitempty"`
	// RecoveryPoints are the checkpoints that can be rolled back, the most recent first.
	RecoveryPoints []string `json:"recovery_points,omitempty"`

	// Roots and Leaves are the ids of tokens that follow from none, and that none follows from. Unordered are
	// those on a cycle, or behind one.
	Roots     []string `json:"roots"`
	Leaves    []string `json:"leaves"`              // see Roots
	Unordered []string `json:"unordered,omitempty"` // see Roots
	// Nodes are the tokens in topological order, and Edges what leads from one to another.
	Nodes []nodeDocument `json:"nodes"`
	Edges []edgeDocument `json:"edges"` // see Nodes

	// Plan is where what the reader takes part in is in the plan that binds its calls, or that its start names, if
	// the gateway has that (P3).
	Plan *plan.Progress `json:"plan,omitempty"`
}

// holdDocument says what keeps new calls of the workflow from beginning at its participants.
type holdDocument struct {
	Escalation   string             `json:"escalation_id"`
	Level        string             `json:"level"`
	State        string             `json:"state"`
	Rollback     string             `json:"rollback_id,omitempty"`
	Participants []hitl.Participant `json:"participants"`
}

type nodeDocument struct {
	ID       string    `json:"jti"`
	Action   string    `json:"exec_act"`
	Event    ect.Event `json:"event,omitempty"`
	Issuer   string    `json:"iss,omitempty"`
	Time     time.Time `json:"time,omitzero"`
	Recorded time.Time `json:"recorded"`
	Log      string    `json:"log"`
	Index    int64     `json:"index"`

	State  workflow.State  `json:"state,omitempty"`
	Detail workflow.Detail `json:"detail,omitempty"`

	// Outcome and Answer, the status of the upstream's answer, are set for guarded calls.
	Outcome workflow.Outcome `json:"outcome,omitempty"`
	Answer  int64            `json:"answer_status,omitempty"`
	// Severity is that of an error, Worst the highest of a node's errors.
	Severity     string    `json:"severity,omitempty"`
	Worst        string    `json:"worst_severity,omitempty"`
	CheckpointID string    `json:"checkpoint_id,omitempty"`
	Status       string    `json:"status,omitempty"`
	Reversible   *bool     `json:"reversible,omitempty"`
	Expires      time.Time `json:"expires,omitzero"`
	Guards       []string  `json:"guards,omitempty"`
	Missing      []string  `json:"missing_parents,omitempty"`
	// Cascade is the path of the cascade that an alert is about.
	Cascade string `json:"cascade,omitempty"`
	Entry   string `json:"entry"`
}

type edgeDocument struct {
	From string            `json:"from"`
	To   string            `json:"to"`
	Kind workflow.EdgeKind `json:"kind"`
}

// source is the place of a node in the ledger, with the data that the graph does not need.
type source struct {
	log    string
	index  int64
	at     time.Time
	status int64  // of the upstream's answer; 0 is none
	plan   string // that a workflow_start names
	alert  string // the cascade that it is about
	opened string // the upstream whose breaker has opened, or rejected a call
}

func (s *Ledger) sourceOf(e *ledger.Entry) source {
	from, ext := source{log: e.Log, index: e.Index, at: e.Recorded}, extension(e)
	from.plan, _ = ext.Text(ect.MemberWorkflowName)
	if s.own(e) {
		from.status, _ = ext.Int(memberStatus)
		from.alert, _ = ext.Text(memberAlert)
		from.opened, _ = ext.Text(ect.MemberDownstreamAgent)
	}
	return from
}

// workflow answers with the graph of a workflow (A-node-states-a).
func (q *ledgerRequest) workflow() error {
	name, err := router.Segment(q.Name, "workflow id")
	if err != nil {
		return err
	}
	form := q.Form(mediaEvents, plan.MediaType)
	if form == plan.MediaType && q.Assigned != nil {
		return q.plan(name)
	}
	// A client that saw the end of a call can rely on finding its record.
	if err := q.caughtUp(q.R.Context()); err != nil {
		return err
	}
	for _, wid := range workflowIDs(name) {
		doc, found, err := q.read(wid)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		if doc.Holds, err = q.holds(wid); err != nil {
			return err
		}
		if form == mediaEvents && q.Followers != nil && q.R.Method != http.MethodHead {
			return q.follow(&doc)
		}
		return q.Show(http.StatusOK, form, doc, doc.Drawing)
	}
	return unknownWorkflow()
}

// ShowOperator answers an operator with a workflow, whole, in the form that the request accepts. The error is a
// *problem.Problem that was not sent yet, or that of the request's context.
func (s *Ledger) ShowOperator(w http.ResponseWriter, r *http.Request, name string) error {
	q := &ledgerRequest{
		Ledger: s, Responder: router.Responder{W: w, R: r, Name: url.PathEscape(name)}, who: router.Reader{Operator: true},
	}
	err := q.problem(q.workflow())
	if p := (*problem.Problem)(nil); errors.As(err, &p) && p.Kind().Slug == WorkflowUnknown.Slug {
		return problem.New(WorkflowUnknown, "Nothing is recorded of a workflow with this id, or this name.")
	}
	return err
}

func (q *ledgerRequest) holds(wid string) (all []holdDocument, err error) {
	if q.Reaching == nil {
		return nil, nil
	}
	found, err := q.Reaching(q.R.Context(), wid)
	for i := range found {
		e := &found[i]
		all = append(all, holdDocument{e.ID, e.LevelName, string(e.Hold()), e.Links.Rollback, e.Participants})
	}
	return all, err
}

func unknownWorkflow() *problem.Problem {
	return problem.New(WorkflowUnknown, "Nothing of it is known for the identity that asks.")
}

// view is what a reader may see of a workflow.
type view struct {
	records []workflow.Record
	sources map[string]source // by the ids of the records, of which the first counts
	part    participation
	more    bool // there is more than was read
}

// records reads at most so many entries of a workflow, in the order of each log.
func (s *Ledger) records(ctx context.Context, wid string, most int) (view, error) {
	v := view{sources: make(map[string]source)}
	for e, err := range s.Log.All(ctx, wid) {
		if err != nil {
			return v, err
		}
		if v.more = len(v.records) == most; v.more {
			break
		}
		v.records = append(v.records, s.recordOf(e))
		if _, twice := v.sources[e.ID]; !twice {
			v.sources[e.ID] = s.sourceOf(e)
		}
	}
	return v, nil
}

// sort puts the records of several nodes of a fleet into one order.
func (v *view) sort() {
	slices.SortStableFunc(v.records, func(a, b workflow.Record) int { return v.sources[a.ID].at.Compare(v.sources[b.ID].at) })
}

// view is what the reader may see of the records of a workflow, in the order of recording.
func (s *Ledger) view(ctx context.Context, wid string, who router.Reader, most int) (view, error) {
	v, err := s.records(ctx, wid, most)
	v.part = partOf(v.records, who)
	if err != nil || v.part.Empty() {
		return v, err
	}
	if err := markStrangers(v.records, func(id string) ([]string, error) {
		e, err := s.Log.Lookup(ctx, wid, id)
		if errors.Is(err, ledger.ErrPruned) {
			return nil, nil // pruned meanwhile
		}
		return audienceOf(&e), err
	}); err != nil {
		return v, err
	}
	v.records = slices.DeleteFunc(v.records, func(r workflow.Record) bool { return !v.part.Has(r.ID) })
	v.sort()
	return v, nil
}

// views reads at most so many entries of a workflow: what the reader may see, and of that what its plan is about. For
// an operator that is what its initiator takes part in, since strangers who use its name are no part of its plan.
func (q *ledgerRequest) views(wid string, most int) (v, planned *view, err error) {
	ctx := q.R.Context()
	all, err := q.view(ctx, wid, q.who, most)
	if err != nil || !q.who.Operator || len(q.Plans) == 0 && (q.Assigned == nil || !q.Assigned.Has(wid)) {
		return &all, &all, err
	}
	end, err := q.beginning(ctx, wid)
	if err != nil {
		return &all, nil, err
	}
	part, err := q.view(ctx, wid, end.Initiator, most)
	return &all, &part, err
}

// read reads what the reader may see of a workflow.
func (q *ledgerRequest) read(wid string) (doc Workflow, found bool, err error) {
	ctx := q.R.Context()
	v, planned, err := q.views(wid, q.MaxNodes)
	if err != nil {
		return doc, false, err
	}
	if v.part.Empty() {
		return q.readPlanned(wid, v)
	}
	follows, err := q.planOf(ctx, wid, planned)
	if err != nil {
		return doc, false, err
	}
	if follows != nil && v.more { // the states of its nodes follow from all records
		done, err := q.Assigned.ReadLarge(ctx)
		if err != nil {
			return doc, false, err
		}
		defer done()
		if v, planned, err = q.views(wid, q.MaxPlanned); err != nil {
			return doc, false, err
		}
	}
	return describe(wid, v, planned, follows, v.more, q.MaxNodes, time.Now()), true, nil
}

// readPlanned describes a workflow of which the reader sees nothing but its plan. Calls that he does not see may have
// changed the states of its nodes.
func (q *ledgerRequest) readPlanned(wid string, v *view) (doc Workflow, found bool, err error) {
	if q.Assigned == nil || !q.Assigned.Has(wid) {
		return doc, false, nil
	}
	a, err := q.seePlan(wid)
	if err != nil || a == nil || a.Plan == nil {
		return doc, false, err
	}
	known := !v.more && (len(v.records) == 0 || a.Issuer != "" && a.Begun.IsZero())
	none := new(view)
	return describe(wid, none, none, a.Plan, !known, q.MaxNodes, time.Now()), true, nil
}

// WorkflowTokens is a page of the tokens of a workflow. Its members are an API.
type WorkflowTokens struct {
	// Tokens are those of checkpoints and of actions, in the order of the ledger.
	Tokens []string `json:"tokens"`
	// Next is the value of `after` for the next page; empty at the end.
	Next string `json:"next,omitempty"`
}

const (
	// tokensPage is how many entries a page of tokens reads, and tokensBytes how many bytes of tokens
	// it has before it ends.
	tokensPage  = 512
	tokensBytes = 1 << 20
	// tokensAtOnce is how many entries are read at once: their tokens come on top of tokensBytes.
	tokensAtOnce = 16
)

// workflowTokens answers coordinators of rollbacks with the tokens of which a plan is made: those of
// the actions of a workflow, and of its checkpoints (C-4.3.1-e).
func (q *ledgerRequest) workflowTokens() error {
	name, err := router.Segment(q.Name, "workflow id")
	if err != nil {
		return err
	}
	p, err := router.ParseParams(q.R.URL, "after")
	if err != nil {
		return err
	}
	if q.who.Issuer == "" || !slices.Contains(q.Coordinators, q.who.Issuer) {
		return router.UnknownPart() // P3
	}
	if err := q.caughtUp(q.R.Context()); err != nil {
		return err
	}
	doc := WorkflowTokens{Tokens: []string{}, Next: p.Get("after")}
	size := 0
	for read := 0; read < tokensPage && size < tokensBytes; read += tokensAtOnce {
		page, err := q.Log.List(q.R.Context(), WorkflowID(name), ledger.Cursor(doc.Next), tokensAtOnce)
		if errors.Is(err, ledger.ErrInvalid) {
			return router.Invalid("after is not where a page begins; give what an earlier page named as the next.")
		}
		if err != nil {
			return err
		}
		for i := range page.Entries {
			e := &page.Entries[i]
			event, is := ect.ParseEvent(e.Action)
			if is && event != ect.EventCheckpoint || IsUnproven(e) {
				continue
			}
			token, err := q.token(q.R.Context(), e)
			if err != nil {
				return err
			}
			if token != "" {
				doc.Tokens = append(doc.Tokens, token)
				size += len(token)
			}
		}
		if doc.Next = string(page.Next); doc.Next == "" {
			break
		}
	}
	return q.JSON(http.StatusOK, doc)
}

// planOf returns the plan that binds calls in a part of a workflow, or else that the first start in it names; nil
// without.
func (s *Ledger) planOf(ctx context.Context, wid string, v *view) (*plan.Descriptor, error) {
	if s.Assigned != nil {
		if a, err := s.Assigned.Of(ctx, wid, has(&v.part)); err != nil {
			return nil, err
		} else if a != nil {
			return a.Plan, nil
		}
	}
	for i := range v.records {
		if v.records[i].Event == ect.EventWorkflowStart {
			return s.Plans[v.sources[v.records[i].ID].plan], nil
		}
	}
	return nil, nil
}

// begun reports whether a guarded call is recorded in what somebody takes part in.
func (s *Ledger) begun(ctx context.Context, wid string, who router.Reader) (bool, error) {
	if err := s.caughtUp(ctx); err != nil {
		return false, err
	}
	v, err := s.records(ctx, wid, s.MaxNodes)
	part := partOf(v.records, who)
	return slices.ContainsFunc(v.records, func(r workflow.Record) bool { return r.IsCheckpoint() && r.Own && part.Has(r.ID) }), err
}

// describe makes the document of a workflow, with at most so many of its tokens. Of planned its plan is about.
func describe(id string, v, planned *view, follows *plan.Descriptor, truncated bool, most int, now time.Time) Workflow {
	g := workflow.New(v.records)
	doc := Workflow{ID: id, Truncated: truncated, Nodes: []nodeDocument{}, Edges: []edgeDocument{}}
	if !truncated {
		s := g.Summary()
		doc.Status, doc.Stated, doc.Tasks = s.Status, s.Stated, s.Tasks
		points := g.RecoveryPoints(now)
		doc.RecoveryPoints = points[:min(len(points), maxRecoveryPoints)]
	}
	switch {
	case follows == nil:
	case truncated:
		doc.Plan = follows.Outline()
	default:
		g := g
		if planned != v {
			g = workflow.New(planned.records)
		}
		doc.Plan = follows.Progress(g)
		if g.Ended() == workflow.ByGateway { // perhaps its initiator has given it up
			doc.Plan.Status = doc.Plan.Abandoned
		}
		if doc.Tasks[workflow.Escalated] == 0 { // else a person decides, whatever goes on
			doc.Status = doc.Plan.Status
		}
	}
	doc.LeftOut = max(0, g.Len()-most)
	listed := func(id string) bool {
		i, there := g.Index(id)
		return there && i < most
	}
	for i := range min(g.Len(), most) {
		n := g.At(i)
		doc.Nodes = append(doc.Nodes, describeNode(id, n, v.sources[n.ID], truncated))
	}
	for _, e := range g.Edges() {
		if listed(e.From) && listed(e.To) {
			doc.Edges = append(doc.Edges, edgeDocument(e))
		}
	}
	cut := func(ids []string) []string {
		return slices.DeleteFunc(ids, func(id string) bool { return !listed(id) })
	}
	doc.Roots, doc.Leaves, doc.Unordered = cut(g.Roots()), cut(g.Leaves()), cut(g.Unordered())
	return doc
}

func describeNode(id string, n *workflow.Node, from source, truncated bool) nodeDocument {
	doc := nodeDocument{
		ID: n.ID, Action: n.Action, Event: n.Event, Issuer: n.Issuer, Time: n.Time.UTC(),
		Recorded: from.at.UTC(), Log: from.log, Index: from.index, Outcome: n.Outcome, Answer: from.status,
		Severity: n.Severity, Worst: n.Worst, CheckpointID: n.CheckpointID, Status: n.Status,
		Guards: n.Guards, Missing: n.Missing, Entry: entryURL(id, n.ID),
	}
	if !truncated {
		doc.State, doc.Detail = n.State, n.Detail
	}
	if from.alert != "" {
		doc.Cascade = CascadesPath + "/" + url.PathEscape(from.alert)
	}
	if n.Event == ect.EventCheckpoint {
		doc.Reversible, doc.Expires = &n.Reversible, n.Expires.UTC()
	}
	return doc
}

// checkpointDocument is a checkpoint with its verification status (cascade 4.2.2). Its
// members are an API.
type checkpointDocument struct {
	ID       string          `json:"jti"`
	Workflow string          `json:"wid,omitempty"`
	Issuer   string          `json:"iss,omitempty"`
	Token    string          `json:"token,omitempty"`
	Claims   json.RawMessage `json:"claims,omitempty"`

	Verification checkpointVerification `json:"verification"`
	// Reversible says whether the call can be undone, as far as is known now; Way how, and
	// Reason why not, as a fixed word.
	Reversible bool   `json:"reversible"`
	Way        string `json:"way,omitempty"`
	Reason     string `json:"reason,omitempty"`

	Undo      checkpointUndo       `json:"undo"`
	Execution *checkpointExecution `json:"execution,omitempty"`
}

type checkpointVerification struct {
	// Signature is valid, invalid, unsigned, or unknown if the key is no longer available.
	Signature string `json:"signature"`
	// Snapshot is matches, mismatch, none if the token has no out_hash, released if the
	// call never ran, or missing. It is checked when the document is requested.
	Snapshot string    `json:"snapshot"`
	Hash     string    `json:"out_hash,omitempty"`
	Expired  bool      `json:"expired"`
	Expires  time.Time `json:"expires,omitzero"`
}

type checkpointUndo struct {
	State    string    `json:"state"`
	Rollback string    `json:"rollback_id,omitempty"`
	At       time.Time `json:"at,omitzero"`
}

type checkpointExecution struct {
	State  string `json:"state"`
	Status int    `json:"status,omitempty"`
}

const (
	// freshTime is how long a request waits for an unknown checkpoint, which is in the tree
	// a moment after its call. Unknown checkpoints and those of others take equally long
	// (P3).
	freshTime = 2 * time.Second
	// firstLook is when it is looked up again, with doubling intervals up to lookEvery:
	// finding its owner means reading its workflow.
	firstLook = 20 * time.Millisecond
	lookEvery = 640 * time.Millisecond
)

// checkpoint answers with a checkpoint and what can be verified about it now.
func (q *ledgerRequest) checkpoint() error {
	id, err := router.Segment(q.Name, "id")
	if err != nil {
		return err
	}
	p, err := router.ParseParams(q.R.URL, "wait")
	if err != nil {
		return err
	}
	wait := freshTime
	if p.Has("wait") {
		if wait, err = p.Wait(); err != nil {
			return err
		}
	}
	e, err := q.findCheckpoint(id, wait)
	if err != nil {
		return err
	}
	ext := extension(e)
	expires := e.Time.Add(ttlOf(ext))
	if !time.Now().Before(expires) {
		return problem.New(rollback.CheckpointExpired, "It could be undone until "+expires.UTC().Format(time.RFC3339)+".")
	}
	doc := checkpointDocument{ID: e.ID, Workflow: e.Workflow, Issuer: e.Issuer}
	doc.Verification.Expires = expires.UTC()
	doc.Reversible, _ = ext.Bool(ect.MemberReversible)
	if doc.Token, err = q.token(q.R.Context(), e); err != nil {
		return err
	}
	doc.Claims = claimsOf(e)
	doc.Verification.Signature = q.signature(e, doc.Token)
	if err := q.kept(e, &doc); err != nil {
		return err
	}
	return q.JSON(http.StatusOK, doc)
}

// findCheckpoint finds the checkpoint with an id that the reader may see.
func (q *ledgerRequest) findCheckpoint(id string, wait time.Duration) (*ledger.Entry, error) {
	ctx, cancel := router.Until(q.R.Context(), q.Waits, wait)
	defer cancel()
	for pause := firstLook; ; pause = min(2*pause, lookEvery) {
		all, err := q.Log.Find(q.R.Context(), id)
		if err != nil {
			return nil, err
		}
		for i := range all {
			e := &all[i]
			if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint || IsUnproven(e) {
				continue
			}
			may, err := q.mayRead(q.R.Context(), e, q.who)
			if may || err != nil {
				return e, err
			}
		}
		again := time.NewTimer(pause)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			if err := q.R.Context().Err(); err != nil {
				return nil, err
			}
			return nil, router.UnknownPart()
		}
	}
}

// claimsOf returns the decoded claims of an entry's token.
func claimsOf(e *ledger.Entry) json.RawMessage {
	payload := string(e.Payload)
	if parts := strings.Split(payload, "."); len(parts) == 3 && e.Header == nil {
		payload = parts[1]
	}
	if plain, err := base64.RawURLEncoding.DecodeString(payload); err == nil {
		payload = string(plain)
	}
	if !json.Valid([]byte(payload)) {
		return nil
	}
	return json.RawMessage(payload)
}

// signature checks the signature of an entry's token.
func (q *ledgerRequest) signature(e *ledger.Entry, token string) string {
	switch level := levelOf(token); {
	case level == "" || level == "L1":
		return "unsigned"
	case q.Verified == nil || !q.own(e):
		return "unknown" // the signature was valid when the token was presented
	}
	err := q.Verified(q.R.Context(), token)
	refusal := (*ect.Error)(nil)
	switch {
	case err == nil:
		return "valid"
	case errors.As(err, &refusal) && refusal.Code == ect.CodeSignature:
		return "invalid"
	}
	return "unknown"
}

// kept adds to a document what is stored for undoing the call of a checkpoint, and the
// call's state.
func (q *ledgerRequest) kept(e *ledger.Entry, doc *checkpointDocument) error {
	v := &doc.Verification
	v.Snapshot, doc.Undo.State = "none", checkpoint.Active.String()
	sum, ok := outputOf(e)
	if !ok || q.Undos == nil || !q.own(e) {
		return nil
	}
	v.Hash = ect.HashOf(sum).String()
	mark, err := q.Undos.Mark(q.R.Context(), e.ID)
	switch {
	case err == nil:
		doc.Undo = checkpointUndo{mark.State.String(), mark.Rollback, mark.At.UTC()}
		if mark.State == checkpoint.Active {
			doc.Undo.At = time.Time{}
		}
	case errors.Is(err, checkpoint.ErrTampered):
		doc.Undo.State = "unreadable"
	default:
		return err
	}
	c, err := q.Undos.Open(q.R.Context(), e.ID, checkpoint.Want{Sum: sum, Expires: v.Expires})
	switch {
	case err == nil:
		v.Snapshot = "matches"
	case errors.Is(err, checkpoint.ErrReleased):
		v.Snapshot, doc.Reversible, doc.Reason = "released", false, "released"
		return nil
	case errors.Is(err, checkpoint.ErrTampered):
		v.Snapshot, doc.Reversible, doc.Reason = "mismatch", false, "tampered"
		return nil
	case errors.Is(err, checkpoint.ErrExpired):
		return problem.New(rollback.CheckpointExpired, "What was kept for undoing it was purged.")
	case errors.Is(err, checkpoint.ErrUnknown):
		v.Snapshot, doc.Reversible, doc.Reason = "missing", false, "missing"
		return nil
	default:
		return err
	}
	doc.Way, doc.Reason = c.Snapshot.Way.String(), string(c.Snapshot.Reason)
	doc.Reversible = c.Snapshot.Reversible()
	if c.Result != nil && c.Result.Reason != "" {
		doc.Reversible, doc.Reason = false, string(c.Result.Reason)
	}
	if q.Execution == nil {
		return nil
	}
	state, status, err := q.Execution(q.R.Context(), c.Snapshot.Execution)
	if err == nil && state != "" {
		doc.Execution = &checkpointExecution{state, status}
	}
	if err == nil && state == execution.StateInDoubt.String() && rollback.LacksValues(c) {
		doc.Reversible, doc.Reason = false, string(checkpoint.ReasonAbsent) // its answer was lost
	}
	return err
}

// outputOf returns the out_hash of an entry's token.
func outputOf(e *ledger.Entry) (sum [sha256.Size]byte, there bool) {
	var claims struct {
		Hash string `json:"out_hash"`
	}
	if json.Unmarshal(claimsOf(e), &claims) != nil {
		return sum, false
	}
	plain, err := base64.RawURLEncoding.DecodeString(claims.Hash)
	if err != nil || len(plain) != len(sum) {
		return sum, false
	}
	return [sha256.Size]byte(plain), true
}

// Downstreams returns the upstreams whose circuit breakers have opened or rejected a call
// in a workflow, by their names in the tokens. With all it reads the whole workflow, else
// what the reader may see of it. found is false if that is nothing.
func (s *Ledger) Downstreams(ctx context.Context, name string, who router.Reader, all bool) (names map[string]bool, found bool, err error) {
	for _, wid := range workflowIDs(name) {
		v, err := s.records(ctx, wid, s.MaxNodes)
		if err != nil {
			return nil, false, err
		}
		part := partOf(v.records, who)
		if len(v.records) == 0 || !all && part.Empty() {
			continue
		}
		names = map[string]bool{}
		for i := range v.records {
			if r := &v.records[i]; r.Own && r.Event == ect.EventCircuitOpen && (all || part.Has(r.ID)) {
				names[v.sources[r.ID].opened] = true
			}
		}
		return names, true, nil
	}
	return nil, false, nil
}

// own reports whether the gateway issued an entry.
func (s *Ledger) own(e *ledger.Entry) bool {
	return slices.Contains(s.Identities, e.Issuer) || s.Own != nil && s.Own(e)
}

// issued reports whether the reader issued an entry.
func (s *Ledger) issued(e *ledger.Entry, who router.Reader) bool {
	return who.Issuer != "" && e.Issuer == who.Issuer && !s.own(e)
}

// recordOf returns an entry in the form that the graph reads.
func (s *Ledger) recordOf(e *ledger.Entry) workflow.Record { return RecordOf(e, s.own(e)) }

// levelOf returns the level that a token proves by itself; none without a token.
func levelOf(token string) string {
	if token == "" {
		return ""
	}
	u, err := ect.ParseInsecure(token)
	if err != nil {
		return ""
	}
	return strings.ToUpper(u.Level().String())
}
