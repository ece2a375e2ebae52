package caddymodule

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// anonymous is the caller of requests without any credential. They share one space
// of execution ids.
const anonymous = "anonymous"

// caller is the first identity that applies. Each kind has its own prefix, so that no caller can
// take another kind's name.
func (h *Handler) caller(g *execution.Guard, r *http.Request, tokens *presented) (string, error) {
	if name := h.named(r, tokens.issuer()); name != "" {
		return name, nil
	}
	if credentials := present(r.Header, h.credentials); credentials != "" {
		if slices.Contains(h.credentials, "Authorization") && unstable(r.Header["Authorization"]) {
			return "", api.NewProblem(api.CallerUnstable,
				"The Authorization scheme is neither Basic nor Bearer, and no `caller` is configured.")
		}
		return "credential:" + keyed(g, credentials), nil
	}
	if cookies := present(r.Header, []string{"Cookie"}); cookies != "" {
		return "cookie:" + keyed(g, cookies), nil
	}
	return anonymous, nil
}

// named is the caller whom the gateway itself knows, by the configuration, a token of
// this issuer, a certificate, or Caddy's authentication; empty if it knows none.
func (h *Handler) named(r *http.Request, issuer string) string {
	if h.Caller != "" {
		if name, ok := filled(r, h.Caller); ok {
			return h.explicits + name
		}
	}
	if issuer != "" {
		return "issuer:" + issuer
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return "certificate:" + authority(r.TLS.VerifiedChains) + ":" + subject(r.TLS.VerifiedChains[0][0])
	}
	if id, _ := replacer(r).GetString("http.auth.user.id"); id != "" {
		return h.users + id
	}
	return ""
}

// setRealm sets the namespace of the guard's own names of callers: `alice` of one site's basic_auth
// is not the `alice` of another's (P3, ADR 0045).
func (h *Handler) setRealm(realm string) {
	h.explicits = "explicit:" + strconv.Quote(realm) + ":"
	h.users = "user:" + strconv.Quote(realm) + ":"
}

// authority identifies the authority of a client's certificate by the key at the root of its chain,
// which outlives a renewed root. The subject is not enough: the server name of the connection selects
// the accepted authorities, but Host, which the client chooses, selects the site.
func authority(chains [][]*x509.Certificate) string {
	var least [sha256.Size]byte
	for i, chain := range chains { // several, if authorities have signed each other
		key := sha256.Sum256(chain[len(chain)-1].RawSubjectPublicKeyInfo)
		if i == 0 || bytes.Compare(key[:], least[:]) < 0 {
			least = key
		}
	}
	return hex.EncodeToString(least[:])
}

// operatorName is a caller's name in the option `operators`: the user, the value of `caller` or the
// certificate's subject at this guard.
func (h *Handler) operatorName(r *http.Request, caller string) string {
	if name, ok := strings.CutPrefix(caller, h.explicits); ok {
		return "caller:" + name
	}
	if name, ok := strings.CutPrefix(caller, h.users); ok {
		return "user:" + name
	}
	if rest, ok := strings.CutPrefix(caller, "certificate:"); ok {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		// Otherwise an authority of another site may have issued it.
		if r.TLS == nil || !strings.EqualFold(r.TLS.ServerName, host) {
			return ""
		}
		_, name, _ := strings.Cut(rest, ":")
		return "certificate:" + name
	}
	return caller
}

func keyed(g *execution.Guard, secret string) string {
	hash := g.Caller(secret)
	return hex.EncodeToString(hash[:])
}

// subject names the holder of a certificate. Workload certificates often have just a URI.
func subject(cert *x509.Certificate) string {
	if name := cert.Subject.String(); name != "" {
		return "dn:" + name
	}
	for _, uri := range cert.URIs {
		return "uri:" + uri.String()
	}
	for _, name := range cert.DNSNames {
		return "dns:" + name
	}
	return "spki:" + string(cert.RawSubjectPublicKeyInfo)
}

// present joins the values of header fields. Different values never give the same string.
func present(h http.Header, names []string) string {
	var b strings.Builder
	for _, name := range names {
		for _, value := range h[name] {
			b.WriteString(name + "=" + strconv.Itoa(len(value)) + ":" + value + ";")
		}
	}
	return b.String()
}

// unstable reports whether an Authorization may change with every attempt, as signatures do.
func unstable(authorization []string) bool {
	for _, value := range authorization {
		scheme, _, _ := strings.Cut(strings.TrimSpace(value), " ")
		if !strings.EqualFold(scheme, "Basic") && !strings.EqualFold(scheme, "Bearer") {
			return true
		}
	}
	return false
}

// workflow is the id of the call's workflow: that of a verified token, else Workflow-Id, else the
// trace id of traceparent, else empty. An invalid Workflow-Id is refused: a call must not silently
// leave its workflow, with its rollbacks, locks and limits.
func workflow(r *http.Request, tokens *presented) (string, error) {
	if id := tokens.workflow(); id != "" {
		return id, nil
	}
	lines := r.Header[headerWorkflowID]
	switch {
	case len(lines) > 1:
		return "", api.NewProblem(api.WorkflowIDInvalid, "The header Workflow-Id was sent more than once; send exactly one line, with one id.")
	case len(lines) == 0 || lines[0] == "":
		return traceID(r.Header.Get("Traceparent")), nil
	case len(lines[0]) > execution.MaxID:
		return "", api.NewProblem(api.WorkflowIDInvalid, "The header Workflow-Id is too long; send 1 to 255 visible ASCII characters.")
	case execution.CheckID(lines[0]) != nil:
		return "", api.NewProblem(api.WorkflowIDInvalid,
			"The header Workflow-Id holds a space, or another character that is not allowed; send 1 to 255 visible ASCII characters, such as a UUID.")
	}
	return lines[0], nil
}

// traceID is the trace id of a traceparent (W3C Trace Context, section 3.2), or
// empty where that is malformed. Versions after 00 may have further fields.
func traceID(traceparent string) string {
	const version, trace, parent, flags = 2, 32, 16, 2 // lengths in hexadecimal digits
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

// IDSource is a place where callers name the intended effect. Exactly one member is set.
type IDSource struct {
	// A request header field. One line, 1 to 255 visible ASCII characters; a
	// quoted string and the bare characters are the same id.
	Header string `json:"header,omitempty"`

	// Text with placeholders. One without a value makes it no id.
	Placeholder string `json:"placeholder,omitempty"`

	// A JSON pointer (RFC 6901) into the request's JSON body, to a string or a
	// number.
	JSON string `json:"json,omitempty"`
}

// errNoID says that a source has nothing.
var errNoID = errors.New("no execution id")

func invalidID(err error) error { return api.NewProblem(api.ExecutionIDInvalid, sentence(err)) }

// sentence is an error's text with a capital letter and a full stop.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// filled replaces the placeholders of text. All must have a value, or different callers or calls
// could look the same (P1, P3).
func filled(r *http.Request, text string) (string, bool) {
	value, err := replacer(r).ReplaceOrErr(text, true, true)
	return value, err == nil && value != ""
}

func replacer(r *http.Request) *caddy.Replacer {
	return r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
}

// maxPresented is how many tokens one request may carry.
const maxPresented = 10

// presented are the verified tokens of one request.
type presented struct {
	all    []*ect.Token // as they came, with parents
	own    []*ect.Token // made by the caller: not ours, and no parents of others
	leaves []string     // the ids of those that are no parents of others
	late   error        // the refusal of expired tokens, which are only good for a recorded call
	asked  *breaker.View
}

// issuer is the caller that the tokens prove, or empty. Unverified tokens do not identify the caller
// (P3) and do not affect other tokens.
func (p *presented) issuer() string {
	for _, t := range p.own {
		if author := t.Author(); author != "" {
			return author
		}
	}
	return ""
}

// workflow is that of the tokens, or empty.
func (p *presented) workflow() string {
	for _, t := range p.all {
		if t.Workflow() != "" {
			return t.Workflow()
		}
	}
	return ""
}

// checkInput compares the body with the hash in the tokens: a token of another call is refused.
func (p *presented) checkInput(body func() (ect.Hash, error)) error {
	if !slices.ContainsFunc(p.own, func(t *ect.Token) bool { return !t.InputHash().IsZero() }) {
		return nil
	}
	sum, err := body()
	if err != nil {
		return err
	}
	for _, t := range p.own {
		if err := t.CheckInput(sum); err != nil {
			return refusedToken(err)
		}
	}
	return nil
}

// verifyTokens verifies the tokens of a request to the upstream. Without `trust` they are ignored.
func (h *Handler) verifyTokens(policy *tokenPolicy, r *http.Request) (presented, error) {
	return h.verified(policy, r, h.RequireECT)
}

// verifyQuestion verifies the tokens of a request to one of the gateway's endpoints. `require_ect`
// does not apply there.
func (h *Handler) verifyQuestion(policy *tokenPolicy, r *http.Request) (presented, error) {
	return h.verified(policy, r, false)
}

func (h *Handler) verified(policy *tokenPolicy, r *http.Request, required bool) (presented, error) {
	if policy == nil || policy.verifier == nil {
		return presented{}, nil
	}
	p, err := policy.verify(r)
	if err == nil && len(p.own) == 0 && required {
		err = &ect.Error{Code: ect.CodeMissing}
	}
	if err == nil {
		err = policy.checkReports(r.Context(), &p)
	}
	h.counts.Token(tokenResult(&p, err))
	if err != nil {
		return presented{}, refusedToken(err)
	}
	return p, nil
}

// inTime refuses expired tokens, where there is no recorded call.
func (p *presented) inTime() error {
	if p.late != nil {
		return refusedToken(p.late)
	}
	return nil
}

// tokenResult is the result of a verification for metrics; empty without tokens.
func tokenResult(p *presented, err error) string {
	var refused *ect.Error
	switch {
	case errors.As(err, &refused):
		return string(refused.Code)
	case err != nil:
		return "unavailable"
	case p.late != nil:
		return "late"
	case len(p.all) > 0:
		return "verified"
	}
	return ""
}

// executionID is the id of a call without another one: that of its token, or one made of several;
// empty without tokens.
func (p *presented) executionID() string {
	switch len(p.own) {
	case 0:
		return ""
	case 1:
		return p.own[0].ID()
	}
	ids := make([]string, 0, len(p.own))
	for _, t := range p.own {
		ids = append(ids, t.ID())
	}
	slices.Sort(ids)
	return evidence.JointID(ids)
}

// peer is the SPIFFE ID of the connection's verified certificate, which then has exactly one URI
// (X509-SVID, section 2).
func peer(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	uris := r.TLS.VerifiedChains[0][0].URIs
	if len(uris) != 1 || uris[0].Scheme != "spiffe" {
		return ""
	}
	return uris[0].String()
}

// refusedToken is the problem of a token that was not accepted.
func refusedToken(err error) error {
	var refused *ect.Error
	if !errors.As(err, &refused) {
		p := api.NewProblem(api.ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.")
		p.Cause = err
		return p
	}
	p := api.NewProblem(api.ECTInvalid, refused.Detail())
	p.Status, p.Reason = refused.Status(), string(refused.Code)
	return p
}

func replayedToken() error { return refusedToken(&ect.Error{Code: ect.CodeReplayed}) }

// needsTokens reports whether a request has tokens to verify, or lacks required ones.
func (h *Handler) needsTokens(r *http.Request) bool {
	return h.app.Trust != nil && (h.RequireECT || len(r.Header[ect.FieldName]) > 0)
}

// verifySafe verifies the tokens of a safe request. The use of such tokens is kept in memory; only at
// level L3 they are recorded before the request goes on.
func (h *Handler) verifySafe(r *http.Request) error {
	// Tokens that another guard has verified would count as used twice.
	if !h.needsTokens(r) || r.Context().Value(guardedBy{h.Name}) != nil || caddyhttp.GetVar(r.Context(), tokensVerified) != nil {
		return nil
	}
	policy, err := h.app.tokenPolicy()
	if err != nil {
		return storeClosed(err)
	}
	if policy.ledgerFirst { // it writes, and the store must not close meanwhile
		e, err := h.app.acquire()
		if err != nil {
			return storeClosed(err)
		}
		defer func() { _ = e.release() }() // closing the store logs its own errors
	}
	p, err := h.verifyTokens(policy, r)
	if err != nil {
		return err
	}
	if err := h.checkUnguardedInput(&p, r); err != nil {
		return err
	}
	if err := policy.spend(&p, r); err != nil {
		return err
	}
	if !policy.ledgerFirst {
		policy.evidence.Seen(p.all)
	}
	caddyhttp.SetVar(r.Context(), tokensVerified, p.issuer())
	policy.constrain(r, &p)
	return nil
}

// verifiedSafe is the verified caller of a safe request, after verifySafe; empty if it is unknown.
func (h *Handler) verifiedSafe(r *http.Request) string {
	issuer, _ := caddyhttp.GetVar(r.Context(), tokensVerified).(string)
	return h.named(r, issuer)
}

// tokensVerified is a request variable: the issuer of the tokens that verifySafe has verified.
const tokensVerified = "agent_guard.tokens_verified"

// checkUnguardedInput compares the body of an unguarded request with the hash in its tokens. Such a
// body is read before the request is forwarded only if there is one.
func (h *Handler) checkUnguardedInput(p *presented, r *http.Request) error {
	return p.checkInput(func() (ect.Hash, error) {
		if r.ContentLength == 0 {
			return ect.Sum(nil), nil
		}
		x := &call{h: h, r: r}
		if err := x.readBody(); err != nil {
			return ect.Hash{}, err
		}
		context.AfterFunc(r.Context(), func() { _ = x.body.Close() })
		x.giveBack()
		r.ContentLength, r.TransferEncoding = x.body.Size(), nil
		r.Header.Del("Expect") // the body is here
		return x.bodyHash()
	})
}

// storeClosed is the problem of a store that cannot be opened.
func storeClosed(err error) error {
	p := api.NewProblem(api.StoreUnavailable, "The gateway's store cannot be opened.")
	p.Cause = err
	return p
}
