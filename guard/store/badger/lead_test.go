package badger

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
)

const leadEnds = "AGENT_GUARD_LEAD_ENDS"

// A commit that ends without a result ends the process, and says where.
func TestLeadThatPanics(t *testing.T) {
	if how := os.Getenv(leadEnds); how != "" {
		endWhileLeading(t, how)
		return
	}
	for _, how := range []string{"panic", "Goexit"} {
		t.Run(how, func(t *testing.T) {
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLeadThatPanics$", "-test.timeout=1m")
			child.Env = append(os.Environ(), leadEnds+"="+how)
			out, err := child.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 2 || strings.Contains(string(out), "test timed out") {
				t.Fatalf("the process ended with %v: %s", err, out)
			}
			for _, part := range []string{"ended midway", "stopMidway", "commitGroup"} {
				if !strings.Contains(string(out), part) {
					t.Errorf("no %s in: %s", part, out)
				}
			}
		})
	}
}

func stopMidway(how string) error {
	if how == "panic" {
		panic("hook failed")
	}
	runtime.Goexit()
	return nil
}

// endWhileLeading recovers from panics in a commit, as net/http does.
func endWhileLeading(t *testing.T, how string) {
	s, d := newFaulty(t, Options{})
	d.set(func() { d.onCommit = func() error { return stopMidway(how) } })
	var caller sync.WaitGroup
	caller.Go(func() {
		defer func() { _ = recover() }()
		_, err := s.Commit(t.Context(), put("a", "1"))
		t.Errorf("the commit returned %v", err)
	})
	caller.Wait()
	_, err := s.Commit(t.Context(), put("b", "1"))
	t.Errorf("the next commit returned %v", err)
}
