// Command child is a gateway alone, as compare builds it against other commits: it needs
// less of the product than the whole benchmark does.
package main

import (
	"fmt"
	"os"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

func main() {
	proc.Child(proc.Roles{gateway.Role: gateway.Run})
	fmt.Fprintln(os.Stderr, "this is a part of the benchmark, which starts it")
	os.Exit(2)
}
