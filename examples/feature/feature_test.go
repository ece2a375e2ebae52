package feature_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/examples/feature"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// While the window is open, no call begins, and a retry gets the answer of the call that has run.
func Example() {
	ctx, st, window := context.Background(), memory.New(memory.Options{}), new(feature.Maintenance)
	engine, _, err := guard.OpenEngine(ctx, st, seal.Generate(), nil)
	if err != nil {
		panic(err)
	}
	running := func() int {
		n, err := feature.Running(ctx, st)
		if err != nil {
			panic(err)
		}
		return n
	}
	guarded, err := guard.New(guard.Config{
		Open: engine.Open, Gates: []guard.Gate{window}, Parts: []guard.Part{window},
		Next: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, "%d running", running()) }),
	})
	if err != nil {
		panic(err)
	}
	call := func(key string) {
		r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader("amount=10"))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		guarded.ServeHTTP(w, r)
		answer := w.Body.String()
		if w.Code != http.StatusOK {
			answer = w.Header().Get("Retry-After")
		}
		fmt.Println(w.Code, w.Header().Get("Execution-Status"), answer)
	}
	call("order-7")
	window.Open(time.Now().Add(time.Hour))
	call("order-7")
	call("order-8")
	fmt.Println(running(), "running")
	window.Close()
	call("order-8")
	// Output:
	// 200 executed 1 running
	// 200 replayed 1 running
	// 503 refused 3600
	// 0 running
	// 200 executed 1 running
}
