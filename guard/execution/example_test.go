package execution_test

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A call is looked up, claimed, run and settled; its retry finds the result.
func Example() {
	ctx := context.Background()
	g, _, err := execution.Open(ctx, memory.New(memory.Options{}), seal.Generate())
	if err != nil {
		panic(err)
	}
	scope := execution.Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/v1/charges", ID: "order-7"}
	call := &execution.Call{
		Key: g.Key(scope), Scope: scope,
		Deadline: time.Minute, KeepResult: 24 * time.Hour, KeepKey: 30 * 24 * time.Hour, ResultCap: 1 << 20,
	}
	for range 2 {
		found, err := g.LookUp(ctx, call.Key, call.Fingerprint)
		if err != nil {
			panic(err)
		}
		switch found.Status {
		case execution.Free:
			run, err := g.Claim(ctx, call, found)
			if err != nil {
				panic(err)
			}
			// Only now may the call be sent.
			run.Recording().Start(201, nil)
			run.Write([]byte("charged"), false)
			if err := run.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}); err != nil {
				panic(err)
			}
			fmt.Println("executed")
		case execution.Replayable:
			result, err := g.Result(ctx, call.Key, found)
			if err != nil {
				panic(err)
			}
			body, _ := io.ReadAll(result.Body(ctx))
			fmt.Println("replayed:", result.Head.Status, string(body))
		}
	}
	// Output:
	// executed
	// replayed: 201 charged
}

// What a status means depends on the route's preset.
func ExamplePreset_Judge() {
	for _, preset := range execution.Presets() {
		fmt.Println(preset, preset.Judge(execution.Answer{Status: 502}))
	}
	// Output:
	// default in_doubt
	// stripe in_doubt
	// acp released
	// strict in_doubt
}
