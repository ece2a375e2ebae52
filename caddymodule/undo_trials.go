package caddymodule

import (
	"fmt"
	"net/http"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// undoTrials are the undos of this life that have got no good answer yet, by the checkpoint
// of their step: who looks at a rollback that hangs is told why.
type undoTrials struct {
	mu  sync.Mutex
	all map[string]admin.Trial
}

// maxTrials bounds how many are remembered: many more than run at a time.
const maxTrials = 10_000

// tried takes what came of a request.
func (t *undoTrials) tried(o *undo.Outgoing, answer *undo.Answer, err error) {
	cause := ""
	switch looks := o.Method == http.MethodGet; {
	case err != nil:
		cause = fmt.Sprintf("%s: %v", o.Method, err)
	case answer == nil, answer.Status < 300, looks && answer.Status < 500:
	default:
		cause = fmt.Sprintf("%s: it was answered with %d", o.Method, answer.Status)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	was, known := t.all[o.Step]
	if cause == "" || !known && len(t.all) >= maxTrials {
		return
	}
	if t.all == nil {
		t.all = map[string]admin.Trial{}
	}
	t.all[o.Step] = admin.Trial{Attempts: was.Attempts + 1, Cause: cause}
}

// ended forgets a checkpoint: its step says what came of it.
func (t *undoTrials) ended(checkpoint string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, checkpoint)
}

// of is what is known of a checkpoint.
func (t *undoTrials) of(checkpoint string) (admin.Trial, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.all[checkpoint]
	return found, ok
}
