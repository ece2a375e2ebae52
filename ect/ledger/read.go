package ledger

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"slices"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// MaxPage is the largest number of entries of one page.
	MaxPage = 256
	// maxPageBytes is the size in bytes after which a page ends early.
	maxPageBytes = 4 << 20
	// MaxFound is the largest number of workflows in which Find finds one id.
	MaxFound = 16
)

// Entry returns the entry of this log at index. The error is ErrNotFound, ErrPruned, or
// ErrTampered if the entry is missing.
func (l *Log) Entry(ctx context.Context, index int64) (Entry, error) {
	s, err := l.current(ctx, index+1)
	if err != nil {
		return Entry{}, err
	}
	if index < 0 || index >= s.size {
		return Entry{}, ErrNotFound
	}
	return l.entry(ctx, l.id, index)
}

func (l *Log) entry(ctx context.Context, log logID, index int64) (Entry, error) {
	e, err := l.read(ctx, log, index)
	if errors.Is(err, store.ErrNotFound) {
		return Entry{}, l.absent(ctx, log, index)
	}
	if err != nil {
		return Entry{}, err
	}
	if e.Index != index {
		return Entry{}, fmt.Errorf("%w: entry %d stands at %d", ErrTampered, e.Index, index)
	}
	origin, err := l.originOf(ctx, log)
	return e.in(origin), err
}

// absent returns the reason why no entry is stored at an index below the log's size.
func (l *Log) absent(ctx context.Context, log logID, index int64) error {
	m, err := l.marksOf(ctx, log, index>>tileHeight)
	if err != nil {
		return err
	}
	if m.has(index) {
		return ErrPruned
	}
	return fmt.Errorf("%w: entry %d is missing", ErrTampered, index)
}

// marksOf reads the marks of a tile of any log of the store, and verifies them.
func (l *Log) marksOf(ctx context.Context, log logID, n int64) (_ marks, err error) {
	on := *l.logStore
	if on.id = log; log != l.id {
		if on.origin, err = l.originOf(ctx, log); err != nil {
			return marks{}, err
		}
		if on.keys, err = l.options.KeysOf(on.origin); err != nil {
			return marks{}, err
		}
	}
	return on.pruned(ctx, n)
}

// originOf returns the name of a log of this store, from its head.
func (l *Log) originOf(ctx context.Context, log logID) (string, error) {
	if log == l.id {
		return l.origin, nil
	}
	if origin, ok := l.origins.Load(log); ok {
		return origin.(string), nil
	}
	found, err := l.store.Get(ctx, logKey(spaceHead, log, 0))
	if err != nil {
		return "", err
	}
	head, err := parseHeadText(noteText(found.Value))
	if err != nil || logOf(l.sealer, head.Origin) != log {
		return "", fmt.Errorf("%w: the head of another log", ErrTampered)
	}
	l.origins.Store(log, head.Origin)
	return head.Origin, nil
}

// current returns a state of at least that size, if there is one. It reloads the head if
// the state in memory is smaller: other processes extend the log too, and this one updates
// its memory after the commit.
func (l *Log) current(ctx context.Context, size int64) (*state, error) {
	s := l.now.Load()
	if size <= s.size {
		return s, nil
	}
	head, _, err := l.storedHead(ctx)
	if err != nil || head.Size < size {
		return s, err
	}
	if now := l.now.Load(); size <= now.size {
		return now, nil
	}
	return l.advance(ctx, s)
}

// Lookup finds an event of a workflow by its id, in any log of the store. The error is
// ErrNotFound, ErrPruned or ErrTampered.
func (l *Log) Lookup(ctx context.Context, workflow, id string) (Entry, error) {
	e, err := l.Recorded(ctx, l.idKey(workflow, id))
	if err == nil && (e.Workflow != workflow || e.ID != id) {
		err = fmt.Errorf("%w: entry %d is not the one that its id leads to", ErrTampered, e.Index)
	}
	return e, err
}

// Known is Lookup for who can do without the event: it returns nil if there is none, or if it was pruned.
func (l *Log) Known(ctx context.Context, workflow, id string) (*Entry, error) {
	if len(id) > MaxName {
		return nil, nil
	}
	e, err := l.Lookup(ctx, workflow, id)
	switch {
	case err == nil:
		return &e, nil
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrPruned):
		return nil, nil
	}
	return nil, err
}

// Has reports whether an event of a workflow has an id, also one that was pruned since.
func (l *Log) Has(ctx context.Context, workflow, id string) (bool, error) {
	if len(id) > MaxName {
		return false, nil
	}
	_, err := l.Lookup(ctx, workflow, id)
	switch {
	case err == nil, errors.Is(err, ErrPruned):
		return true, nil
	case errors.Is(err, ErrNotFound):
		return false, nil
	}
	return false, err
}

// Recorded returns the event under a key that begins with IDPrefix, of any log of the store. The error is ErrNotFound,
// ErrPruned or ErrTampered.
func (l *Log) Recorded(ctx context.Context, key []byte) (Entry, error) {
	found, err := l.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return Entry{}, ErrNotFound
	}
	if err != nil {
		return Entry{}, err
	}
	return l.entryAt(ctx, found.Value)
}

// entryAt reads the entry at an encoded location.
func (l *Log) entryAt(ctx context.Context, value []byte) (Entry, error) {
	at, ok := decodeLocation(value)
	if !ok {
		return Entry{}, fmt.Errorf("%w: what stands under an id", ErrTampered)
	}
	return l.entry(ctx, at.log, at.index)
}

// Find returns the events with an id in all workflows, at most MaxFound. It leaves out pruned events.
func (l *Log) Find(ctx context.Context, id string) ([]Entry, error) {
	r := store.Prefix(l.idKey("", id)[:2+idHash])
	r.Limit = MaxFound
	var located []store.Entry
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return nil, err
		}
		located = append(located, found)
	}
	var all []Entry
	for _, found := range located {
		e, err := l.entryAt(ctx, found.Value)
		switch {
		case err == nil && e.ID != id:
			return nil, fmt.Errorf("%w: entry %d is not the one that its id leads to", ErrTampered, e.Index)
		case err == nil:
			all = append(all, e)
		case !errors.Is(err, ErrPruned) && !errors.Is(err, ErrNotFound):
			return nil, err
		}
	}
	return all, nil
}

// Await waits until an event of a workflow is recorded. The errors are those of Lookup, and of ctx.
func (l *Log) Await(ctx context.Context, workflow, id string) (Entry, error) {
	for {
		changed, cancel := l.store.Watch(l.idKey(workflow, id))
		e, err := l.Lookup(ctx, workflow, id)
		if !errors.Is(err, ErrNotFound) {
			cancel()
			return e, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err = ctx.Err()
		}
		cancel()
		if ctx.Err() != nil {
			return Entry{}, err
		}
	}
}

// Cursor is a position in a list; empty is its start.
type Cursor string

// Page is a part of a list.
type Page struct {
	// Entries are ordered by log and index.
	Entries []Entry
	// Next is the cursor of the next page; empty at the end.
	Next Cursor
}

// List returns a page of a workflow's entries: limit, from 1 to MaxPage, or fewer if they
// are large. The error is ErrInvalid or ErrTampered.
func (l *Log) List(ctx context.Context, workflow string, from Cursor, limit int) (Page, error) {
	if workflow == "" || limit < 1 || limit > MaxPage {
		return Page{}, fmt.Errorf("%w: a workflow, and a page of 1 to %d", ErrInvalid, MaxPage)
	}
	return l.page(ctx, l.workflowPrefix(workflow), from, limit, func(e *Entry) error {
		if e.Workflow != workflow {
			return fmt.Errorf("%w: entry %d is of another workflow", ErrTampered, e.Index)
		}
		return nil
	})
}

// Ends returns, for each log, the cursor after the last entry of a workflow. They change
// with each new entry, and when the last one is pruned.
func (l *Log) Ends(ctx context.Context, workflow string) ([]Cursor, error) {
	prefix := l.workflowPrefix(workflow)
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, 1
	var ends []Cursor
	for {
		var at []byte
		for found, err := range l.store.Scan(ctx, r) {
			if err != nil {
				return nil, err
			}
			at = bytes.Clone(found.Key[len(found.Key)-16:])
		}
		if at == nil {
			return ends, nil
		}
		r.To = append(bytes.Clone(prefix), at[:8]...) // the logs before this one
		binary.BigEndian.PutUint64(at[8:], binary.BigEndian.Uint64(at[8:])+1)
		ends = append(ends, Cursor(hex.EncodeToString(at)))
	}
}

// Following lists, as List does, the entries of a workflow that are linked to an id
// (Options.Links). Its cost does not depend on the size of the workflow.
func (l *Log) Following(ctx context.Context, workflow, id string, from Cursor, limit int) (Page, error) {
	if workflow == "" || id == "" || limit < 1 || limit > MaxPage {
		return Page{}, fmt.Errorf("%w: a workflow, an id, and a page of 1 to %d", ErrInvalid, MaxPage)
	}
	prefix := l.idKey(workflow, id)
	prefix[1] = spaceLink
	return l.page(ctx, prefix, from, limit, func(e *Entry) error {
		if e.Workflow != workflow || !slices.Contains(l.links(&e.Event), id) {
			return fmt.Errorf("%w: entry %d is not linked to what leads to it", ErrTampered, e.Index)
		}
		return nil
	})
}

// maxElsewhere is how many entries of other workflows Elsewhere reads on either side of the own one.
const maxElsewhere = 16

// Elsewhere returns other workflows than this one that have entries linked to an id (Options.Links):
// up to 32, each once.
func (l *Log) Elsewhere(ctx context.Context, workflow, id string) (all []string, err error) {
	if workflow == "" || id == "" {
		return nil, fmt.Errorf("%w: a workflow and an id", ErrInvalid)
	}
	own := l.idKey(workflow, id)
	own[1] = spaceLink
	whole := store.Prefix(own[:2+idHash])
	for _, r := range []store.Range{{From: whole.From, To: own}, {From: store.Prefix(own).To, To: whole.To}} {
		r.Limit = maxElsewhere
		var linked [][]byte
		for found, err := range l.store.Scan(ctx, r) {
			if err != nil {
				return nil, err
			}
			linked = append(linked, bytes.Clone(found.Key[len(found.Key)-16:]))
		}
		for _, at := range linked {
			e, err := l.entry(ctx, logID(at[:8]), int64(binary.BigEndian.Uint64(at[8:])))
			switch {
			case errors.Is(err, ErrPruned):
			case err != nil:
				return nil, err
			case e.Workflow == workflow || !slices.Contains(l.links(&e.Event), id):
				return nil, fmt.Errorf("%w: entry %d is not linked to what leads to it", ErrTampered, e.Index)
			case !slices.Contains(all, e.Workflow):
				all = append(all, e.Workflow)
			}
		}
	}
	return all, nil
}

// All visits the entries of a workflow, as List has them, until it yields an error.
func (l *Log) All(ctx context.Context, workflow string) iter.Seq2[*Entry, error] {
	return all(func(from Cursor) (Page, error) { return l.List(ctx, workflow, from, MaxPage) })
}

// AllFollowing visits the entries of a workflow that are linked to an id, as Following has them, until it yields an
// error.
func (l *Log) AllFollowing(ctx context.Context, workflow, id string) iter.Seq2[*Entry, error] {
	return all(func(from Cursor) (Page, error) { return l.Following(ctx, workflow, id, from, MaxPage) })
}

// all visits the entries of all pages.
func all(read func(from Cursor) (Page, error)) iter.Seq2[*Entry, error] {
	return func(yield func(e *Entry, err error) bool) {
		for next := Cursor(""); ; {
			page, err := read(next)
			if err != nil {
				yield(nil, err)
				return
			}
			for i := range page.Entries {
				if !yield(&page.Entries[i], nil) {
					return
				}
			}
			if next = page.Next; next == "" {
				return
			}
		}
	}
}

// page lists the entries under a prefix of keys that end with a log and an index.
func (l *Log) page(ctx context.Context, prefix []byte, from Cursor, limit int, check func(e *Entry) error) (Page, error) {
	r := store.Prefix(prefix)
	if from != "" {
		at, err := hex.DecodeString(string(from))
		if err != nil || len(at) != 16 {
			return Page{}, fmt.Errorf("%w: not a cursor", ErrInvalid)
		}
		r.From = append(r.From, at...)
	}
	r.Limit = limit + 1
	var page Page
	size := 0
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return Page{}, err
		}
		at := found.Key[len(found.Key)-16:]
		if len(page.Entries) == limit || size > maxPageBytes {
			page.Next = Cursor(hex.EncodeToString(at))
			break
		}
		e, err := l.entry(ctx, logID(at[:8]), int64(binary.BigEndian.Uint64(at[8:])))
		if errors.Is(err, ErrPruned) {
			continue // pruned since the scan began
		}
		if err == nil {
			err = check(&e)
		}
		if err != nil {
			return Page{}, err
		}
		size += len(e.Leaf)
		page.Entries = append(page.Entries, e)
	}
	return page, nil
}

// maxProof is the longest proof, in hashes: more than any tree needs.
const maxProof = 128

// Receipt proves that a log contains an entry. It is checked with Check.
type Receipt struct {
	// Log is the log's origin.
	Log string `json:"log"`
	// Index is the entry's position, from 0.
	Index int64 `json:"index"`
	// Proof is the inclusion proof (RFC 6962, section 2.1.1).
	Proof tlog.RecordProof `json:"proof"`
	// Head is the signed head whose root the proof leads to.
	Head string `json:"head"`
}

// Receipt makes the receipt of the entry at index, with the newest head. The error is
// ErrNotFound or ErrTampered.
func (l *Log) Receipt(ctx context.Context, index int64) (Receipt, error) {
	s, err := l.current(ctx, index+1)
	if err != nil {
		return Receipt{}, err
	}
	proof, err := l.prove(ctx, s, index, s.size)
	if err != nil {
		return Receipt{}, err
	}
	return Receipt{Log: l.origin, Index: index, Proof: proof, Head: string(s.head.Note)}, nil
}

// Prove makes the inclusion proof of the entry at index in the tree of that size. The errors
// are those of Receipt.
func (l *Log) Prove(ctx context.Context, index, size int64) (tlog.RecordProof, error) {
	s, err := l.current(ctx, size)
	if err != nil {
		return nil, err
	}
	return l.prove(ctx, s, index, size)
}

func (l *Log) prove(ctx context.Context, s *state, index, size int64) (tlog.RecordProof, error) {
	if index < 0 || index >= size || size > s.size {
		return nil, fmt.Errorf("%w: entry %d of %d", ErrNotFound, index, min(size, s.size))
	}
	return tlog.ProveRecord(size, index, s.hashes(ctx, l.logStore))
}

// ProveConsistency proves that the tree of size new begins with all entries of the tree of
// size old; an empty tree needs no proof. The errors are those of Receipt.
func (l *Log) ProveConsistency(ctx context.Context, old, new int64) (tlog.TreeProof, error) {
	s, err := l.current(ctx, new)
	if err != nil {
		return nil, err
	}
	if old < 0 || old > new || new > s.size {
		return nil, fmt.Errorf("%w: from size %d to %d of %d", ErrNotFound, old, new, s.size)
	}
	if old == 0 {
		return tlog.TreeProof{}, nil
	}
	return tlog.ProveTree(new, old, s.hashes(ctx, l.logStore))
}

// Check verifies that the receipt proves leaf in the log called origin, under a head that
// one of keys has signed. It returns that head. The error is ErrProof.
func (r *Receipt) Check(leaf []byte, origin string, keys note.Verifiers) (Head, error) {
	if r.Log != origin {
		return Head{}, fmt.Errorf("%w: a receipt of the log %q", ErrProof, r.Log)
	}
	head, err := ParseHead([]byte(r.Head), origin, keys)
	if err != nil {
		return Head{}, err
	}
	if e, err := decode(leaf); err != nil || e.Index != r.Index {
		return Head{}, fmt.Errorf("%w: the leaf is not that of entry %d", ErrProof, r.Index)
	}
	return head, CheckInclusion(r.Proof, head, r.Index, tlog.RecordHash(leaf))
}

// CheckInclusion verifies that the tree of head has a leaf with that hash at index. The
// error is ErrProof.
func CheckInclusion(proof tlog.RecordProof, head Head, index int64, leaf tlog.Hash) error {
	if len(proof) > maxProof {
		return fmt.Errorf("%w: %d hashes", ErrProof, len(proof))
	}
	if index < 0 || index >= head.Size {
		return fmt.Errorf("%w: entry %d of %d", ErrProof, index, head.Size)
	}
	return proofError(tlog.CheckRecord(proof, head.Size, head.Root, index, leaf))
}

// CheckConsistency verifies that the tree of new begins with all entries of the tree of
// old. The error is ErrProof.
func CheckConsistency(proof tlog.TreeProof, old, new Head) error {
	switch {
	case len(proof) > maxProof:
		return fmt.Errorf("%w: %d hashes", ErrProof, len(proof))
	case old.Origin != new.Origin:
		return fmt.Errorf("%w: heads of two logs", ErrProof)
	case old.Size < 0 || old.Size > new.Size:
		return fmt.Errorf("%w: from size %d to %d", ErrProof, old.Size, new.Size)
	case old.Size == 0:
		var empty merkleState
		if len(proof) > 0 || old.Root != empty.root() {
			return fmt.Errorf("%w: of the empty tree", ErrProof)
		}
		return nil
	}
	return proofError(tlog.CheckTree(proof, new.Size, new.Root, old.Size, old.Root))
}

func proofError(err error) error {
	if err != nil {
		return errors.Join(ErrProof, err)
	}
	return nil
}
