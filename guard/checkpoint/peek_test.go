package checkpoint_test

import (
	"errors"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Who looks at a checkpoint is told of its call whatever became of it, without its token.
func TestPeek(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		if _, _, err := r.Peek(ctx, "none"); !errors.Is(err, checkpoint.ErrUnknown) {
			t.Errorf("unknown: %v", err)
		}
		for id, body := range map[string]int{"small": 10, "large": 700_000} {
			p := r.kept(full(id, body))
			call, end, err := r.Peek(ctx, id)
			if err != nil || call.Execution != (guard.Key{2}) || call.Request.Path != "/a%20b" || call.Way != checkpoint.Restore || call.Created.IsZero() || end != nil {
				t.Errorf("%s: %+v %+v %v", id, call, end, err)
			}
			r.landed(r.Release(p.Handle()))
			call, end, err = r.Peek(ctx, id)
			if err != nil || call.Execution != (guard.Key{2}) || call.Action != "update" || call.Way != 0 || end != nil {
				t.Errorf("%s: released: %+v %+v %v", id, call, end, err)
			}
		}
	})
}
