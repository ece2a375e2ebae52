package ect

import (
	"container/heap"
	"context"
	"errors"
	"sync"
	"time"
)

// Replays remembers the ids of tokens.
type Replays interface {
	// Add records the token's id if it is not there, as one step, and reports whether
	// it was not. The id need not be remembered after until, a time of the same clock
	// as now. An error means that nothing is known.
	Add(ctx context.Context, t *Token, now, until time.Time) (fresh bool, err error)
}

// ReplayCache is Replays in memory, for requests that write nothing. It holds for one
// process and one life of it. When it is full of ids that must still be remembered,
// nothing is known of further ones: forgetting would let tokens in twice.
type ReplayCache struct {
	size int

	mu   sync.Mutex
	byID map[string][]*replayEntry // by jti; nearly always one
	due  replayHeap
}

type replayEntry struct {
	id, workflow string
	until        time.Time
}

// NewReplayCache makes a cache of that many ids; 100,000 if zero. Each takes about 200
// bytes.
func NewReplayCache(size int) *ReplayCache {
	if size <= 0 {
		size = 100_000
	}
	return &ReplayCache{size: size, byID: make(map[string][]*replayEntry)}
}

var errReplaysFull = errors.New("the memory for ids that were used is full")

// Add implements Replays. An id is unique within its workflow, and anywhere for a token
// without one.
func (c *ReplayCache) Add(_ context.Context, t *Token, now, until time.Time) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.due) > 0 && now.After(c.due[0].until) {
		c.forget(heap.Pop(&c.due).(*replayEntry))
	}
	for _, other := range c.byID[t.NodeID()] {
		if sameScope(t.NodeID(), t.workflow, other.id, other.workflow) {
			return false, nil
		}
	}
	if len(c.due) >= c.size {
		return false, unavailable(errReplaysFull)
	}
	e := &replayEntry{t.NodeID(), t.workflow, until}
	c.byID[e.id] = append(c.byID[e.id], e)
	heap.Push(&c.due, e)
	return true, nil
}

func (c *ReplayCache) forget(e *replayEntry) {
	rest := c.byID[e.id]
	for i, other := range rest {
		if other == e {
			rest = append(rest[:i], rest[i+1:]...)
			break
		}
	}
	if len(rest) == 0 {
		delete(c.byID, e.id)
		return
	}
	c.byID[e.id] = rest
}

// Len is the number of ids that are remembered.
func (c *ReplayCache) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.due)
}

// replayHeap has the id that may be forgotten first at its top.
type replayHeap []*replayEntry

func (h replayHeap) Len() int           { return len(h) }
func (h replayHeap) Less(i, j int) bool { return h[i].until.Before(h[j].until) }
func (h replayHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *replayHeap) Push(x any)        { *h = append(*h, x.(*replayEntry)) }
func (h *replayHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}
