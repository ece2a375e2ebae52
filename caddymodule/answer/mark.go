package answer

import (
	"io"
	"net/http"
)

// Mark returns a response writer on w whose answers carry the header field name with
// value, whatever the upstream says. Nothing is held back or recorded.
func Mark(w http.ResponseWriter, name, value string) http.ResponseWriter {
	return &marked{ResponseWriter: w, name: name, value: value}
}

type marked struct {
	http.ResponseWriter
	name, value string
	wrote       bool
}

// WriteHeader sends the header.
func (m *marked) WriteHeader(status int) {
	if !m.wrote && !informational(status) {
		m.wrote = true
		m.Header().Set(m.name, m.value)
	}
	m.ResponseWriter.WriteHeader(status)
}

// Write sends p.
func (m *marked) Write(p []byte) (int, error) {
	m.begin()
	return m.ResponseWriter.Write(p)
}

// ReadFrom sends what r gives.
func (m *marked) ReadFrom(r io.Reader) (int64, error) {
	m.begin()
	return io.Copy(m.ResponseWriter, r)
}

// FlushError is Flush for http.ResponseController.
func (m *marked) FlushError() error {
	m.begin()
	return http.NewResponseController(m.ResponseWriter).Flush()
}

func (m *marked) begin() {
	if !m.wrote {
		m.WriteHeader(http.StatusOK)
	}
}

// Unwrap is for http.ResponseController.
func (m *marked) Unwrap() http.ResponseWriter { return m.ResponseWriter }
