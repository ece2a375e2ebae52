package hitl

import (
	"cmp"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// Path is where escalations are listed; one is read at Path + "/" + id.
const Path = router.WellKnown + "escalations"

// Reader is who reads or decides escalations, as the gateway has verified it.
type Reader struct {
	// Name is the caller's name as operators know it; empty for callers that the gateway does
	// not know itself, who have no role.
	Name string
	// Roles are what the reader may decide.
	Roles []string
	// Signed is the body that the reader's token is bound to, and nil without a token in a POST.
	Signed []byte
	// Token is the hash of that token; empty without one in a POST.
	Token string
}

// Endpoints answers questions about escalations, and decides them. It is safe for concurrent use.
type Endpoints struct {
	// Store has the escalations.
	Store *Store
	// Read identifies who asks; body is that of a decision, else nil. The error is a *problem.Problem or an
	// *ect.Error.
	Read func(r *http.Request, body []byte) (*Reader, error)
	// Coordinator identifies who tells what holds a workflow elsewhere: the issuer of a token with the
	// hash of the body, and the token's workflow; no identity is nobody who may. The error is a *problem.Problem
	// or an *ect.Error.
	Coordinator func(r *http.Request, body []byte) (identity, workflow string, err error)
}

// Routes are the paths of escalations, and where a coordinator tells what holds a workflow.
var Routes = []router.Route[router.Endpoint[*Endpoints]]{
	{Path: Path, Method: http.MethodGet, To: at((*request).list)},
	{Path: Path + "/{id}", Method: http.MethodGet, To: at((*request).show)},
	{Path: Path + "/{id}/decision", Method: http.MethodPost, To: at((*request).decide)},
	{Path: Path + "/{id}/page", Method: http.MethodGet, To: at((*request).page)},
	{Path: Path + "/{id}/form", Method: http.MethodPost, To: at((*request).page)},
	{Path: router.WellKnown + "workflows/{id}/holds", Method: http.MethodPost, To: router.Endpoint[*Endpoints]{
		Serve: at((*request).hold).Serve, Fits: router.PhaseIs(PhaseHold),
	}},
}

// PhaseHold is the phase of a token that tells what holds a workflow.
const PhaseHold = "hold"

// request is one request to Endpoints.
type request struct {
	*Endpoints
	router.Responder
	who *Reader
}

func at(serve func(*request) error) router.Endpoint[*Endpoints] {
	return router.Endpoint[*Endpoints]{Serve: func(s *Endpoints, a router.Responder) error {
		err := serve(&request{Endpoints: s, Responder: a})
		if err == nil || a.R.Context().Err() != nil {
			return err
		}
		if errors.Is(err, ErrNotFound) {
			err = problem.New(unknown, "Nothing of it is known for the identity that asks.")
		}
		return router.ProblemOf(err, problem.New(problem.StoreUnavailable, "The gateway's store does not answer. Nothing was decided."))
	}}
}

// identify finds out who reads escalations.
func (q *request) identify() (err error) {
	if q.who, err = q.Read(q.R, nil); err == nil && q.who.Name == "" {
		err = problem.New(router.Unauthenticated, "Escalations are for those who may decide them, and for who asked.")
	}
	return err
}

// may reports whether the reader has the role that an escalation requires.
func (who *Reader) may(e *Escalation) bool {
	return who.Name != "" && slices.Contains(who.Roles, e.RequiredRole)
}

// see reads an escalation, if the reader may: with the required role, or as who asked (P3).
func (q *request) see() (Escalation, error) {
	id, err := router.Segment(q.Name, "escalation")
	if err != nil {
		return Escalation{}, err
	}
	e, err := q.Store.Get(q.R.Context(), id)
	if err == nil && !q.who.may(&e) && (q.who.Name == "" || q.who.Name != e.Requester) {
		err = ErrNotFound
	}
	return e, err
}

// shown is the escalation for this reader: who asked does not learn who decides.
func (q *request) shown(e Escalation) *Escalation {
	if !q.who.may(&e) {
		e.Decisions, e.LastError, e.Links.Upstream = nil, "", ""
	}
	return &e
}

func (q *request) show() error {
	if err := q.identify(); err != nil {
		return err
	}
	e, err := q.see()
	if err != nil {
		return err
	}
	return q.JSON(http.StatusOK, q.shown(e))
}

// list answers with what the reader may see: a page of all, so that it may have fewer than asked
// for, and still a next one.
func (q *request) list() error {
	if err := q.identify(); err != nil {
		return err
	}
	p, err := router.ParseParams(q.R.URL, "status", "workflow", "after", "limit")
	if err != nil {
		return err
	}
	limit, there, err := p.Number("limit")
	if err != nil {
		return err
	}
	if !there {
		limit = 50
	}
	f := Filter{Workflow: p.Get("workflow"), Status: Status(p.Get("status"))}
	if f.Status != "" && !slices.Contains(Statuses(), f.Status) {
		return router.Invalid(fmt.Sprintf("status is none of %v.", Statuses()))
	}
	found, err := q.Store.List(q.R.Context(), f, p.Get("after"), int(min(limit, maxEscalations)))
	if errors.Is(err, ErrCursor) {
		return router.Invalid("after is not where a page begins.")
	}
	if err != nil {
		return err
	}
	page := Page{Escalations: []Escalation{}, Next: found.Next}
	for _, e := range found.Escalations {
		if q.who.may(&e) || q.who.Name == e.Requester {
			page.Escalations = append(page.Escalations, *q.shown(e))
		}
	}
	return q.JSON(http.StatusOK, page)
}

const (
	// maxEscalations is the largest number that is read for a page.
	maxEscalations = 200
	// maxReason is the longest reason, in bytes.
	maxReason = 512
	// maxDecisionBody is the largest body of a decision, in bytes.
	maxDecisionBody = 16 << 10
)

// wantedDecision is the body of a decision.
type wantedDecision struct{ decision, hash, reason, id string }

// decide answers POST {id}/decision.
func (q *request) decide() error {
	body, err := q.decisionBody("application/json")
	if err != nil {
		return err
	}
	members, err := router.ReadObject(body)
	if err != nil {
		return err
	}
	var d wantedDecision
	var hashes [2]string
	for name, into := range map[string]*string{
		"decision": &d.decision, "reason": &d.reason, "escalation_id": &d.id, "request_hash": &hashes[0], "plan_hash": &hashes[1],
	} {
		if raw, there := members[name]; there && json.Unmarshal(raw, into) != nil {
			return router.Invalid(name + " is no string.")
		}
	}
	d.hash = cmp.Or(hashes[0], hashes[1])
	switch {
	case hashes[0] != "" && hashes[1] != "":
		return router.Invalid("request_hash and plan_hash cannot both be meant.")
	case d.decision != Approve && d.decision != deny:
		return router.Invalid("decision is neither approve nor deny.")
	case len(d.reason) > maxReason:
		return router.Invalid(fmt.Sprintf("reason is longer than %d bytes.", maxReason))
	}
	if q.who, err = q.Read(q.R, body); err != nil {
		return err
	}
	if q.who.Name == "" {
		return problem.New(router.Unauthenticated, "Only who is known to the gateway and has the required role can decide.")
	}
	e, err := q.see()
	if err != nil {
		return err
	}
	if d.id != "" && d.id != e.ID || d.id == "" && q.who.Signed != nil {
		// A stolen token is good for this escalation only.
		return router.Invalid("escalation_id is not the escalation of the path; where a token decides it has to be in the body.")
	}
	e, err = q.count(&e, &d)
	if err != nil {
		return err
	}
	return q.JSON(http.StatusOK, q.shown(e))
}

// decisionBody reads the body of a decision. Pages of other sites cannot send it: they get no such
// media type past the browser, and browsers say where a request comes from.
func (q *request) decisionBody(mediaType string) ([]byte, error) {
	if got, _, err := mime.ParseMediaType(q.R.Header.Get("Content-Type")); err != nil || got != mediaType {
		return nil, router.Invalid("Content-Type is not " + mediaType + ".")
	}
	site, origin := q.R.Header.Get("Sec-Fetch-Site"), q.R.Header.Get("Origin")
	if u, err := url.Parse(origin); origin != "" && (err != nil || !strings.EqualFold(u.Host, q.R.Host)) || site != "" && site != "same-origin" && site != "none" {
		return nil, refusedDecision("origin", "The request comes from another site's page.")
	}
	body, err := io.ReadAll(io.LimitReader(q.R.Body, maxDecisionBody+1))
	if err != nil {
		return nil, router.Invalid("The body could not be read to its end.")
	}
	if len(body) > maxDecisionBody {
		return nil, problem.New(problem.BodyTooLarge, "A decision has at most 16 KiB.")
	}
	return body, nil
}

func refusedDecision(reason, detail string) *problem.Problem {
	p := problem.New(decisionRefused, detail)
	p.Reason = reason
	return p
}

// count counts the decision, or says why it does not.
func (q *request) count(e *Escalation, d *wantedDecision) (Escalation, error) {
	got, err := q.Store.Decide(q.R.Context(), e.ID, Vote{
		By: q.who.Name, Roles: q.who.Roles, Approve: d.decision == Approve, Hash: d.hash, Reason: d.reason, Token: q.who.Token,
	})
	void := func(reason, detail string) error {
		p := problem.New(decisionVoid, detail)
		p.Reason, p.EscalationID = reason, e.ID
		return p
	}
	switch {
	case errors.Is(err, errRole):
		return got, refusedDecision("role", "The required role is missing.")
	case errors.Is(err, ErrOwn):
		return got, refusedDecision("own", "Who asked cannot approve.")
	case errors.Is(err, errFinal):
		return got, refusedDecision("final", "The rule allows no override.")
	case errors.Is(err, errReason):
		return got, router.Invalid("reason is missing; a denial says why.")
	case errors.Is(err, ErrDecided):
		return got, void("decided", "It was decided before, or this person has decided already.")
	case errors.Is(err, ErrExpired):
		return got, void("expired", "Nobody has decided in time, which counts as a denial.")
	case errors.Is(err, ErrHash):
		return got, void("changed", "The hash is not that of what is proposed.")
	}
	return got, err
}

// HoldMessage is what a coordinator tells the participants of its rollbacks: that an escalation holds a
// workflow, or does not any more. Its members are an API.
type HoldMessage struct {
	// EscalationID and Opened name the escalation there.
	EscalationID string    `json:"escalation_id"`
	Opened       time.Time `json:"opened"` // see EscalationID
	// State is held or lifted; what was lifted is never held again.
	State string `json:"state"`
	// Level is pause or stop, and Cause a word of the escalation's.
	Level string `json:"level"`
	Cause string `json:"cause,omitempty"` // see Level
	// Final says that nobody will lift it.
	Final bool `json:"final,omitempty"`
	// RollbackID is the rollback that it is about.
	RollbackID string `json:"rollback_id,omitempty"`
}

// hold answers POST workflows/{id}/holds: the workflow is held here as long as it is at the coordinator
// (ATD, "Interaction with HITL"). The same message changes nothing, nor does one that comes late.
func (q *request) hold() error {
	body, err := q.decisionBody("application/json")
	if err != nil {
		return err
	}
	by, workflow, err := q.Coordinator(q.R, body)
	if err != nil {
		return err
	}
	if name, err := router.Segment(q.Name, "workflow id"); err != nil || by == "" || name != workflow {
		return router.UnknownPart() // P3; or the token is for another workflow
	}
	var h HoldMessage
	if json.Unmarshal(body, &h) != nil || h.EscalationID == "" || h.Opened.IsZero() {
		return router.Invalid("The body is no JSON object with escalation_id, opened, state and level.")
	}
	o := Opening{
		Key: fmt.Sprintf("hold %q %q %d", by, h.EscalationID, h.Opened.UnixNano()), Cause: CauseOther, Workflow: workflow,
		Requester: "issuer:" + by, Final: h.Final, Notice: h.Final,
	}
	if slices.Contains(causes(), Cause(h.Cause)) {
		o.Cause = Cause(h.Cause)
	}
	if id, err := router.ParseID(h.RollbackID); err == nil {
		o.Links.Rollback = id
	}
	switch h.Level {
	case Pause.String():
		o.Level, o.Summary = Pause, "The coordinator of a rollback has paused the workflow."
	case Stop.String():
		o.Level, o.Summary = Stop, "The coordinator of a rollback has stopped the workflow."
	default:
		return router.Invalid("level is neither pause nor stop.")
	}
	var e Escalation
	switch hold(h.State) {
	case holding:
		e, err = q.Store.Open(q.R.Context(), o)
	case lifted:
		e, err = q.Store.lift(q.R.Context(), o)
	default:
		return router.Invalid("state is neither held nor lifted.")
	}
	if err != nil {
		return err
	}
	state := lifted
	if e.Held {
		state = holding
	}
	return q.JSON(http.StatusOK, map[string]string{"escalation_id": e.ID, "state": string(state)})
}

// page answers GET {id}/page, what is asked, for people; and POST {id}/form, the form in it.
// Without the key of the link, a name or the role nothing is shown (P3).
func (q *request) page() error {
	var form url.Values
	var err error
	if q.R.Method == http.MethodPost {
		body, err := q.decisionBody("application/x-www-form-urlencoded")
		if err != nil {
			return err
		}
		if form, err = url.ParseQuery(string(body)); err != nil {
			return router.Invalid("The form is not encoded correctly.")
		}
	}
	id, err := router.Segment(q.Name, "escalation")
	if err != nil {
		return err
	}
	key := q.R.URL.Query().Get("key")
	if !hmac.Equal([]byte(q.Store.LinkKey(id)), []byte(key)) {
		return ErrNotFound
	}
	if q.who, err = q.Read(q.R, []byte{}); err != nil {
		return err
	}
	if q.who.Name == "" || q.who.Signed != nil {
		return problem.New(router.Unauthenticated, "Sign in to decide.")
	}
	e, err := q.Store.Get(q.R.Context(), id)
	if err == nil && !q.who.may(&e) {
		err = ErrNotFound
	}
	if err != nil {
		return err
	}
	token := q.Store.formKey(&e, q.who.Name)
	said := ""
	if form != nil {
		if !hmac.Equal([]byte(form.Get("token")), []byte(token)) {
			said = "Nothing was decided: what is asked has changed meanwhile, or the form was not this page's. Look again."
		} else if _, err := q.count(&e, &wantedDecision{decision: form.Get("decision"), hash: e.Proposal.Hash(), reason: form.Get("reason")}); err != nil {
			var p *problem.Problem
			if !errors.As(err, &p) || p.Kind() == problem.StoreUnavailable {
				return err
			}
			said = "Nothing was decided: " + p.Detail
		} else {
			said = "It is recorded."
		}
		if e, err = q.Store.Get(q.R.Context(), id); err != nil {
			return err
		}
		token = q.Store.formKey(&e, q.who.Name)
	}
	var text strings.Builder
	if err := escalationPage.Execute(&text, struct {
		*Escalation
		Said, Token, Key, You string
		Pending               bool
	}{&e, said, token, key, q.who.Name, e.Status == Pending}); err != nil {
		return err
	}
	h := q.W.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("Referrer-Policy", "no-referrer") // the key is in the address
	q.Write(http.StatusOK, "text/html; charset=utf-8", []byte(text.String()))
	return nil
}

var escalationPage = template.Must(template.New("escalation").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Summary}}</title>
<style>body{font:1rem/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}pre{background:#8882;padding:.6em;white-space:pre-wrap;overflow-wrap:anywhere}dt{font-weight:600}dd{margin:0 0 .4em}button{font:inherit;padding:.4em 1em}textarea{font:inherit;width:100%}</style>
<h1>{{.Summary}}</h1>
{{with .Said}}<p role="status"><strong>{{.}}</strong></p>{{end}}
<dl>
<dt>Status</dt><dd>{{.Status}}</dd>
<dt>Level</dt><dd>{{.LevelName}}{{if .Held}}: new calls of the workflow wait{{end}}</dd>
<dt>Cause</dt><dd>{{.Cause}}</dd>
{{with .Workflow}}<dt>Workflow</dt><dd>{{.}}</dd>{{end}}
{{with .Caller}}<dt>Caller</dt><dd>{{.}}</dd>{{end}}
{{with .Requester}}<dt>Asked by</dt><dd>{{.}}</dd>{{end}}
{{with .Links.Checkpoint}}<dt>Checkpoint</dt><dd>{{.}}</dd>{{end}}
{{with .Links.Rollback}}<dt>Rollback</dt><dd>{{.}}</dd>{{end}}
{{with .Links.Error}}<dt>Error</dt><dd>{{.}}</dd>{{end}}
<dt>Opened</dt><dd>{{.Opened}}</dd>
{{if not .Deadline.IsZero}}<dt>Denied after</dt><dd>{{.Deadline}}</dd>{{end}}
<dt>Decided by</dt><dd>the role {{.RequiredRole}}{{if gt .Quorum 1}}, {{.Quorum}} people{{end}}</dd>
</dl>
{{if .Proposal.Kind}}<h2>An approval does this: {{.Proposal.Kind}}</h2>
<pre>{{.Proposal.Text}}</pre>{{with .Proposal.RequestHash}}<p>Request {{.}}</p>{{end}}{{with .Proposal.PlanHash}}<p>Plan {{.}}</p>{{end}}
{{else}}<p>An approval changes nothing; it says that somebody has seen to it.</p>{{end}}
{{range .Decisions}}<p>{{.At}}: {{.By}}, {{.Decision}}. {{.Reason}}</p>{{end}}
{{if .Pending}}<form method="post" action="form?key={{.Key}}">
<p>You are {{.You}}.</p>
<input type="hidden" name="token" value="{{.Token}}">
<p><label>Reason<br><textarea name="reason" rows="3" maxlength="512"></textarea></label></p>
<p><button name="decision" value="approve">Approve</button> <button name="decision" value="deny">Deny</button></p>
</form>{{end}}
</html>
`))

// Kinds are the problems of escalations, in the order in which they are documented.
var Kinds = []problem.Kind{problem.ApprovalRequired, problem.ApprovalDenied, unknown, decisionRefused, decisionVoid}

var (
	unknown = problem.Kind{
		Slug: "escalation-unknown", Status: http.StatusNotFound,
		Title:    "There is no such escalation for this reader",
		Meaning:  "No escalation has this id, or the identity that asks is neither the one that asked for the decision, nor has the role that is required. These are not told apart.",
		Caller:   "Ask with the identity that made the call, or has the role.",
		Operator: "`role`, `roles` and `role_issuers` in the `hitl` block say who has which role.",
	}
	decisionRefused = problem.Kind{
		Slug: "decision-refused", Status: http.StatusForbidden,
		Title:    "This identity cannot decide it",
		Meaning:  "`reason` says why: `role`, the required role is missing; `own`, who asked cannot approve; `final`, the rule allows no override; `origin`, the request comes from a page of another site. Nothing was decided.",
		Caller:   "Let somebody else decide.",
		Operator: "`role`, `roles` and `role_issuers` in the `hitl` block say who has which role.",
	}
	decisionVoid = problem.Kind{
		Slug: "decision-void", Status: http.StatusConflict,
		Title:    "The decision does not count",
		Meaning:  "`reason` says why: `decided`, it was decided before; `expired`, the time to decide is over; `changed`, something else is proposed than what the decision names. Nothing was changed by it.",
		Caller:   "Read the escalation again.",
		Operator: "`caddy agent-guard escalations show` shows who decided, when and why. A workflow that is still held can be asked for again with `escalations ask`.",
	}
)

// OperatorStatus maps an error of this package to an HTTP status for operators; 0 is for others.
func OperatorStatus(err error) int {
	for status, known := range map[int][]error{
		http.StatusNotFound: {ErrNotFound}, http.StatusBadRequest: {ErrCursor, errReason}, http.StatusForbidden: {ErrOwn, errRole},
		http.StatusConflict: {ErrDecided, errFinal, ErrExpired, ErrHash, errNotHeld}, http.StatusServiceUnavailable: {ErrStore},
	} {
		if slices.ContainsFunc(known, func(one error) bool { return errors.Is(err, one) }) {
			return status
		}
	}
	return 0
}
