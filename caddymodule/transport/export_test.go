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

// VerifyWith lets t verify tokens in answers with verify.
func VerifyWith(t *Transport, verify AnswerVerifier) { t.verify = verify }

// SeeEvents looks for an error in an event stream that comes in pieces of step bytes.
func SeeEvents(stream []byte, step int) (fault string, good bool) {
	e := new(events)
	for len(stream) > 0 && fault == "" {
		n := min(step, len(stream))
		var now bool
		fault, now = e.see(stream[:n])
		good, stream = good || now, stream[n:]
	}
	return fault, good
}

// SeeFrames follows one side of a WebSocket that comes in pieces of step bytes, and
// returns the code of its close frame.
func SeeFrames(stream []byte, step int) int {
	f := new(frames)
	for len(stream) > 0 {
		n := min(step, len(stream))
		f.see(stream[:n])
		stream = stream[n:]
	}
	return f.code
}
