package undo

import "context"

// Watcher is a Sender that sees who else writes at the target of an undo. Where nobody
// does so, only entity tags keep an undo from writing over what came after its look.
type Watcher interface {
	// Watch begins to watch the target of a request; nil where it cannot be seen.
	Watch(r *Outgoing) Window
}

// Window is the time from the look of an undo to the last one after its write. The
// requests that carry it do not disturb it.
type Window interface {
	// Disturbed reports that somebody else has written there, or has begun to.
	Disturbed() bool
	// Close ends it.
	Close()
}

// watch begins a window, where there is none and others are not to be written over.
func (j *job) watch() {
	if w, is := j.o.Sender.(Watcher); is && j.window == nil && !j.overwrites() {
		look := Look(&j.call.Request)
		look.Guard, look.Action, look.Upstream = j.spec.Guard, j.call.Action, j.call.Upstream
		j.window = w.Watch(look)
	}
}

func (j *job) unwatch() {
	if j.window != nil {
		j.window.Close()
		j.window = nil
	}
}

func (j *job) disturbed() bool { return j.window != nil && j.window.Disturbed() }

// lookAlone looks in a window. Where somebody writes beside it, it looks once more:
// what was written may have been refused. Once an undo was sent that may still have its
// effect, the window is what it was.
func (j *job) lookAlone(ctx context.Context, sent bool) (*sight, note, error) {
	j.watch()
	now, n, err := j.look(ctx)
	if err != nil || now == nil || sent || !j.disturbed() {
		return now, n, err
	}
	j.unwatch()
	j.watch()
	return j.look(ctx)
}

// readsAlone is readsTarget for what was sent in the window of the job. P6: what somebody
// else has written meanwhile is lost, perhaps. It is recorded with the answer, since the
// window does not outlive the process.
func (j *job) readsAlone(method string) func(*Answer) note {
	read := j.readsTarget(method)
	return func(a *Answer) note {
		n := read(a)
		if n.reading.final() && (n.reading == done || n.reading == pending || n.unknown || j.doubt) && j.disturbed() {
			n.reading, n.unknown = disturbed, true
		}
		return n
	}
}

// restoredAlone is restored, for what was sent in the window of the job.
func (j *job) restoredAlone(ctx context.Context, n note) (Result, error) {
	r, err := j.restored(ctx, n)
	if err == nil && (r.Done || r.Reason == ReasonUnverified) && j.disturbed() {
		j.doubt = true
		return j.result(ReasonChanged), nil
	}
	return r, err
}
