package hitl

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Filter says which escalations to list; the zero value is all of them.
type Filter struct {
	// Workflow is the workflow's id; empty is any.
	Workflow string
	// Level and State are compared; zero is any.
	Level Level
	State State
}

// Page is a part of a listing.
type Page struct {
	// Escalations, the newest first.
	Escalations []Escalation
	// Unreadable counts those that stand there and do not open.
	Unreadable int
	// Next is where the next page begins, empty after the last one. A page may hold fewer
	// than were asked for, even none, and still have a next one.
	Next string
}

const (
	// MaxPage is the largest number of escalations on a page.
	MaxPage = 1000
	// maxSeen bounds the index entries that are looked at for a page.
	maxSeen = 20 * listChunk
	// listChunk is how many of them are read at once.
	listChunk = 256
)

// ErrCursor: the text does not say where a page begins.
var ErrCursor = errors.New("hitl: this is not where a page begins; give what an earlier page named as the next")

// List returns up to limit escalations that pass f, from where after says; empty is the
// beginning. One that changes meanwhile may be on no page.
func (d *Desk) List(ctx context.Context, f Filter, after string, limit int) (Page, error) {
	limit = min(max(limit, 1), MaxPage)
	prefix := []byte{space, kindAge}
	if f.Workflow != "" {
		prefix = d.workflowPrefix(f.Workflow)
	}
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, listChunk
	if after != "" {
		place, err := base64.RawURLEncoding.DecodeString(after)
		if err != nil || len(place) != placeSize {
			return Page{}, ErrCursor
		}
		r.To = append(bytes.Clone(prefix), place...)
	}
	var page Page
	for range maxSeen / listChunk {
		names, last, err := d.passing(ctx, &f, r)
		if err != nil {
			return Page{}, err
		}
		for _, name := range names {
			if err := d.enlist(ctx, &f, name, &page); err != nil {
				return Page{}, err
			}
			if len(page.Escalations) == limit {
				page.Next = cursor(name)
				return page, nil
			}
		}
		if last == nil {
			return page, nil
		}
		r.To = last
	}
	page.Next = cursor(r.To)
	return page, nil
}

func cursor(name []byte) string {
	return base64.RawURLEncoding.EncodeToString(name[len(name)-placeSize:])
}

// passing reads a stretch of an index: the keys of those entries that pass, and the last
// key of all; nil at the end.
func (d *Desk) passing(ctx context.Context, f *Filter, r store.Range) (names [][]byte, last []byte, err error) {
	n := 0
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		n++
		last = entry.Key
		if v := entry.Value; len(v) < 2 || f.passes(Level(v[0]), State(v[1])) {
			names = append(names, entry.Key)
		}
	}
	if n < r.Limit {
		last = nil
	}
	return names, last, nil
}

func (f *Filter) passes(l Level, s State) bool {
	return (f.Level == 0 || f.Level == l) && (f.State == 0 || f.State == s)
}

// enlist adds the escalation of an index entry to the page, if it passes still.
func (d *Desk) enlist(ctx context.Context, f *Filter, name []byte, page *Page) error {
	_, id := placeIn(name)
	e, _, err := d.read(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound):
	case errors.Is(err, ErrUnreadable):
		page.Unreadable++
	case err != nil:
		return err
	case f.passes(e.Level, e.State):
		page.Escalations = append(page.Escalations, *e)
	}
	return nil
}
