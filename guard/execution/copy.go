package execution

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// layoutCopying is the layout of a store into which another one is being copied. Every build refuses
// to open it: what it does not have yet would run again (P1).
const layoutCopying = "copying"

// Errors of Copy.
var (
	// ErrNoSource: there is nothing to copy.
	ErrNoSource = errors.New("there is no store of a gateway to copy")
	// ErrTarget: the target holds something, and is no interrupted copy.
	ErrTarget = errors.New("the target is not empty, and no copy that was interrupted; name an empty one")
	// ErrUnfinished: a copy into the store was interrupted.
	ErrUnfinished = errors.New("guard: a copy into this store was interrupted: go on with it by the same `store copy`")
	// ErrDiffers: the stores are not equal after the copy.
	ErrDiffers = errors.New("the copy differs from its source")
)

// CopyOptions are those of Copy.
type CopyOptions struct {
	// Kept are the prefixes of keys whose values are written once and stay; see store.Write.Bulk.
	Kept []string
	// Count has the entries counted first, so that Progress knows how many there are.
	Count bool
	// Progress is called now and then; nil is nobody.
	Progress func(CopyProgress)
}

// CopyStep is what a copy does at the moment.
type CopyStep string

// The steps of a copy, in their order.
const (
	CopyCounts   CopyStep = "counting"
	CopyCopies   CopyStep = "copying"
	CopyVerifies CopyStep = "verifying"
)

// CopyProgress is how far a copy has come.
type CopyProgress struct {
	Step CopyStep
	// Entries and Bytes are those that the step has passed: of keys and values.
	Entries, Bytes int64
	// Of is about how many entries there are; 0 if nobody has counted them.
	Of int64
}

// Copied is what two stores have in common after a copy.
type Copied struct {
	// Entries is their number, and Bytes the size of their keys and values.
	Entries, Bytes int64
	// Written is how many of them this run wrote or deleted: fewer where it went on with an earlier one.
	Written int64
	// Digest is the SHA-256 of all keys, values and expiries in the order of the keys.
	Digest [sha256.Size]byte
}

// Copy makes to equal to from: every living entry with its value and its expiry, to the microsecond.
// Versions are the target's own. Nobody else may write to either meanwhile. The target must be empty,
// or be left of a Copy that did not end: it then goes on, and writes only what differs. Until everything
// was compared, no gateway opens the target.
func Copy(ctx context.Context, from, to store.Store, o CopyOptions) (Copied, error) {
	layout, err := from.Get(ctx, metaKey("layout"))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return Copied{}, ErrNoSource
	case err != nil:
		return Copied{}, fmt.Errorf("reading the source: %w", err)
	}
	if err := checkLayout(layout); err != nil {
		return Copied{}, fmt.Errorf("the source: %w", err)
	}
	mark, err := markTarget(ctx, to)
	if err != nil {
		return Copied{}, err
	}
	c := &copier{from: from, to: to, CopyOptions: o}
	if o.Count {
		if err := c.count(ctx); err != nil {
			return Copied{}, err
		}
	}
	if err := c.copy(ctx); err != nil {
		return Copied{}, err
	}
	if err := c.verify(ctx); err != nil {
		return Copied{}, err
	}
	// Proves that nobody has taken the source over: a store that was commits nothing. One without
	// space is as its lock says.
	nothing := store.Write{Key: metaKey("copied"), If: store.Absent(), Delete: true}
	if _, err := from.Commit(ctx, nothing); err != nil && !errors.Is(err, store.ErrFull) {
		return Copied{}, fmt.Errorf("the source: %w", err)
	}
	_, err = to.Commit(ctx, store.Write{Key: layout.Key, Value: layout.Value, If: store.VersionIs(mark)})
	if err != nil {
		return Copied{}, fmt.Errorf("the target: %w", err)
	}
	return c.done, nil
}

// checkLayout returns why a store of this layout cannot be used.
func checkLayout(layout store.Entry) error {
	switch string(layout.Value) {
	case layoutVersion:
		return nil
	case layoutCopying:
		return ErrUnfinished
	}
	return fmt.Errorf("%w: layout %q, this build knows %q", ErrLayout, layout.Value, layoutVersion)
}

// markTarget makes an empty store a target, or finds that it is one, and returns the mark's version.
func markTarget(ctx context.Context, to store.Store) (store.Version, error) {
	key := metaKey("layout")
	fresh, err := Fresh(ctx, to)
	if err == nil && fresh {
		mark, err := to.Commit(ctx, store.Write{Key: key, Value: []byte(layoutCopying), If: store.Absent()})
		if err != nil {
			return 0, fmt.Errorf("the target: %w", err)
		}
		return mark, nil
	}
	var layout store.Entry
	if err == nil {
		layout, err = to.Get(ctx, key)
	}
	switch {
	case errors.Is(err, store.ErrNotFound) || err == nil && string(layout.Value) != layoutCopying:
		return 0, ErrTarget
	case err != nil:
		return 0, fmt.Errorf("reading the target: %w", err)
	}
	return layout.Version, nil
}

// copier copies and compares two stores.
type copier struct {
	CopyOptions
	from, to store.Store
	of       int64
	done     Copied
}

const (
	// A batch of a copy is smaller than it may be, so that it is made durable within a statement's time.
	copyBatchBytes = 1 << 20 // of keys and ordinary values
	copyBatchLarge = 8 << 20 // of large ones
	// copyLarge is the size from which on a value that expires is written as a large one.
	copyLarge = 16 << 10
	// copyReports is after how many entries Progress is called.
	copyReports = 256
)

func (c *copier) report(step CopyStep, entries, bytes int64) {
	if c.Progress != nil && entries%copyReports == 0 {
		c.Progress(CopyProgress{Step: step, Entries: entries, Bytes: bytes, Of: max(c.of, entries)})
	}
}

func (c *copier) count(ctx context.Context) error {
	var bytes int64
	for e, err := range c.from.Scan(ctx, store.Range{}) {
		if err != nil {
			return sourceError(err)
		}
		bytes += int64(len(e.Key) + len(e.Value))
		c.of++
		if c.Progress != nil && c.of%copyReports == 0 {
			c.Progress(CopyProgress{Step: CopyCounts, Entries: c.of, Bytes: bytes})
		}
	}
	return nil
}

// sourceError says why a store with a damaged value is not copied: a call whose record is left out
// would run again (P1).
func sourceError(err error) error {
	if errors.Is(err, store.ErrDamaged) {
		return fmt.Errorf("a value of the source is damaged, and a copy without it would have its call run again; restore the source from a backup first: %w", err)
	}
	return fmt.Errorf("reading the source: %w", err)
}

// copy writes what the target lacks, and deletes what it has too much.
func (c *copier) copy(ctx context.Context) error {
	b := copyBatch{to: c.to}
	var entries, bytes int64
	err := c.walk(ctx, func(from, to *store.Entry) error {
		if from != nil {
			c.report(CopyCopies, entries, bytes)
			entries++
			bytes += int64(len(from.Key) + len(from.Value))
		}
		switch {
		case from == nil:
			return b.add(ctx, store.Write{Key: to.Key, Delete: true})
		case to == nil || !equalEntries(from, to):
			return b.add(ctx, c.write(from))
		}
		return nil
	})
	if err == nil {
		err = b.flush(ctx)
	}
	c.done.Written = b.written
	return err
}

// write is the entry as it is written to the target.
func (c *copier) write(e *store.Entry) store.Write {
	w := store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires}
	if !w.Expires.IsZero() {
		w.Bulk = len(w.Value) >= copyLarge
		return w
	}
	for _, prefix := range c.Kept {
		w.Bulk = w.Bulk || strings.HasPrefix(string(e.Key), prefix)
	}
	return w
}

// verify compares every entry of the two stores.
func (c *copier) verify(ctx context.Context) error {
	sum, head := sha256.New(), make([]byte, 0, 16)
	c.done.Entries, c.done.Bytes = 0, 0
	err := c.walk(ctx, func(from, to *store.Entry) error {
		if from != nil && to != nil && equalEntries(from, to) {
			c.report(CopyVerifies, c.done.Entries, c.done.Bytes)
			// Each part with its length.
			head := binary.BigEndian.AppendUint32(head[:0], uint32(len(from.Key)))
			head = binary.BigEndian.AppendUint32(head, uint32(len(from.Value)))
			sum.Write(binary.BigEndian.AppendUint64(head, uint64(expiry(from))))
			sum.Write(from.Key)
			sum.Write(from.Value)
			c.done.Entries++
			c.done.Bytes += int64(len(from.Key) + len(from.Value))
			return nil
		}
		// One of them alone may have expired meanwhile, or by one of the two clocks.
		if one := or(from, to); from == nil || to == nil {
			gone, err := c.expired(ctx, one.Expires)
			if err != nil || gone {
				return err
			}
		}
		return fmt.Errorf("%w: in an entry of %q, after %d equal ones; did something write to one of them? Start the copy again",
			ErrDiffers, or(from, to).Key[:1], c.done.Entries)
	})
	sum.Sum(c.done.Digest[:0])
	return err
}

func or(a, b *store.Entry) *store.Entry {
	if a != nil {
		return a
	}
	return b
}

// expired reports whether an entry with this expiry has expired for one of the stores.
func (c *copier) expired(ctx context.Context, expires time.Time) (bool, error) {
	if expires.IsZero() {
		return false, nil
	}
	for _, st := range []store.Store{c.from, c.to} {
		now, err := st.Now(ctx)
		if err != nil {
			return false, err
		}
		// A clock that is counted on may be a little behind.
		if !now.Add(clockTolerance).Before(expires) {
			return true, nil
		}
	}
	return false, nil
}

const clockTolerance = 2 * time.Second

// walk goes through both stores in the order of their keys, without the layout of either. An entry that
// one of them alone has comes with nil for the other.
func (c *copier) walk(ctx context.Context, visit func(from, to *store.Entry) error) error {
	nextFrom, stopFrom := iter.Pull2(c.from.Scan(ctx, store.Range{}))
	defer stopFrom()
	nextTo, stopTo := iter.Pull2(c.to.Scan(ctx, store.Range{}))
	defer stopTo()
	from, err := following(nextFrom)
	if err != nil {
		return sourceError(err)
	}
	to, err := following(nextTo)
	if err != nil {
		return fmt.Errorf("reading the target: %w", err)
	}
	for from != nil || to != nil {
		a, b := from, to
		if a != nil && b != nil {
			switch order := bytes.Compare(a.Key, b.Key); {
			case order < 0:
				b = nil
			case order > 0:
				a = nil
			}
		}
		if err := visit(a, b); err != nil {
			return err
		}
		if a != nil {
			if from, err = following(nextFrom); err != nil {
				return sourceError(err)
			}
		}
		if b != nil {
			if to, err = following(nextTo); err != nil {
				return fmt.Errorf("reading the target: %w", err)
			}
		}
	}
	return nil
}

// following is the next entry of a scan that is not the layout; nil at the end.
func following(next func() (store.Entry, error, bool)) (*store.Entry, error) {
	for {
		e, err, ok := next()
		switch {
		case !ok:
			return nil, nil
		case err != nil:
			return nil, err
		case string(e.Key) != string(metaKey("layout")):
			return &e, nil
		}
	}
}

// equalEntries compares what a copy copies. Stores may keep expiries to the microsecond.
func equalEntries(a, b *store.Entry) bool {
	return bytes.Equal(a.Value, b.Value) && expiry(a) == expiry(b)
}

func expiry(e *store.Entry) int64 {
	if e.Expires.IsZero() {
		return math.MaxInt64
	}
	return e.Expires.UnixMicro()
}

// copyBatch gathers writes until they are worth a commit.
type copyBatch struct {
	to              store.Store
	writes          []store.Write
	ordinary, large int // bytes
	written         int64
}

func (b *copyBatch) add(ctx context.Context, w store.Write) error {
	ordinary, large := len(w.Key)+len(w.Value), 0
	if w.Large() {
		ordinary, large = len(w.Key), len(w.Value)
	}
	if len(b.writes) == store.MaxBatch || b.ordinary+ordinary > copyBatchBytes || b.large+large > copyBatchLarge {
		if err := b.flush(ctx); err != nil {
			return err
		}
	}
	b.writes, b.ordinary, b.large = append(b.writes, w), b.ordinary+ordinary, b.large+large
	return nil
}

func (b *copyBatch) flush(ctx context.Context) error {
	if len(b.writes) == 0 {
		return nil
	}
	if _, err := b.to.Commit(ctx, b.writes...); err != nil {
		return fmt.Errorf("writing to the target: %w", err)
	}
	b.written += int64(len(b.writes))
	b.writes, b.ordinary, b.large = b.writes[:0], 0, 0
	return nil
}
