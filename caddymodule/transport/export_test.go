package transport

import (
	"context"
	"net"
	"net/http"
)

// Redial makes t dial with dial, so that a test can hand out connections that
// break in a way real ones cannot be made to at a given moment.
func Redial(t *Transport, dial func(ctx context.Context, network, addr string) (net.Conn, error)) error {
	t.Transport.DialContext = dial
	guarded, err := t.twin()
	t.guarded = guarded
	return err
}

// Guarded returns the transport of the guarded requests.
func Guarded(t *Transport) *http.Transport { return t.guarded }
