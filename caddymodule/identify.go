package caddymodule

import (
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net/http"
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
func (h *Handler) caller(g *guard.Guard, r *http.Request) (string, error) {
	if h.Caller != "" {
		if name := replacer(r).ReplaceAll(h.Caller, ""); name != "" {
			return "explicit:" + name, nil
		}
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return "certificate:" + subject(r.TLS.VerifiedChains[0][0]), nil
	}
	if id, _ := replacer(r).GetString("http.auth.user.id"); id != "" {
		return "user:" + id, nil
	}
	if credentials := present(r.Header, h.Credentials); credentials != "" {
		if unstable(r.Header["Authorization"], h.Credentials) {
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
		for _, value := range h[http.CanonicalHeaderKey(name)] {
			b.WriteString(name + "=" + strconv.Itoa(len(value)) + ":" + value + ";")
		}
	}
	return b.String()
}

// unstable reports an Authorization whose value changes with every attempt, as
// signatures do.
func unstable(authorization, credentials []string) bool {
	counts := false
	for _, name := range credentials {
		counts = counts || strings.EqualFold(name, "Authorization")
	}
	for _, value := range authorization {
		scheme, _, _ := strings.Cut(strings.TrimSpace(value), " ")
		if counts && !strings.EqualFold(scheme, "Basic") && !strings.EqualFold(scheme, "Bearer") {
			return true
		}
	}
	return false
}

// workflow is the id shared by the calls of one piece of work: Workflow-Id, else
// the trace id of traceparent, else none.
func workflow(r *http.Request) string {
	if id := r.Header.Get("Workflow-Id"); execid.Check(id) == nil {
		return id
	}
	parts := strings.Split(r.Header.Get("Traceparent"), "-")
	if len(parts) < 4 || len(parts[0]) != 2 || len(parts[1]) != 32 || strings.Trim(parts[1], "0") == "" {
		return ""
	}
	if _, err := hex.DecodeString(parts[1]); err != nil {
		return ""
	}
	return parts[1]
}

// IDSource is a place where callers name the intended effect. Exactly one member is set.
type IDSource struct {
	// A request header field. One line, 1 to 255 visible ASCII characters; a
	// quoted string and the bare characters are the same id.
	Header string `json:"header,omitempty"`

	// A placeholder. Empty is no id.
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
		if id = replacer(x.r).ReplaceAll(s.Placeholder, ""); id == "" {
			return "", errNoID
		}
		err = execid.Check(id)
	default:
		var found bool
		if id, found, err = x.lookUpBody(x.h.pointers[index]); err != nil {
			return "", err
		}
		if !found {
			return "", errNoID
		}
		err = execid.Check(id)
	}
	if err != nil {
		return "", problem.New(problem.ExecutionIDInvalid, sentence(err))
	}
	return id, nil
}

// sentence makes an error's text one.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

func replacer(r *http.Request) *caddy.Replacer {
	return r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
}
