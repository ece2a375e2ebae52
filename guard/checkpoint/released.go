package checkpoint

import (
	"context"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Released is what is left of a checkpoint whose call never ran: enough to keep the call
// from running later (architecture brief: cancellation). Long texts are cut.
type Released struct {
	// Execution is the key that the call had, Caller the hash of who made it.
	Execution guard.Key
	Caller    guard.CallerHash
	// Workflow, Action, Method, Host and Path are as in the snapshot.
	Workflow, Action, Method, Host, Path string
}

// mostLeft is how much of a text is left, in bytes.
const mostLeft = 256

func short(s string) string { return s[:min(len(s), mostLeft)] }

// left is what is left of a snapshot when it is released.
func (s *Snapshot) left() []byte {
	var e encoder
	e.bytes(tagCaller, s.Caller[:])
	e.bytes(tagExecution, s.Execution[:])
	e.string(tagWorkflow, short(s.Workflow))
	e.string(tagAction, short(s.Action))
	r := encoder{}
	r.string(tagMethod, short(s.Request.Method))
	r.string(tagHost, short(s.Request.Host))
	r.string(tagPath, short(s.Request.Path))
	e.bytes(tagRequest, r.b)
	return e.b
}

// Released returns what is left of a checkpoint of which Open says ErrReleased. ErrUnknown
// says that nothing is, or that it was not released.
func (v *Vault) Released(ctx context.Context, id string) (Released, error) {
	at, _, err := v.part(ctx, v.name(id), kindResult)
	switch {
	case err != nil:
		return Released{}, err
	case at == nil || !at.released || len(at.inline) == 0:
		return Released{}, ErrUnknown
	}
	var r Released
	var request Request
	d := decoder{b: at.inline}
	for d.next() {
		switch d.tag {
		case tagCaller:
			d.fill(r.Caller[:])
		case tagExecution:
			d.fill(r.Execution[:])
		case tagWorkflow:
			r.Workflow = d.string()
		case tagAction:
			r.Action = d.string()
		case tagRequest:
			d.sub(request.decode)
		}
	}
	if d.err != nil {
		return Released{}, fmt.Errorf("%w: %w", ErrTampered, d.err)
	}
	r.Method, r.Host, r.Path = request.Method, request.Host, request.Path
	return r, nil
}
