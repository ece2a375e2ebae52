package caddymodule

import (
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execid"
)

// anonymous is the caller of requests without any credential. They share one space
// of execution ids.
const anonymous = "anonymous"

// caller says who asks: the first identity that applies. Each kind has a prefix of
// its own, so that no caller can take another kind's name.
func (h *Handler) caller(g *guard.Guard, r *http.Request, tokens *presented) (string, error) {
	if name := h.named(r, tokens.issuer()); name != "" {
		return name, nil
	}
	if credentials := present(r.Header, h.credentials); credentials != "" {
		if slices.Contains(h.credentials, "Authorization") && unstable(r.Header["Authorization"]) {
			return "", problem.New(problem.CallerUnstable,
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
			return "explicit:" + name
		}
	}
	if issuer != "" {
		return "issuer:" + issuer
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return "certificate:" + subject(r.TLS.VerifiedChains[0][0])
	}
	if id, _ := replacer(r).GetString("http.auth.user.id"); id != "" {
		return "user:" + id
	}
	return ""
}

// inEvidence is a caller as the ledger knows it. Names that a site gives by itself mean
// nothing at another guard or host (P3, ADR 0018).
func (h *Handler) inEvidence(g *guard.Guard, caller, host string) guard.CallerHash {
	if strings.HasPrefix(caller, "explicit:") || strings.HasPrefix(caller, "user:") {
		caller = "at:" + strconv.Quote(h.Name) + strconv.Quote(strings.ToLower(host)) + caller
	}
	return g.Caller(caller)
}

func keyed(g *guard.Guard, secret string) string {
	hash := g.Caller(secret)
	return hex.EncodeToString(hash[:])
}

// subject names the holder of a certificate. Workload certificates often have no
// subject but a URI.
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

// present joins the values of those header fields that the request has, so that no
// two sets of values give the same string.
func present(h http.Header, names []string) string {
	var b strings.Builder
	for _, name := range names {
		for _, value := range h[name] {
			b.WriteString(name + "=" + strconv.Itoa(len(value)) + ":" + value + ";")
		}
	}
	return b.String()
}

// unstable reports an Authorization whose value changes with every attempt, as
// signatures do.
func unstable(authorization []string) bool {
	for _, value := range authorization {
		scheme, _, _ := strings.Cut(strings.TrimSpace(value), " ")
		if !strings.EqualFold(scheme, "Basic") && !strings.EqualFold(scheme, "Bearer") {
			return true
		}
	}
	return false
}

// workflow is the id shared by the calls of one piece of work: that of a verified token,
// else Workflow-Id, else
// the trace id of traceparent, else none.
func workflow(r *http.Request, tokens *presented) string {
	if id := tokens.workflow(); id != "" {
		return id
	}
	if id := r.Header.Get("Workflow-Id"); execid.Check(id) == nil {
		return id
	}
	return traceID(r.Header.Get("Traceparent"))
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

// statedID is the id that the caller states, from the first source that has one.
func (x *exchange) statedID() (string, error) {
	for i := range x.h.ExecutionID {
		id, err := x.fromSource(&x.h.ExecutionID[i], i)
		if errors.Is(err, errNoID) {
			continue
		}
		return id, err
	}
	return "", errNoID
}

func (x *exchange) fromSource(s *IDSource, index int) (string, error) {
	var id string
	var err error
	switch {
	case s.Header != "":
		lines := x.r.Header[http.CanonicalHeaderKey(s.Header)]
		if len(lines) == 0 {
			return "", errNoID
		}
		id, err = execid.ParseHeader(lines)
	case s.Placeholder != "":
		var ok bool
		if id, ok = filled(x.r, s.Placeholder); !ok {
			return "", errNoID
		}
		err = execid.Check(id)
	default:
		if id, err = x.lookUpBody(x.h.pointers[index]); err != nil {
			return "", err
		}
		err = execid.Check(id)
	}
	if err != nil {
		return "", invalidID(err)
	}
	return id, nil
}

func invalidID(err error) error { return problem.New(problem.ExecutionIDInvalid, sentence(err)) }

// sentence makes an error's text one.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// filled fills the placeholders of text, all of which must have a value: with the
// rest alone, different callers or calls would look the same (P1, P3).
func filled(r *http.Request, text string) (string, bool) {
	value, err := replacer(r).ReplaceOrErr(text, true, true)
	return value, err == nil && value != ""
}

func replacer(r *http.Request) *caddy.Replacer {
	return r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
}
