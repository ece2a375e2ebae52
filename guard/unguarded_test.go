package guard

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// cascade 3.3.1 (C-3.3.1-b): what is not guarded has a deadline to the header of its answer,
// and then for every pause. No download is too long, and no upload.
func TestTimeOfWhatIsNotGuarded(t *testing.T) {
	piece := func(w http.ResponseWriter, every time.Duration, n int, r *http.Request) error {
		for range n {
			select {
			case <-time.After(every):
			case <-r.Context().Done():
				panic(http.ErrAbortHandler) // as reverse_proxy does
			}
			_, _ = w.Write([]byte("x"))
		}
		return nil
	}
	for _, c := range []struct {
		name    string
		body    io.Reader
		idle    time.Duration
		header  string // Request-Timeout
		forward func(w http.ResponseWriter, r *http.Request) error
		took    time.Duration
		status  int // of the error
		cut     bool
	}{
		{name: "no answer", took: time.Minute, status: 504,
			forward: func(_ http.ResponseWriter, r *http.Request) error { <-r.Context().Done(); return r.Context().Err() }},
		{name: "a caller that waits for less", header: "10", took: 9 * time.Second, status: 504,
			forward: func(_ http.ResponseWriter, r *http.Request) error { <-r.Context().Done(); return r.Context().Err() }},
		{name: "a long download", took: 1000 * 59 * time.Second,
			forward: func(w http.ResponseWriter, r *http.Request) error { return piece(w, 59*time.Second, 1000, r) }},
		{name: "a stream that pauses", took: 59*time.Second + 10*time.Minute, cut: true,
			forward: func(w http.ResponseWriter, r *http.Request) error {
				_ = piece(w, 59*time.Second, 1, r)
				return piece(w, time.Hour, 1, r)
			}},
		{name: "a stream that may", idle: -1, took: 59*time.Second + 1000*time.Hour,
			forward: func(w http.ResponseWriter, r *http.Request) error {
				_ = piece(w, 59*time.Second, 1, r)
				return piece(w, 1000*time.Hour, 1, r)
			}},
		{name: "a long upload", body: slow{30 * time.Second, strings.NewReader(strings.Repeat("x", 100))}, took: 100*30*time.Second + time.Minute, status: 504,
			forward: func(_ http.ResponseWriter, r *http.Request) error {
				for {
					if _, err := r.Body.Read(make([]byte, 1)); err == io.EOF {
						break
					}
				}
				<-r.Context().Done()
				return r.Context().Err()
			}},
		{name: "an error of another kind", took: time.Second, status: 502,
			forward: func(http.ResponseWriter, *http.Request) error {
				<-time.After(time.Second)
				return &StatusError{Status: 502, Err: errors.New("refused")}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHandler(t, Config{Settings: Settings{IdleTimeout: jsontime.Duration(c.idle)}, Policy: Policy{Deadline: jsontime.Duration(time.Minute)}})
				r := httptest.NewRequest(http.MethodGet, "/", c.body)
				if c.header != "" {
					r.Header.Set("Request-Timeout", c.header)
				}
				began := time.Now()
				var err error
				cut := func() (cut bool) {
					defer func() { cut = recover() != nil }()
					err = h.forwardInTime(httptest.NewRecorder(), r, nil, nextFunc(c.forward))
					return
				}()
				took := time.Since(began)
				status := 0
				if failed := (*StatusError)(nil); errors.As(err, &failed) {
					status = failed.Status
				}
				if took != c.took || status != c.status || cut != c.cut {
					t.Errorf("after %v: %d, cut %v, %v; want %v, %d, %v", took, status, cut, err, c.took, c.status, c.cut)
				}
			})
		})
	}
}

// slow gives a byte at a time.
type slow struct {
	every time.Duration
	from  io.Reader
}

func (s slow) Read(p []byte) (int, error) {
	n, err := s.from.Read(p[:1])
	if n > 0 {
		<-time.After(s.every)
	}
	return n, err
}

// BenchmarkForwardInTime is what a request that is not guarded pays for its time.
func BenchmarkForwardInTime(b *testing.B) {
	h := newHandler(b, Config{})
	r := request(http.MethodGet, "/")
	body := make([]byte, 200)
	next := nextFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		_, err := w.Write(body)
		return err
	})
	w := &nowhere{http.Header{}}
	for name, forward := range map[string]func(http.ResponseWriter, *http.Request, Next) error{
		"timed": func(w http.ResponseWriter, r *http.Request, next Next) error { return h.forwardInTime(w, r, nil, next) },
		"bare": func(w http.ResponseWriter, r *http.Request, next Next) error {
			return next.ServeHTTP(w, r)
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := forward(w, r, next); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// nowhere is a response writer that keeps nothing.
type nowhere struct{ header http.Header }

func (n *nowhere) Header() http.Header         { return n.header }
func (n *nowhere) WriteHeader(int)             {}
func (n *nowhere) Write(p []byte) (int, error) { return len(p), nil }

// P4: a guard that fails open forwards the whole body of a call or nothing. What was read in vain to find a message is
// gone.
func TestFailsOpenWithAWholeBodyOnly(t *testing.T) {
	message := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"note":"`
	for _, c := range []struct{ name, body, want string }{
		{"short", message + `"}}}`, message + `"}}}`},
		{"longer than max_body", message + strings.Repeat("x", 20000) + `"}}}`, ""},
		{"no message, longer than max_body", strings.Repeat("x", 20000), strings.Repeat("x", 20000)},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHandler(t, Config{
				Settings: Settings{FailOpen: true, MaxBody: 10000, Protocol: protocol.Auto},
				Open:     func() (*Engine, func(), error) { return nil, nil, errors.New("no store") },
			})
			r := request(http.MethodPost, "/mcp", "Content-Type", "application/json")
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(c.body)), -1
			w, got := httptest.NewRecorder(), ""
			err := h.Serve(w, r, nextFunc(func(_ http.ResponseWriter, r *http.Request) error {
				text, err := io.ReadAll(r.Body)
				got = string(text)
				return err
			}))
			if err != nil || got != c.want || (w.Code == http.StatusServiceUnavailable) != (c.want == "") {
				t.Errorf("%d, %v; the upstream got %d bytes; want %d", w.Code, err, len(got), len(c.want))
			}
		})
	}
}

// A matcher that fails for a message leaves its call the action of the HTTP request, by which it is refused, logged and
// counted.
func TestMatcherThatFailsForAMessage(t *testing.T) {
	failed := errors.New("no value")
	for _, speaks := range []protocol.Protocol{protocol.Auto, protocol.MCP} {
		engine := testEngine(t)
		h := newHandler(t, Config{
			Settings: Settings{Protocol: speaks},
			Open:     func() (*Engine, func(), error) { return engine, func() {}, nil },
			Actions: []*Action{
				{Name: "pay", Tools: []string{"pay"}, Match: func(*http.Request) (bool, error) { return false, failed }},
				{Name: "rest"},
			},
		})
		r := request(http.MethodPost, "/mcp", "Content-Type", "application/json")
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay"}}`
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		q, _, err := h.read(r, h.Actions[len(h.Actions)-1])
		if err = cmp.Or(err, q.unreadable); !errors.Is(err, failed) || q.action == nil || q.action.Name != "rest" {
			t.Errorf("%s: %+v, %v", speaks, q.action, err)
		}
		_ = q.text.Close()
	}
}
