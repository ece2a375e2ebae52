package transport

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
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
			_, watch := sent.Arm(context.Background())
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
			_, watch = sent.Arm(context.Background())
			attempt = watch.Attempt()
			c.Count(attempt)
			n, err := c.Write([]byte("lost"))
			if n != 0 || err == nil || stale != 1 {
				t.Errorf("write to a closed connection: %d, %v, told %d times", n, err, stale)
			}
			attempt.Done(err)
			if v := watch.Proof(err, 0); v.Reason != sent.NothingWritten {
				t.Errorf("proof: %v", v.Reason)
			}
		})
	}
}
