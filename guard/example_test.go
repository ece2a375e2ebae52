package guard_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A retried call reaches the server behind a reverse proxy once.
func Example() {
	charges := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		charges++
		fmt.Fprintf(w, "charge %d", charges)
	}))
	defer server.Close()
	target, _ := url.Parse(server.URL)

	engine, _, err := guard.OpenEngine(context.Background(), memory.New(memory.Options{}), seal.Generate(), nil)
	if err != nil {
		panic(err)
	}
	guarded, err := guard.New(guard.Config{Open: engine.Open, Next: httputil.NewSingleHostReverseProxy(target)})
	if err != nil {
		panic(err)
	}
	for range 2 {
		r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader("amount=10"))
		r.Header.Set("Idempotency-Key", "order-7")
		w := httptest.NewRecorder()
		guarded.ServeHTTP(w, r)
		body, _ := io.ReadAll(w.Body)
		fmt.Println(w.Header().Get("Execution-Status"), string(body))
	}
	// Output:
	// executed charge 1
	// replayed charge 1
}
