package checkpoint_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// B-normative-k: of a call that never ran enough is left to cancel it, also where its
// snapshot was large or is irreversible.
func TestReleasedNamesItsCall(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		for id, body := range map[string]int{"small": 10, "large": 700_000} {
			s := full(id, body)
			s.Request.Path = strings.Repeat("/p", 300)
			p := r.kept(s)
			if _, err := r.Released(ctx, id); !errors.Is(err, checkpoint.ErrUnknown) {
				t.Errorf("%s: before: %v", id, err)
			}
			r.landed(r.Release(p.Handle()))
			r.restart()
			got, err := r.Released(ctx, id)
			want := checkpoint.Released{
				Execution: guard.Key{2}, Caller: guard.CallerHash{1}, Workflow: "w-1", Action: "update",
				Method: "PUT", Host: "h", Path: s.Request.Path[:256],
			}
			if err != nil || got != want {
				t.Errorf("%s: %+v, %v", id, got, err)
			}
			for entry, err := range r.st.Scan(ctx, store.Range{}) {
				if err != nil || strings.Contains(string(entry.Key)+string(entry.Value), "update") {
					t.Errorf("P8: %q, %v", entry.Key, err)
				}
			}
		}
	})
}
