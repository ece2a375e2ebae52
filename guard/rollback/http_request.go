package rollback

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

const (
	maxRollbackBody = 16 << 10
	maxUrgency      = 64
)

// The gateway's own extension members in the tokens of requests for rollbacks.
const (
	// MemberKeepDependants asks to keep completed actions that depend on what is undone.
	MemberKeepDependants ect.Member = "agent_guard.keep_dependants"
	// MemberPartOf is the id of the rollback that was asked for first, in a request for a part of it: by
	// that the tokens of all participants belong to it.
	MemberPartOf ect.Member = "agent_guard.part_of"
	// MemberPhase is what a request asks for, so that its token is good for nothing else: a phase of a
	// rollback, or another one. inp_hash of the token has the body.
	MemberPhase ect.Member = "agent_guard.phase"
)

// body reads the request's body.
func (q *rollbackRequest) body() ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(q.R.Body, maxRollbackBody+1))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge) || len(body) > maxRollbackBody:
		return nil, problem.New(problem.BodyTooLarge, "A request for a rollback has at most 16 KiB.")
	case err != nil:
		return nil, router.Invalid("The body could not be read to its end.")
	}
	return body, nil
}

// asked is the content of a request, from its body or its token. Empty fields were not
// given.
type asked struct {
	id, checkpoint, scope, reason, urgency string
	cascade, keep                          *bool
	dry                                    bool       // nothing is to be done
	release                                bool       // what is reserved is to be released
	planned                                string     // the hash of the plan, 32 bytes; empty without one
	partOf                                 string     // the rollback at another gateway; empty without
	precedence                             precedence // of that; zero without
}

// parseBody parses Figures 9 and 10 of the cascade draft, and AERR's request. It ignores unknown
// members, except for what another path has: the rollback would be carried out.
func parseBody(body []byte, to endpoint) (*asked, error) {
	members, err := router.ReadObject(body)
	if err != nil {
		return nil, err
	}
	executes := to == endpoint{dialect: ect.Cascade}
	for _, name := range []string{"dry_run", "plan_hash"} {
		known := executes || name == "dry_run" && to.prepares
		if _, there := members[name]; there && !known {
			return nil, router.Invalid(name + " is not known here, and nothing was done. Send it to " + Path + ".")
		}
	}
	text := func(name string) (value string) {
		if raw, there := members[name]; there && err == nil && json.Unmarshal(raw, &value) != nil {
			err = router.Invalid(name + " is no string.")
		}
		return value
	}
	phase := text("phase")
	a := &asked{
		id: text("rollback_id"), checkpoint: text("checkpoint_id"), scope: text("scope"),
		reason: text("reason"), urgency: text("urgency"),
	}
	truth := func(name string) (value *bool) {
		if raw, there := members[name]; there && err == nil && json.Unmarshal(raw, &value) != nil {
			err = router.Invalid(name + " is neither true nor false.")
		}
		return value
	}
	a.release = to.prepares && phase == phaseRelease
	a.cascade, a.keep = truth("cascade"), truth("keep_dependants")
	if dry := truth("dry_run"); dry != nil {
		a.dry = *dry
	}
	hash := text("plan_hash")
	a.partOf = text("part_of")
	if err != nil {
		return nil, err
	}
	switch {
	case a.id == "":
		return nil, router.Invalid("rollback_id is missing; write urn:uuid: and a UUID, the same for every repetition.")
	case a.checkpoint == "":
		return nil, router.Invalid("checkpoint_id is missing.")
	case !isName(a.checkpoint):
		return nil, router.Invalid("checkpoint_id is no id: 1 to 256 bytes without control characters.")
	case executes && phase != "" && phase != "execute":
		return nil, router.Invalid("phase is not execute; the other one is asked for at " + PreparePath + ".")
	case to.prepares && phase != "" && phase != "prepare" && phase != phaseRelease:
		return nil, router.Invalid("phase is neither prepare nor release; execute is asked for at " + Path + ".")
	case len(a.reason) > maxReason:
		return nil, router.Invalid(fmt.Sprintf("reason is longer than %d bytes.", maxReason))
	case len(a.urgency) > maxUrgency:
		return nil, router.Invalid(fmt.Sprintf("urgency is longer than %d bytes.", maxUrgency))
	}
	if hash != "" {
		sum, err := hex.DecodeString(hash)
		if err != nil || len(sum) != sha256.Size {
			return nil, router.Invalid("plan_hash is no SHA-256 in hexadecimal, as the prepared plan has it.")
		}
		a.planned = string(sum)
	}
	if a.precedence, err = parsePrecedence(members["precedence"]); err != nil {
		return nil, err
	}
	if a.partOf != "" {
		if a.partOf, err = router.ParseID(a.partOf); err != nil {
			return nil, err
		}
	}
	a.checkpoint = ledger.Canonical(a.checkpoint)
	if a.id, err = router.ParseID(a.id); err != nil {
		return nil, err
	}
	_, err = ParseScope(a.scope, a.cascade)
	return a, err
}

// parsePrecedence parses what decides between the rollback of a part and others; zero without.
func parsePrecedence(raw json.RawMessage) (p precedence, err error) {
	if raw == nil {
		return p, nil
	}
	err = json.Unmarshal(raw, &p)
	p.Asked = p.Asked.Round(0).UTC()
	if year := p.Asked.Year(); err != nil || p.Asked.IsZero() || year < 0 || year > 9999 {
		return p, router.Invalid("precedence has no rollback_id, scope and time (asked, RFC 3339).")
	}
	if p.ID, err = router.ParseID(p.ID); err != nil {
		return p, err
	}
	if p.Scope == "" {
		return p, router.Invalid("scope of precedence is missing.")
	}
	_, err = ParseScope(string(p.Scope), nil)
	return p, err
}

// ParseScope parses the word for a scope. Without a word, cascade decides; without both,
// the scope is single. Both together must not contradict each other.
func ParseScope(word string, cascade *bool) (Scope, error) {
	scope := Scope(word)
	switch scope {
	case Single, SubDAG, FullWorkflow:
	case "":
		if cascade != nil && *cascade {
			return SubDAG, nil
		}
		return Single, nil
	default:
		return "", router.Invalid("scope is none of single, sub_dag and full_workflow.")
	}
	if cascade != nil && *cascade != (scope != Single) {
		return "", router.Invalid(fmt.Sprintf("scope and cascade contradict each other: scope is %s, and cascade is %t; leave one of them out.", scope, *cascade))
	}
	return scope, nil
}

func isName(id string) bool {
	return id != "" && len(id) <= ledger.MaxName && !strings.ContainsFunc(id, unicode.IsControl)
}

// said returns the request's content apart from its token: that of its body, or nothing in
// ATD.
func (q *rollbackRequest) said(t *ect.Token, body []byte) (*asked, error) {
	if q.dialect != ect.ATD {
		return parseBody(body, q.endpoint)
	}
	return &asked{id: t.ID(), checkpoint: ledger.Canonical(t.Parents()[0])}, nil
}

// bind completes a request from its token and refuses contradictions between the two (ADR
// 0043 and 0054). The body alone is not signed: whoever stole the token could otherwise
// roll back something else with it.
func bind(a *asked, t *ect.Token, dialect ect.Vocabulary) error {
	in := inToken{t: t}
	id, checkpoint := in.text(ect.MemberRollbackID), in.text(ect.MemberCheckpointID)
	scope, reason := in.text(ect.MemberScope), in.text(ect.MemberReason)
	cascade, keep := in.truth(ect.MemberCascade), in.truth(MemberKeepDependants)
	partOf := in.text(MemberPartOf)
	if in.err != nil {
		return in.err
	}
	if id != "" && dialect != ect.ATD { // in ATD the token itself identifies the rollback
		if named, err := router.ParseID(id); err != nil || named != a.id {
			return in.contradicts(ect.MemberRollbackID, "rollback_id")
		}
	}
	if partOf != "" {
		if whole, err := router.ParseID(partOf); err != nil || a.partOf != "" && whole != a.partOf {
			return in.contradicts(MemberPartOf, "part_of")
		}
	}
	if checkpoint != "" && ledger.Canonical(checkpoint) != a.checkpoint {
		return in.contradicts(ect.MemberCheckpointID, "checkpoint_id")
	}
	if reason != "" && a.reason != "" && reason != a.reason {
		return in.contradicts(ect.MemberReason, "reason")
	}
	if a.reason == "" {
		a.reason = reason
	}
	if len(a.reason) > maxReason {
		return router.Refused(ect.CodeExt, fmt.Sprintf("%s is longer than %d bytes.", in.name(ect.MemberReason), maxReason))
	}
	if keep != nil && a.keep != nil && *keep != *a.keep {
		return in.contradicts(MemberKeepDependants, "keep_dependants")
	}
	if a.keep == nil {
		a.keep = keep
	}
	return in.bindScope(a, scope, cascade)
}

// bindScope checks the scope of the request against the token.
func (in *inToken) bindScope(a *asked, scope string, cascade *bool) error {
	if scope == "" && cascade == nil {
		if Scope(a.scope) == FullWorkflow && in.t.InputHash().IsZero() {
			// It ends the workflow, so a stolen token must not allow it unless the token
			// says so.
			return router.Refused(ect.CodeExt, fmt.Sprintf("The scope full_workflow must stand in %s of the token, or inp_hash of the token must be the hash of the body.",
				in.name(ect.MemberScope)))
		}
		return nil
	}
	signed, err := ParseScope(scope, cascade)
	if err != nil {
		return router.Refused(ect.CodeExt, fmt.Sprintf("%s and %s of the token contradict each other, or the first is no scope.",
			in.name(ect.MemberScope), in.name(ect.MemberCascade)))
	}
	if a.scope == "" && a.cascade == nil {
		a.scope = string(signed)
	}
	if wanted, err := ParseScope(a.scope, a.cascade); err != nil || wanted == signed {
		return err
	}
	m := ect.MemberScope
	if scope == "" {
		m = ect.MemberCascade
	}
	return router.Refused(ect.CodeExt, fmt.Sprintf("%s of the token means the scope %s, and the request's is another one; the token must say the same in %s.",
		in.name(m), signed, ect.MemberScope))
}

// inToken reads extension members of a token.
type inToken struct {
	t   *ect.Token
	err error // for the first member of a wrong type
}

// name returns the name of a member in the token's vocabulary.
func (in *inToken) name(m ect.Member) string { return in.t.Vocabulary().Member(m) }

func (in *inToken) text(m ect.Member) string {
	value, ok := in.t.Ext().Text(m)
	if _, there := in.t.Ext().Raw(m); there && !ok && in.err == nil {
		in.err = router.Refused(ect.CodeExt, in.name(m)+" is no string.")
	}
	return value
}

func (in *inToken) truth(m ect.Member) *bool {
	value, ok := in.t.Ext().Bool(m)
	if ok {
		return &value
	}
	if _, there := in.t.Ext().Raw(m); there && in.err == nil {
		in.err = router.Refused(ect.CodeExt, in.name(m)+" is neither true nor false.")
	}
	return nil
}

func (in *inToken) contradicts(m ect.Member, member string) error {
	return router.Refused(ect.CodeExt, fmt.Sprintf("%s of the token is not the request's %s.", in.name(m), member))
}

// patience returns how long the answer may wait: the value of `Prefer` (RFC 7240) or of the
// parameter wait, else byDefault, at most LongestWait.
func (q *rollbackRequest) patience(byDefault time.Duration) (time.Duration, error) {
	wait := byDefault
	for preference := range strings.SplitSeq(strings.Join(q.R.Header.Values("Prefer"), ","), ",") {
		name, value, _ := strings.Cut(preference, "=")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "respond-async":
			wait = 0
		case "wait":
			// RFC 7240: ignore malformed preferences.
			if seconds, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 32); err == nil {
				wait = time.Duration(seconds) * time.Second
			}
		}
	}
	if text := q.R.URL.Query().Get("wait"); text != "" {
		if seconds, err := strconv.ParseUint(text, 10, 32); err == nil {
			text = strconv.FormatUint(seconds, 10) + "s"
		}
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return 0, router.Invalid("wait is neither a duration, like 30s, nor a number of seconds.")
		}
		wait = d
	}
	return min(wait, LongestWait), nil
}

// What an agent answers to a request to prepare (cascade 4.3.2).
const (
	statusPrepared      = "prepared"
	statusCannotPrepare = "cannot_prepare"
	statusReleased      = "released"
)

// releasedDocument is the answer to a release: nothing is reserved for the rollback.
type releasedDocument struct {
	// RollbackID is the id as a URN (urn:uuid:).
	RollbackID string `json:"rollback_id"`
	// CheckpointID is the checkpoint that was to be rolled back.
	CheckpointID string `json:"checkpoint_id"`
	// Status is released.
	Status string `json:"status"`
}

// preparedDocument is the answer to a request to prepare a rollback: its document, with what
// stands in the way. Its members are an API.
type preparedDocument struct {
	Rollback
	// Status is prepared or cannot_prepare.
	Status string `json:"status"`
	// Reason is a fixed word for why there is no plan that may be carried out; empty where
	// agents say why they cannot prepare.
	Reason string `json:"reason_code,omitempty"`
	// Conflicting is the rollback that takes precedence (cascade 4.3.4).
	Conflicting string `json:"conflicting_rollback_id,omitempty"`
	// Until is when the reservation ends; missing without one.
	Until time.Time `json:"reserved_until,omitzero"`
	// Irreversible are the checkpoints of calls that cannot be undone.
	Irreversible []string `json:"irreversible,omitempty"`
	// Agents are those of the plan, with their answers.
	Agents []Obstacle `json:"agents"`
}

// describePrepared makes the answer to a request to prepare.
func describePrepared(p *preparation, id string) *preparedDocument {
	doc := &preparedDocument{Rollback: *Shown(p.Rollback, id), Status: statusPrepared, Until: p.Rollback.Until, Agents: []Obstacle{}}
	if !p.Ready() {
		doc.Status = statusCannotPrepare
	}
	if p.Rollback.Until.IsZero() && p.Rollback.State == reserved {
		doc.State, doc.Asked, doc.Due = Planned, time.Time{}, time.Time{}
	}
	conflict, depended := (*ConflictError)(nil), (*DependedOnError)(nil)
	switch {
	case errors.As(p.Refusal, &conflict):
		doc.Reason, doc.Conflicting = "conflict", urn(conflict.Winner)
	case errors.As(p.Refusal, &depended):
		doc.Reason, doc.Dependants = dependedOn.Slug, depended.Dependants
	case errors.Is(p.Refusal, checkpoint.ErrExpired):
		doc.Reason = CheckpointExpired.Slug
	case errors.Is(p.Refusal, checkpoint.ErrTampered):
		doc.Reason = checkpointTampered.Slug
	}
	status, named := statusPrepared, map[string]bool{}
	if doc.Reason != "" {
		status = statusCannotPrepare
	}
	for _, o := range p.Obstacles {
		if o.Reason == string(reasonIrreversible) {
			doc.Irreversible = append(doc.Irreversible, o.Checkpoint)
		}
		named[o.Agent] = true
		o.Status = statusCannotPrepare
		doc.Agents = append(doc.Agents, o)
	}
	for i := range p.Rollback.Steps {
		if agent := p.Rollback.Steps[i].Agent; !named[agent] {
			named[agent] = true
			doc.Agents = append(doc.Agents, Obstacle{Agent: agent, Status: status, Reason: doc.Reason})
		}
	}
	if len(doc.Agents) == 0 && doc.Reason != "" { // there is no plan that names them
		doc.Agents = append(doc.Agents, Obstacle{Status: status, Reason: doc.Reason, Checkpoint: doc.Checkpoint})
	}
	return doc
}

// Shown is a rollback as it is shown to who has asked for it under an id.
func Shown(r *Rollback, id string) *Rollback {
	doc := *r
	doc.ID, doc.Effect = urn(cmp.Or(r.Named, id)), Effect(r.Unknown, r.Mixed)
	doc.Steps, doc.Cascaded = slices.Clone(r.Steps), []agentStatus{}
	if r.Joined != "" {
		doc.Joined = urn(r.Joined)
	}
	if p := r.Plan; p != nil {
		sum := p.Hash()
		doc.PlanHash = hex.EncodeToString(sum[:])
		doc.Uncovered, doc.Along, doc.Dependants, doc.Missing = p.Passed, p.Along, p.Dependants, p.Missing
		doc.Others = p.Left
		for _, left := range p.Elsewhere {
			doc.Elsewhere = append(doc.Elsewhere, left.Checkpoint)
		}
	}
	doc.Unreached = slices.Clone(r.Unreached)
	for i := range doc.Unreached {
		doc.Unreached[i].Status = statusCannotPrepare
	}
	if doc.Steps == nil {
		doc.Steps = []Step{}
	}
	for i := range doc.Steps {
		step := &doc.Steps[i]
		step.Action, step.Effect = action(step), Effect(step.Unknown, false)
	}
	if r.State == Finished {
		var others []ect.Outcome
		others, doc.FailedAgents = r.Agents()
		for _, o := range others {
			doc.Cascaded = append(doc.Cascaded, agentStatus{Agent: o.Agent, Status: Status(o.Status)})
		}
	}
	doc.FollowUp = r.remaining()
	return &doc
}

// Agents returns the outcome of each agent behind the steps of a rollback, without
// the agent behind the target, and the agents with a step that was not completed or of which nobody
// knows what they have.
func (r *Rollback) Agents() (others []ect.Outcome, failed []string) {
	own, all, order := "", map[string]Status{}, []string(nil)
	for i := range r.Steps {
		s := &r.Steps[i]
		if s.Checkpoint == r.Checkpoint {
			own = s.Agent
		}
		status, met := all[s.Agent]
		if !met {
			order = append(order, s.Agent)
			all[s.Agent] = s.Status
			continue
		}
		all[s.Agent] = combined(status, s.Status)
	}
	for _, agent := range order {
		status := all[agent]
		if status == "" { // a step that was never taken (P6)
			status = Failed
		}
		if agent != own {
			others = append(others, ect.Outcome{Agent: agent, Status: string(status)})
		}
		if status != Completed {
			failed = append(failed, agent)
		}
	}
	for _, o := range r.Unreached {
		if !slices.Contains(failed, o.Agent) {
			failed = append(failed, o.Agent)
		}
	}
	return others, failed
}

// combined is the status of an agent with two steps.
func combined(a, b Status) Status {
	switch {
	case a == b:
		return a
	case a == Completed, b == Completed, a == Partial, b == Partial:
		return Partial
	}
	return Failed
}

// Drawing draws the steps, with nothing that the document does not say: the target at the top,
// and the arrows to what followed from it.
func Drawing(d *Rollback) *drawing.Drawing {
	top := 0
	places := make(map[string]int, len(d.Steps))
	for i := range d.Steps {
		places[d.Steps[i].Checkpoint] = i
		top = max(top, d.Steps[i].Level)
	}
	p := &drawing.Drawing{Title: "Rollback " + d.ID + ": " + drawing.InWords(string(d.State), string(d.Status))}
	note := func(parts ...string) {
		if text := drawing.InWords(parts...); text != "" {
			p.Notes = append(p.Notes, text)
		}
	}
	note("checkpoint "+d.Checkpoint, "scope "+string(d.Scope))
	note(drawing.Label("asked", drawing.Time(d.Asked)), drawing.Label("due", drawing.Time(d.Due)), drawing.Label("finished", drawing.Time(d.Finished)))
	if d.TimedOut {
		note("not done in time")
	}
	note(drawing.Label("waits for the decision of people on escalation", d.Waits))
	note(drawing.Label("effect", d.Effect))
	note(drawing.Label("joined", d.Joined))
	for i := range d.Unreached {
		note(fmt.Sprintf("nobody knows what %s has done in the workflow (%s)", d.Unreached[i].Agent, d.Unreached[i].Reason))
	}
	if n := len(d.Uncovered); n > 0 {
		note(fmt.Sprintf("%d actions without a checkpoint are not shown", n))
	}
	note("What followed from a call stands below it, and is undone before it: level 0 first.")
	for level := range top + 1 {
		p.Layers = append(p.Layers, fmt.Sprint("level ", top-level))
	}
	for i := range d.Steps {
		s := &d.Steps[i]
		node := drawing.Node{Layer: top - s.Level, Name: cmp.Or(s.Agent, "(agent not known)"), Tone: tone(s)}
		node.State = s.Action + ": " + cmp.Or(string(s.Status), string(s.State), string(d.State))
		node.Lines = []string{
			drawing.Label("reason", drawing.InWords(s.Reason, s.Cause)), drawing.Label("effect", s.Effect), "", s.Checkpoint,
			drawing.Label("begun", drawing.Time(s.Begun)), drawing.Label("ended", drawing.Time(s.Ended)),
		}
		if c := s.Call; c != nil {
			node.Lines[2] = strings.TrimSpace(c.Action + " " + c.Method + " " + c.Path)
		}
		p.Nodes = append(p.Nodes, node)
		for _, id := range s.Earlier {
			if to, ok := places[id]; ok {
				p.Edges = append(p.Edges, drawing.Edge{From: i, To: to})
			}
		}
	}
	return p
}

func tone(s *Step) drawing.Tone {
	switch {
	case s.Status == Completed:
		return drawing.Good
	case s.Status == Failed:
		return drawing.Bad
	case s.Status != "", s.Action == "escalate":
		return drawing.Warning
	case s.State == StepRunning:
		return drawing.Active
	}
	return drawing.Plain
}

// action returns the action of a step as one word. A call that never ran is cancelled, not
// rolled back: the architecture brief has a word of its own for it.
func action(s *Step) string {
	if s.Cancelled {
		return "cancel"
	}
	switch s.What {
	case block:
		return "cancel"
	case expired, Escalate:
		return "escalate"
	case noUndo:
		return "none"
	}
	return string(s.What) // wait, gather, undo
}

// Effect is what is not known of the effects of a call, or of a rollback; empty where all is.
func Effect(unknown, mixed bool) string {
	switch {
	case unknown:
		return EffectUnknown // it takes precedence
	case mixed:
		return EffectMixed
	}
	return ""
}

// result is the result of a rollback in the form of an older draft: the members of its
// token, and the token (ATD "Basic Rollback", AERR "Rollback Response"). Its members are an
// API.
type result struct {
	Action  string          `json:"exec_act"`
	ID      string          `json:"jti"`
	Parents []string        `json:"par"`
	OutHash string          `json:"out_hash,omitempty"`
	Ext     json.RawMessage `json:"ext"`
	ECT     string          `json:"ect"`
}

// answerIn answers with a finished rollback in the form of an older draft.
func (q *rollbackRequest) answerIn(ctx context.Context, r *Rollback, id string, v ect.Vocabulary, request string) error {
	raw, err := q.Tokens.Result(ctx, r, request, v)
	if err != nil {
		if q.R.Context().Err() == nil {
			q.Logger.Warn("the result of a rollback cannot be written in the vocabulary that was asked for",
				slog.String("rollback", id), slog.String("vocabulary", v.String()), slog.Any("error", err))
		}
		return err
	}
	token, err := ect.ParseInsecure(raw) // the gateway has just signed it
	if err != nil {
		return err
	}
	doc := result{
		Action: token.Action(), ID: token.ID(), Parents: token.Parents(), OutHash: token.OutputHash().String(),
		Ext: json.RawMessage(token.Ext().JSON()), ECT: raw,
	}
	if token.OutputHash().IsZero() {
		doc.OutHash = ""
	}
	q.W.Header().Set(ect.FieldName, raw)
	return q.JSON(http.StatusOK, doc)
}

func urn(id string) string { return "urn:uuid:" + id }

// Kinds are the problems of rollbacks, in the order in which they are documented.
var Kinds = []problem.Kind{
	router.NotInWorkflow, coordinatorRequired, problem.WorkflowStopped, problem.WorkflowPaused, rollbackConflict, rollbackMismatch,
	dependedOn, cannotPrepare, planChanged, checkpointUnknown, CheckpointExpired, checkpointTampered,
}

var (
	coordinatorRequired = problem.Kind{
		Slug: "coordinator-required", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "Only a rollback coordinator may undo a whole workflow",
		Meaning:  "The scope full_workflow undoes every checkpoint of the workflow, also those of others, and needs the authority of a coordinator. Nothing was touched.",
		Caller:   "Ask for sub_dag, or let the coordinator ask.",
		Operator: "`coordinators` in the `rollback` block names who may. An operator can do it with `caddy agent-guard rollback --scope full_workflow`.",
	}
	rollbackConflict = problem.Kind{
		Slug: "rollback-conflict", Status: http.StatusConflict, SafeNewKey: true, GRPC: 10, // ABORTED: another attempt would be a new one
		Title:    "Another rollback is under way and takes precedence",
		Meaning:  "A rollback of the same checkpoints was asked for before, or with a wider scope. `conflicting_rollback_id` names it. Nothing was begun for this one.",
		Caller:   "Look at the other rollback until it is finished. What it leaves can be asked for again under a new rollback id.",
		Operator: "`caddy agent-guard rollbacks` lists what is under way.",
	}
	rollbackMismatch = problem.Kind{
		Slug: "rollback-mismatch", Status: http.StatusUnprocessableEntity, SafeNewKey: true,
		Title:   "The rollback id was used for another rollback",
		Meaning: "A rollback of this checkpoint with this id is recorded, and its scope, reason, urgency or requester are others than this request's. Nothing was begun.",
		Caller:  "If this is meant as another rollback, ask for it under a new id. If it is a repetition, send exactly what was sent before.",
	}
	dependedOn = problem.Kind{
		Slug: "depended-on", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "Completed work depends on what would be undone",
		Meaning:  "Completed actions that the rollback would not undo depend on what it would; `dependants` names some of them. A part of a workflow is rolled back only where nothing of the rest depends on it, unless the request says that the rest is to stay. Nothing was touched.",
		Caller:   "Ask with `cascade` true, or the scope sub_dag, to undo what depends on it too. With `keep_dependants` true it stays as it is: say so only where that can be. Both are other requests, under a new rollback id.",
		Operator: "`caddy agent-guard rollback --cascade --dry-run` shows what would be undone with it; `--keep-dependants` leaves it.",
	}
	cannotPrepare = problem.Kind{
		Slug: "cannot-prepare", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The rollback cannot be planned",
		Meaning:  "What is recorded of the workflow makes no plan; `reason` says why: `too-large`, or `cycle` where something follows from itself. Nothing was touched.",
		Caller:   "Ask for a narrower scope, or ask a person.",
		Operator: "A cycle cannot come from verified tokens: the log names its nodes.",
	}
	planChanged = problem.Kind{
		Slug: "plan-changed", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "What would be undone is not what was prepared",
		Meaning:  "The rollback was prepared, or the request names a `plan_hash`, and by now the plan is another one: calls have ended, or were undone, or others have come. Nothing was begun, and nothing is reserved any more.",
		Caller:   "Prepare the rollback again under the same id, look at the plan, and execute that one.",
		Operator: "Nothing needs to be done. `caddy agent-guard rollback --dry-run` shows the plan as it is now.",
	}
	checkpointUnknown = problem.Kind{
		Slug: "checkpoint-unknown", Status: http.StatusNotFound, SafeNewKey: true,
		Title:    "There is no such checkpoint",
		Meaning:  "Nothing is recorded under this id that could be rolled back. Only coordinators and operators are told so.",
		Caller:   "Take the id from the answer's `Execution-Checkpoint`, or from the workflow.",
		Operator: "The ledger names the checkpoints of a workflow; those whose ttl is long over are purged.",
	}
	// CheckpointExpired is also for who reads a checkpoint.
	CheckpointExpired = problem.Kind{
		Slug: "checkpoint-expired", Status: http.StatusGone, SafeNewKey: true,
		Title:    "The checkpoint has expired",
		Meaning:  "The time for which the call could be rolled back is over. What it had changed may have been built upon since. Nothing was touched.",
		Caller:   "Ask a person. A compensating call of your own is a new action.",
		Operator: "The checkpoint's ttl is how long a call can be rolled back.",
	}
	checkpointTampered = problem.Kind{
		Slug: "checkpoint-tampered", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The checkpoint is not what was recorded",
		Meaning:  "The checkpoint's token, one of those that led to it, or the snapshot behind it does not verify. Nothing was touched; an error was told to the ledger.",
		Caller:   "Ask a person. No retry helps.",
		Operator: "Somebody has altered the store, or it is damaged: look at the log, and run `caddy agent-guard ledger check`.",
	}
)

// maxDependants is the largest number of dependants that a problem lists.
const maxDependants = 20

// ProblemOf maps an error of this package, or of checkpoints, to a problem; nil if it is none.
func ProblemOf(err error) *problem.Problem {
	var conflict *ConflictError
	var depended *DependedOnError
	var scope *ScopeError
	var planned *planChangedError
	var large *TooManyError
	var cycle *CycleError
	switch {
	case errors.Is(err, ErrNotInWorkflow):
		return router.UnknownPart()
	case errors.Is(err, ErrUnnamed):
		return router.Refused(ect.CodeParents, "The token is not bound to the checkpoint: par has neither that, nor its action, nor an error that follows from it, which AERR requires; nor does it say cascade.checkpoint_id, or inp_hash of the body.")
	case errors.Is(err, ErrMismatch):
		return problem.New(rollbackMismatch, "What is recorded under this id is another rollback.")
	case errors.Is(err, ErrCheckpointUnknown):
		return problem.New(checkpointUnknown, "No checkpoint has this id.")
	case errors.Is(err, checkpoint.ErrTampered):
		p := problem.New(checkpointTampered, "What is kept of the checkpoint is not what was recorded.")
		p.Cause = err // for the operator's log
		return p
	case errors.Is(err, checkpoint.ErrExpired):
		return problem.New(CheckpointExpired, "The time for which it was kept is over.")
	case errors.As(err, &conflict):
		p := problem.New(rollbackConflict, "The other rollback has a wider scope, or was asked for earlier.")
		p.ConflictingRollback = urn(conflict.Winner)
		return p
	case errors.As(err, &depended):
		n := len(depended.Dependants)
		p := problem.New(dependedOn, fmt.Sprintf("Completed actions depend on what would be undone: %d. Ask with cascade true to undo them too, or with keep_dependants true to leave them as they are.", n))
		p.Dependants = depended.Dependants[:min(n, maxDependants)]
		return p
	case errors.As(err, &planned):
		p := problem.New(planChanged, "`plan_hash` is that of the plan as it is now.")
		p.PlanHash = hex.EncodeToString(planned.Hash[:])
		return p
	case errors.As(err, &large):
		p := problem.New(cannotPrepare, "The workflow is too large to be planned for.")
		p.Reason = "too-large"
		return p
	case errors.As(err, &cycle):
		p := problem.New(cannotPrepare, "What is recorded of the workflow follows from itself.")
		p.Reason, p.Cause = "cycle", err // impossible with verified tokens: for the operator's log
		return p
	case errors.As(err, &scope):
		return problem.New(coordinatorRequired, "The scope full_workflow needs the authority of a coordinator.")
	case errors.Is(err, ErrInvalid):
		return problem.New(router.ParameterInvalid, "The request for a rollback breaks a rule.")
	case errors.Is(err, ErrStopping):
		return problem.New(problem.ShuttingDown, "Nothing was begun.")
	}
	return nil
}
