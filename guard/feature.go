package guard

import (
	"context"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Gate decides whether a call may begin now (docs/extend.md). It is asked before the call is claimed, and again where
// another call was faster. Many goroutines may call it.
type Gate interface {
	// Admit lets the call begin, or refuses it: then nothing is recorded, and its key stays free. It may wait until ctx
	// ends, which is when the client has left. An error should be a *problem.Problem; any other one is answered as that of
	// a store that is not available. leave gives back what the gate holds for the call, once the upstream has done its
	// part, or the call ends without that; nil where it holds nothing.
	Admit(ctx context.Context, call *Request) (leave func(), err error)
}

// Part records something of its own in the commits of a call (docs/extend.md). Many goroutines may call it.
type Part interface {
	// Claim adds writes to the commit with which the call is claimed. Where a condition of one of them fails, the call
	// is looked up again. An error refuses the call like that of a Gate.
	Claim(ctx context.Context, call *Request, commit *store.Batch) error
	// Settle adds writes to the commit that records the outcome. They should have no conditions: one that fails leaves
	// the call in doubt. Where the store does not take the commit, Settle is asked again for the next one.
	Settle(ctx context.Context, call *Request, o execution.Outcome, commit *store.Batch)
}

// HTTP is the request as the guard has got it. It must not be changed, and its body has been read.
func (q *Request) HTTP() *http.Request { return q.r }

// Key is the key of the call's execution.
func (q *Request) Key() execution.Key { return q.call.Key }

// Caller is the keyed hash of who makes the call: it is equal for all calls of one caller.
func (q *Request) Caller() string { return q.executions.Keyed(q.call.Scope.Caller) }

// pass asks the gates, and returns what gives back what they hold.
func (q *Request) pass(gates []Gate) (leave []func(), err error) {
	for _, gate := range gates {
		left, err := gate.Admit(q.r.Context(), q)
		if left != nil {
			leave = append(leave, left)
		}
		if err != nil {
			return leave, q.storeFailed(err)
		}
	}
	return leave, nil
}

// claimed has the parts add to the commit of the claim; nil where there are none.
func (q *Request) claimed(parts []Part) (*store.Batch, error) {
	if len(parts) == 0 {
		return nil, nil
	}
	b := store.NewBatch()
	b.OnDone(func(err error) error {
		if store.Lost(err, b.Writes()) {
			return execution.ErrTaken // look again
		}
		return err
	})
	for _, part := range parts {
		if err := part.Claim(q.r.Context(), q, b); err != nil {
			return nil, b.Done(err)
		}
	}
	return b, nil
}

// settled has the parts add to the commit of the outcome.
func (q *Request) settled(ctx context.Context, parts []Part, o execution.Outcome) *store.Batch {
	if len(parts) == 0 {
		return nil
	}
	b := store.NewBatch()
	for _, part := range parts {
		part.Settle(ctx, q, o, b)
	}
	return b
}
