package guard

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// Recording is the answer of a running execution while it comes in. The owner
// writes it; followers read it from the beginning, at their own pace (P7).
type Recording struct {
	limit int64

	mu        sync.Mutex
	body      *spool.Spool
	head      *Head
	over      bool // past the limit: not kept, followers go on live
	deaf      bool // past the limit and nobody listens: bytes are only counted
	failed    bool // bytes are missing: not kept, followers are cut
	size      int64
	holders   int // the owner and the followers: the last one frees the body
	followers int
	changed   chan struct{} // closed at the next change; nil while nobody waits
	ending    Ending
}

func newRecording(limit int64) *Recording {
	return &Recording{limit: limit, holders: 1}
}

// Start records the status and the header difference. Only the first call counts.
func (r *Recording) Start(status int, header map[string][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head == nil {
		r.head = &Head{Status: status, Header: header}
		r.wake()
	}
}

// Write records the next bytes of the body. It never fails and never waits for a
// follower: a recording that cannot be kept is given up, the answer goes on.
func (r *Recording) Write(p []byte) {
	if len(p) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.size += int64(len(p))
	if r.size > r.limit {
		r.over = true
		r.deaf = r.deaf || r.followers == 0
	}
	if r.deaf || r.failed {
		return
	}
	if r.body == nil {
		r.body = spool.New(spool.Options{Limit: r.limit, Ring: true})
	}
	if _, err := r.body.Write(p); err != nil {
		r.failed = true
	}
	r.wake()
}

// SetTrailer records what came after the body. It is for the owner, before it settles.
func (r *Recording) SetTrailer(trailer map[string][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head != nil {
		r.head.Trailer = trailer
	}
}

// Size is the number of body bytes so far.
func (r *Recording) Size() int64 {
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

// lost reports that the answer is not kept, whatever comes.
func (r *Recording) lost() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.over || r.failed
}

func (r *Recording) readAt(p []byte, off int64) (int, error) {
	r.mu.Lock()
	body := r.body
	r.mu.Unlock()
	if body == nil {
		return 0, io.EOF
	}
	return body.ReadAt(p, off)
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

func (r *Recording) drop() {
	r.mu.Lock()
	r.holders--
	var body *spool.Spool
	if r.holders == 0 {
		body, r.body = r.body, nil
	}
	r.mu.Unlock()
	if body != nil {
		body.Close()
	}
}

// Errors of a Follower.
var (
	// ErrCut: the execution's answer was cut short, or the follower fell too far
	// behind an answer that is too large to keep. What was read is not the whole.
	ErrCut = errors.New("guard: the followed answer was cut short")
	// ErrNoAnswer: the execution ended without an answer that could be followed.
	ErrNoAnswer = errors.New("guard: the followed execution ended without an answer")
)

// Follower reads a recording. It is for one goroutine, and must be closed.
type Follower struct {
	r      *Recording
	off    int64
	closed bool
}

// follow returns nil where the recording is too large to be followed from its
// beginning.
func (r *Recording) follow() *Follower {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || r.failed || r.holders == 0 {
		return nil
	}
	r.holders++
	r.followers++
	return &Follower{r: r}
}

// Close frees the follower.
func (f *Follower) Close() {
	if f.closed {
		return
	}
	f.closed = true
	f.r.mu.Lock()
	f.r.followers--
	f.r.mu.Unlock()
	f.r.drop()
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

// Head waits for the answer's first byte: its status and header. ErrNoAnswer says
// that the execution ended before, or that its key was released unsent.
func (f *Follower) Head(ctx context.Context) (*Head, error) {
	var head *Head
	err := f.wait(ctx, func() bool {
		head = f.r.head
		return head != nil || f.r.ending != 0
	})
	switch {
	case err != nil:
		return nil, err
	case head == nil:
		return nil, ErrNoAnswer
	}
	return head, nil
}

// Read reads the next bytes of the body, waiting for them. io.EOF comes only after
// the execution is settled, so that who saw the end can rely on the record.
func (f *Follower) Read(ctx context.Context, p []byte) (int, error) {
	var ending Ending
	var size int64
	err := f.wait(ctx, func() bool {
		ending, size = f.r.ending, f.r.size
		return size > f.off || ending != 0 || f.r.failed
	})
	if err != nil {
		return 0, err
	}
	if size > f.off {
		n, _ := f.r.readAt(p, f.off)
		f.off += int64(n)
		if n > 0 {
			return n, nil
		}
		return 0, ErrCut // bytes that were overwritten, or counted but not recorded
	}
	if ending.whole() {
		return 0, io.EOF
	}
	return 0, ErrCut
}

// Trailer is what came after the body. It is whole once Read returned io.EOF.
func (f *Follower) Trailer() map[string][]string {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if f.r.head == nil {
		return nil
	}
	return f.r.head.Trailer
}
