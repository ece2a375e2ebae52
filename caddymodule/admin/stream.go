package admin

import (
	"io"
	"net/http"
	"time"
)

// streamPatience is how long a reader may take nothing: a stream keeps the store open
// and the ledger from being pruned.
const streamPatience = 5 * time.Minute

// stream is an answer that is too large to be held: it writes itself, as text.
type stream func(to io.Writer) error

// serve writes the stream. What goes wrong before the first byte is an error like any
// other. After it nothing can be said any more but by breaking off, so that nobody
// takes a part for the whole.
func (s stream) serve(w http.ResponseWriter) error {
	to := streamWriter{to: w, control: http.NewResponseController(w)}
	err := s(&to)
	if err == nil {
		_ = to.control.SetWriteDeadline(time.Time{}) // for the next answer on this connection
		return nil
	}
	if to.begun {
		panic(http.ErrAbortHandler)
	}
	return refusal(err)
}

// streamWriter sets the header at the first byte, and gives each write its time.
type streamWriter struct {
	to      http.ResponseWriter
	control *http.ResponseController
	begun   bool
}

func (s *streamWriter) Write(b []byte) (int, error) {
	if !s.begun {
		begin(s.to, "text/plain; charset=utf-8")
		s.begun = true
	}
	_ = s.control.SetWriteDeadline(time.Now().Add(streamPatience)) // where the connection has one
	return s.to.Write(b)
}
