// Package api answers the gateway's own requests: the well-known paths of the ledger, of
// workflows and of agents' errors, and the paths on which agents ask for rollbacks (cascade
// 4.3; ATD and AERR, "Rollback Protocol"). It also lists every kind of problem that the
// gateway answers with.
//
// Heads and proofs have no content: every caller that the gateway can identify may read
// them. Entries, workflows, checkpoints and rollbacks are for those who took part (ADR
// 0023, 0024). Everybody else gets the same answer for what is unknown and what belongs to
// others (P3).
package api

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// WellKnown begins all paths but those of the older drafts.
const WellKnown = "/.well-known/cascade/"

// Paths that other packages use. A rollback is read at RollbackPath + "/" + id.
const (
	RollbackPath     = WellKnown + "rollback"
	ATDRollbackPath  = "/.well-known/atd/rollback"
	AERRRollbackPath = "/aerr/rollback"
	PreparePath      = RollbackPath + "/prepare"
)

const entriesPath = WellKnown + "ledger/entries"

// endpoint says which resource a path names.
type endpoint uint8

const (
	endpointHead endpoint = iota + 1
	endpointProof
	endpointConsistency
	endpointEntries
	endpointEntry
	endpointWorkflow
	endpointErrors
	endpointWorkflowTokens
	endpointCompleteWorkflow
	endpointCheckpoint
	endpointAskRollback
	endpointPrepareRollback
	endpointRollback
	endpointPolicy
	endpointKeys
	endpointHealth
	endpointCircuits
	endpointExecutions
	endpointProblems
	endpointPlanSchema
	endpointCascades
	endpointCascade
	endpointEscalations
	endpointEscalation
	endpointDecision
	endpointEscalationPage
	endpointHold
)

// resource is what a path of the gateway's own names.
type resource struct {
	endpoint endpoint
	// dialect is the draft that defines the form of a rollback request.
	dialect ect.Vocabulary
}

// routes are the paths of sites.
var routes = []Route[resource]{
	{WellKnown + "policy", http.MethodGet, resource{endpoint: endpointPolicy}},
	{WellKnown + "jwks", http.MethodGet, resource{endpoint: endpointKeys}},
	{WellKnown + "health", http.MethodGet, resource{endpoint: endpointHealth}},
	{planSchemaPath, http.MethodGet, resource{endpoint: endpointPlanSchema}},
	{problem.BasePath + "{slug...}", http.MethodGet, resource{endpoint: endpointProblems}},
	{problem.ExecutionsPath + "{id...}", http.MethodGet, resource{endpoint: endpointExecutions}},

	{WellKnown + "circuits", http.MethodGet, resource{endpoint: endpointCircuits}},
	{"/.well-known/aerr/circuits", http.MethodGet, resource{endpoint: endpointCircuits}},
	{"/aerr/circuits", http.MethodGet, resource{endpoint: endpointCircuits}},

	{cascadesPath, http.MethodGet, resource{endpoint: endpointCascades}},
	{cascadesPath + "/{id}", http.MethodGet, resource{endpoint: endpointCascade}},

	{WellKnown + "ledger/head", http.MethodGet, resource{endpoint: endpointHead}},
	{WellKnown + "ledger/proof", http.MethodGet, resource{endpoint: endpointProof}},
	{WellKnown + "ledger/consistency", http.MethodGet, resource{endpoint: endpointConsistency}},
	{entriesPath, http.MethodGet, resource{endpoint: endpointEntries}},
	{entriesPath + "/{index}", http.MethodGet, resource{endpoint: endpointEntry}},
	{WellKnown + "workflows/{id}", http.MethodGet + ", " + http.MethodPut, resource{endpoint: endpointWorkflow}},
	{WellKnown + "workflows/{id}/tokens", http.MethodGet, resource{endpoint: endpointWorkflowTokens}},
	{WellKnown + "workflows/{id}/complete", http.MethodPost, resource{endpoint: endpointCompleteWorkflow}},
	{WellKnown + "workflows/{id}/holds", http.MethodPost, resource{endpoint: endpointHold}},
	{WellKnown + "checkpoints/{id}", http.MethodGet, resource{endpoint: endpointCheckpoint}},
	{WellKnown + "errors", http.MethodPost, resource{endpoint: endpointErrors}},

	{EscalationsPath, http.MethodGet, resource{endpoint: endpointEscalations}},
	{EscalationsPath + "/{id}", http.MethodGet, resource{endpoint: endpointEscalation}},
	{EscalationsPath + "/{id}/decision", http.MethodPost, resource{endpoint: endpointDecision}},
	{EscalationsPath + "/{id}/page", http.MethodGet, resource{endpoint: endpointEscalationPage}},
	{EscalationsPath + "/{id}/form", http.MethodPost, resource{endpoint: endpointEscalationPage}},

	{RollbackPath, http.MethodPost, resource{endpointAskRollback, ect.Cascade}},
	{PreparePath, http.MethodPost, resource{endpointPrepareRollback, ect.Cascade}},
	{RollbackPath + "/{id}", http.MethodGet, resource{endpointRollback, ect.Cascade}},
	{ATDRollbackPath, http.MethodPost, resource{endpointAskRollback, ect.ATD}},
	{AERRRollbackPath, http.MethodPost, resource{endpointAskRollback, ect.AERR}},
	{"/.well-known/aerr/rollback", http.MethodPost, resource{endpointAskRollback, ect.AERR}},
}

// Route is a row of a table of the gateway's own paths (ADR 0063). The table of this package
// has those of sites; the admin API has another one, since its listener is another one.
type Route[T any] struct {
	// Path is compared segment by segment after percent-decoding. {name} matches any
	// segment that is not empty, {name...} at the end the rest of the path.
	Path string
	// Method is GET, which includes HEAD, or POST, or several with a comma and a space between them.
	Method string
	// To is the resource or the handler.
	To T
}

// Match returns the first route that matches a percent-encoded path, and its name, which is
// still encoded: a slash in a name is written as %2F. The route is nil if none matches.
func Match[T any](table []Route[T], path string) (to *Route[T], name string) {
	for i := range table {
		if name, ok := matchPath(table[i].Path, path); ok {
			return &table[i], name
		}
	}
	return nil, ""
}

func matchPath(pattern, path string) (name string, ok bool) {
	for {
		if strings.HasSuffix(pattern, "...}") && !strings.Contains(pattern, "/") {
			return path, true
		}
		want, next, more := strings.Cut(pattern, "/")
		segment, rest, longer := strings.Cut(path, "/")
		switch {
		case more != longer:
			return "", false
		case strings.HasPrefix(want, "{"):
			if name = segment; name == "" {
				return "", false
			}
		case want != segment:
			if plain, err := url.PathUnescape(segment); err != nil || plain != want {
				return "", false
			}
		}
		if !more {
			return name, true
		}
		pattern, path = next, rest
	}
}

// Allows reports whether the route accepts an HTTP method.
func (to *Route[T]) Allows(method string) bool {
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return slices.Contains(strings.Split(to.Method, ", "), method)
}

// route is a parsed path.
type route struct {
	row *Route[resource]
	resource
	name string // the variable part of the path, still percent-encoded
}

// parseRoute parses the path of a request.
func parseRoute(u *url.URL) (to route, ok bool) {
	if !Owns(u.Path) {
		return route{}, false // a call to guard
	}
	found, name := Match(routes, u.EscapedPath())
	if found == nil {
		return route{}, false
	}
	return route{found, found.To, name}, true
}

func (t route) rollback() bool {
	switch t.endpoint {
	case endpointAskRollback, endpointPrepareRollback, endpointRollback:
		return true
	}
	return false
}

// ledger reports whether a Ledger answers the path.
func (t route) ledger() bool { return t.endpoint <= endpointCheckpoint }

// allowed reports whether the path accepts the request's method; if not, it answers.
func (t route) allowed(w http.ResponseWriter, r *http.Request) bool {
	if t.row.Allows(r.Method) {
		return true
	}
	allow := t.row.Method
	if rest, gets := strings.CutPrefix(allow, http.MethodGet); gets {
		allow = http.MethodGet + ", " + http.MethodHead + rest
	}
	w.Header().Set("Allow", allow)
	w.WriteHeader(http.StatusMethodNotAllowed)
	return false
}

// HandlesRollback reports whether Rollbacks answer the request's path.
func HandlesRollback(r *http.Request) bool {
	to, ok := parseRoute(r.URL)
	return ok && to.rollback()
}

// FitsPhase reports whether a token may be presented with a request that names its phase: what it was
// made for is that endpoint, and that checkpoint. Which phase of a rollback the body asks for is
// compared by Rollbacks.
func FitsPhase(r *http.Request, phase string, ext ect.Ext) bool {
	to, ok := parseRoute(r.URL)
	if !ok {
		return false
	}
	switch to.endpoint {
	case endpointPrepareRollback:
		return phase != string(rollback.PhaseExecute)
	case endpointAskRollback:
		return phase == string(rollback.PhaseExecute) || phase == string(rollback.PhaseDry)
	case endpointRollback:
		return phase == evidence.PhaseStatus
	case endpointCheckpoint:
		name, err := segment(to.name, "checkpoint")
		return err == nil && phase == evidence.PhaseCheckpoint && name == evidence.NamedCheckpoint(ext)
	case endpointWorkflowTokens, endpointCircuits:
		return phase == evidence.PhaseRead
	case endpointHold:
		return phase == evidence.PhaseHold
	}
	return false
}

// RollbackURL returns the path at which a rollback is read.
func RollbackURL(id string) string { return RollbackPath + "/" + url.PathEscape(id) }

// entryURL returns the path at which an entry is read.
func entryURL(wid, id string) string {
	return entriesPath + "?" + url.Values{"jti": {id}, "wid": {wid}}.Encode()
}

// responder writes the answer to one request.
type responder struct {
	w http.ResponseWriter
	r *http.Request
}

func (a *responder) writeJSON(status int, doc any) error {
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	a.write(status, "application/json", append(body, '\n'))
	return nil
}

// The media types of pictures, and of a stream of changes.
const (
	mediaDOT    = "text/vnd.graphviz"
	mediaSVG    = "image/svg+xml"
	mediaEvents = "text/event-stream"
)

// writeRollback answers with a rollback, also as a picture where a GET prefers that.
func (a *responder) writeRollback(status int, doc *rollback.Rollback) error {
	if a.r.Method == http.MethodPost {
		return a.writeJSON(status, doc)
	}
	a.w.Header().Set("Vary", "Accept")
	if a.writePicture(status, preferred(a.r, "application/json", mediaDOT, mediaSVG), func() *drawing.Drawing { return Drawing(doc) }) {
		return nil
	}
	return a.writeJSON(status, doc)
}

// writePicture answers with a picture, if the form is one.
func (a *responder) writePicture(status int, form string, draw func() *drawing.Drawing) bool {
	switch form {
	case mediaDOT:
		a.write(status, mediaDOT+"; charset=utf-8", draw().DOT())
	case mediaSVG:
		// Opened by itself in a browser it is a document of the site's origin.
		a.w.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
		a.write(status, mediaSVG, draw().SVG())
	default:
		return false
	}
	return true
}

// maxRanges bounds the members of Accept that are read.
const maxRanges = 64

// preferred is the offered media type that a request accepts with the highest quality: of several
// the one that it names more exactly, then the first. It is the first one too if the request
// accepts none: an answer in another form is of more use than none (RFC 9110, 12.5.1).
func preferred(r *http.Request, offered ...string) string {
	ranges := strings.SplitN(strings.Join(r.Header.Values("Accept"), ","), ",", maxRanges)
	best, quality, exact := offered[0], 0.0, 0
	for _, one := range offered {
		q, how := 0.0, 0
		major, _, _ := strings.Cut(one, "/")
		for _, text := range ranges {
			accepted, params, err := mime.ParseMediaType(text)
			specific := 1 + slices.Index([]string{"*/*", major + "/*", one}, accepted)
			if err != nil || specific <= how {
				continue
			}
			how, q = specific, 1
			if text, ok := params["q"]; ok {
				if q, err = strconv.ParseFloat(text, 64); err != nil || !(q >= 0 && q <= 1) {
					q = 0
				}
			}
		}
		if q > quality || q == quality && q > 0 && how > exact {
			best, quality, exact = one, q, how
		}
	}
	return best
}

// write answers. Caches must not keep the answer, and other sites must not frame it (P3).
func (a *responder) write(status int, contentType string, body []byte) {
	h := a.w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	protect(h)
	a.w.WriteHeader(status)
	if a.r.Method != http.MethodHead {
		_, _ = a.w.Write(body) // the client may be gone
	}
}

// Respond answers with a body that is the same for all readers. cache is the value of
// Cache-Control; empty for none.
func Respond(w http.ResponseWriter, status int, contentType, cache string, body []byte) {
	w.Header().Set("Content-Type", contentType)
	if cache != "" {
		w.Header().Set("Cache-Control", cache)
	}
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}

// protect keeps the answer to one caller out of caches and out of other sites' pages.
func protect(h http.Header) {
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// until returns a context that ends after d, with ctx or with exit.
func until(ctx, exit context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(exit, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// maxDependants is the largest number of dependants that a problem lists.
const maxDependants = 20

// unknownPart is the one answer for what is unknown and what belongs to others (C-6.1-c,
// P3).
func unknownPart() *problem.Problem {
	return problem.New(notInWorkflow, "Nothing of it is known for the identity that asks.")
}

func badParameter(detail string) error { return problem.New(ParameterInvalid, detail) }

func refused(code ect.Code) error { return &ect.Error{Code: code} }

// refusedFor refuses a token with a detail of its own.
func refusedFor(code ect.Code, detail string) *problem.Problem {
	p := problem.New(problem.ECTInvalid, detail)
	p.Status, p.Reason = (&ect.Error{Code: code}).Status(), string(code)
	return p
}

// problemOf maps an error to a problem; otherwise is the problem for unknown errors.
func problemOf(err error, otherwise *problem.Problem) *problem.Problem {
	var known *problem.Problem
	if errors.As(err, &known) {
		return known
	}
	var refusal *ect.Error
	if errors.As(err, &refusal) {
		p := problem.New(problem.ECTInvalid, refusal.Detail())
		p.Status, p.Reason, p.Cause = refusal.Status(), string(refusal.Code), refusal.Unwrap()
		return p
	}
	var conflict *rollback.ConflictError
	var depended *rollback.DependedOnError
	var scope *rollback.ScopeError
	var planned *rollback.PlanChangedError
	var large *rollback.TooManyError
	var cycle *rollback.CycleError
	var wrong *plan.Error
	switch {
	case errors.As(err, &wrong):
		p := problem.New(planInvalid, fmt.Sprintf("It has %d problems, which the member problems lists.", len(wrong.Problems)+wrong.More))
		p.Problems, p.More = wrong.Problems, wrong.More
		return p
	case errors.Is(err, plan.ErrExists):
		return problem.New(planExists, "Name the version that is replaced in If-Match.")
	case errors.Is(err, plan.ErrChanged):
		return problem.New(planReplaced, "Read it, and decide anew.")
	case errors.Is(err, plan.ErrBegun):
		return problem.New(planInForce, "The workflow stays with the version under which its first call began.")
	case errors.Is(err, plan.ErrFull):
		return problem.New(problem.QuotaExceeded, "As many plans are kept as may be.")
	case errors.Is(err, rollback.ErrNotInWorkflow):
		return unknownPart()
	case errors.Is(err, rollback.ErrUnnamed):
		return refusedFor(ect.CodeParents, "The token is not bound to the checkpoint: par has neither that, nor its action, nor an error that follows from it, which AERR requires; nor does it say cascade.checkpoint_id, or inp_hash of the body.")
	case errors.Is(err, rollback.ErrMismatch):
		return problem.New(rollbackMismatch, "What is recorded under this id is another rollback.")
	case errors.Is(err, rollback.ErrCheckpointUnknown):
		return problem.New(checkpointUnknown, "No checkpoint has this id.")
	case errors.Is(err, checkpoint.ErrTampered):
		p := problem.New(checkpointTampered, "What is kept of the checkpoint is not what was recorded.")
		p.Cause = err // for the operator's log
		return p
	case errors.Is(err, checkpoint.ErrExpired):
		return problem.New(checkpointExpired, "The time for which it was kept is over.")
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
	case errors.Is(err, rollback.ErrInvalid):
		return problem.New(ParameterInvalid, "The request for a rollback breaks a rule.")
	case errors.Is(err, rollback.ErrStopping):
		return problem.New(problem.ShuttingDown, "Nothing was begun.")
	}
	otherwise.Cause = err
	return otherwise
}

// OperatorStatus maps an error to an HTTP status for operators. Unlike callers (P3), they
// may learn that nothing is recorded under a name. It is 0 for unknown errors.
func OperatorStatus(err error) int {
	is := func(known ...error) bool {
		return slices.ContainsFunc(known, func(one error) bool { return errors.Is(err, one) })
	}
	switch {
	case is(execution.ErrUnknown, rollback.ErrUnknown, hitl.ErrNotFound):
		return http.StatusNotFound
	case is(execution.ErrAmbiguous, execution.ErrKeyForm, execution.ErrResolution, execution.ErrAnswerTooLarge,
		execution.ErrCursor, hitl.ErrCursor, rollback.ErrCursor, hitl.ErrReason):
		return http.StatusBadRequest
	case is(hitl.ErrOwn, hitl.ErrRole):
		return http.StatusForbidden
	case errors.As(err, new(*execution.QuotaError)), is(execution.ErrNotInDoubt, execution.ErrTaken, hitl.ErrDecided, hitl.ErrFinal, hitl.ErrExpired, hitl.ErrHash, hitl.ErrNotHeld):
		return http.StatusConflict
	case is(execution.ErrStore, hitl.ErrStore, plan.ErrStore, store.ErrClosed, store.ErrUnhealthy):
		return http.StatusServiceUnavailable
	}
	return problemOf(err, new(problem.Problem)).Kind().Status
}

func urn(id string) string { return "urn:uuid:" + id }

const (
	// maxQuery is the longest query string, in bytes.
	maxQuery = 4 << 10
	// LongestQuestion is the longest time that a request waits for an entry or a
	// checkpoint.
	LongestQuestion = 60 * time.Second
	// badQuery is the detail for a query that cannot be decoded.
	badQuery = "The query is not percent-encoded correctly."
)

// params are the query parameters of a request.
type params struct{ values url.Values }

// parseParams parses a query in which each of the names may occur once. Other parameters
// are ignored.
func parseParams(u *url.URL, names ...string) (params, error) {
	if len(u.RawQuery) > maxQuery {
		return params{}, badParameter("The query is longer than 4096 bytes.")
	}
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return params{}, badParameter(badQuery)
	}
	for _, name := range names {
		if len(values[name]) > 1 {
			return params{}, badParameter(name + " stands more than once.")
		}
	}
	return params{values}, nil
}

// number reads a parameter that is a size or an index, and reports whether it is present.
func (p params) number(name string) (n int64, there bool, err error) {
	if !p.values.Has(name) {
		return 0, false, nil
	}
	n, ok := parseNumber(p.values.Get(name))
	if !ok {
		return 0, true, badParameter(name + " is not a whole number from 0 on, without a sign or leading zeros.")
	}
	return n, true, nil
}

// required reads a number that must be present.
func (p params) required(name string) (int64, error) {
	n, there, err := p.number(name)
	if err == nil && !there {
		err = badParameter(name + " is missing.")
	}
	return n, err
}

// parseNumber parses a decimal number of at most 18 digits without leading zeros or sign.
func parseNumber(text string) (int64, bool) {
	if len(text) == 0 || len(text) > 18 || len(text) > 1 && text[0] == '0' {
		return 0, false
	}
	if strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// wait reads how long a request waits.
func (p params) wait() (time.Duration, error) {
	if !p.values.Has("wait") {
		return 0, nil
	}
	return parseWait(p.values.Get("wait"))
}

// parseWait parses a duration, or a number of seconds. Longer times are cut to LongestQuestion.
func parseWait(text string) (time.Duration, error) {
	wait, err := time.ParseDuration(text)
	if seconds, notSeconds := strconv.ParseUint(text, 10, 64); notSeconds == nil {
		wait, err = time.Duration(min(seconds, uint64(LongestQuestion/time.Second)))*time.Second, nil
	}
	if err != nil || wait < 0 {
		return 0, badParameter("wait is neither a duration, like 30s, nor a number of seconds.")
	}
	return min(wait, LongestQuestion), nil
}

// name reads a parameter that is an id, and reports whether it is present.
func (p params) name(param string) (id string, there bool, err error) {
	if !p.values.Has(param) {
		return "", false, nil
	}
	id, err = parseName(p.values.Get(param), param)
	return id, true, err
}

// segment decodes an id from the last segment of a path.
func segment(escaped, what string) (string, error) {
	name, err := url.PathUnescape(escaped)
	if err != nil {
		return "", badParameter("The " + what + " is not percent-encoded correctly.")
	}
	return parseName(name, what)
}

// parseName checks the id of a token or a workflow, and converts UUIDs to lower case.
func parseName(id, what string) (string, error) {
	if id == "" || len(id) > ledger.MaxName || !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl) {
		return "", badParameter(what + " is not an id: 1 to 256 bytes without control characters.")
	}
	return evidence.Canonical(id), nil
}
