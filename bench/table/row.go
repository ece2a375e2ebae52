package table

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// kind is what a row's requests are.
type kind uint8

const (
	get         kind = iota + 1 // changes nothing, so it passes through
	post                        // each a call of its own
	replay                      // the same call again and again
	replays                     // calls that were made before, each as often as any other
	signed                      // each a call of its own, with a token that names it
	message                     // a message of MCP that changes nothing, so it is read and passes
	failed                      // equal calls without a key that were answered 500: a call for each connection
	failedKeyed                 // the same with a key: that of its call, for each connection
	streamed                    // calls of a tool, each of its own, answered by a stream of events
)

// row is one line of the table: a subject, and what it is compared with.
type row struct {
	name               string
	kind               kind
	conns              int
	subject, reference place
	// bar is what the product has to reach, 0 where it is no promise; tail is the
	// largest ratio of the 99th percentiles, work that of the processor times of a call.
	bar, tail, work float64
	// against is the kind of the reference's requests, where that is another one.
	against kind
	// first is how much later the first event of a stream may come than from the reference, in ms.
	first float64
	// sustained is for load that lasts, so that compaction is in it: on a fresh process
	// with an empty store. memory is then the most anonymous memory at its end, in MiB, and
	// written the most bytes that reach the device, as a multiple of the payload.
	sustained       bool
	memory, written float64
	// syncs has the records per sync reported.
	syncs bool
	// few is for calls of which few are made at once: the time that the guard adds is reported in syncs of
	// the same run. added is the most of them, beside addedShare of a bare call's time; 0 is no promise.
	few   bool
	added float64
}

// addedShare is how much of a bare call's time the guard may add, beside the syncs of its two records.
const addedShare = 0.4

// place is a server of the scene.
type place string

const (
	bare     place = "reverse_proxy"
	static   place = "respond"
	guarded  place = "agent_proxy"
	unshared place = "agent_proxy, bulkhead off"
	lenient  place = "agent_proxy, breaker off"
	noop     place = "no-op handler"
	naive    place = "naive map"
	speaking place = "agent_proxy, protocol mcp"
	ledgered place = "agent_proxy, ledger"
	trusting place = "agent_proxy, ledger, trust"
	trustEd  place = "agent_proxy, ledger, trust, EdDSA"
	sending  place = "agent_proxy, ledger, trust, upstream's identity"
	peerBare place = "fiber v2, proxy"
	peerIdem place = "fiber v2, idempotency"
)

// The bars of processor time were set where a call through the bare proxy takes 108 µs;
// what holds elsewhere is their ratio.
const (
	bareWork   = 108
	guardWork  = 162. / bareWork
	ledgerWork = 225. / bareWork
	tokenWork  = 350. / bareWork
)

// payload is what a call carries, there and back.
const payload = requestSize + 1024

// rows is the table. The bars hold on two processors.
var rows = []row{
	{name: "GET, passed through", kind: get, conns: 1, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 16, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 64, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 256, subject: guarded, reference: bare, bar: 0.97},
	{name: "MCP message that changes nothing", kind: message, conns: 64, subject: speaking, reference: bare, bar: 0.95},
	{name: "first event of a tool call", kind: streamed, conns: 1, subject: speaking, reference: bare, first: 2},
	{name: "first event of a tool call", kind: streamed, conns: 16, subject: speaking, reference: bare, first: 2},
	{name: "retry recognised by its 500, against one with a key", kind: failed, conns: 64, subject: lenient, reference: lenient, against: failedKeyed, work: 1.1},
	{name: "POST, outcome awaited", kind: post, conns: 1, subject: guarded, reference: bare, bar: 0.40, few: true, added: 2},
	{name: "POST, outcome awaited", kind: post, conns: 2, subject: guarded, reference: bare, few: true},
	{name: "POST, outcome awaited", kind: post, conns: 4, subject: guarded, reference: bare, few: true},
	{name: "POST, outcome awaited", kind: post, conns: 16, subject: guarded, reference: bare, bar: 0.50},
	{name: "POST, outcome awaited", kind: post, conns: 64, subject: guarded, reference: bare, bar: 0.70, tail: 1.5, work: guardWork, syncs: true},
	{name: "POST, outcome awaited", kind: post, conns: 256, subject: guarded, reference: bare, bar: 0.70},
	{name: "POST, against one without a bulkhead", kind: post, conns: 64, subject: guarded, reference: unshared, work: 1.02},
	{name: "POST, with ledger", kind: post, conns: 64, subject: ledgered, reference: bare, bar: 0.50, work: ledgerWork},
	{name: "POST, with ledger, ES256 token verified", kind: signed, conns: 64, subject: trusting, reference: bare, bar: 0.36, work: tokenWork},
	{name: "POST, with ledger, EdDSA token verified", kind: signed, conns: 64, subject: trustEd, reference: bare, bar: 0.40, work: tokenWork},
	{name: "POST, with ledger, ES256 token verified, token sent on", kind: signed, conns: 64, subject: sending, reference: bare},
	{name: "replay of one key", kind: replay, conns: 64, subject: guarded, reference: bare, bar: 2.5},
	{name: "replay of one key", kind: replay, conns: 64, subject: guarded, reference: static, bar: 0.85},
	{name: "replay of many keys", kind: replays, conns: 64, subject: guarded, reference: bare, bar: 2.5},
	{name: "replay of many keys", kind: replays, conns: 64, subject: guarded, reference: static, work: 1.5},
	{name: "POST through a no-op handler", kind: post, conns: 64, subject: noop, reference: bare},
	{name: "POST, naive middleware in memory", kind: post, conns: 64, subject: naive, reference: bare},
	{name: "POST, fiber v2 with its idempotency in memory", kind: post, conns: 64, subject: peerIdem, reference: bare},
	{name: "POST, fiber v2 with its idempotency in memory", kind: post, conns: 64, subject: peerIdem, reference: peerBare},
	{name: "POST, sustained", kind: post, conns: 64, subject: guarded, reference: bare, sustained: true, work: guardWork, memory: 100, written: 3},
	{name: "POST, with ledger, sustained", kind: post, conns: 64, subject: ledgered, reference: bare, sustained: true, bar: 0.45, work: ledgerWork, memory: 150},
	{name: "POST, with ledger, ES256 token verified, sustained", kind: signed, conns: 64, subject: trusting, reference: bare, sustained: true, work: tokenWork, memory: 150},
}

const requestSize = 200

// title names the row with its connections, by which it is chosen.
func (r *row) title() string { return fmt.Sprintf("%s @%d", r.name, r.conns) }

// request is what a row of this kind sends. Recorded calls have ids with this prefix and numbers
// below keys.
func (k kind) request(recorded string, keys int) load.Request {
	switch k {
	case get:
		return load.Request{Method: "GET", Path: "/v1/charges"}
	case message:
		return load.Message(requestSize)
	case failed:
		request := load.Payment(requestSize)
		request.Path, request.Own = "/v1/fails", true
		return request
	case failedKeyed:
		request := load.Payment(requestSize)
		request.Path, request.Own, request.Key = "/v1/fails", true, load.NewKey()
		return request
	case streamed:
		request := load.ToolCall(requestSize)
		request.Keys = load.Fresh
		return request
	case replay:
		request := load.Payment(requestSize)
		request.Key = load.NewKey()
		return request
	case replays:
		request := load.Payment(requestSize)
		request.Keys = load.AnyOf(recorded, keys)
		return request
	case signed:
		request := load.Payment(requestSize)
		request.Field = ect.FieldName // the keys are made for each round
		return request
	default:
		request := load.Payment(requestSize)
		request.Keys = load.Fresh
		return request
	}
}

// status is what such requests are answered with.
func (k kind) status() int {
	if k == failed || k == failedKeyed {
		return 500
	}
	return 200
}

// proof is a line that an answer of the subject has where it did what the row says.
func (r *row) proof() string {
	switch {
	case r.kind == get || r.kind == message || !sites[r.subject].guarded:
		return ""
	case r.kind == replay || r.kind == replays || r.kind == failed:
		return "Execution-Status: replayed"
	default:
		return "Execution-Status: executed"
	}
}
