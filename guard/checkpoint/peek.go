package checkpoint

import (
	"context"
	"fmt"
)

// Peek shows what is recorded of the call of a checkpoint and of its end, for people who
// look: as the store has it, and not held against the token. Nothing may be undone from it.
// result is nil while the call runs. Of a call that never ran it is what Released has left.
//
// It reads on what stands there after the ttl. The errors are ErrUnknown, ErrTampered and
// ErrStore.
func (v *Vault) Peek(ctx context.Context, id string) (call *Snapshot, result *Result, err error) {
	n := v.name(id)
	at, _, err := v.part(ctx, n, kindSnapshot)
	if err != nil {
		return nil, nil, err
	}
	end, _, err := v.part(ctx, n, kindResult)
	if err != nil {
		return nil, nil, err
	}
	if end != nil && end.released {
		left, err := v.Released(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		return &Snapshot{
			ID: id, Workflow: left.Workflow, Caller: left.Caller, Execution: left.Execution, Action: left.Action,
			Request: Request{Method: left.Method, Host: left.Host, Path: left.Path},
		}, nil, nil
	}
	if at == nil {
		return nil, nil, ErrUnknown
	}
	plain, err := v.join(ctx, n, kindSnapshot, at)
	if err != nil {
		return nil, nil, err
	}
	if call, err = decodeSnapshot(plain); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	result, err = v.result(ctx, n, end, [32]byte{})
	return call, result, err
}
