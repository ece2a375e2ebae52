package checkpoint_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A checkpoint gets on disk with the claim, its result with the outcome. Afterwards it
// is read against the hash in its token, and undone once.
func Example() {
	ctx := context.Background()
	st := memory.New(memory.Options{})
	checkpoints := checkpoint.New(st, seal.Generate())

	before, _ := checkpoints.Prepare(ctx, checkpoint.Snapshot{
		ID: "ckpt-1", Workflow: "w-1", Way: checkpoint.Restore,
		Request: checkpoint.Request{Method: "PUT", Path: "/routers/7"},
		Image:   &checkpoint.Image{Exists: true, Status: 200, ETag: `"1"`, Message: checkpoint.Message{Body: []byte("old")}},
	}, nil, checkpoint.Terms{TTL: 24 * time.Hour})
	fmt.Println("claimed:", before.Commit(ctx, st)) // in practice with the guard's claim

	after, _ := checkpoints.Record(ctx, before.Handle(), checkpoint.Result{
		Status: 204, Image: &checkpoint.Image{Exists: true, Status: 200, ETag: `"2"`},
	})
	fmt.Println("settled:", after.Commit(ctx, st)) // in practice with the guard's outcome

	c, err := checkpoints.Open(ctx, "ckpt-1", checkpoint.Want{Sum: before.Sum()})
	fmt.Println(c.Snapshot.Way, string(c.Snapshot.Image.Body), c.Result.Image.ETag, err)
	_, err = checkpoints.Open(ctx, "ckpt-1", checkpoint.Want{Sum: [32]byte{1}})
	fmt.Println(errors.Is(err, checkpoint.ErrTampered))

	fmt.Println(checkpoints.Advance(ctx, "ckpt-1", c.Mark, checkpoint.Step{To: checkpoint.Undoing, Rollback: "r-1"}))
	err = checkpoints.Advance(ctx, "ckpt-1", c.Mark, checkpoint.Step{To: checkpoint.Undoing, Rollback: "r-2"})
	fmt.Println(errors.Is(err, checkpoint.ErrChanged))
	// Output:
	// claimed: <nil>
	// settled: <nil>
	// restore old "2" <nil>
	// true
	// <nil>
	// true
}
