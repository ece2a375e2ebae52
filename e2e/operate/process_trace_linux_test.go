package operate

import (
	"fmt"
	"math"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P2, P7: what the gateway asks of the kernel for one guarded call, in order. The
// sync of the claim has returned before the first byte goes to the upstream, and the
// sync of the outcome before the end of the answer goes to the client. SIGKILL keeps
// the page cache, so no crash test could show this.
func TestProcessSyncsInOrder(t *testing.T) {
	t.Parallel() // its gateways are processes
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal("this test needs strace: apt-get install strace")
	}
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	out := site.Path("strace")
	site.Wrap = []string{
		strace, "-f", "-yy", "-s", "48", "-o", out, "-e", "signal=none", "-e",
		"trace=mmap,mremap,munmap,msync,fsync,fdatasync,read,write,writev,sendto,sendmsg",
	}
	gateway := site.Start(t)
	shapes := []map[string]string{
		nil,
		{harness.ProcSize: "5000"},
		{harness.ProcChunked: "yes"},
		{harness.ProcStatus: "204"},
		{harness.ProcSize: "300000"},
	}
	for i, header := range shapes {
		if a := gateway.Post(t, harness.ProcCall{Id: fmt.Sprint("call-", i), Path: fmt.Sprint("/traced/", i), Header: header}); !a.Executed() {
			t.Fatalf("%v", a)
		}
	}
	if status, text, err := gateway.Admin("POST", "/stop", "", ""); err != nil || status != http.StatusOK {
		t.Fatalf("stop: %d %s %v", status, text, err)
	}
	gateway.Wait(t)
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	trace := parseProcTrace(t, string(b))
	for i, header := range shapes {
		t.Run(fmt.Sprint("shape ", header), func(t *testing.T) {
			trace.checkCall(t, fmt.Sprint("POST /traced/", i), site.Addr, upstream.Addr, header[harness.ProcSize] == "300000")
		})
	}
}

// procSyscall is one system call: where in the trace it began, and where it returned.
// The tracer lets no thread go on before it has written the line, so that the order
// of the lines is the order of the events.
type procSyscall struct {
	name, args  string
	ok          bool
	start, end  int
	file        string // of fsync and fdatasync; of msync by its mapping
	synchronous bool
}

type procTrace []*procSyscall

var (
	procLine    = regexp.MustCompile(`^(\d+) +(.*)$`)
	procBegun   = regexp.MustCompile(`^(\w+)\((.*?)(?: <unfinished \.\.\.>)?$`)
	procResumed = regexp.MustCompile(`^<\.\.\. (\w+) resumed>(.*)$`)
	procResult  = regexp.MustCompile(`\) += (-?\w+)`)
	procHandle  = regexp.MustCompile(`^\d+<([^>]*)>`)
	procMapped  = regexp.MustCompile(`, \d+<([^>]*)>`)
)

func parseProcTrace(t *testing.T, text string) procTrace {
	t.Helper()
	var trace procTrace
	open := map[string]*procSyscall{} // by thread
	mapped := map[string]string{}     // file by address
	for n, line := range strings.Split(text, "\n") {
		m := procLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		thread, what := m[1], m[2]
		var call *procSyscall
		if r := procResumed.FindStringSubmatch(what); r != nil {
			call = open[thread]
			if call == nil || call.name != r[1] {
				continue // begun before the trace
			}
			call.args += r[2]
		} else if b := procBegun.FindStringSubmatch(what); b != nil {
			call = &procSyscall{name: b[1], args: b[2], start: n, end: -1}
			trace = append(trace, call)
			if strings.HasSuffix(what, "<unfinished ...>") {
				open[thread] = call
				continue
			}
		} else {
			continue // a signal, an exit
		}
		delete(open, thread)
		call.end = n
		result := procResult.FindStringSubmatch(call.args)
		call.ok = result != nil && !strings.HasPrefix(result[1], "-")
		switch call.name {
		case "mmap":
			if file := procMapped.FindStringSubmatch(call.args); file != nil && call.ok {
				mapped[result[1]] = file[1]
			}
		case "munmap":
			address, _, _ := strings.Cut(call.args, ",")
			delete(mapped, address)
		case "msync":
			address, _, _ := strings.Cut(call.args, ",")
			call.file, call.synchronous = mapped[address], strings.Contains(call.args, "MS_SYNC")
		case "fsync", "fdatasync":
			if file := procHandle.FindStringSubmatch(call.args); file != nil {
				call.file, call.synchronous = file[1], true
			}
		}
	}
	if len(trace) == 0 {
		t.Fatalf("strace has seen nothing; may this user trace?\n%.2000s", text)
	}
	return trace
}

// socket reports whether the call is on a connection between the two addresses; an
// empty one is any.
func (c *procSyscall) socket(local, remote string) bool {
	name := procConnection.FindStringSubmatch(c.args)
	return name != nil && (local == "" || name[1] == local) && (remote == "" || name[2] == remote)
}

var procConnection = regexp.MustCompile(`^\d+<TCP:\[([0-9.:]+)->([0-9.:]+)\]>`)

func (c *procSyscall) writes() bool {
	switch c.name {
	case "write", "writev", "sendto", "sendmsg":
		return true
	}
	return false
}

// checkCall finds one call in the trace by the begin of its request line, of which
// Caddy reads 14 bytes first, to see whether it is HTTP/2.
func (trace procTrace) checkCall(t *testing.T, request, gateway, upstream string, bulk bool) {
	t.Helper()
	// first is the earliest of those that match, by the line that when gives.
	first := func(what string, when func(*procSyscall) int, after int, match func(*procSyscall) bool) *procSyscall {
		t.Helper()
		var found *procSyscall
		for _, c := range trace {
			if when(c) > after && match(c) && (found == nil || when(c) < when(found)) {
				found = c
			}
		}
		if found == nil {
			t.Fatalf("not in the trace: %s", what)
		}
		return found
	}
	// A read may begin long before its bytes are there, on a thread that does not get a
	// processor: what it read is known from its return on.
	begun := func(c *procSyscall) int { return c.start }
	returned := func(c *procSyscall) int { return c.end }
	received := first("the request is read", returned, -1, func(c *procSyscall) bool {
		return c.name == "read" && c.socket(gateway, "") && strings.Contains(c.args, request)
	})
	client := procConnection.FindStringSubmatch(received.args)[2]
	sent := first("the request goes to the upstream", begun, received.end, func(c *procSyscall) bool {
		return c.writes() && c.socket("", upstream)
	})
	if !strings.Contains(sent.args, request) {
		t.Fatalf("the first that the upstream gets is %s", sent.args)
	}
	answered := first("the upstream's answer is read", returned, sent.start, func(c *procSyscall) bool {
		return c.name == "read" && c.socket("", upstream) && strings.Contains(c.args, "HTTP/1.1 2")
	})
	// The next request that was read, or the end of the trace, bounds the answer.
	ended := math.MaxInt
	for _, c := range trace {
		if c.name == "read" && c.end > answered.end && c.socket(gateway, "") && strings.Contains(c.args, "POST /traced/") {
			ended = min(ended, c.end)
		}
	}
	var last *procSyscall
	for _, c := range trace {
		if c.start > answered.end && c.start < ended && c.writes() && c.socket(gateway, client) {
			last = c
		}
	}
	if last == nil {
		for _, c := range trace {
			if c.start >= received.start && c.start <= ended {
				t.Logf("%d-%d %s(%.160s", c.start+1, c.end+1, c.name, c.args)
			}
		}
		t.Fatal("not in the trace: the answer goes to the client")
	}

	log := func(c *procSyscall) bool { return strings.HasSuffix(c.file, ".wal") }
	trace.wantSync(t, "P2: the claim", received.end, sent.start, log)
	trace.wantSync(t, "P7: the outcome", answered.end, last.start, log)
	if bulk {
		trace.wantSync(t, "P7: the answer's body", answered.end, last.start, func(c *procSyscall) bool {
			return strings.Contains(c.file, "/bodies/")
		})
	}
}

// wantSync fails unless a sync of the file begins after one line and has returned
// before another.
func (trace procTrace) wantSync(t *testing.T, what string, after, before int, file func(*procSyscall) bool) {
	t.Helper()
	for _, c := range trace {
		if c.synchronous && c.ok && file(c) && c.start > after && c.end >= 0 && c.end < before {
			return
		}
	}
	t.Errorf("%s is not synced between lines %d and %d of the trace:", what, after+1, before+1)
	for _, c := range trace {
		if c.start >= after && c.start <= before {
			t.Logf("%d-%d %s(%.120s [%s]", c.start+1, c.end+1, c.name, c.args, c.file)
		}
	}
}
