package guard

import (
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

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

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
// then has the key of the earlier execution, else its own.
func (x *Call) recognize(c *execution.Call) error {
	peer := ""
	if c.Scope.Caller == caller.Anonymous { // else strangers would be one caller (P3)
		peer = peerOf(x.r)
	}
	a, err := x.executions.Recognize(x.r.Context(), execution.Question{
		Scope: c.Scope, Fingerprint: c.Fingerprint, Whole: x.h.whole.Load().Whole(c.Fingerprint, x.r.Header), Peer: peer,
		Given: c.Origin == execution.OriginGiven,
		NewID: uuid.NewString, Count: retryCount(x.r.Header), Window: time.Duration(x.h.RecognizeWindow),
		ErrorWindow: time.Duration(x.h.ErrorWindow), Gone: x.client.gone,
	})
	if err != nil {
		return x.storeFailed(err)
	}
	c.Attempt, c.Scope.ID, c.Key, x.w.Attempt = a, a.ID, a.Key, a
	if x.message != nil && !x.message.REST {
		x.w.Message = callMessage{x}
	}
	if a.Evidence != "" {
		x.found = true // it must not run again unguarded
		x.action.Counts.Recognized(a.Evidence)
	}
	return nil
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
