package undo_test

import (
	"context"
	"crypto/sha256"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// C-6.3-b: hashes of a state stand in tokens for the whole workflow, and say only which
// states of one rollback are equal: nobody can try what they may be of.
func TestStateHashesTellNothing(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		o := r.options
		o.Guard, o.Vault, o.Sender = r.guard, r.vault, r
		seen := func(u *undo.Undoer, id, call string, before, after state) undo.Result {
			res := &resource{tags: true}
			r.answer = res.serve
			task := restoring(res, before, after, undo.Spec{Verify: true})
			task.Rollback, task.Checkpoint.Snapshot.ID = id, call
			got, err := u.Undo(context.Background(), task)
			if err != nil || !got.Done {
				t.Fatalf("%+v, %v", got, err)
			}
			return got
		}
		u := undo.New(o)
		one := seen(u, "first", "c1", "old", "new")
		two := seen(u, "first", "c2", "new", "newer")
		life := seen(undo.New(o), "first", "c3", "old", "new")
		other := seen(u, "second", "c4", "old", "new")
		if one.Before != two.After || one.After != life.After || one.Before != life.Before {
			t.Error("equal states are not equal in one rollback")
		}
		if one.Before == one.After || one.Before == two.Before {
			t.Error("states that differ are equal")
		}
		if one.After == other.After || one.Before == other.Before {
			t.Error("states are equal in two rollbacks")
		}
		for _, sum := range [][32]byte{one.Before, one.After} {
			for _, s := range []state{"old", "new"} {
				if sum == sha256.Sum256([]byte(s)) || sum == ([32]byte{}) {
					t.Error("the state can be guessed")
				}
			}
		}
	})
}
