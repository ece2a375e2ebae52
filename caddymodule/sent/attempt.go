package sent

import "net"

// Attempt is what our transport reports of one RoundTrip. A transport may have
// any number of goroutines writing; Done makes the count final by refusing what
// they have not begun.
type Attempt struct {
	watch *Watch

	// Guarded by watch.mu.
	shared   net.Conn // the multiplexed connection the request goes to, or nil
	taken    bool     // a connection was obtained
	pending  int      // writes begun and not ended
	wrote    bool     // at least one byte was accepted by the socket
	unknown  bool     // bytes may have left that nobody counts
	sealed   bool     // no write may begin
	unframed bool
	onConn   func()
}

// Attempt opens the next attempt of our transport. It returns nil, and cancels
// the request, where an earlier attempt may have sent something: the transport
// must then fail without sending.
func (w *Watch) Attempt() *Attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.blown || w.attempt != nil && !w.attempt.zero() {
		w.cancel()
		return nil
	}
	w.attempt = &Attempt{watch: w}
	w.inside = true
	return w.attempt
}

// OnConn lets f be called once a connection was obtained, before anything is written
// to it. It is not called where the request is cut off there.
func (a *Attempt) OnConn(f func()) {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.onConn = f
}

// Begin announces a write of the request's bytes. If it returns false, nothing
// may be written: the attempt is over, and its count was given away as final.
func (a *Attempt) Begin() bool {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	if a.sealed {
		return false
	}
	a.watch.blown = true
	a.pending++
	return true
}

// Wrote ends a write that Begin allowed: n bytes were accepted.
func (a *Attempt) Wrote(n int) {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.pending--
	a.wrote = a.wrote || n > 0
}

// Unknown says that the attempt sends in a way that cannot be counted.
func (a *Attempt) Unknown() {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.unknown = true
}

// Unframed says that the response body is ended by nothing but the connection.
func (a *Attempt) Unframed() {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.unframed = true
}

// Done says that RoundTrip has returned with err. After a failure no further
// write may begin; after a response the rest of the body may still be on its way.
func (a *Attempt) Done(err error) {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.watch.inside = false
	if err != nil {
		a.sealed = true
	}
}

// take notes the connection that the attempt was given. watch.mu is held.
func (a *Attempt) take(conn net.Conn, shared bool) {
	a.taken = true
	if shared {
		a.shared = conn
	} else if c := counted(conn); c != nil {
		c.Count(a)
	} else {
		a.unknown = true
	}
}

// encoding notes that a request is about to be put on a multiplexed connection,
// where its bytes cannot be told from others'. Where that comes after the count
// was given away as final, it returns the connection: closing it is the only way
// to keep the request off the wire. watch.mu is held.
func (a *Attempt) encoding() (late net.Conn) {
	switch {
	case a == nil || a.shared == nil:
		return nil
	case a.sealed:
		return a.shared
	default:
		a.unknown = true
		return nil
	}
}

// zero reports whether it is final that no byte left. watch.mu is held.
func (a *Attempt) zero() bool {
	return a.sealed && !a.unknown && !a.wrote && a.pending == 0
}
