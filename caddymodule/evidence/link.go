package evidence

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// linkKey is where the checkpoint of an execution stands, for calls that name it as
// their parent within the same workflow.
func (e *Evidence) linkKey(workflow, execution string) []byte {
	hash := e.sealer.Index("execution parent", workflow, execution)
	return append(append(make([]byte, 0, 1+hashed), spaceLink), hash[:hashed]...)
}

// Link is the write by which calls that name this execution as their parent find its
// checkpoint.
func (e *Evidence) Link(workflow, execution, checkpoint string, expires time.Time) store.Write {
	id := uuid.MustParse(checkpoint) // ours
	return store.Write{Key: e.linkKey(workflow, execution), Value: id[:], Expires: expires}
}

// Parent finds the checkpoint of the execution that a call without a token names as
// its parent; empty where there is none.
func (e *Evidence) Parent(ctx context.Context, workflow, execution string) (string, error) {
	item, err := e.store.Get(ctx, e.linkKey(workflow, execution))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	id, err := uuid.FromBytes(item.Value)
	if err != nil {
		return "", fmt.Errorf("evidence: the checkpoint of an execution: %w", err)
	}
	return id.String(), nil
}
