package evidence

import (
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// PlanSchemaPath is where the JSON schema of plans is published.
const PlanSchemaPath = router.WellKnown + "atd-workflow.schema.json"

// PlanDocument is the answer to a plan that was put. Its members are an API.
type PlanDocument struct {
	// Workflow is the workflow's id in the ledger, PlanID the plan's own name.
	Workflow string `json:"wid"`
	PlanID   string `json:"wf_id,omitempty"` // see Workflow; it is left out in lists
	// Version is the plan's, Earlier are those that it has replaced, the latest last.
	Version string   `json:"version"`
	Earlier []string `json:"earlier,omitempty"` // see Version
	// By is who put it, Put when. Begun is when the first call under it was claimed.
	By      string    `json:"by"`
	Put     time.Time `json:"put"`            // see By
	Begun   time.Time `json:"begun,omitzero"` // see By
	Expires time.Time `json:"expires"`
	// InForce says that it binds calls: all of the workflow, or, if an agent without the authority of a coordinator
	// has put it, those that take part in the first call that it has led to.
	InForce bool `json:"in_force"`
	// Warnings are what is probably not meant.
	Warnings []plan.Problem `json:"warnings,omitempty"`
	// Misfits are the calls that were made before, and that the plan does not fit; Unread says that there
	// are more than were read.
	Misfits []Misfit `json:"misfits,omitempty"`
	Unread  bool     `json:"unread,omitempty"` // see Misfits
}

// Misfit is a call that does not fit a plan.
type Misfit struct {
	// Task is the id of its token, Node that of its node in the plan; empty if it is none.
	Task string `json:"task,omitempty"`
	Node string `json:"node,omitempty"` // see Task
	// Text says what does not fit.
	Text string `json:"problem"`
}

// DescribePlan returns the document of an assignment.
func DescribePlan(a *plan.Assigned) PlanDocument {
	doc := PlanDocument{
		Workflow: a.Workflow, Version: a.Version, Earlier: a.Earlier, By: a.By, Put: a.Put.UTC(), Expires: a.Expires.UTC(), InForce: a.Issuer == "" || !a.Begun.IsZero(),
	}
	if !a.Begun.IsZero() {
		doc.Begun = a.Begun.UTC()
	}
	if a.Plan != nil {
		doc.PlanID, doc.Warnings = a.Plan.WorkflowID, slices.Clone(a.Plan.Warnings)
	}
	return doc
}

// MayPut is who wants to put a plan.
type MayPut struct {
	*hitl.Reader
	// Token is the caller's own token, with the hash of a body; nil without one.
	Token *ect.Token
}

// authority reports whether who puts a plan may do so for any workflow.
func (q *ledgerRequest) authority(who *MayPut) bool {
	return slices.Contains(who.Roles, hitl.DefaultRole) || who.Token != nil && slices.Contains(q.Coordinators, who.Token.Author())
}

// receiveTime is how long the text of a plan may take to come.
const receiveTime = time.Minute

// putPlan takes a plan for a workflow (A-optional-a, A-media-type-a).
func (q *ledgerRequest) putPlan() error {
	name, err := router.Segment(q.Name, "workflow id")
	if err != nil {
		return err
	}
	if q.Assigned == nil || q.MayPut == nil {
		return problem.New(plan.Refused, "This gateway takes no plans.")
	}
	if got, _, err := mime.ParseMediaType(q.R.Header.Get("Content-Type")); err != nil || got != plan.MediaType && got != "application/json" {
		q.W.Header().Set("Accept", plan.MediaType+", application/json")
		return problem.New(plan.MediaTypeUnsupported, "Send a plan as "+plan.MediaType+" or application/json.")
	}
	// Nothing of the body is read for who may not put a plan anyway.
	p, token, err := q.putting(name)
	if err != nil {
		if q.R.ProtoMajor == 1 {
			q.W.Header().Set("Connection", "close") // nor before the answer
		}
		return err
	}
	sender := p.By
	if token != nil {
		sender = token.Author()
	}
	body, err := q.receive(sender)
	if err != nil {
		return err
	}
	if token != nil && token.InputHash() != ect.Sum(body) {
		return &ect.Error{Code: ect.CodeInputHash}
	}
	if token != nil && q.Bind != nil {
		if err := q.Bind(q.R.Context(), token, router.UseAt("plan", p.Workflow, body)); err != nil {
			return err
		}
	}
	doc, created, err := q.PutPlan(q.R.Context(), body, p)
	if err != nil {
		return err
	}
	q.W.Header().Add("Link", "<"+PlanSchemaPath+`>; rel="describedby"`)
	q.W.Header().Set("ETag", `"`+doc.Version+`"`)
	switch {
	case created:
		return q.JSON(http.StatusCreated, doc)
	case len(doc.Warnings) == 0 && len(doc.Misfits) == 0 && !doc.Unread:
		router.Protect(q.W.Header())
		q.W.WriteHeader(http.StatusNoContent)
		return nil
	}
	return q.JSON(http.StatusOK, doc)
}

// putting finds out who puts a plan for which workflow, by the header alone, and whether they may.
func (q *ledgerRequest) putting(name string) (p plan.Putting, t *ect.Token, err error) {
	who, err := q.MayPut(q.R, true)
	if err != nil {
		return p, nil, err
	}
	if who.Name == "" && who.Token == nil {
		return p, nil, problem.New(router.Unauthenticated, "A plan is put with a token, or by an operator.")
	}
	t = who.Token
	p = plan.Putting{Workflow: WorkflowID(name), By: who.Name}
	if t != nil && t.Workflow() != "" && WorkflowID(t.Workflow()) != p.Workflow {
		return p, nil, &ect.Error{Code: ect.CodeWorkflow} // a token is good for its own workflow only
	}
	if p.Replaces, p.Fresh, err = preconditions(q.R.Header); err != nil || q.authority(who) {
		return p, t, err
	}
	if t == nil || t.Author() == "" || t.Workflow() == "" {
		return p, nil, problem.New(plan.Refused, "The caller is neither a coordinator nor an operator, and shows no token of the workflow.")
	}
	p.Issuer, p.By = t.Author(), t.Author()
	// The rest learns nothing of the workflow (P3).
	if begun, err := q.begun(q.R.Context(), p.Workflow, router.Reader{Issuer: p.Issuer}); err != nil {
		return p, nil, err
	} else if begun {
		return p, nil, problem.New(plan.Refused, "The workflow has begun: only a coordinator or an operator puts a plan now.")
	}
	return p, t, nil
}

// receive reads the text of a plan. A slow sender keeps nobody else from it.
func (q *ledgerRequest) receive(sender string) ([]byte, error) {
	done := q.Assigned.Receive(sender)
	if done == nil {
		return nil, problem.New(problem.QuotaExceeded, "As many plans are being received as may be at a time. Send it again in a moment.")
	}
	defer done()
	control := http.NewResponseController(q.W)
	_ = control.SetReadDeadline(time.Now().Add(receiveTime)) // where the server has one, else its own holds
	body, err := io.ReadAll(io.LimitReader(q.R.Body, plan.MaxSize+1))
	_ = control.SetReadDeadline(time.Time{}) // as above
	if err != nil {
		return nil, router.Invalid("The body could not be read to its end.")
	}
	if len(body) > plan.MaxSize {
		return nil, problem.New(problem.BodyTooLarge, "A plan has at most 8 MiB.")
	}
	return body, nil
}

// PutPlan takes the text of a plan. created says that the workflow had none. The errors are those of
// plan.Parse and plan.Store, a *problem.Problem, or one of the ledger.
func (s *Ledger) PutPlan(ctx context.Context, text []byte, p plan.Putting) (doc PlanDocument, created bool, err error) {
	if p.Plan, err = plan.Parse(text); err != nil {
		return doc, false, err
	}
	if len(p.Plan.Canonical()) > plan.MaxSize {
		return doc, false, problem.New(problem.BodyTooLarge, "A plan has at most 8 MiB, also in its canonical form.")
	}
	awaited := p.Issuer == "" && s.AwaitEnd != nil // it is in force at once, and its calls may have been made
	if awaited {                                   // before, so that a crash leaves no plan whose end nobody awaits
		if err := s.AwaitEnd(ctx, p.Workflow); err != nil {
			return doc, false, err
		}
	}
	a, created, err := s.Assigned.Put(ctx, p)
	if s.Followers != nil {
		s.Followers.Changed(p.Workflow)
	}
	if err == nil && awaited {
		err = s.AwaitEnd(ctx, p.Workflow) // it has its plan now
	}
	if err != nil {
		return doc, false, err
	}
	doc = DescribePlan(a)
	if s.CanUndo != nil {
		doc.Warnings = append(doc.Warnings, a.Plan.CheckUndo(s.CanUndo)...)
	}
	if p.Issuer == "" {
		if doc.Misfits, doc.Unread, err = s.misfits(ctx, a.Workflow, a.Plan); err != nil {
			return doc, created, err
		}
		var others int
		if others, err = s.Assigned.Others(ctx, a); others > 0 {
			doc.Misfits = append(doc.Misfits, Misfit{Text: fmt.Sprintf("%d parts of the workflow have begun under plans of their agents, and stay with them", others)})
		}
	}
	return doc, created, err
}

// preconditions are the versions of If-Match, and whether If-None-Match says that there must be none
// (RFC 9110, section 13.1).
func preconditions(h http.Header) (replaces []string, fresh bool, err error) {
	for tag := range strings.SplitSeq(strings.Join(h["If-Match"], ","), ",") {
		switch tag = strings.TrimSpace(tag); {
		case tag == "":
		case tag == "*":
			replaces = append(replaces, tag)
		case len(tag) > 2 && tag[0] == '"' && tag[len(tag)-1] == '"':
			replaces = append(replaces, tag[1:len(tag)-1])
		default:
			return nil, false, router.Invalid(`If-Match is no list of versions in quotes, such as "oYpIfPNN", nor *.`)
		}
	}
	switch none := strings.TrimSpace(strings.Join(h["If-None-Match"], ",")); none {
	case "":
	case "*":
		fresh = true
	default:
		return nil, false, router.Invalid("If-None-Match is not *: only that says something about a change.")
	}
	return replaces, fresh, nil
}

// misfits are the calls of a workflow that a plan does not fit: what it has no node for, and what began
// before what comes before it was done.
func (s *Ledger) misfits(ctx context.Context, wid string, d *plan.Descriptor) (found []Misfit, unread bool, err error) {
	if err := s.caughtUp(ctx); err != nil {
		return nil, false, err
	}
	done, err := s.Assigned.ReadLarge(ctx)
	if err != nil {
		return nil, false, err
	}
	defer done()
	v, err := s.records(ctx, wid, s.MaxPlanned)
	if err != nil || len(v.records) == 0 {
		return nil, v.more, err
	}
	v.sort()
	for place := range v.records { // the times of tokens are whole seconds, of several clocks
		v.records[place].Time = time.Unix(int64(place), 0)
	}
	p := d.Progress(workflow.New(v.records))
	for _, id := range p.Others {
		found = append(found, Misfit{Task: id, Text: "it is no node of the plan"})
	}
	state := make(map[string]*plan.Status, len(p.Nodes))
	for i := range p.Nodes {
		state[p.Nodes[i].ID] = &p.Nodes[i]
	}
	for i := range p.Nodes {
		n := &p.Nodes[i]
		if len(n.Tasks) == 0 {
			continue
		}
		for _, id := range n.After {
			switch before := state[id]; {
			case before.State != workflow.Done:
				found = append(found, Misfit{Node: n.ID, Text: fmt.Sprintf("it has begun, and %s, which comes before it, is %s", id, before.State)})
			case before.Ended.After(n.Begun):
				found = append(found, Misfit{Node: n.ID, Text: fmt.Sprintf("it began before %s was done, which comes before it", id)})
			}
		}
	}
	return found[:min(len(found), maxMisfits)], v.more || len(found) > maxMisfits, nil
}

// maxMisfits is how many misfits an answer names.
const maxMisfits = 100

// plan answers with the plan of a workflow, to who may see all of it, to coordinators and operators, and
// to who has put it.
func (q *ledgerRequest) plan(name string) error {
	params, err := router.ParseParams(q.R.URL, "version")
	if err != nil {
		return err
	}
	ctx := q.R.Context()
	for _, wid := range workflowIDs(name) {
		a, err := q.seePlan(wid)
		if err != nil {
			return err
		}
		if a == nil {
			continue
		}
		d := a.Plan
		if version := params.Get("version"); version != "" {
			if d, err = q.Assigned.Version(ctx, a, version); err != nil {
				return err
			}
		}
		if d == nil {
			break
		}
		q.W.Header().Add("Link", "<"+PlanSchemaPath+`>; rel="describedby"`)
		tag := `"` + d.Version() + `"`
		q.W.Header().Set("ETag", tag)
		if q.R.Header.Get("If-None-Match") == tag {
			router.Protect(q.W.Header())
			q.W.WriteHeader(http.StatusNotModified)
			return nil
		}
		q.Write(http.StatusOK, plan.MediaType, d.Canonical())
		return nil
	}
	return unknownWorkflow()
}

// seePlan is the plan of a workflow that the reader may see; nil if there is none (P3): one that it has put, or that
// binds its calls. Coordinators and operators see that of the workflow's initiator.
func (q *ledgerRequest) seePlan(wid string) (*plan.Assigned, error) {
	ctx := q.R.Context()
	if err := q.Assigned.CatchUp(ctx); err != nil {
		return nil, err
	}
	if !q.Assigned.Has(wid) {
		return nil, nil
	}
	a, err := q.Assigned.Offered(ctx, wid, q.who.Issuer)
	if a != nil || err != nil {
		return a, err
	}
	if a, err = q.Assigned.Of(ctx, wid, nil); err != nil || a != nil && q.who.Issuer != "" && a.By == q.who.Issuer {
		return a, err
	}
	all := q.who.Operator || q.who.Issuer != "" && slices.Contains(q.Coordinators, q.who.Issuer)
	if !all && q.who.Issuer == "" && !q.who.Anonymous && !q.who.Credential {
		who, err := q.MayPut(q.R, false)
		if err != nil {
			return nil, err
		}
		all = q.authority(who)
	}
	if err := q.caughtUp(ctx); err != nil {
		return nil, err
	}
	who := q.who
	if all {
		end, err := q.beginning(ctx, wid)
		if err != nil || end.Start == "" {
			return a, err
		}
		who = end.Initiator
	}
	part, err := q.participationOf(ctx, wid, who)
	if err != nil || part.Empty() && !all {
		return nil, err
	}
	return q.Assigned.Of(ctx, wid, has(&part))
}

// has says of a call whether it is in a part.
func has(part *participation) func(call string) (bool, error) {
	return func(call string) (bool, error) { return part.Has(call), nil }
}
