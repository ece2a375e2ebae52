package ledger

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sealer keeps values unreadable at rest and derives the store's keys.
type Sealer interface {
	// Seal appends the sealed plaintext to dst; it opens under the same name only.
	Seal(dst, plaintext, name []byte) []byte
	// Open appends the plain value to dst.
	Open(dst, sealed, name []byte) ([]byte, error)
	// Index derives 32 bytes from parts, stable for the life of the store.
	Index(domain string, parts ...string) [32]byte
	// KeyIDs lists the keys with which it opens, by id, the last of which seals.
	KeyIDs() []uint32
	// KeyOf is the id of the key under which a value is sealed.
	KeyOf(sealed []byte) uint32
}

// Signer makes the token of an event that was recorded unsigned, off the way of the
// request that it tells of. After a crash it is asked again for what did not reach the
// tree; the token that it made then must tell the same event. An error that wraps
// ErrRefused is final; any other is tried again, and the events behind wait.
type Signer interface {
	Sign(ctx context.Context, e Event) ([]byte, error)
}

// Options are the settings of a log.
type Options struct {
	// Store is where the log stands. It may hold other things and other logs.
	Store store.Store
	// Sealer seals what a caller gave.
	Sealer Sealer
	// Origin names the log for ever: one for each node.
	Origin string
	// HeadSigner signs the heads.
	HeadSigner note.Signer
	// HeadKeys are the public keys of the heads: the signer's, and those before it.
	HeadKeys note.Verifiers
	// Signer makes tokens of unsigned events. Without one, these are invalid.
	Signer Signer
	// Known are heads that were seen before and kept elsewhere. A log that does not
	// contain them was altered, or is an older copy.
	Known []Head
	// MaxBacklog and MaxAge bound what waits for the sequencer: with more events, or
	// an older one, Admit waits. Zero is 10,000 and 10 s.
	MaxBacklog int
	MaxAge     time.Duration
	// Gather is how long the sequencer waits for more once it has one, so that a
	// commit carries several. Zero is 5 ms; less than zero is not at all.
	Gather time.Duration
	// Logger gets what the sequencer cannot return to anybody; nil is none.
	Logger *slog.Logger
}

const (
	defaultBacklog = 10_000
	defaultAge     = 10 * time.Second
	defaultGather  = 5 * time.Millisecond
)

func (o *Options) complete() error {
	if o.Store == nil || o.Sealer == nil || o.HeadKeys == nil {
		return errors.New("ledger: a log needs a store, a sealer and the keys of its heads")
	}
	if o.MaxBacklog == 0 {
		o.MaxBacklog = defaultBacklog
	}
	if o.MaxAge == 0 {
		o.MaxAge = defaultAge
	}
	if o.Gather == 0 {
		o.Gather = defaultGather
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return checkOrigin(o.Origin)
}

// Log is one process's view of a log. It is safe for concurrent use.
type Log struct {
	*shelf
	options Options
	signer  note.Signer
	boot    [8]byte
	queue   *queue
	now     atomic.Pointer[state] // as it is in the store
	pruning sync.Mutex            // held by what takes away, and by what must not see that
	kept    map[int64]bool        // entries that cannot be pruned, and were reported; of pruning
	origins sync.Map              // logID -> string, of the other logs of the store
	counts  counts

	lifecycle sync.Mutex
	started   bool
	cancel    context.CancelFunc // ends the sequencer at once
	stopped   chan struct{}      // closed when the sequencer has ended
}

type counts struct {
	refused, damaged, retries atomic.Int64
}

// Stats are counts of a log since it was opened, but for Size.
type Stats struct {
	// Size is the number of entries in the tree.
	Size int64
	// Refused is the number of events that went into the tree without a token.
	Refused int64
	// Damaged is the number of waiting events that do not open, at the last look.
	Damaged int64
	// Retries is the number of moves that failed and were tried again.
	Retries int64
	// Backlog is what waits for the sequencer.
	Backlog Backlog
}

// Open reads the head of the log and what is needed to go on from it, and compares the
// one with the other. ErrTampered says that they differ: nothing may be added then,
// and Verify tells more.
func Open(ctx context.Context, o Options) (*Log, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if o.HeadSigner == nil {
		return nil, errors.New("ledger: a log needs a signer of its heads")
	}
	l := &Log{shelf: newShelf(&o), options: o, signer: o.HeadSigner, stopped: make(chan struct{})}
	_, _ = rand.Read(l.boot[:]) // never fails
	s, err := l.load(ctx)
	if err != nil {
		return nil, err
	}
	for _, known := range o.Known {
		if err := s.contains(ctx, l.shelf, &known); err != nil {
			return nil, err
		}
	}
	if s, err = l.adopt(ctx, s); err != nil {
		return nil, err
	}
	l.now.Store(s)
	last, waiting, err := l.inherited(ctx)
	if err != nil {
		return nil, err
	}
	l.queue = newQueue(last+1, o.MaxBacklog, o.MaxAge)
	l.queue.inherit(waiting)
	return l, nil
}

// adopt puts the signature of the present key on a head that lacks it, and makes the
// first head of an empty log.
func (l *Log) adopt(ctx context.Context, s *state) (*state, error) {
	key, err := l.keys.Verifier(l.signer.Name(), l.signer.KeyHash())
	if err != nil {
		return nil, fmt.Errorf("ledger: the keys of the heads lack the signer's: %w", err)
	}
	mine := note.VerifierList(key)
	condition := store.Absent()
	if s.version != 0 {
		if _, err := ParseHead(s.head.Note, l.origin, mine); err == nil {
			return s, nil
		}
		condition = store.VersionIs(s.version)
	}
	head, err := l.sign(s.tree)
	if err != nil {
		return nil, err
	}
	if _, err := ParseHead(head.Note, l.origin, mine); err != nil {
		return nil, fmt.Errorf("ledger: the signer of heads does not fit its key: %w", err)
	}
	version, err := l.store.Commit(ctx, store.Write{Key: l.headKey(), Value: head.Note, If: condition})
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
		return l.load(ctx) // another process of this node was faster
	}
	if err != nil {
		return nil, err
	}
	return &state{tree: s.tree, head: head, version: version, recorded: s.recorded}, nil
}

// inherited counts what waits already; last is the highest number among it, or 0.
func (l *Log) inherited(ctx context.Context) (last uint64, waiting int, err error) {
	for e, err := range l.store.Scan(ctx, store.Prefix(logKey(spaceOutbox, l.id, 0))) {
		if err != nil {
			return 0, 0, err
		}
		if t, ok := ticketIn(e.Key); ok {
			last, waiting = t.number, waiting+1
		}
	}
	return last, waiting, nil
}

// Start starts the sequencer. It is called once.
func (l *Log) Start() {
	l.lifecycle.Lock()
	defer l.lifecycle.Unlock()
	if l.started {
		return
	}
	l.started = true
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	go l.run(ctx)
}

// Close refuses new events and lets the sequencer empty the outbox, until ctx ends;
// what is left is found by the next life of the log. Events whose commit is under way
// should be done before.
func (l *Log) Close(ctx context.Context) error {
	l.queue.close(ErrClosed)
	l.lifecycle.Lock()
	started := l.started
	l.started = true // nothing starts behind a close
	l.lifecycle.Unlock()
	if !started || l.cancel == nil {
		return nil
	}
	defer l.cancel()
	select {
	case <-l.stopped:
		return nil
	case <-ctx.Done():
		l.cancel()
		<-l.stopped
		return ctx.Err()
	}
}

// Origin is the log's name.
func (l *Log) Origin() string { return l.origin }

// Head is the newest signed head.
func (l *Log) Head() Head {
	head := l.now.Load().head
	head.Note = bytes.Clone(head.Note)
	return head
}

// Stats are the log's counts.
func (l *Log) Stats() Stats {
	return Stats{
		Size:    l.now.Load().size,
		Refused: l.counts.refused.Load(),
		Damaged: l.counts.damaged.Load(),
		Retries: l.counts.retries.Load(),
		Backlog: l.Backlog(),
	}
}
