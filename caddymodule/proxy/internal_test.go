package proxy

import (
	"context"
	"errors"
	"net"
	"net/http"
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
			c := &conn{Conn: client, stale: func() { stale++ }}
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
			for deadline := time.Now().Add(20 * time.Second); !gone(client); {
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
	refused := errors.New("refused")
	var seen map[string]any
	tr := &Transport{HTTPTransport: &reverseproxy.HTTPTransport{
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			seen, _ = ctx.Value(caddyhttp.VarsCtxKey).(map[string]any)
			return nil, refused
		}},
	}}
	var err error
	if tr.guarded, err = tr.twin(); err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{"before": 1}
	ctx, watch := Arm(context.WithValue(context.Background(), caddyhttp.VarsCtxKey, vars))
	defer watch.Release()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:1/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.RoundTrip(req); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	vars["after"] = 2
	if seen["before"] != 1 || seen["after"] != nil {
		t.Errorf("the dial has the variables %v", seen)
	}
}
