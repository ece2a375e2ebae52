package guard

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// testHost is a host whose placeholders are header fields, and `user`.
type testHost struct{ plainHost }

func (h testHost) User(r *http.Request) string {
	user, _ := h.Var(r, "user").(string)
	return user
}

func (h testHost) Note(r *http.Request, name, value string) { h.SetVar(r, "noted "+name, value) }

// notedOf is what a handler has noted of a request.
func notedOf(r *http.Request, name string) string {
	value, _ := testHost{}.Var(r, "noted "+name).(string)
	return value
}

func (h testHost) Expand(r *http.Request, text string) (string, bool) {
	var b strings.Builder
	for {
		before, rest, open := strings.Cut(text, "{")
		b.WriteString(before)
		if !open {
			return b.String(), b.Len() > 0
		}
		name, after, _ := strings.Cut(rest, "}")
		var value string
		if field, ok := strings.CutPrefix(name, "http.request.header."); ok {
			value = r.Header.Get(field)
		} else if name == "http.auth.user.id" {
			value = h.User(r)
		}
		if value == "" {
			return "", false
		}
		b.WriteString(value)
		text = after
	}
}

// EndingHost is a host whose process may be Over.
type EndingHost struct {
	Host
	Over *atomic.Bool
}

// Exiting implements Host.
func (h EndingHost) Exiting() bool { return h.Over.Load() }

// Ending is a host that ends when over is set; nil is net/http.
func Ending(h Host, over *atomic.Bool) Host {
	if h == nil {
		h = plainHost{}
	}
	return EndingHost{h, over}
}

// StatusHost is net/http with an upstream whose statuses it knows.
type StatusHost struct{ plainHost }

func (StatusHost) Upstream(next Next) Upstream {
	u := &statusUpstream{}
	u.next = nextFunc(func(w http.ResponseWriter, r *http.Request) error {
		return next.ServeHTTP(statusWriter{w, &u.status}, r)
	})
	return u
}

type statusUpstream struct {
	plainUpstream
	status int
}

func (u *statusUpstream) Status() int { return u.status }

type statusWriter struct {
	http.ResponseWriter
	status *int
}

func (w statusWriter) WriteHeader(status int) {
	*w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// nextFunc is a handler behind the guard.
type nextFunc func(http.ResponseWriter, *http.Request) error

func (f nextFunc) ServeHTTP(w http.ResponseWriter, r *http.Request) error { return f(w, r) }

// request makes a request with header fields given as name, value, name, value...
func request(method, target string, fields ...string) *http.Request {
	r := httptest.NewRequest(method, target, nil)
	for i := 0; i < len(fields); i += 2 {
		r.Header.Add(fields[i], fields[i+1])
	}
	return r.WithContext(context.WithValue(r.Context(), varsKey{}, map[string]any{}))
}

// Mark is mark.
func Mark(w http.ResponseWriter, name, value string) http.ResponseWriter { return mark(w, name, value) }

// testGuard is an execution guard over a store in memory.
func testGuard(t testing.TB) *execution.Guard {
	t.Helper()
	return testEngine(t).Executions
}

// testEngine is an engine over a store in memory.
func testEngine(t testing.TB) *Engine {
	t.Helper()
	st := memory.New(memory.Options{})
	e, _, err := OpenEngine(t.Context(), st, seal.Generate(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// newHandler is a handler with this configuration, over an engine of its own where that has
// none.
func newHandler(t testing.TB, c Config) *Handler {
	t.Helper()
	if c.Host == nil {
		c.Host = testHost{}
	}
	if c.Open == nil {
		c.Open = func() (*Engine, func(), error) { panic("no test of this opens the engine") }
	}
	h, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return h
}
