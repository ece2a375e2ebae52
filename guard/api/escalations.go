package api

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

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// EscalationsPath is where escalations are listed; one is read at EscalationsPath + "/" + id.
const EscalationsPath = WellKnown + "escalations"

// EscalationReader is who reads or decides escalations, as the gateway has verified it.
type EscalationReader struct {
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

// Escalations answers questions about escalations, and decides them. It is safe for concurrent use.
type Escalations struct {
	// Store has the escalations.
	Store *hitl.Store
	// Read identifies who asks; body is that of a decision, else nil. The error is a *problem.Problem or an
	// *ect.Error.
	Read func(r *http.Request, body []byte) (*EscalationReader, error)
	// Coordinator identifies who tells what holds a workflow elsewhere: the issuer of a token with the
	// hash of the body, and the token's workflow; no identity is nobody who may. The error is a *problem.Problem
	// or an *ect.Error.
	Coordinator func(r *http.Request, body []byte) (identity, workflow string, err error)
}

// escalationRequest is one request to Escalations.
type escalationRequest struct {
	*Escalations
	responder
	route
	who *EscalationReader
}

// serve answers. The error is a *problem.Problem that was not sent yet, or that of the request's context.
func (s *Escalations) serve(a responder, to route) error {
	q := &escalationRequest{Escalations: s, responder: a, route: to}
	var err error
	switch to.endpoint {
	case endpointEscalationPage:
		err = q.page()
	case endpointDecision:
		err = q.decide()
	case endpointHold:
		err = q.hold()
	default:
		if q.who, err = q.Read(a.r, nil); err == nil && q.who.Name == "" {
			err = problem.New(AuthenticationRequired, "Escalations are for those who may decide them, and for who asked.")
		}
		if err == nil && to.endpoint == endpointEscalation {
			err = q.show()
		} else if err == nil {
			err = q.list()
		}
	}
	if err == nil || a.r.Context().Err() != nil {
		return err
	}
	if errors.Is(err, hitl.ErrNotFound) {
		err = problem.New(escalationUnknown, "Nothing of it is known for the identity that asks.")
	}
	return problemOf(err, problem.New(problem.StoreUnavailable,
		"The gateway's store does not answer. Nothing was decided."))
}

// may reports whether the reader has the role that an escalation requires.
func (who *EscalationReader) may(e *hitl.Escalation) bool {
	return who.Name != "" && slices.Contains(who.Roles, e.RequiredRole)
}

// see reads an escalation, if the reader may: with the required role, or as who asked (P3).
func (q *escalationRequest) see() (hitl.Escalation, error) {
	id, err := segment(q.name, "escalation")
	if err != nil {
		return hitl.Escalation{}, err
	}
	e, err := q.Store.Get(q.r.Context(), id)
	if err == nil && !q.who.may(&e) && (q.who.Name == "" || q.who.Name != e.Requester) {
		err = hitl.ErrNotFound
	}
	return e, err
}

// shown is the escalation for this reader: who asked does not learn who decides.
func (q *escalationRequest) shown(e hitl.Escalation) *hitl.Escalation {
	if !q.who.may(&e) {
		e.Decisions, e.LastError, e.Links.Upstream = nil, "", ""
	}
	return &e
}

func (q *escalationRequest) show() error {
	e, err := q.see()
	if err != nil {
		return err
	}
	return q.writeJSON(http.StatusOK, q.shown(e))
}

// list answers with what the reader may see: a page of all, so that it may have fewer than asked
// for, and still a next one.
func (q *escalationRequest) list() error {
	p, err := parseParams(q.r.URL, "status", "workflow", "after", "limit")
	if err != nil {
		return err
	}
	limit, there, err := p.number("limit")
	if err != nil {
		return err
	}
	if !there {
		limit = 50
	}
	f := hitl.Filter{Workflow: p.values.Get("workflow"), Status: hitl.Status(p.values.Get("status"))}
	if f.Status != "" && !slices.Contains(hitl.Statuses(), f.Status) {
		return badParameter(fmt.Sprintf("status is none of %v.", hitl.Statuses()))
	}
	found, err := q.Store.List(q.r.Context(), f, p.values.Get("after"), int(min(limit, maxEscalations)))
	if errors.Is(err, hitl.ErrCursor) {
		return badParameter("after is not where a page begins.")
	}
	if err != nil {
		return err
	}
	page := hitl.Page{Escalations: []hitl.Escalation{}, Next: found.Next}
	for _, e := range found.Escalations {
		if q.who.may(&e) || q.who.Name == e.Requester {
			page.Escalations = append(page.Escalations, *q.shown(e))
		}
	}
	return q.writeJSON(http.StatusOK, page)
}

const (
	// maxEscalations is the largest number that is read for a page.
	maxEscalations = 200
	// maxDecisionBody is the largest body of a decision, in bytes.
	maxDecisionBody = 16 << 10
)

// wantedDecision is the body of a decision.
type wantedDecision struct{ decision, hash, reason, id string }

// decide answers POST {id}/decision.
func (q *escalationRequest) decide() error {
	body, err := q.decisionBody("application/json")
	if err != nil {
		return err
	}
	members, err := readObject(body)
	if err != nil {
		return err
	}
	var d wantedDecision
	var hashes [2]string
	for name, into := range map[string]*string{
		"decision": &d.decision, "reason": &d.reason, "escalation_id": &d.id, "request_hash": &hashes[0], "plan_hash": &hashes[1],
	} {
		if raw, there := members[name]; there && json.Unmarshal(raw, into) != nil {
			return badParameter(name + " is no string.")
		}
	}
	d.hash = cmp.Or(hashes[0], hashes[1])
	switch {
	case hashes[0] != "" && hashes[1] != "":
		return badParameter("request_hash and plan_hash cannot both be meant.")
	case d.decision != hitl.Approve && d.decision != hitl.Deny:
		return badParameter("decision is neither approve nor deny.")
	case len(d.reason) > maxReason:
		return badParameter(fmt.Sprintf("reason is longer than %d bytes.", maxReason))
	}
	if q.who, err = q.Read(q.r, body); err != nil {
		return err
	}
	if q.who.Name == "" {
		return problem.New(AuthenticationRequired, "Only who is known to the gateway and has the required role can decide.")
	}
	e, err := q.see()
	if err != nil {
		return err
	}
	if d.id != "" && d.id != e.ID || d.id == "" && q.who.Signed != nil {
		// A stolen token is good for this escalation only.
		return badParameter("escalation_id is not the escalation of the path; where a token decides it has to be in the body.")
	}
	e, err = q.count(&e, &d)
	if err != nil {
		return err
	}
	return q.writeJSON(http.StatusOK, q.shown(e))
}

// decisionBody reads the body of a decision. Pages of other sites cannot send it: they get no such
// media type past the browser, and browsers say where a request comes from.
func (q *escalationRequest) decisionBody(mediaType string) ([]byte, error) {
	if got, _, err := mime.ParseMediaType(q.r.Header.Get("Content-Type")); err != nil || got != mediaType {
		return nil, badParameter("Content-Type is not " + mediaType + ".")
	}
	site, origin := q.r.Header.Get("Sec-Fetch-Site"), q.r.Header.Get("Origin")
	if u, err := url.Parse(origin); origin != "" && (err != nil || !strings.EqualFold(u.Host, q.r.Host)) || site != "" && site != "same-origin" && site != "none" {
		return nil, refusedDecision("origin", "The request comes from another site's page.")
	}
	body, err := io.ReadAll(io.LimitReader(q.r.Body, maxDecisionBody+1))
	if err != nil {
		return nil, badParameter("The body could not be read to its end.")
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
func (q *escalationRequest) count(e *hitl.Escalation, d *wantedDecision) (hitl.Escalation, error) {
	got, err := q.Store.Decide(q.r.Context(), e.ID, hitl.Vote{
		By: q.who.Name, Roles: q.who.Roles, Approve: d.decision == hitl.Approve, Hash: d.hash, Reason: d.reason, Token: q.who.Token,
	})
	void := func(reason, detail string) error {
		p := problem.New(decisionVoid, detail)
		p.Reason, p.EscalationID = reason, e.ID
		return p
	}
	switch {
	case errors.Is(err, hitl.ErrRole):
		return got, refusedDecision("role", "The required role is missing.")
	case errors.Is(err, hitl.ErrOwn):
		return got, refusedDecision("own", "Who asked cannot approve.")
	case errors.Is(err, hitl.ErrFinal):
		return got, refusedDecision("final", "The rule allows no override.")
	case errors.Is(err, hitl.ErrReason):
		return got, badParameter("reason is missing; a denial says why.")
	case errors.Is(err, hitl.ErrDecided):
		return got, void("decided", "It was decided before, or this person has decided already.")
	case errors.Is(err, hitl.ErrExpired):
		return got, void("expired", "Nobody has decided in time, which counts as a denial.")
	case errors.Is(err, hitl.ErrHash):
		return got, void("changed", "The hash is not that of what is proposed.")
	}
	return got, err
}

// Hold is what a coordinator tells the participants of its rollbacks: that an escalation holds a
// workflow, or does not any more. Its members are an API.
type Hold struct {
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
func (q *escalationRequest) hold() error {
	body, err := q.decisionBody("application/json")
	if err != nil {
		return err
	}
	by, workflow, err := q.Coordinator(q.r, body)
	if err != nil {
		return err
	}
	if name, err := segment(q.name, "workflow id"); err != nil || by == "" || name != workflow {
		return unknownPart() // P3; or the token is for another workflow
	}
	var h Hold
	if json.Unmarshal(body, &h) != nil || h.EscalationID == "" || h.Opened.IsZero() {
		return badParameter("The body is no JSON object with escalation_id, opened, state and level.")
	}
	o := hitl.Opening{
		Key: fmt.Sprintf("hold %q %q %d", by, h.EscalationID, h.Opened.UnixNano()), Cause: hitl.CauseOther, Workflow: workflow,
		Requester: "issuer:" + by, Final: h.Final, Notice: h.Final,
	}
	if slices.Contains(hitl.Causes(), hitl.Cause(h.Cause)) {
		o.Cause = hitl.Cause(h.Cause)
	}
	if id, err := ParseID(h.RollbackID); err == nil {
		o.Links.Rollback = id
	}
	switch h.Level {
	case hitl.Pause.String():
		o.Level, o.Summary = hitl.Pause, "The coordinator of a rollback has paused the workflow."
	case hitl.Stop.String():
		o.Level, o.Summary = hitl.Stop, "The coordinator of a rollback has stopped the workflow."
	default:
		return badParameter("level is neither pause nor stop.")
	}
	var e hitl.Escalation
	switch hitl.Hold(h.State) {
	case hitl.Holding:
		e, err = q.Store.Open(q.r.Context(), o)
	case hitl.Lifted:
		e, err = q.Store.Lift(q.r.Context(), o)
	default:
		return badParameter("state is neither held nor lifted.")
	}
	if err != nil {
		return err
	}
	state := hitl.Lifted
	if e.Held {
		state = hitl.Holding
	}
	return q.writeJSON(http.StatusOK, map[string]string{"escalation_id": e.ID, "state": string(state)})
}

// page answers GET {id}/page, what is asked, for people; and POST {id}/form, the form in it.
// Without the key of the link, a name or the role nothing is shown (P3).
func (q *escalationRequest) page() error {
	var form url.Values
	var err error
	if q.r.Method == http.MethodPost {
		body, err := q.decisionBody("application/x-www-form-urlencoded")
		if err != nil {
			return err
		}
		if form, err = url.ParseQuery(string(body)); err != nil {
			return badParameter("The form is not encoded correctly.")
		}
	}
	id, err := segment(q.name, "escalation")
	if err != nil {
		return err
	}
	key := q.r.URL.Query().Get("key")
	if !hmac.Equal([]byte(q.Store.LinkKey(id)), []byte(key)) {
		return hitl.ErrNotFound
	}
	if q.who, err = q.Read(q.r, []byte{}); err != nil {
		return err
	}
	if q.who.Name == "" || q.who.Signed != nil {
		return problem.New(AuthenticationRequired, "Sign in to decide.")
	}
	e, err := q.Store.Get(q.r.Context(), id)
	if err == nil && !q.who.may(&e) {
		err = hitl.ErrNotFound
	}
	if err != nil {
		return err
	}
	token := q.Store.FormKey(&e, q.who.Name)
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
		if e, err = q.Store.Get(q.r.Context(), id); err != nil {
			return err
		}
		token = q.Store.FormKey(&e, q.who.Name)
	}
	var text strings.Builder
	if err := escalationPage.Execute(&text, struct {
		*hitl.Escalation
		Said, Token, Key, You string
		Pending               bool
	}{&e, said, token, key, q.who.Name, e.Status == hitl.Pending}); err != nil {
		return err
	}
	h := q.w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("Referrer-Policy", "no-referrer") // the key is in the address
	q.write(http.StatusOK, "text/html; charset=utf-8", []byte(text.String()))
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
