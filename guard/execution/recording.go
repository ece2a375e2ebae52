package execution

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
)

// readAhead is how many bytes the upstream may be ahead of the slowest reader of an answer larger
// than the call's ResultCap, if that is not more. All but the first MiB of them are on disk.
const readAhead = 64 << 20

// Recording is the growing answer of a running execution. The owner writes it; followers read it
// from the beginning at their own pace (P7), as does the owner's client when it is slow.
type Recording struct {
	limit  int64
	window int64                            // how many bytes can be read back
	pace   func(ready <-chan struct{}) bool // see SetPace

	mu        sync.Mutex
	body      *body.Spool
	own       body.Spool   // the first body, nearly always the only one
	owned     bool         // it was used
	memory    *body.Budget // that bodies share
	base      int64        // offset of the first byte that body was given
	head      *Head        // nil until it is known, then &first
	first     Head
	over      bool // past the limit: not kept, readers get it live
	skipped   bool // past the limit and nobody reads: body ends before size
	failed    bool // bytes are missing: not kept, followers are cut
	doubtful  bool // the answer leaves the call in doubt
	size      int64
	holders   int // the owner and the readers: the last one frees the body
	followers map[*Follower]struct{}
	client    *ReadBack     // of the owner's client; nil while it needs none
	changed   chan struct{} // closed at the next change; nil while nobody waits
	room      chan struct{} // closed when a reader has read; nil while the writer does not wait
	ending    Ending
}

func (r *Recording) begin(limit int64, memory *body.Budget) {
	r.limit, r.memory, r.window, r.holders = limit, memory, max(limit, readAhead), 1
}

// SetPace sets how to wait for readers that would miss bytes, once the answer is too large to
// keep: pace waits until ready is closed, and reports whether it was. False means that the readers' time is used up:
// slower ones are cut; without a pace at once. It must precede the owner's writes.
func (r *Recording) SetPace(pace func(ready <-chan struct{}) bool) { r.pace = pace }

// Start records the status and the header difference. Only the first call counts.
func (r *Recording) Start(status int, header map[string][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head == nil {
		r.first = Head{Status: status, Header: header}
		r.head = &r.first
		r.wake()
	}
}

// add records the next bytes of the body, as Execution.Write says. It never fails: a recording that cannot be
// kept is dropped, and the answer continues. It waits for readers only as pace allows.
func (r *Recording) add(p []byte, needed bool) (recorded bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	recorded = true
	for len(p) > 0 {
		n := min(int64(len(p)), max(r.window/2, 1))
		recorded = r.write(p[:n], needed) && recorded
		p = p[n:]
	}
	return recorded
}

// write records a part of the body. The caller holds mu, which is released while waiting for
// readers.
func (r *Recording) write(p []byte, needed bool) bool {
	defer r.wake()
	n := int64(len(p))
	if r.size+n > r.limit {
		r.over = true
	}
	if r.over && len(r.followers) == 0 && !needed {
		r.size += n
		r.skipped = true // nobody will read them
		r.release()
		return false
	}
	if r.failed {
		r.size += n
		return false
	}
	if r.skipped {
		r.skipped = false
		r.release()
	}
	if r.body == nil {
		r.body, r.base = &r.own, r.size
		if r.owned {
			r.body = new(body.Spool) // an earlier one may still be read
		}
		r.owned = true
		r.body.Init(body.SpoolOptions{Limit: r.window, Ring: true, Budget: r.memory})
	}
	if r.over {
		r.makeRoom(r.size + n - r.window)
	}
	if _, err := r.body.Write(p); err != nil {
		r.failed = true
	}
	r.size += n
	return !r.failed
}

// makeRoom waits until every reader has read everything before low. The caller holds mu.
func (r *Recording) makeRoom(low int64) {
	for r.behind(low, func(*Follower) {}) {
		if r.room == nil {
			r.room = make(chan struct{})
		}
		room := r.room
		patient := false
		if r.pace != nil {
			r.mu.Unlock()
			patient = r.pace(room)
			r.mu.Lock()
		}
		if !patient {
			r.behind(low, func(f *Follower) {
				f.cut = true
				delete(r.followers, f)
			})
			if r.client != nil && r.client.off < low {
				r.client = nil
			}
			r.wake()
			return
		}
	}
}

// behind calls f for the followers that have not read everything before low, and reports whether
// there are any. The caller holds mu.
func (r *Recording) behind(low int64, f func(*Follower)) bool {
	found := r.client != nil && r.client.off < low
	for follower := range r.followers {
		if follower.off < low {
			f(follower)
			found = true
		}
	}
	return found
}

// progress wakes a waiting writer: a reader has read. The caller holds mu.
func (r *Recording) progress() {
	if r.room != nil {
		close(r.room)
		r.room = nil
	}
}

// release frees the body, which has no readers any more. The caller holds mu.
func (r *Recording) release() {
	if r.body != nil {
		_ = r.body.Close() // what it failed at is lost with it
		r.body = nil
	}
}

// Doubt tells followers, before Start, that the answer leaves the call in doubt.
func (r *Recording) Doubt() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.doubtful = true
}

// SetTrailer records the trailer. The owner calls it before settling.
func (r *Recording) SetTrailer(trailer map[string][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head != nil {
		r.head.Trailer = trailer
	}
}

// written is the number of body bytes so far.
func (r *Recording) written() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.size
}

// complete reports whether the recording holds the whole answer, and its head.
func (r *Recording) complete() (*Head, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head == nil || r.over || r.failed {
		return nil, false
	}
	r.head.Size = r.size
	return r.head, true
}

// lost reports that the answer cannot be kept any more.
func (r *Recording) lost() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.over || r.failed
}

func (r *Recording) readAt(p []byte, off int64) (int, error) {
	r.mu.Lock()
	from, base := r.body, r.base
	r.mu.Unlock()
	switch {
	case from == nil:
		return 0, io.EOF
	case off < base:
		return 0, body.ErrGone
	}
	return from.ReadAt(p, off-base)
}

// fail cuts followers, since bytes are missing.
func (r *Recording) fail() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	r.wake()
}

func (r *Recording) wake() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

func (r *Recording) end(e Ending) {
	r.mu.Lock()
	r.ending = e
	r.wake()
	r.mu.Unlock()
	r.drop()
}

// hold keeps the body until drop, also when the execution has ended.
func (r *Recording) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holders++
}

func (r *Recording) drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holders--
	if r.holders == 0 {
		r.release()
	}
}

// Errors of a Follower.
var (
	// errCut: the answer was cut short, or the follower fell too far behind an answer that is too
	// large to keep. The bytes read are not the whole.
	errCut = errors.New("guard: the followed answer was cut short")
	// ErrNoAnswer: the execution ended without an answer that could be followed.
	ErrNoAnswer = errors.New("guard: the followed execution ended without an answer")
)

// Follower reads a recording. It is for one goroutine, and must be closed.
type Follower struct {
	r      *Recording
	off    int64 // changed under the recording's mu
	cut    bool  // it was too slow; guarded by the recording's mu
	closed bool
	left   func() // is called when it is closed; nil for nobody
}

// follow returns nil if the recording is too large to be followed from its beginning.
func (r *Recording) follow() *Follower {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || r.failed || r.holders == 0 {
		return nil
	}
	r.holders++
	f := &Follower{r: r}
	if r.followers == nil {
		r.followers = map[*Follower]struct{}{}
	}
	r.followers[f] = struct{}{}
	return f
}

// Close frees the follower.
func (f *Follower) Close() {
	if f.closed {
		return
	}
	f.closed = true
	f.r.mu.Lock()
	delete(f.r.followers, f)
	f.r.progress()
	f.r.mu.Unlock()
	f.r.drop()
	if f.left != nil {
		f.left()
	}
}

// wait blocks until ready reports true under the lock, or ctx ends.
func (f *Follower) wait(ctx context.Context, ready func() bool) error {
	for {
		f.r.mu.Lock()
		if ready() {
			f.r.mu.Unlock()
			return nil
		}
		if f.r.changed == nil {
			f.r.changed = make(chan struct{})
		}
		changed := f.r.changed
		f.r.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Head waits for the answer's first byte: its status and header. ErrNoAnswer means that the
// execution ended before, that its key was released unsent, or that the answer cannot be followed.
func (f *Follower) Head(ctx context.Context) (*Head, error) {
	var head *Head
	err := f.wait(ctx, func() bool {
		head = f.r.head
		return head != nil || f.r.ending != 0 || f.r.failed
	})
	switch {
	case err != nil:
		return nil, err
	case head == nil:
		return nil, ErrNoAnswer
	}
	return head, nil
}

// Doubtful reports, once there is a head, that the answer leaves the call in doubt.
func (f *Follower) Doubtful() bool {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	return f.r.doubtful
}

// Read waits for and reads the next bytes of the body. io.EOF comes only after settling, so that
// a reader that saw the end can rely on the record.
func (f *Follower) Read(ctx context.Context, p []byte) (int, error) {
	var ending Ending
	var size int64
	cut := false
	err := f.wait(ctx, func() bool {
		ending, size, cut = f.r.ending, f.r.size, f.cut
		return size > f.off || ending != 0 || f.r.failed || cut
	})
	switch {
	case err != nil:
		return 0, err
	case cut:
		return 0, errCut
	case size > f.off:
		n, _ := f.r.readAt(p, f.off)
		if n > 0 {
			f.r.mu.Lock()
			f.off += int64(n)
			f.r.progress()
			f.r.mu.Unlock()
			return n, nil
		}
		return 0, errCut // bytes that were overwritten, or counted but not recorded
	}
	if ending.whole() {
		return 0, io.EOF
	}
	return 0, errCut
}

// Trailer is complete once Read returned io.EOF.
func (f *Follower) Trailer() map[string][]string {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if f.r.head == nil {
		return nil
	}
	return f.r.head.Trailer
}

// ReadBack gives a slow client of the owner the bytes that it missed. It is for one goroutine,
// and must be closed, once.
type ReadBack struct {
	r   *Recording
	off int64 // of the first byte that is still needed; guarded by the recording's mu
}

// ReadBack lets the client of the call itself read from off: bytes written as needed, and
// others that are still in memory. Needed bytes are overwritten only as pace allows.
func (r *Recording) ReadBack(off int64) *ReadBack {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holders++
	b := &ReadBack{r: r, off: off}
	r.client = b
	return b
}

// Read reads the next bytes, without waiting for them.
func (b *ReadBack) Read(p []byte) (int, error) {
	n, err := b.r.readAt(p, b.off)
	if n == 0 {
		if err == nil {
			err = io.EOF
		}
		return 0, err
	}
	b.r.mu.Lock()
	defer b.r.mu.Unlock()
	b.off += int64(n)
	b.r.progress()
	return n, nil
}

// Close ends the reading; the recording may then forget what only it needed.
func (b *ReadBack) Close() error {
	b.r.mu.Lock()
	if b.r.client == b {
		b.r.client = nil
	}
	b.r.progress()
	b.r.mu.Unlock()
	b.r.drop()
	return nil
}
