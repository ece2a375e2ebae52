package operate

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// procTerminal opens a terminal: what is written to the first end is typed on the
// second.
func procTerminal(t *testing.T) (keyboard, terminal *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprint("/dev/pts/", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	return keyboard, terminal
}

// P1: on a terminal nobody frees a key by a slip: the execution is shown, and only a
// whole yes counts.
func TestProcessTerminalIsAskedBeforeAKeyIsFree(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	key := gateway.Doubtful(t, upstream, harness.ProcCall{Id: harness.ProcTwice + "asked"})
	resolve := func(typed string) harness.ProcOutput {
		t.Helper()
		keyboard, terminal := procTerminal(t)
		if _, err := keyboard.WriteString(typed); err != nil {
			t.Fatal(err)
		}
		cmd := site.Operator(t, "executions", "resolve", key[:16], "--not-applied", "--reason", "none there")
		cmd.Stdin = terminal
		return harness.ProcRun(t, cmd)
	}
	for _, typed := range []string{"\n", "y\n", "no\n", "yes yes\n", "\x04"} {
		got := resolve(typed)
		got.Fails(t, "key           "+key, "connection_lost", "Is it certain that it was not? Type yes: ", "nothing was changed")
	}
	harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: harness.ProcTwice + "asked"}))
	if got := resolve("yes\n"); !strings.HasPrefix(got.Says(t), key[:16]+": not applied") {
		t.Errorf("%+v", got)
	}
	if a := gateway.Post(t, harness.ProcCall{Id: harness.ProcTwice + "asked"}); !a.Executed() {
		t.Errorf("%v", a)
	}
}
