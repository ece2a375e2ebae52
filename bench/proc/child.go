// Package proc runs parts of a benchmark in processes of their own, from the same
// binary, and watches what they use.
package proc

import (
	"fmt"
	"io"
	"os"
)

// roleVariable in the environment makes this binary a part of a benchmark.
const roleVariable = "AGENT_GUARD_BENCH_ROLE"

// Roles are the parts, by name. Each gets the arguments of its process.
type Roles map[string]func(args []string) error

// Child plays the role that the parent gave to this process and ends it. It returns
// where there is none.
func Child(roles Roles) {
	name := os.Getenv(roleVariable)
	if name == "" {
		return
	}
	role := roles[name]
	if role == nil {
		fmt.Fprintf(os.Stderr, "no role %q\n", name)
		os.Exit(2)
	}
	go func() {
		// The other end of the pipe is the parent: without it, nobody stays behind.
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if err := role(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Ready tells the parent that this process does its work, and what it has to say.
func Ready(word string) { fmt.Println(readyMark + word) }

const readyMark = "ready "
