//go:build unix

package e2e

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var procStack = regexp.MustCompile(`,"stacktrace":"[^"]*"`)

// procLog collects what a process says, and tells when it has said something.
type procLog struct {
	mu    sync.Mutex
	text  bytes.Buffer
	waits []procWait
}

type procWait struct {
	said func(text []byte) bool
	done chan struct{}
}

func (l *procLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.text.Write(p)
	l.waits = slices.DeleteFunc(l.waits, func(w procWait) bool {
		said := w.said(l.text.Bytes())
		if said {
			close(w.done)
		}
		return said
	})
	return n, err
}

func (l *procLog) wait(said func(text []byte) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := procWait{said, make(chan struct{})}
	if said(l.text.Bytes()) {
		close(w.done)
	} else {
		l.waits = append(l.waits, w)
	}
	return w.done
}

// when is closed once the process has said text.
func (l *procLog) when(text string) <-chan struct{} {
	return l.wait(func(said []byte) bool { return bytes.Contains(said, []byte(text)) })
}

// line is closed once the process has said n lines.
func (l *procLog) line(n int) <-chan struct{} {
	return l.wait(func(said []byte) bool { return bytes.Count(said, []byte{'\n'}) >= n })
}

func (l *procLog) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.text.Bytes(), []byte(text))
}

// says waits until the process has said text, and reports whether it has: what it says
// comes through a pipe.
func (l *procLog) says(text string) bool {
	select {
	case <-l.when(text):
		return true
	case <-time.After(patience):
		return false
	}
}

func (l *procLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// tail is the end of what the process has said, without the stacks of its lines.
func (l *procLog) tail(n int) string {
	text := procStack.ReplaceAllString(l.String(), "")
	return text[max(0, len(text)-n):]
}

// Options that have no effect, as they are written, are logged when the configuration loads.
func TestProcessWarnsOfOptionsWithoutEffect(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	const nobody, all = "nobody has the role that has to approve calls", "`exempt` takes every path"
	for name, c := range map[string]struct{ guard, want string }{
		"a role of nobody":      {"approve acountant", nobody},
		"a role of users":       {"approve accountant\n roles_from {http.auth.user.roles}", ""},
		"a role of a caller":    {"approve accountant\n role accountant user:alice", ""},
		"the role of operators": {"approve", ""},
		"every path is exempt":  {"exempt path /*", all},
		"a path is exempt":      {"exempt path /search/*", ""},
	} {
		t.Run(name, func(t *testing.T) {
			site := procNewSite(t, upstream.addr)
			site.guard = c.guard
			gateway := site.start(t)
			gateway.end(t)
			for _, warning := range []string{nobody, all} {
				want := 0
				if warning == c.want {
					want = 1
				}
				if got := strings.Count(gateway.log.String(), warning); got != want {
					t.Errorf("%q is logged %d times, want %d", warning, got, want)
				}
			}
		})
	}
}

// The space of ids that callers without a credential share is warned of once, not with each
// reload, and not where every request has to authenticate itself first.
func TestProcessWarnsOfAnonymousOnce(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	const warning = "calls without any credential share one space"
	for name, c := range map[string]struct {
		auth string
		want int
	}{
		"nobody asks who calls":    {"", 1},
		"basic_auth of everything": {"basic_auth {\n alice $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS\n}", 0},
		"basic_auth of a part":     {"basic_auth /admin/* {\n alice $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS\n}", 1},
	} {
		t.Run(name, func(t *testing.T) {
			site := procNewSite(t, upstream.addr)
			config := func(deadline string) string {
				site.raw, site.guard = "", "deadline "+deadline
				return strings.Replace(site.config(), "\tagent_proxy ", "\t"+c.auth+"\n\tagent_proxy ", 1)
			}
			site.raw = config("60s")
			gateway := site.start(t)
			for _, deadline := range []string{"61s", "62s"} {
				site.raw = config(deadline)
				gateway.reload(t)
			}
			gateway.end(t)
			if got := strings.Count(gateway.log.String(), warning); got != c.want {
				t.Errorf("warned %d times, want %d", got, c.want)
			}
		})
	}
}
