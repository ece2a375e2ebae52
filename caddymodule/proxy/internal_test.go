package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// A kept connection whose end has arrived is not written to: what would be lost in
// it, and be in doubt, is proven not to have been sent (P1).
func TestClosedConnectionIsNotWrittenTo(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			address := "127.0.0.1:0"
			if network == "unix" {
				address = t.TempDir() + "/s"
			}
			l, err := net.Listen(network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			client, err := net.Dial(network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()

			stale := 0
			dial := func(context.Context, string, string) (net.Conn, error) { return client, nil }
			dialled, err := countWrites(dial, func() { stale++ }, false, new(atomic.Int64))(t.Context(), network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			c := dialled.(*conn)
			_, watch := Arm(context.Background())
			attempt := watch.Attempt()
			c.Count(attempt)
			if n, err := c.Write([]byte("living")); n != 6 || err != nil {
				t.Fatalf("write to a living connection: %d, %v", n, err)
			}
			watch.Release()

			if err := server.Close(); err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(20 * time.Second); !c.peek.gone(); {
				if time.Now().After(deadline) {
					t.Fatal("the end of the connection never arrived")
				}
			}
			_, watch = Arm(context.Background())
			attempt = watch.Attempt()
			c.Count(attempt)
			n, err := c.Write([]byte("lost"))
			if n != 0 || err == nil || stale != 1 {
				t.Errorf("write to a closed connection: %d, %v, told %d times", n, err, stale)
			}
			attempt.Done(err)
			if v := watch.Proof(err, 0); v.Reason != nothingWritten {
				t.Errorf("proof: %v", v.Reason)
			}
		})
	}
}

// Go's transport dials in a goroutine that outlives a forward that was cut, and
// Caddy's dial reads the request's variables there. Forwarding again writes them, and
// a map that is read and written at once ends the process.
func TestDialHasVariablesOfItsOwn(t *testing.T) {
	for _, n := range []int{0, 1, 8, 9} { // few are kept in place, many in a map
		seen, vars := sendRefused(t, n, context.Background())
		vars["after"] = 2
		if got, ok := seen.Value(caddyhttp.VarsCtxKey).(map[string]any); !ok || len(got) != n || n > 0 && got["v0"] != 0 || got["after"] != nil {
			t.Errorf("of %d variables and one set later the dial has %v", n, got)
		}
	}
}

// sendRefused sends a guarded request with n variables to where no connection is, and returns the
// dial's context.
func sendRefused(t *testing.T, n int, parent context.Context) (dialled context.Context, vars map[string]any) {
	t.Helper()
	refused := errors.New("refused")
	tr := &Transport{HTTPTransport: &reverseproxy.HTTPTransport{
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			dialled = ctx
			return nil, refused
		}},
	}}
	var err error
	if tr.guarded, err = tr.twin(); err != nil {
		t.Fatal(err)
	}
	vars = map[string]any{}
	for i := range n {
		vars[fmt.Sprint("v", i)] = i
	}
	ctx, watch := Arm(context.WithValue(parent, caddyhttp.VarsCtxKey, vars))
	defer watch.Release()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:1/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.RoundTrip(req); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	return dialled, vars
}

// Only our own hook for header fields is left out over HTTP/1. Others hear of them as behind Caddy's
// transport, and all other hooks stay.
func TestOthersHearOfHeaderFields(t *testing.T) {
	ctx, _ := sendRefused(t, 1, context.Background())
	if trace := httptrace.ContextClientTrace(ctx); trace == nil || trace.WroteHeaderField != nil || trace.GetConn == nil || trace.GotConn == nil {
		t.Errorf("the trace of a request over HTTP/1 is %+v", trace)
	}
	heard := 0
	other := &httptrace.ClientTrace{WroteHeaderField: func(string, []string) { heard++ }, GotFirstResponseByte: func() {}}
	ctx, _ = sendRefused(t, 1, httptrace.WithClientTrace(context.Background(), other))
	trace := httptrace.ContextClientTrace(ctx)
	if trace == nil || trace.WroteHeaderField == nil || trace.GotFirstResponseByte == nil {
		t.Fatalf("the trace of a request that others trace is %+v", trace)
	}
	if trace.WroteHeaderField("Name", nil); heard != 1 {
		t.Errorf("the other trace has heard of %d fields", heard)
	}
}
