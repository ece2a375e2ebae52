package e2e

import (
	"bytes"
	"fmt"
	"runtime/pprof"
	"strings"
	"testing"
)

// waiting counts the goroutines that are in a function.
func waiting(function string) int {
	var dump bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&dump, 1); err != nil {
		panic(err) // a buffer takes everything
	}
	total := 0
	for block := range strings.SplitSeq(dump.String(), "\n\n") {
		if i := strings.Index(block, " @ "); i > 0 && strings.Contains(block, function) {
			first := block[:i]
			var n int
			if _, err := fmt.Sscan(first[strings.LastIndexByte(first, '\n')+1:], &n); err == nil {
				total += n
			}
		}
	}
	return total
}

// followers waits until n calls follow an execution. They are invisible from
// outside while it has not answered.
func followers(t *testing.T, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d calls are attached", n), func() bool {
		return waiting("execution.(*Follower).wait") >= n
	})
}
