package ledger

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// MaxPage is the largest number of entries of one page.
	MaxPage = 256
	// maxPageBytes ends a page early.
	maxPageBytes = 4 << 20
	// MaxFound is the largest number of workflows in which Find finds one id.
	MaxFound = 16
)

// Entry is the entry of this log at index. An entry that was pruned is ErrPruned, one
// that is missing ErrTampered.
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
	e.Log, err = l.originOf(ctx, log)
	return e, err
}

// absent says why nothing stands at an index below the log's size.
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

// marksOf are the marks of a tile of a log of the store. Those of other logs are signed
// with other keys: their own verification looks at that.
func (l *Log) marksOf(ctx context.Context, log logID, n int64) (marks, error) {
	if log == l.id {
		m, _, err := l.pruned(ctx, n)
		return m, err
	}
	on := *l.shelf
	on.id = log
	_, msg, version, err := on.storedMarks(ctx, n)
	if err != nil || version == 0 {
		return marks{}, err
	}
	if text, _, ok := cutNote(msg); ok {
		if _, of, m, err := parseMarks(text); err == nil && of == n {
			return m, nil
		}
	}
	return marks{}, fmt.Errorf("%w: the note of what was pruned of tile %d of another log", ErrTampered, n)
}

// originOf is the name of a log of this store, as its head tells.
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
	text, _, ok := cutNote(found.Value)
	if !ok {
		return "", fmt.Errorf("%w: the head of another log", ErrTampered)
	}
	head, err := parseHeadText(text)
	if err != nil || logOf(l.sealer, head.Origin) != log {
		return "", fmt.Errorf("%w: the head of another log", ErrTampered)
	}
	l.origins.Store(log, head.Origin)
	return head.Origin, nil
}

// Lookup finds an event of a workflow by its id, in any log of the store. ErrWaiting
// says that it is recorded and has no place yet.
func (l *Log) Lookup(ctx context.Context, workflow, id string) (Entry, error) {
	found, err := l.store.Get(ctx, l.idKey(workflow, id))
	if errors.Is(err, store.ErrNotFound) {
		return Entry{}, ErrNotFound
	}
	if err != nil {
		return Entry{}, err
	}
	e, err := l.account(ctx, found.Value)
	if err == nil && (e.ID != id || e.Workflow != workflow) {
		err = fmt.Errorf("%w: entry %d is not the one that its id leads to", ErrTampered, e.Index)
	}
	return e, err
}

// Find finds the events with an id in all workflows, 16 at most. Those without a place
// in a tree yet are left out.
func (l *Log) Find(ctx context.Context, id string) ([]Entry, error) {
	r := store.Prefix(l.idPrefix(id))
	r.Limit = MaxFound
	var all []Entry
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return nil, err
		}
		e, err := l.account(ctx, found.Value)
		if errors.Is(err, ErrWaiting) || errors.Is(err, ErrPruned) {
			continue
		}
		if err == nil && e.ID != id {
			err = fmt.Errorf("%w: entry %d is not the one that its id leads to", ErrTampered, e.Index)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// FindRecorded is Find with those that have no place in a tree yet, which are waited for.
func (l *Log) FindRecorded(ctx context.Context, id string) ([]Entry, error) {
	r := store.Prefix(l.idPrefix(id))
	r.Limit = MaxFound
	var keys [][]byte
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return nil, err
		}
		keys = append(keys, found.Key)
	}
	var all []Entry
	for _, key := range keys {
		e, err := l.wait(ctx, key, func() (e Entry, err error) {
			found, err := l.store.Get(ctx, key)
			if errors.Is(err, store.ErrNotFound) {
				return e, ErrNotFound // it was pruned meanwhile
			}
			if err == nil {
				e, err = l.account(ctx, found.Value)
			}
			if err == nil && e.ID != id {
				err = fmt.Errorf("%w: entry %d is not the one that its id leads to", ErrTampered, e.Index)
			}
			return e, err
		})
		if errors.Is(err, ErrNotFound) || errors.Is(err, ErrPruned) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

func (l *Log) account(ctx context.Context, value []byte) (Entry, error) {
	where, ok := decodeAccount(value)
	switch {
	case !ok:
		return Entry{}, fmt.Errorf("%w: what stands under an id", ErrTampered)
	case where.waiting:
		return Entry{}, ErrWaiting
	}
	return l.entry(ctx, where.log, where.index)
}

// shown waits until the newest head covers an entry of this log: it is shown a moment
// after the commit that both stand in.
func (l *Log) shown(ctx context.Context, e *Entry) error {
	for {
		moved := l.queue.next() // before the look, so that nothing is missed
		if e.Log != l.options.Origin || l.now.Load().size > e.Index {
			return nil
		}
		select {
		case <-moved:
		case <-l.stopped:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Wait waits until an event that was recorded is in the tree, and returns its entry. The
// newest head covers it then.
func (l *Log) Wait(ctx context.Context, workflow, id string) (Entry, error) {
	return l.wait(ctx, l.idKey(workflow, id), func() (Entry, error) { return l.Lookup(ctx, workflow, id) })
}

// wait looks until what stands under the key of an id has its place.
func (l *Log) wait(ctx context.Context, key []byte, look func() (Entry, error)) (Entry, error) {
	for {
		changed, cancel := l.store.Watch(key)
		e, err := look()
		if !errors.Is(err, ErrWaiting) {
			cancel()
			if err == nil {
				err = l.shown(ctx, &e)
			}
			return e, err
		}
		select {
		case <-changed:
		case <-l.stopped: // by a close, or because the log was altered
			cancel()
			if e, err = look(); errors.Is(err, ErrWaiting) {
				err = errors.Join(err, l.queue.admit(ctx))
			}
			return e, err
		case <-ctx.Done():
			cancel()
			return Entry{}, ctx.Err()
		}
		cancel()
	}
}

// Cursor is a place in a workflow's list; empty is its start.
type Cursor string

// Page is a part of a list.
type Page struct {
	Entries []Entry
	// Next is where the next page begins; empty at the end.
	Next Cursor
}

// List lists a workflow's entries, by log and index, from 1 to MaxPage at once. A page
// may be shorter where entries are large.
func (l *Log) List(ctx context.Context, workflow string, from Cursor, limit int) (Page, error) {
	if workflow == "" || limit < 1 || limit > MaxPage {
		return Page{}, fmt.Errorf("%w: a workflow, and a page of 1 to %d", ErrInvalid, MaxPage)
	}
	r := store.Prefix(l.workflowPrefix(workflow))
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
			continue // a moment ago
		}
		if err == nil && e.Workflow != workflow {
			err = fmt.Errorf("%w: entry %d is of another workflow", ErrTampered, e.Index)
		}
		if err != nil {
			return Page{}, err
		}
		size += len(e.Leaf)
		page.Entries = append(page.Entries, e)
	}
	return page, nil
}
