package admin

import (
	"io"
	"net/http"
)

// stream is an answer that is too large to be held: it writes itself, as text.
type stream func(to io.Writer) error

// serve writes the stream. What goes wrong before the first byte is an error like any
// other. After it nothing can be said any more but by breaking off, so that nobody
// takes a part for the whole.
func (s stream) serve(w http.ResponseWriter) error {
	to := streamWriter{to: w}
	err := s(&to)
	if err == nil {
		return nil
	}
	if to.begun {
		panic(http.ErrAbortHandler)
	}
	return refusal(err)
}

// streamWriter sets the header at the first byte.
type streamWriter struct {
	to    http.ResponseWriter
	begun bool
}

func (s *streamWriter) Write(b []byte) (int, error) {
	if !s.begun {
		begin(s.to, "text/plain; charset=utf-8")
		s.begun = true
	}
	return s.to.Write(b)
}
