package body

import (
	"crypto/sha256"
	"encoding/binary"
	"hash/maphash"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/net/http/httpguts"
)

// Class says what a header field is where two requests are compared.
type Class uint8

// The classes. A field that the table does not name is Content, unless its name says that it is a Credential or a
// Tenant; see words.
const (
	// Content: compared where a call without a key may be a retry. With a key it is not compared.
	Content Class = iota
	// Operand: says what is to be done, as method and path do. Always compared.
	Operand
	// Volatile: differs between the attempts of one call, or says nothing of its effect. Never compared.
	Volatile
	// Tenant: names who the call is for. It belongs to the key, beside the caller.
	Tenant
	// Credential: names the caller, and is not compared.
	Credential
	// Elsewhere: compared, or read, by other means than its value, such as a digest of the body.
	Elsewhere
)

// alike are header fields of one class that have something in common.
type alike struct {
	Class Class
	// About says what they have in common, as docs/same-call.md shows it.
	About string
	// Names are in lower case and separated by white space. A "*" at the end matches any suffix, which a
	// name without "*" comes before.
	Names string
}

// known is the table of all header fields that are treated in another way than Content.
var known = []alike{
	{Operand, "WebDAV, CalDAV (RFC 4918, 3253, 3648, 4437, 6638)", `
		destination overwrite depth lock-token if timeout label position ordering-type redirect-ref
		apply-to-redirect-ref translate brief`},
	{Operand, "conditions (RFC 9110)", `
		if-*`},
	{Operand, "parts of a resource, uploads that are resumed", `
		range content-range upload-* tus-* x-upload-content-* x-goog-upload-* slug`},
	{Operand, "another method or path than the request line's", `
		x-http-method-override x-http-method x-method-override x-original-method x-original-url x-rewrite-url`},
	{Operand, "Amazon S3 and other AWS services", `
		x-amz-copy-source x-amz-copy-source-* x-amz-rename-source x-amz-rename-source-* x-amz-metadata-directive
		x-amz-tagging-directive x-amz-meta-* x-amz-write-offset-bytes x-amz-bypass-governance-retention x-amz-target
		x-amz-invocation-type x-amz-client-context`},
	{Operand, "Google Cloud Storage", `
		x-goog-copy-source x-goog-copy-source-* x-goog-metadata-directive x-goog-meta-* x-goog-if-*`},
	{Operand, "Azure Storage and Cosmos DB", `
		x-ms-copy-source x-ms-copy-action x-ms-source-* x-ms-rename-source x-ms-range x-ms-if-* x-ms-lease-*
		x-ms-proposed-lease-id x-ms-write x-ms-page-write x-ms-blob-* x-ms-meta-* x-ms-documentdb-*`},
	{Operand, "other object stores", `
		x-copy-from x-copy-from-account x-object-manifest x-cos-copy-source x-oss-copy-source x-obs-copy-source
		x-bz-file-name x-bz-part-number dropbox-api-arg`},
	{Operand, "operations and how to do them", `
		soapaction prefer ce-*`},

	{Volatile, "who sends, and what is wanted as an answer", `
		user-agent x-user-agent date accept accept-* cache-control pragma expect priority referer max-forwards
		early-data upgrade-insecure-requests save-data dnt purpose sec-ch-* sec-fetch-* sec-gpc sec-purpose
		device-memory downlink dpr rtt viewport-width`},
	{Volatile, "cookies, tokens against forgery", `
		cookie cookie2 x-csrf-token x-csrftoken x-xsrf-token csrf-token`},
	{Volatile, "ids of requests", `
		x-request-id request-id x-correlation-id correlation-id x-client-request-id client-request-id
		x-ms-client-request-id x-ms-correlation-request-id x-amz-request-id x-amzn-requestid x-goog-request-id`},
	{Volatile, "traces", `
		traceparent tracestate baggage ce-traceparent ce-tracestate correlation-context request-context b3 x-b3-*
		x-trace-id x-span-id x-cloud-trace-context x-amzn-trace-id x-datadog-* sentry-trace uber-trace-id uberctx-*
		x-ot-span-context ot-tracer-* elastic-apm-traceparent newrelic x-newrelic-* x-instana-* grpc-trace-bin
		grpc-tags-bin`},
	{Volatile, "retry counters, time limits, telemetry of SDKs", `
		x-stainless-* amz-sdk-invocation-id amz-sdk-request amz-sdk-retry x-amz-user-agent x-goog-api-client
		x-stripe-client-user-agent x-stripe-client-telemetry x-ms-useragent x-retry-count x-retry-attempt x-attempt
		retry-attempt x-envoy-attempt-count grpc-previous-rpc-attempts grpc-timeout connect-timeout-ms x-server-timeout
		request-timeout`},
	{Volatile, "signatures, and the times and numbers that they sign", `
		signature signature-input dpop x-amz-date x-goog-date x-ms-date x-signature x-timestamp x-nonce
		x-hub-signature x-hub-signature-256 stripe-signature svix-signature svix-timestamp webhook-signature
		webhook-timestamp x-slack-signature x-slack-request-timestamp x-twilio-signature paypal-transmission-sig
		paypal-transmission-time x-ms-copy-source-authorization`},
	{Volatile, "proxies on the way", `
		forwarded via x-forwarded-for x-forwarded-port x-forwarded-proto x-forwarded-by x-forwarded-server
		x-original-forwarded-for x-real-ip x-client-ip x-cluster-client-ip true-client-ip cdn-loop cf-connecting-ip
		cf-connecting-ipv6 cf-ew-via cf-ipcountry cf-ray cf-visitor cf-worker fastly-client-ip fastly-ff x-amz-cf-id
		x-azure-clientip x-azure-fdid x-azure-ref x-azure-socketip fly-client-ip fly-request-id x-vercel-id
		x-envoy-expected-rq-timeout-ms x-envoy-external-address x-envoy-internal x-varnish x-request-start x-queue-start
		x-timer`},
	{Volatile, "sessions and streams of MCP", `
		mcp-session-id last-event-id`},
	{Volatile, "hop by hop (RFC 9110, section 7.6.1), and every field that `Connection` names", `
		connection proxy-connection keep-alive te trailer transfer-encoding upgrade http2-settings
		proxy-authenticate alt-used`},

	{Tenant, "the customer, account or user that a call is for", `
		stripe-account stripe-context openai-organization openai-project x-tenant-id x-organization-id xero-tenant-id
		harvest-account-id x-goog-user-project x-scope-orgid login-customer-id
		x-customer-id x-algolia-application-id x-parse-application-id on-behalf-of sudo impersonate-* x-act-as`},
	{Credential, "credentials", `
		authorization proxy-authorization api-key x-api-key x-amz-security-token`},

	{Elsewhere, "by media type and coding", `
		content-type content-encoding`},
	{Elsewhere, "by the body", `
		content-length content-digest repr-digest digest content-md5 x-amz-content-sha256 x-amz-checksum-*`},
	{Elsewhere, "the key, tokens and the place in a workflow", `
		idempotency-key execution-id execution-context workflow-node`},
}

// Fields gives each header field its class. It must not be changed while it is in use.
type Fields struct {
	exact    map[string]Class // by canonical name
	prefixes []prefix
	known    int // prefixes, the last ones, are those of known

	seed  maphash.Seed
	found [mostFound]atomic.Pointer[prefix] // whole names that were looked for: rules cost more than the rest of a look-up
}

const (
	mostFound = 256
	maxFound  = 64 // length of such a name, in bytes
)

type prefix struct {
	text  string // canonical
	class Class
}

// NewFields returns the table of known.
func NewFields() *Fields {
	t := &Fields{exact: map[string]Class{}, seed: maphash.MakeSeed()}
	for _, f := range known {
		t.Set(f.Class, strings.Fields(f.Names)...)
	}
	t.known = len(t.prefixes)
	return t
}

// Set gives fields a class, in place of the one that they have. Names are in any case; a "*" at the end of one
// matches any suffix.
func (t *Fields) Set(class Class, names ...string) {
	for i := range t.found {
		t.found[i].Store(nil)
	}
	for _, name := range names {
		text, open := strings.CutSuffix(name, "*")
		if text = http.CanonicalHeaderKey(text); open {
			t.prefixes = append([]prefix{{text, class}}, t.prefixes...)
		} else {
			t.exact[text] = class
		}
	}
}

// Class is that of a field, by its canonical name.
func (t *Fields) Class(name string) Class {
	if class, ok := t.exact[name]; ok {
		return class
	}
	place := &t.found[maphash.String(t.seed, name)%mostFound]
	if p := place.Load(); p != nil && p.text == name {
		return p.class
	}
	class := t.byRules(name)
	if len(name) <= maxFound {
		place.Store(&prefix{strings.Clone(name), class})
	}
	return class
}

// byRules is the class of a field that the table has no whole name of.
func (t *Fields) byRules(name string) Class {
	for i := range t.prefixes {
		if p := &t.prefixes[i]; strings.HasPrefix(name, p.text) {
			if named := byWords(name); named != Content && i < len(t.prefixes)-t.known {
				return named // whoever names many fields at once does not mean it (P3)
			}
			return p.class
		}
	}
	return byWords(name)
}

// operands appends the names of the operands of a header, in order.
func (t *Fields) operands(names []string, h http.Header) []string {
	if t == nil {
		return names
	}
	for name := range h {
		if t.Class(name) == Operand {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Whole returns the sum of a request that sum is of, with all header fields that count where it has no key: the
// operands and those of no other class that no Connection names.
func (t *Fields) Whole(sum Fingerprint, h http.Header) Fingerprint {
	s := states.Get().(*state)
	defer s.free()
	s.names = s.names[:0]
	hops := h["Connection"]
	for name := range h {
		if t.Class(name) == Content && (len(hops) == 0 || !httpguts.HeaderValuesContainsToken(hops, name)) {
			s.names = append(s.names, name)
		}
	}
	slices.Sort(s.names)
	s.head = append(appendText(s.head[:0], domainWhole), sum[:]...)
	s.head = appendFields(s.head, s.names, h)
	return sha256.Sum256(s.head)
}

// appendFields appends fields so that different ones never give the same text.
func appendFields(to []byte, names []string, h http.Header) []byte {
	to = binary.AppendUvarint(to, uint64(len(names)))
	for _, name := range names {
		to = binary.AppendUvarint(appendText(to, name), uint64(len(h[name])))
		for _, value := range h[name] {
			to = appendText(to, value)
		}
	}
	return to
}

func appendText(to []byte, text string) []byte {
	return append(binary.AppendUvarint(to, uint64(len(text))), text...)
}
