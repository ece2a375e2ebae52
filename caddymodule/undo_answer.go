package caddymodule

import (
	"errors"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// undoAnswer is a response writer that keeps the answer to a request of an undo.
type undoAnswer struct {
	undo.Answer
}

func newUndoAnswer() *undoAnswer { return &undoAnswer{undo.Answer{Header: http.Header{}}} }

// Header implements http.ResponseWriter.
func (a *undoAnswer) Header() http.Header { return a.Answer.Header }

// WriteHeader implements http.ResponseWriter. Interim answers are not the answer.
func (a *undoAnswer) WriteHeader(status int) {
	if a.Status == 0 && status >= 200 {
		a.Status = status
	}
}

// Write implements http.ResponseWriter. It goes on to take what is not kept: an answer
// that is too long is still known to be whole.
func (a *undoAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	room := undo.MaxAnswer - len(a.Body)
	if len(p) > room {
		a.Cut = true
		a.Body = append(a.Body, p[:room]...)
		return len(p), nil
	}
	a.Body = append(a.Body, p...)
	return len(p), nil
}

// maybeCut is for a body that nothing but the connection's end has ended, so that its own
// end may be lacking. Of what changes something the status says enough, and the body is
// marked; who looks at what there is must not take a part of it for the whole.
func (a *undoAnswer) maybeCut(method string) error {
	if circuits.Safe(method) {
		return errCutShort
	}
	a.Cut = true
	return nil
}

var (
	errCutShort = errors.New("the answer was cut short")
	errNoAnswer = errors.New("no answer came")
	errReplaced = errors.New("a handler on the way has answered in the upstream's place")
)
