package undo_test

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// watcher is a rig that is told who else writes.
type watcher struct {
	*rig
	disturbed bool
	open, all int
}

func (w *watcher) Watch(*undo.Outgoing) undo.Window {
	w.open, w.all, w.disturbed = w.open+1, w.all+1, false
	return w
}
func (w *watcher) Disturbed() bool { return w.disturbed }
func (w *watcher) Close()          { w.open-- }

// P6: what others write beside an undo is not written over, or said to be perhaps.
func TestRestoreBesideOthers(t *testing.T) {
	for name, c := range map[string]struct {
		spec   undo.Spec
		script func(w *watcher, u *resource)
		want   undo.Result
		looks  int
		stands state
	}{
		"alone": {looks: 1, want: undo.Result{Done: true, Status: 204, Attempts: 1, Before: state("new").hash()}, stands: "old"},
		"one write while it looks, that had no effect": {
			script: func(w *watcher, u *resource) {
				w.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
					w.disturbed = w.asked() == 1
					return u.serve(o)
				}
			},
			looks: 2, want: undo.Result{Done: true, Status: 204, Attempts: 1, Before: state("new").hash()}, stands: "old",
		},
		"always somebody": {
			script: func(w *watcher, u *resource) {
				w.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
					w.disturbed = true
					return u.serve(o)
				}
			},
			looks: 2, want: undo.Result{Reason: undo.ReasonChanged, Before: state("new").hash()}, stands: "new",
		},
		"always somebody, and all is to be written over": {
			spec: undo.Spec{OnChanged: undo.Overwrite},
			script: func(w *watcher, u *resource) {
				w.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
					w.disturbed = true
					return u.serve(o)
				}
			},
			looks: 1, want: undo.Result{Done: true, Status: 204, Attempts: 1, Before: state("new").hash()}, stands: "old",
		},
		"while it is written": {
			script: func(w *watcher, u *resource) {
				u.before = func(*undo.Outgoing) (*undo.Answer, error) { w.disturbed = true; return nil, nil }
			},
			looks: 1, want: undo.Result{Unknown: true, Reason: undo.ReasonChanged, Status: 204, Attempts: 1, Before: state("new").hash()}, stands: "old",
		},
		"while it is checked": {
			spec: undo.Spec{Verify: true},
			script: func(w *watcher, u *resource) {
				w.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
					w.disturbed = u.writes > 0 && o.Method == http.MethodGet
					return u.serve(o)
				}
			},
			looks: 2, want: undo.Result{Unknown: true, Reason: undo.ReasonChanged, Status: 204, Attempts: 1, Before: state("new").hash(), After: state("old").hash()}, stands: "old",
		},
		"after an answer that was lost": {
			script: func(w *watcher, u *resource) {
				u.after = func(*undo.Outgoing) (*undo.Answer, error) { w.disturbed = true; return nil, errLost }
			},
			looks: 2, want: undo.Result{Unknown: true, Reason: undo.ReasonChanged, Attempts: 1, Before: state("new").hash()}, stands: "old",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				u := &resource{}
				r.answer = u.serve
				w := &watcher{rig: r}
				undoer := undo.New(undo.Options{Guard: r.guard, Vault: r.vault, Sender: w})
				undoer.HashPlainly()
				r.Undoer = undoer
				task := restoring(u, "old", "new", c.spec)
				if c.script != nil {
					c.script(w, u)
				}
				r.wants(task, c.want)
				if u.state() != c.stands || w.open != 0 || r.asked() != c.looks {
					t.Errorf("%q, %d windows are open, %d looks", u.state(), w.open, r.asked())
				}
				if name == "while it is written" { // it is recorded with the answer
					r.wants(task, c.want)
				}
			})
		})
	}
}
