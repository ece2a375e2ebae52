package evidence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// linkKey is where the checkpoint of an execution stands, for calls that name it as
// their parent within the same workflow.
func (e *Evidence) linkKey(workflow, execution string) []byte {
	hash := e.sealer.Index("execution parent", workflow, execution)
	return append(append(make([]byte, 0, 1+hashed), spaceLink), hash[:hashed]...)
}

// Link is the write by which calls that name this execution as their parent find its
// checkpoint; nil where an execution that led to this call has the id already.
//
// The id is the caller's own word. Where two callers use one in a workflow, neither is
// found by it from then on: else one of them would see what the other has caused (P3).
func (e *Evidence) Link(ctx context.Context, c *Call, execution, checkpoint string, expires time.Time) (*store.Write, error) {
	id := uuid.MustParse(checkpoint) // ours
	key := e.linkKey(c.Workflow, execution)
	item, err := e.store.Get(ctx, key)
	switch {
	case errors.Is(err, store.ErrNotFound):
	case err != nil:
		return nil, err
	default:
		before, caller, err := readLink(item.Value)
		if err != nil {
			return nil, err
		}
		if slices.Contains(c.Parents, before.String()) {
			return nil, nil
		}
		if caller != c.Caller || before == uuid.Nil {
			id = uuid.Nil
			if item.Expires.After(expires) {
				expires = item.Expires
			}
		}
	}
	return &store.Write{Key: key, Value: append(id[:], c.Caller[:]...), Expires: expires}, nil
}

func readLink(value []byte) (checkpoint uuid.UUID, caller guard.CallerHash, err error) {
	if len(value) != len(checkpoint)+len(caller) {
		return checkpoint, caller, fmt.Errorf("evidence: the checkpoint of an execution has %d bytes", len(value))
	}
	return uuid.UUID(value[:len(checkpoint)]), guard.CallerHash(value[len(checkpoint):]), nil
}

// Parent finds the checkpoint of the execution that a call without a token names as
// its parent; empty where there is none, or several callers have used the id.
func (e *Evidence) Parent(ctx context.Context, workflow, execution string) (string, error) {
	item, err := e.store.Get(ctx, e.linkKey(workflow, execution))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	id, _, err := readLink(item.Value)
	if err != nil || id == uuid.Nil {
		return "", err
	}
	return id.String(), nil
}
