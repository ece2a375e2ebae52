package guard

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// Settings say which calls a handler recognises, from whom and for how long, and what else it does with requests.
type Settings struct {
	// The guard's name: the namespace of execution ids and of users. It is part of the execution
	// key, so that keys survive every other change of the configuration. Two guards of the same
	// name are refused unless both are `shared`. Default: `default`.
	Name string `json:"name,omitempty"`

	// Where callers put the execution id, in order; the first place that has one counts. Default:
	// every header field whose name speaks of idempotency (see docs/http.md), `PayPal-Request-Id`,
	// `Execution-Id`, and the members `idempotency_key` and `idempotencyKey` of a JSON body; two of
	// these that differ are refused. A list replaces the default.
	ExecutionID []IDSource `json:"execution_id,omitempty"`

	// What happens to a call without an id. `require` refuses it (400). `mint` runs it under a new
	// id, which the answer names; its retries cannot be recognised. `derive` treats equal calls of
	// one caller within a window as one execution. `recognize` does so where there is evidence that
	// the later call is a retry. Default: `recognize`.
	MissingID MissingID `json:"missing_id,omitempty"`

	// How long a derived id counts, from the end of the execution. Default: 60s.
	DeriveWindow jsontime.Duration `json:"derive_window,omitempty"`

	// How long `recognize` finds a call after its end, or after its client has left. Default: 10m.
	RecognizeWindow jsontime.Duration `json:"recognize_window,omitempty"`

	// How long after its end a whole answer that clients retry (408, 429, 5xx) is evidence that an
	// equal call is a retry. It is as long as clients retry: afterwards an equal call is a new one.
	// Default: 60s.
	ErrorWindow jsontime.Duration `json:"error_window,omitempty"`

	// The caller, as text with placeholders like `{http.auth.user.tenant}`. Without this option,
	// and where one of its placeholders has no value, the caller is the first of these that exists:
	// the issuer of a verified token, the subject of a verified client certificate,
	// `{http.auth.user.id}`, a hash of the `caller_cookies`, a hash of the credential fields, a hash of
	// `Mcp-Session-Id` (not with `protocol` `none`), `anonymous`. A caller never gets the result of
	// another.
	Caller string `json:"caller,omitempty"`

	// The cookies whose values name the caller. Cookies change by themselves, so no other cookie does: a
	// call with a key whose only credential is such cookies is refused (400 `caller-unstable`), and one
	// without a key is a new call. Default: none.
	CallerCookies []string `json:"caller_cookies,omitempty"`

	// Header fields that are credentials beside those that look like one by their name
	// ([same-call.md](same-call.md)); with a `-` in front, such that are none. An `Authorization` or
	// `Proxy-Authorization` whose scheme is neither Basic nor Bearer is refused (400 `caller-unstable`)
	// unless one of the better identities above applies. Default: none.
	Credentials []string `json:"credentials,omitempty"`

	// Header fields that say for whom a call is, beside those of [same-call.md](same-call.md) such as
	// `Stripe-Account`; with a `-` in front, such that do not. A key counts for one caller and one such
	// customer. Default: none.
	Tenant []string `json:"tenant,omitempty"`

	// Allows `caller`, `caller_cookies`, `credentials` and `tenant` to differ from what the keys of this
	// guard in the store were recorded under, which is otherwise refused at load: retries of those calls
	// run again. Remove it after the load. Default: false.
	FreeKeys bool `json:"free_keys,omitempty"`

	// The protocol of the upstream: `mcp`, `a2a`, `jsonrpc`, `auto` (found out by header, body and
	// answers) or `none`. With one, messages are read: those that change nothing pass, and the guard's
	// own errors are errors of JSON-RPC. With `auto` a body that is no message stays what it is, and
	// messages pass only once their server has shown that it speaks MCP. Default: `auto`.
	Protocol protocol.Protocol `json:"protocol,omitempty"`

	// The members of a message's `_meta` that name the effect, in order, after those of
	// `execution_id`. Default: `idempotency-key`, `idempotency_key`, `idempotencyKey`, `execution-id`.
	MetaKeys []string `json:"meta_keys,omitempty"`

	// The arguments of tools that name the effect, in order, after the members of `_meta`. Default:
	// none.
	ArgumentKeys []string `json:"argument_keys,omitempty"`

	// Tools that change nothing, whatever their server announces. Default: none.
	ExemptTools []string `json:"exempt_tools,omitempty"`

	// Tools that change something, also where their server announces them as read-only. Default:
	// none.
	ConsequentialTools []string `json:"consequential_tools,omitempty"`

	// JSON pointers to members of the request body that differ between the attempts of one call,
	// and are ignored when two attempts are compared. Default: none.
	FingerprintExclude []string `json:"fingerprint_exclude,omitempty"`

	// Further header fields that say what a call does: one that differs makes another call, with a key (422
	// `fingerprint-mismatch`) and without. A `*` at the end of a name matches any suffix. Default: those of docs/same-call.md only.
	Compare []string `json:"compare,omitempty"`

	// Header fields that differ between the attempts of one call, and are never compared, besides those of
	// docs/same-call.md. A `*` at the end of a name matches any suffix. Default: none.
	Ignore []string `json:"ignore,omitempty"`

	// The largest request body, in bytes. Guarded requests are read completely before they are
	// forwarded; above 1 MiB the body is kept in an encrypted temporary file. Default: 32 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// How long a retry waits for the first byte of a running execution before it gets 409
	// `in-progress`. Default: 30s.
	AttachWait jsontime.Duration `json:"attach_wait,omitempty"`

	// For requests that are not guarded: the longest pause in the answer, and in a tunnel the
	// longest time without a byte in either direction; -1 for no limit. The header of the answer
	// must come within the guard's `deadline`. Default: 10m.
	IdleTimeout jsontime.Duration `json:"idle_timeout,omitempty"`

	// While the store is unavailable, forwards calls that it cannot look up or record, unguarded
	// and marked `Execution-Status: unguarded`, instead of refusing them with 503. Each retry runs
	// such a call again. If the store responds, its record decides as usual. Default: false.
	FailOpen bool `json:"fail_open,omitempty"`

	// Refuses requests without an Execution Context Token (403 `ect-invalid`), also those that
	// change nothing. It needs `trust` in the global options. Default: false.
	RequireECT bool `json:"require_ect,omitempty"`

	// What happens to requests that can have an effect and cannot be guarded: upgrades (WebSockets
	// among them), tunnels (CONNECT), and gRPC calls whose action is not `grpc unary`. `pass`
	// forwards them, marked `Execution-Status: unguarded`; `refuse` answers 403 `stream-refused`,
	// except for those that `exempt` matches. Default: `pass`.
	UnguardedStreams string `json:"unguarded_streams,omitempty"`

	// The identity of the upstream, a URI. Calls are then forwarded with a further
	// `Execution-Context` line: a token of the gateway that names the upstream in its `aud`, and
	// that the upstream's own tokens can name as their parent. Tokens of the request that are for
	// this gateway alone are not sent on. It needs `identity` in the global options. Default: no
	// token is added, and all of the request are sent on.
	UpstreamIdentity string `json:"identity,omitempty"`
}

// SetDefaults sets what s leaves out.
func (s *Settings) SetDefaults() {
	initial(&s.Name, "default")
	initial(&s.MissingID, MissingRecognize)
	initial(&s.DeriveWindow, jsontime.Duration(time.Minute))
	initial(&s.RecognizeWindow, jsontime.Duration(10*time.Minute))
	initial(&s.ErrorWindow, jsontime.Duration(time.Minute))
	initial(&s.Protocol, protocol.Auto)
	initial(&s.MaxBody, 32<<20)
	initial(&s.AttachWait, jsontime.Duration(30*time.Second))
	initial(&s.IdleTimeout, jsontime.Duration(10*time.Minute))
	initial(&s.UnguardedStreams, "pass")
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

// MissingID says how to handle a call without an execution id.
type MissingID string

// A call without an execution id is refused, runs under a new id, equal calls within a window count
// as one, or those that are retries by evidence (ADR 0070).
const (
	MissingRequire MissingID = "require"
	MissingMint    MissingID = "mint"
	MissingDerive  MissingID = "derive"

	MissingRecognize MissingID = "recognize"
)

// StreamsRefuse refuses requests that can have an effect and cannot be guarded.
const StreamsRefuse = "refuse"

// Fields is the table of header fields of s, and Naming by what its callers and tenants are named beside its defaults.
// An error names the member that is wrong.
func (s *Settings) Fields() (*body.Fields, execution.Naming, error) {
	for i, name := range s.CallerCookies {
		// A cookie's name is a token of RFC 9110, as that of a field.
		if !httpguts.ValidHeaderFieldName(name) || slices.Contains(s.CallerCookies[:i], name) {
			return nil, execution.Naming{}, fmt.Errorf("caller_cookies: %q is no name of a cookie, or is written twice", name)
		}
	}
	if s.Caller != "" && len(s.CallerCookies) > 0 {
		return nil, execution.Naming{}, errors.New("caller: a placeholder and cookies both name the caller; write one of them")
	}
	t := body.NewFields()
	credentials, err := t.Change(body.Credential, s.Credentials)
	if err != nil {
		return nil, execution.Naming{}, fmt.Errorf("credentials: %w", err)
	}
	tenant, err := t.Change(body.Tenant, s.Tenant)
	if err != nil {
		return nil, execution.Naming{}, fmt.Errorf("tenant: %w", err)
	}
	t.Set(body.Volatile, append(retryFields[:], headerRequestTimeout)...)
	t.Set(body.Operand, s.Compare...)
	t.Set(body.Volatile, s.Ignore...)
	for _, name := range KeyFieldsOf(s.ExecutionID) {
		t.Set(body.Elsewhere, name)
	}
	cookies := slices.Sorted(slices.Values(s.CallerCookies))
	return t, execution.Naming{
		Caller: strings.Join(append(cookies, s.Caller), " "), Credentials: strings.Join(credentials, " "), Tenant: strings.Join(tenant, " "),
	}, nil
}
