package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	key := gateway.doubtful(t, upstream, procCall{id: procTwice + "asked"})
	resolve := func(typed string) procOutput {
		t.Helper()
		keyboard, terminal := procTerminal(t)
		if _, err := keyboard.WriteString(typed); err != nil {
			t.Fatal(err)
		}
		cmd := site.operator(t, "executions", "resolve", key[:16], "--not-applied", "--reason", "none there")
		cmd.Stdin = terminal
		return procRun(t, cmd)
	}
	for _, typed := range []string{"\n", "y\n", "no\n", "yes yes\n", "\x04"} {
		got := resolve(typed)
		got.fails(t, "key           "+key, "connection_lost", "Is it certain that it was not? Type yes: ", "nothing was changed")
	}
	wantProcDoubt(t, gateway.post(t, procCall{id: procTwice + "asked"}))
	if got := resolve("yes\n"); !strings.HasPrefix(got.says(t), key[:16]+": not applied") {
		t.Errorf("%+v", got)
	}
	if a := gateway.post(t, procCall{id: procTwice + "asked"}); !a.executed() {
		t.Errorf("%v", a)
	}
}
