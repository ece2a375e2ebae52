package table

import (
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// kind is what a row's requests are.
type kind uint8

const (
	get    kind = iota // changes nothing, so it passes through
	post               // each a call of its own
	replay             // the same call again and again
	signed             // each a call of its own, with a token that names it
)

// row is one line of the table: a subject, and what it is compared with.
type row struct {
	name               string
	kind               kind
	conns              int
	subject, reference place
	// bar is what the product has to reach, 0 where it is no promise; tail is the
	// largest ratio of the 99th percentiles.
	bar, tail float64
	// syncs has the records per sync reported.
	syncs bool
}

// place is a server of the scene.
type place string

const (
	bare     place = "reverse_proxy"
	static   place = "respond"
	guarded  place = "agent_proxy"
	async    place = "agent_proxy, settle async"
	noop     place = "no-op handler"
	naive    place = "naive map"
	ledgered place = "agent_proxy, ledger"
	trusting place = "agent_proxy, ledger, trust"
	sending  place = "agent_proxy, ledger, trust, upstream's identity"
)

// rows is the table. The bars hold on two processors.
var rows = []row{
	{name: "GET, passed through", kind: get, conns: 1, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 16, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 64, subject: guarded, reference: bare, bar: 0.97},
	{name: "GET, passed through", kind: get, conns: 256, subject: guarded, reference: bare, bar: 0.97},
	{name: "POST, outcome awaited", kind: post, conns: 1, subject: guarded, reference: bare, bar: 0.33},
	{name: "POST, outcome awaited", kind: post, conns: 16, subject: guarded, reference: bare, bar: 0.42},
	{name: "POST, outcome awaited", kind: post, conns: 64, subject: guarded, reference: bare, bar: 0.70, tail: 1.6, syncs: true},
	{name: "POST, outcome awaited", kind: post, conns: 256, subject: guarded, reference: bare, bar: 0.85},
	{name: "POST, outcome not awaited", kind: post, conns: 64, subject: async, reference: bare, bar: 0.75},
	{name: "POST, with ledger", kind: post, conns: 64, subject: ledgered, reference: bare, bar: 0.60},
	{name: "POST, with ledger, token verified", kind: signed, conns: 64, subject: trusting, reference: bare, bar: 0.55},
	{name: "POST, with ledger, token verified, token sent on", kind: signed, conns: 64, subject: sending, reference: bare, bar: 0.50},
	{name: "replay of one key", kind: replay, conns: 64, subject: guarded, reference: bare, bar: 2.5},
	{name: "replay of one key", kind: replay, conns: 64, subject: guarded, reference: static, bar: 0.85},
	{name: "POST through a no-op handler", kind: post, conns: 64, subject: noop, reference: bare},
	{name: "POST, naive middleware in memory", kind: post, conns: 64, subject: naive, reference: bare},
}

const requestSize = 200

func (r *row) request() load.Request {
	switch r.kind {
	case get:
		return load.Request{Method: "GET", Path: "/v1/charges"}
	case replay:
		request := load.Payment(requestSize)
		request.Key = load.NewKey()
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

// proof is a line that an answer of the subject has where it did what the row says.
func (r *row) proof() string {
	switch {
	case r.kind == get || !sites[r.subject].guarded:
		return ""
	case r.kind == replay:
		return "Execution-Status: replayed"
	default:
		return "Execution-Status: executed"
	}
}
