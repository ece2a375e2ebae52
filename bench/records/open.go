package records

import (
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// OpenRole is the name of the part that opens a store.
const OpenRole = "open"

// Open opens a store and the guard over it, says how long that took together, and
// closes them.
func Open(args []string) error {
	flags := flag.NewFlagSet(OpenRole, flag.ContinueOnError)
	path := flags.String("store", "", "directory of the store")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ring, err := seal.Load(*path + ".key")
	if err != nil {
		return err
	}
	begin := time.Now()
	st, err := badger.Open(*path, badger.Options{})
	if err != nil {
		return err
	}
	_, recovery, err := execution.Open(context.Background(), st, ring)
	if err != nil {
		return err
	}
	took := time.Since(begin)
	if recovery != (execution.Recovery{}) {
		return fmt.Errorf("a store that was closed had open executions: %+v", recovery)
	}
	if err := st.Close(); err != nil {
		return err
	}
	proc.Ready(took.String())
	return nil
}
