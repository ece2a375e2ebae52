// Package caller says who asks. The name of a caller begins with its kind, so that nobody can take the name of another
// kind.
package caller

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// Anonymous is the caller of requests without a credential. They share one space of execution ids.
const Anonymous = "anonymous"

// changing begins the names of callers whose only credentials are cookies that the configuration does not name, or
// signatures. Both change by themselves, so that they name nobody (P1).
const changing = "changing:"

// Names says by what a guard names its callers. It must not be changed while it is in use.
type Names struct {
	Realm     string          // namespace of users and of what Text gives, as a quoted string
	Text      string          // text with placeholders that names the caller; empty: none does
	Cookies   []string        // cookies whose values name the caller
	Balancing func() []string // cookies that never count, since an upstream is chosen by them; nil is none
	Session   string          // header field of a session, which names a caller without a credential; empty: none does
	Fields    *body.Fields    // which header fields are credentials
	Host      interface {
		// Expand replaces the placeholders of text, and reports whether each has a value.
		Expand(r *http.Request, text string) (string, bool)
		// User is the id of the user whom the host has authenticated, or empty.
		User(r *http.Request) string
	}
}

// Of is the first identity that applies; issuer is that of the request's tokens, or empty. keyed hashes what must not
// be read in a name (P8).
func (n *Names) Of(r *http.Request, issuer string, keyed func(secret string) string) (string, error) {
	if name := n.Known(r, issuer); name != "" {
		return name, nil
	}
	if cookies := n.cookies(r.Header); cookies != "" {
		return "cookie:" + keyed(cookies), nil
	}
	if credentials := n.Fields.Join(r.Header, body.Credential); credentials != "" {
		for _, name := range signable {
			if unstable(r.Header[name]) && n.Fields.Class(name) == body.Credential {
				return "", problem.New(problem.CallerUnstable,
					"The scheme of "+name+" is neither Basic nor Bearer, and no `caller` is configured.")
			}
		}
		return "credential:" + keyed(credentials), nil
	}
	if session := r.Header.Get(n.Session); n.Session != "" && session != "" {
		return "session:" + keyed(session), nil
	}
	if what := n.changing(r.Header); what != "" {
		return changing + keyed(what), nil
	}
	return Anonymous, nil
}

// Known is the caller that the gateway itself knows, by the configuration, a token of this issuer, a certificate, or
// the host's authentication; empty if none applies.
func (n *Names) Known(r *http.Request, issuer string) string {
	if n.Text != "" {
		if name, ok := n.Host.Expand(r, n.Text); ok {
			return "explicit:" + n.Realm + ":" + name
		}
	}
	if issuer != "" {
		return "issuer:" + issuer
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return "certificate:" + authority(r.TLS.VerifiedChains) + ":" + subject(r.TLS.VerifiedChains[0][0])
	}
	if id := n.Host.User(r); id != "" {
		return "user:" + n.Realm + ":" + id
	}
	return ""
}

// Operator is the name of a caller of r in the option `operators`: the user, the value of `caller`, or the
// certificate's subject at this guard.
func (n *Names) Operator(r *http.Request, caller string) string {
	if name, ok := strings.CutPrefix(caller, "explicit:"+n.Realm+":"); ok {
		return "caller:" + name
	}
	if name, ok := strings.CutPrefix(caller, "user:"+n.Realm+":"); ok {
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

// Verified reports whether the gateway itself has verified a caller, so that it may see breakers (cascade 6.2).
// Credentials that only the upstream can check may be made up.
func Verified(name string) bool {
	switch kind, _, _ := strings.Cut(name, ":"); kind {
	case "issuer", "certificate", "user", "explicit":
		return true
	}
	return false
}

// Unnamed reports whether nothing that stays names a caller: its next attempt may have another name.
func Unnamed(name string) bool { return name == Anonymous || Changing(name) }

// Changing reports whether a caller is named by what changes by itself.
func Changing(name string) bool { return strings.HasPrefix(name, changing) }

// Refused is the refusal of a call with a key whose caller is Changing: its retry would be another one's call, and run
// again (P1).
func Refused(h http.Header) error {
	if len(h["Cookie"]) == 0 {
		return problem.New(problem.CallerUnstable, "Its only credential is a signature, and no `caller` is configured.")
	}
	return problem.New(problem.CallerUnstable,
		"Its only credential is cookies, and nothing says which of them name the caller. "+
			"Whoever runs the gateway writes `caller cookie NAME` in the block of the guard.")
}

// changing joins the credentials of a request that change by themselves, but for the cookies with which the host
// chooses an upstream; empty if there is none, or if the configuration says by which cookies callers are named.
func (n *Names) changing(header http.Header) string {
	if signed := present(header, "Signature", "Signature-Input", "Dpop"); signed != "" {
		return signed
	}
	if len(n.Cookies) > 0 || strings.Contains(n.Text, "{http.request.cookie.") {
		return ""
	}
	balancing := []string(nil)
	if n.Balancing != nil {
		balancing = n.Balancing()
	}
	for _, line := range header["Cookie"] {
		for pair := range strings.SplitSeq(line, ";") {
			name, _, _ := strings.Cut(strings.TrimSpace(pair), "=")
			if name != "" && !slices.Contains(balancing, name) {
				return present(header, "Cookie")
			}
		}
	}
	return ""
}

// cookies joins the values of the cookies that name a caller; empty without any.
func (n *Names) cookies(header http.Header) string {
	if len(n.Cookies) == 0 || len(header["Cookie"]) == 0 {
		return ""
	}
	named := http.Header{}
	for _, c := range (&http.Request{Header: header}).Cookies() {
		if slices.Contains(n.Cookies, c.Name) {
			named[c.Name] = append(named[c.Name], c.Value)
		}
	}
	return present(named, n.Cookies...)
}

// present joins the values of header fields. Different values never give the same string.
func present(h http.Header, names ...string) string {
	var b strings.Builder
	for _, name := range names {
		for _, value := range h[name] {
			b.WriteString(name + "=" + strconv.Itoa(len(value)) + ":" + value + ";")
		}
	}
	return b.String()
}

// signable are credentials that may change with every attempt, by their scheme.
var signable = []string{"Authorization", "Proxy-Authorization"}

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

// authority identifies the authority of a client's certificate by the key at the root of its chain, which outlives a
// renewed root. The subject is not enough: the server name of the connection selects the accepted authorities, but
// Host, which the client chooses, selects the site.
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

// Peer is the SPIFFE ID of the connection's verified certificate, which must have exactly one URI (X509-SVID,
// section 2).
func Peer(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	uris := r.TLS.VerifiedChains[0][0].URIs
	if len(uris) != 1 || uris[0].Scheme != "spiffe" {
		return ""
	}
	return uris[0].String()
}
