package guard

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// guardedRequest is a guarded request with what its message says. Handler.read makes it; it never changes.
type guardedRequest struct {
	opened
	h          *Handler
	r          *http.Request
	began      time.Time
	action     *Action            // that the request, or its message, belongs to
	message    *protocol.Message  // that the body is, or that changes something in its batch; nil for any other call
	text       *body.Spool        // the body, where it may be a message; nil where it was not read for that
	took       time.Duration      // that its client has taken to send text
	unreadable error              // why text could not be read as a message
	proves     proof              // that the server speaks the protocol, where nobody has configured it
	cancels    []protocol.Message // of the body, where one cancels another request; else nil
}

// opened is the engine of a handler and its policy for tokens, as they are when a request begins.
type opened struct {
	engine     *Engine // nil where it could not be opened
	executions *execution.Guard
	policy     *TokenPolicy // nil without an identity
	release    func()       // of the reference to the engine
	closed     error        // why the engine or the policy is missing
}

func (h *Handler) open() opened {
	e, release, err := h.Open()
	if err != nil {
		return opened{closed: StoreClosed(err)}
	}
	policy, err := h.Tokens()
	if err != nil {
		err = StoreClosed(err)
	}
	return opened{e, e.Executions, policy, release, err}
}

// Request is a guarded call that has a key: who makes it, which call it is, and where it stands in its workflow.
// identify makes it; it never changes.
type Request struct {
	guardedRequest
	body   *body.Spool
	sent   time.Duration // that its client has taken to send the body
	tokens Tokens
	proven bool // the tokens are verified, or none are needed
	call   execution.Call
	facts  evidence.Call // what the ledger records of it, as far as the request says it; admission has what is added
	wait   time.Time     // when a retry stops waiting for a running execution
}

// refuseUnnamed refuses a call that has a key, or gets one from its caller's name, if nothing that stays names its
// caller: its retry would be another one's call, and run again (P1).
func (q *guardedRequest) refuseUnnamed(c *execution.Call) error {
	if q.h.warnedNames.CompareAndSwap(false, true) {
		q.h.Logger.Warn("a caller has no credential but cookies or a signature, which change by themselves: its calls with a key are refused, and those without "+
			"are never recognised as retries; write `caller cookie NAME` with the cookie of its session, or another `caller`", slog.String("guard", q.h.Name))
	}
	if c.Origin == execution.OriginMinted {
		return nil
	}
	return caller.Refused(q.r.Header)
}

// identify finds out which call q is, for the client that waits for its answer. Nothing is recorded yet. Of a call that
// is refused it returns what is known.
func (q guardedRequest) identify(waits *client) (Request, error) {
	c := Request{guardedRequest: q, body: q.text, sent: q.took}
	if q.closed != nil {
		return c, q.closed
	}
	defer func() {
		if p := recover(); p != nil { // of a host's or a matcher's: nobody gets c
			if c.body != nil {
				_ = c.body.Close()
			}
			if c.call.Attempt != nil {
				c.call.Attempt.End()
			}
			panic(p)
		}
	}()
	var err error // 1
	if c.tokens, err = q.h.VerifyTokens(q.policy, q.r, q.message, q.h.RequireECT); err != nil {
		return c, err
	}
	c.proven = true
	name, err := q.h.Callers.Of(q.r, c.tokens.Issuer(), q.executions.Keyed)
	if err != nil {
		return c, err
	}
	if q.unreadable != nil {
		return c, q.unreadable
	}
	if c.body == nil { // 2
		if c.body, c.sent, err = q.h.readBody(q.r, q.executions, nil); err != nil {
			return c, err
		}
	}
	fp, members, err := c.fingerprint()
	if err != nil {
		return c, err
	}
	if c.call, err = c.describe(name, fp, members, waits.of(&q, name)); err != nil {
		return c, err
	}
	c.wait = time.Now().Add(time.Duration(q.h.AttachWait))
	if q.policy == nil {
		return c, nil
	}
	if c.facts, err = c.begin(); err != nil {
		return c, err
	}
	q.policy.constrain(q.h, q.r, &c.tokens)
	return c, nil
}

// fingerprint hashes the request, and compares its body with the hash in the tokens. members are those that may name
// the call.
func (q *Request) fingerprint() (fp body.Fingerprint, members []body.Member, err error) {
	if err := q.tokens.checkInput(func() (ect.Hash, error) { return bodyHash(q.body) }); err != nil {
		return fp, nil, err
	}
	node, err := statedNode(q.r)
	if err != nil {
		return fp, nil, err
	}
	config := q.h.fingerprints
	if q.message != nil { // which has its own places for a key
		config.Exclude = append(q.h.rules.Exclude(q.message), config.Exclude...)
		config.Members = nil
	}
	method, target := q.h.Host.Original(q.r)
	fp, members, err = config.Read(body.Request{
		Method:          method,
		Host:            strings.ToLower(q.r.Host),
		Path:            target.EscapedPath(),
		RawQuery:        target.RawQuery,
		ContentType:     q.r.Header.Get("Content-Type"),
		ContentEncoding: q.r.Header.Get("Content-Encoding"),
		Node:            node,
		Header:          q.r.Header,
		Body:            q.body,
		Size:            q.body.Size(),
	})
	if err != nil {
		err = unkept(err)
	}
	return fp, members, err
}

// readBody reads the body of r whole, before anything is claimed (see body.Reading), into the memory that g has for
// bodies; nil where no engine is open.
func (h *Handler) readBody(
	r *http.Request, g *execution.Guard, wanted func(start []byte) bool,
) (whole *body.Spool, took time.Duration, err error) {
	how := body.Reading{Limit: h.MaxBody, Incremental: h.Host.Incremental(r.Header), OneMessage: isGRPC(r)}
	if g != nil {
		how.Budget = g.BodyMemory()
	}
	whole, took, err = body.Read(r, how, wanted)
	if err != nil && !errors.As(err, new(*problem.Problem)) {
		err = &StatusError{Status: http.StatusBadRequest, Err: fmt.Errorf("reading the request's body: %w", err)}
	}
	return whole, took, err
}

// describe names the call: its workflow, its execution id and its key. left ends when its client has left.
func (q *Request) describe(
	name string, fp body.Fingerprint, members []body.Member, left context.Context,
) (execution.Call, error) {
	tokens, policy := &q.tokens, q.action
	work, err := workflow(q.r, q.message, tokens)
	if err != nil {
		return execution.Call{}, err
	}
	method, target := q.h.Host.Original(q.r)
	c := execution.Call{
		Fingerprint: fp,
		Scope:       execution.Scope{Caller: name, Tenant: q.h.fields.Join(q.r.Header, body.Tenant), Guard: q.h.Name, Method: method, Path: target.EscapedPath()},
		Naming:      &q.h.naming,
		FreeKeys:    q.h.FreeKeys,
		Origin:      execution.OriginGiven,
		Host:        strings.ToLower(q.r.Host),
		Action:      q.action.Name,
		Workflow:    work,
		Proven:      work != "" && tokens.proven() == work,
		Deadline:    atMost(time.Duration(policy.Deadline), q.r.Header),
		KeepResult:  time.Duration(policy.RetainResult),
		KeepKey:     time.Duration(policy.RetainKey),
		ResultCap:   policy.MaxResult,
		Quota:       q.h.Quota,
	}
	id, err := q.h.statedID(q.r, q.body, members)
	if m := q.message; err == nil && m != nil && m.Protocol == protocol.MCP {
		id = m.StepOf(id)
	}
	if errors.Is(err, errNoID) {
		id, err = q.h.messageKey(q.message)
	}
	// A token is its issuer's word.
	evident := policy.Keys == KeysAdvisory && err == nil && len(tokens.Own) == 0 && !opens(q.message)
	if fromTokens := tokens.executionID(); errors.Is(err, errNoID) && fromTokens != "" {
		id, err = fromTokens, nil
	}
	if errors.Is(err, errNoID) {
		id, err = q.missingID(q.executions, &c)
	}
	if err == nil && caller.Changing(name) {
		err = q.refuseUnnamed(&c)
	}
	if err != nil {
		return c, unkept(err)
	}
	c.Scope.ID = id
	if evident || id == "" {
		if c, err = q.recognize(c, left); err != nil {
			return c, err
		}
		id = c.Scope.ID
	} else {
		c.Key = q.executions.Key(c.Scope)
	}
	if policy.OnUnknown == OnUnknownResend {
		c.Sent, err = sentAs(id, q.r.Header, q.body)
	}
	return c, err
}

// workflow is the id of the call's workflow: that of a verified token, else Workflow-Id, else the
// trace id of traceparent, else empty. An invalid Workflow-Id is refused: a call must not silently
// leave its workflow, with its rollbacks, locks and limits.
func workflow(r *http.Request, m *protocol.Message, tokens *Tokens) (string, error) {
	if id := tokens.workflow(); id != "" {
		return id, nil
	}
	lines := r.Header[HeaderWorkflowID]
	switch {
	case len(lines) > 1:
		return "", problem.New(problem.WorkflowIDInvalid, "The header Workflow-Id was sent more than once; send exactly one line, with one id.")
	case len(lines) == 0 || lines[0] == "":
		id := traceID(r.Header.Get("Traceparent"))
		if id == "" && m != nil {
			id = traceID(m.Trace)
		}
		return id, nil
	case len(lines[0]) > execution.MaxID:
		return "", problem.New(problem.WorkflowIDInvalid, "The header Workflow-Id is too long; send 1 to 255 visible ASCII characters.")
	case execution.CheckID(lines[0]) != nil:
		return "", problem.New(problem.WorkflowIDInvalid,
			"The header Workflow-Id holds a space, or another character that is not allowed; send 1 to 255 visible ASCII characters, such as a UUID.")
	}
	return lines[0], nil
}

// traceID is the trace id of a traceparent (W3C Trace Context, section 3.2), or
// empty where that is malformed. Versions after 00 may have further fields.
func traceID(traceparent string) string {
	const version, trace, parent, flags = 2, 32, 16, 2 // lengths in hexadecimal digits
	if traceparent == "" {
		return ""
	}
	fields := strings.Split(traceparent, "-")
	if len(fields) < 4 || fields[0] == "ff" || fields[0] == "00" && len(fields) != 4 {
		return ""
	}
	for i, length := range []int{version, trace, parent, flags} {
		if len(fields[i]) != length || strings.Trim(fields[i], "0123456789abcdef") != "" {
			return ""
		}
	}
	if strings.Trim(fields[1], "0") == "" || strings.Trim(fields[2], "0") == "" {
		return ""
	}
	return fields[1]
}

var errNoID = errors.New("no execution id")

func invalidID(err error) error { return problem.New(problem.ExecutionIDInvalid, sentence(err)) }

func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// statedID is the id that the caller gives the call, in a field, a placeholder, or the members that its body has;
// errNoID without.
func (h *Handler) statedID(r *http.Request, sent *body.Spool, members []body.Member) (string, error) {
	if len(h.ExecutionID) == 0 {
		return namedKey(r.Header, members)
	}
	for i := range h.ExecutionID {
		id, err := h.fromSource(i, r, sent)
		if errors.Is(err, errNoID) {
			continue
		}
		return id, err
	}
	return "", errNoID
}

// KeyPattern is the regular expression (RE2) of the names of header fields that hold a key by default, beside
// KeyFields: those that speak of idempotency, and end in that word or in one for a key. Ids of requests, traces
// and sessions are no keys: each attempt may have another one, or many calls the same.
const KeyPattern = `(?i)idempoten(cy|ce|(cy|ce|t).*(key|id|token|nonce))$`

// KeyFields are the fields with a key that were named otherwise, or before that pattern, and KeyMembers the members
// of a JSON body.
var (
	KeyFields  = [...]string{headerIdempotencyKey, HeaderExecutionID, "Paypal-Request-Id"}
	KeyMembers = [...]string{"idempotency_key", "idempotencyKey"}
)

// IsKey reports whether a header field with this name, in canonical form, holds a key by default.
func IsKey(name string) bool {
	_, rest, speaks := strings.Cut(name, "dempoten") // the letter before it may begin a word
	if !speaks || name == headerIdempotencyKey {
		return slices.Contains(KeyFields[:], name)
	}
	switch rest = strings.ToLower(rest); {
	case !strings.HasPrefix(rest, "cy") && !strings.HasPrefix(rest, "ce") && !strings.HasPrefix(rest, "t"):
		return false
	case rest == "cy", rest == "ce":
		return true
	}
	return strings.HasSuffix(rest, "key") || strings.HasSuffix(rest, "id") || strings.HasSuffix(rest, "token") || strings.HasSuffix(rest, "nonce")
}

// namedKey is the key that a call has in one of the places of the default, or in several that agree; errNoID without.
func namedKey(h http.Header, members []body.Member) (string, error) {
	const field, member = "the header field ", "the member of the body "
	id, from, kind := "", "", ""
	add := func(of, name, value string, err error) error {
		switch {
		case err != nil:
			return invalidID(fmt.Errorf("%s%s: %w", of, name, err))
		case from != "" && id != value:
			one, other := min(kind+from, of+name), max(kind+from, of+name)
			return problem.New(problem.ExecutionIDInvalid, "Different ids stand in "+one+" and in "+other+". Send one, or the same in both.")
		}
		id, from, kind = value, name, of
		return nil
	}
	for name, lines := range h {
		if len(lines) == 0 || !IsKey(name) {
			continue
		}
		value, err := execution.ParseID(lines)
		if err := add(field, name, value, err); err != nil {
			return "", err
		}
	}
	for i := range members {
		m := &members[i]
		if m.Value == "" && m.Err == nil { // it says that there is none
			continue
		}
		err := m.Err
		if err == nil {
			err = execution.CheckID(m.Value)
		}
		if err := add(member, m.Name, m.Value, err); err != nil {
			return "", err
		}
	}
	if from == "" {
		return "", errNoID
	}
	return id, nil
}

// fromSource is the id at one place of ExecutionID.
func (h *Handler) fromSource(index int, r *http.Request, sent *body.Spool) (id string, err error) {
	switch s := &h.ExecutionID[index]; {
	case s.Header != "":
		lines := r.Header[http.CanonicalHeaderKey(s.Header)]
		if len(lines) == 0 {
			return "", errNoID
		}
		id, err = execution.ParseID(lines)
	case s.Placeholder != "":
		var ok bool
		if id, ok = h.Host.Expand(r, s.Placeholder); !ok {
			return "", errNoID
		}
		err = execution.CheckID(id)
	default:
		if id, err = idAt(h.pointers[index], r.Header.Get("Content-Type"), sent); err != nil {
			return "", err
		}
		err = execution.CheckID(id)
	}
	if err != nil {
		return "", invalidID(err)
	}
	return id, nil
}

func (q *guardedRequest) missingID(g *execution.Guard, c *execution.Call) (string, error) {
	switch {
	case q.h.MissingID == MissingRequire:
		field := headerIdempotencyKey
		if i := slices.IndexFunc(q.h.ExecutionID, func(s IDSource) bool { return s.Header != "" }); i >= 0 {
			field = q.h.ExecutionID[i].Header
		}
		return "", problem.New(problem.ExecutionIDMissing, "Send one "+field+" header.")
	case q.h.MissingID == MissingDerive && !opens(q.message):
		// Two equal calls can be intended, so the id counts for a short while only.
		c.Origin = execution.OriginDerived
		c.KeepResult, c.KeepKey = time.Duration(q.h.DeriveWindow), time.Duration(q.h.DeriveWindow)
		return g.Derive(c.Scope, q.h.whole.Load().Whole(c.Fingerprint, q.r.Header)), nil
	}
	c.Origin = execution.OriginMinted
	if q.h.MissingID == MissingRecognize && !opens(q.message) && !caller.Changing(c.Scope.Caller) {
		return "", nil // it is made for a new call only
	}
	return uuid.NewString(), nil
}

// recognize looks for evidence that a call without a key, or with an advisory one, is a retry. It
// then has the key of the earlier execution, else its own. left ends when its client has left.
func (q *guardedRequest) recognize(c execution.Call, left context.Context) (execution.Call, error) {
	peer := ""
	if c.Scope.Caller == caller.Anonymous { // else strangers would be one caller (P3)
		peer = peerOf(q.r)
	}
	a, err := q.executions.Recognize(q.r.Context(), execution.Question{
		Scope: c.Scope, Fingerprint: c.Fingerprint, Whole: q.h.whole.Load().Whole(c.Fingerprint, q.r.Header), Peer: peer,
		Given: c.Origin == execution.OriginGiven,
		NewID: uuid.NewString, Count: retryCount(q.r.Header), Window: time.Duration(q.h.RecognizeWindow),
		ErrorWindow: time.Duration(q.h.ErrorWindow), Gone: left,
	})
	if err != nil {
		return c, q.storeFailed(err)
	}
	c.Attempt, c.Scope.ID, c.Key = a, a.ID, a.Key
	return c, nil
}

// peerOf is the address of the client's host.
func peerOf(r *http.Request) string {
	peer, _, _ := net.SplitHostPort(r.RemoteAddr)
	return peer
}

// retryFields are the fields in which SDKs count their attempts.
var retryFields = [...]string{"X-Stainless-Retry-Count", "Amz-Sdk-Request", "Grpc-Previous-Rpc-Attempts"}

// retryCount is the number that a call gives itself as a retry in one of retryFields; 0 without.
// Amz-Sdk-Request counts attempts from 1 on ("attempt=2; max=3").
func retryCount(h http.Header) int {
	most := 0
	for _, name := range retryFields {
		lines := h[name]
		if len(lines) == 0 {
			continue
		}
		for part, rest, more := "", lines[0], true; more; {
			part, rest, more = strings.Cut(rest, ";")
			part = strings.TrimSpace(part)
			number, attempts := strings.CutPrefix(part, "attempt=")
			if number == "" || strings.Trim(number, "0123456789") != "" { // the error of Atoi would be allocated
				continue
			}
			n, _ := strconv.Atoi(number) // the greatest int where it is greater
			if attempts {
				n--
			}
			most = max(most, n)
		}
	}
	return most
}

// sentAs is a hash of what a resend must repeat: the key as it was sent, with any quotes, and the
// body. It is zero without a key.
func sentAs(id string, header http.Header, sent *body.Spool) (sum [32]byte, err error) {
	lines := header[headerIdempotencyKey]
	if key, err := execution.ParseID(lines); err != nil || key != id {
		return sum, nil
	}
	hash := sha256.New()
	_, _ = fmt.Fprintf(hash, "%d:%s", len(lines[0]), lines[0])
	if _, err := io.Copy(hash, io.NewSectionReader(sent, 0, sent.Size())); err != nil {
		return sum, unkept(err)
	}
	hash.Sum(sum[:0])
	return sum, nil
}

// idAt reads the id at p in a JSON body. A body that is no JSON has none.
func idAt(p jsonx.Pointer, contentType string, sent *body.Spool) (string, error) {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	if !body.IsJSON(media) {
		return "", errNoID
	}
	id, found, err := body.Lookup(sent, sent.Size(), p)
	switch {
	case errors.Is(err, body.ErrNotJSON), err == nil && !found:
		return "", errNoID
	case errors.Is(err, body.ErrNotScalar), errors.Is(err, jsonx.ErrAmbiguous), errors.Is(err, body.ErrValueTooLong):
		return "", invalidID(err)
	}
	return id, err
}
