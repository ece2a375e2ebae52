package caddymodule

import "sync"

// targets knows which guarded calls change what at the same time, so that none takes what
// another has written for its own work, or for what stood there before it (P6). It sees
// what passes the guards of this process that restore anything; what else writes there is
// found by entity tags, or not at all.
type targets struct {
	mu  sync.Mutex
	all map[string]*busyTarget
}

// busyTarget is what calls change, while any is at it.
type busyTarget struct {
	windows map[*window]bool
	writing int
}

// window is from the look before a call, or an undo, to the look after it.
type window struct {
	of   *targets
	name string

	// Guarded by targets.mu.
	disturbed bool // somebody else has written in it
	closed    bool
}

// at is the target of that name, with mu held.
func (t *targets) at(name string) *busyTarget {
	if t.all == nil {
		t.all = map[string]*busyTarget{}
	}
	found := t.all[name]
	if found == nil {
		found = &busyTarget{windows: map[*window]bool{}}
		t.all[name] = found
	}
	return found
}

// left forgets a target at which nobody is, with mu held.
func (t *targets) left(name string) {
	if at := t.all[name]; len(at.windows) == 0 && at.writing == 0 {
		delete(t.all, name)
	}
}

// open begins a window. It must be closed.
func (t *targets) open(name string) *window {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.at(name)
	w := &window{of: t, name: name, disturbed: at.writing > 0}
	at.windows[w] = true
	return w
}

// Disturbed implements undo.Window.
func (w *window) Disturbed() bool {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	return w.disturbed
}

// disturb says that somebody else has written in it, past the register.
func (w *window) disturb() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	w.disturbed = true
}

// Close implements undo.Window.
func (w *window) Close() { w.close() }

// close ends a window, and reports whether it was disturbed. One that is nil was not.
func (w *window) close() bool {
	if w == nil {
		return false
	}
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	if !w.closed {
		w.closed = true
		delete(w.of.all[w.name].windows, w)
		w.of.left(w.name)
	}
	return w.disturbed
}

// write says that somebody begins to change a target, by a call with that window, or with
// none. over must be called when that has ended.
func (t *targets) write(name string, own *window) (over func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.at(name)
	if own != nil && at.writing > 0 {
		own.disturbed = true
	}
	for w := range at.windows {
		w.disturbed = w.disturbed || w != own
	}
	at.writing++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		at.writing--
		t.left(name)
	}
}
