package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
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
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	out := site.path("strace")
	site.wrap = []string{
		strace, "-f", "-yy", "-s", "48", "-o", out, "-e", "signal=none", "-e",
		"trace=mmap,mremap,munmap,msync,fsync,fdatasync,read,write,writev,sendto,sendmsg",
	}
	gateway := site.start(t)
	shapes := []map[string]string{
		nil,
		{procSize: "5000"},
		{procChunked: "yes"},
		{procStatus: "204"},
		{procSize: "300000"},
	}
	for i, header := range shapes {
		if a := gateway.post(t, procCall{id: fmt.Sprint("call-", i), path: fmt.Sprint("/traced/", i), header: header}); !a.executed() {
			t.Fatalf("%v", a)
		}
	}
	if status, text, err := gateway.admin("POST", "/stop", "", ""); err != nil || status != http.StatusOK {
		t.Fatalf("stop: %d %s %v", status, text, err)
	}
	gateway.wait(t)
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	trace := parseProcTrace(t, string(b))
	for i, header := range shapes {
		t.Run(fmt.Sprint("shape ", header), func(t *testing.T) {
			trace.checkCall(t, fmt.Sprint("POST /traced/", i), site.addr, upstream.addr, header[procSize] == "300000")
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
	at := func(what string, from int, match func(*procSyscall) bool) int {
		t.Helper()
		for i := from; i < len(trace); i++ {
			if match(trace[i]) {
				return i
			}
		}
		t.Fatalf("not in the trace: %s", what)
		return -1
	}
	received := at("the request is read", 0, func(c *procSyscall) bool {
		return c.name == "read" && c.socket(gateway, "") && strings.Contains(c.args, request)
	})
	client := procConnection.FindStringSubmatch(trace[received].args)[2]
	sent := at("the request goes to the upstream", received, func(c *procSyscall) bool {
		return c.writes() && c.socket("", upstream)
	})
	if !strings.Contains(trace[sent].args, request) {
		t.Fatalf("the first that the upstream gets is %s", trace[sent].args)
	}
	answered := at("the upstream's answer is read", sent, func(c *procSyscall) bool {
		return c.name == "read" && c.socket("", upstream) && strings.Contains(c.args, "HTTP/1.1 2")
	})
	// The next request on this connection, or its end, bounds the answer.
	ended := len(trace) - 1
	for i := answered; i < len(trace); i++ {
		if c := trace[i]; c.name == "read" && c.socket(gateway, "") && strings.Contains(c.args, "POST /traced/") {
			ended = i
			break
		}
	}
	last := -1
	for i := answered; i < ended; i++ {
		if c := trace[i]; c.writes() && c.socket(gateway, client) {
			last = i
		}
	}
	if last < 0 {
		t.Fatal("not in the trace: the answer goes to the client")
	}

	log := func(c *procSyscall) bool { return strings.HasSuffix(c.file, ".wal") }
	trace.wantSync(t, "P2: the claim", trace[received].end, trace[sent].start, log)
	trace.wantSync(t, "P7: the outcome", trace[answered].end, trace[last].start, log)
	if bulk {
		trace.wantSync(t, "P7: the answer's body", trace[answered].end, trace[last].start, func(c *procSyscall) bool {
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
