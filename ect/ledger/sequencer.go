package ledger

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// movedWrites are those of one event: its outbox entry, its entry, its account,
	// its workflow's index.
	movedWrites = 4
	// treeWrites are those of one move: the head, and the tiles that one full tile
	// leads to, one a level.
	treeWrites = 1 + 64/tileHeight
	// maxMoved is the largest number of events of one move.
	maxMoved = (store.MaxBatch - treeWrites) / movedWrites
	// maxMovedBytes bounds their entries together, with what is written beside them.
	maxMovedBytes = store.MaxBatchBytes - treeWrites*(tileWidth*tlog.HashSize+64)

	// sweepEvery is how often the sequencer looks at the whole outbox: for events
	// whose commit landed unknown to anybody, and those that did not open before.
	sweepEvery = 30 * time.Second

	firstPause = 50 * time.Millisecond
	// lastPause lets whoever waits five seconds for a place (ECT level L3) see two tries.
	lastPause = 2 * time.Second
)

// sealedMore is more than what sealing adds to an entry, with its keys and its account.
const sealedMore = 1 << 9

// The largest entry must fit into a value, and into a move.
const (
	_ = uint(store.MaxValue - maxLeaf - sealedMore)
	_ = uint(maxMovedBytes - maxLeaf - sealedMore)
)

// run moves events until the log is closed and nothing waits, or ctx ends.
func (l *Log) run(ctx context.Context) {
	defer close(l.stopped)
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	m := mover{Log: l, all: true}
	pause := time.Duration(0)
	for {
		rest, err := m.move(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, ErrTampered), errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrUnhealthy):
			l.options.Logger.Error("the ledger takes nothing more", slog.Any("error", err))
			l.queue.close(err)
			return
		case err != nil:
			l.counts.retries.Add(1)
			l.options.Logger.Warn("events could not be moved into the ledger", slog.Any("error", err))
			pause = min(max(2*pause, firstPause), lastPause)
			if !sleep(ctx, pause) {
				return
			}
			continue
		}
		pause = 0
		if rest {
			continue
		}
		if l.queue.closed() && m.all {
			return // and nothing was there
		}
		if l.queue.closed() {
			m.all = true
			continue
		}
		select {
		case <-l.queue.wake:
			l.gather(ctx)
		case <-sweep.C:
			m.all, m.damaged = true, nil
		case <-ctx.Done():
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// gather waits a moment for more, unless a move is full already.
func (l *Log) gather(ctx context.Context) {
	if l.options.Gather <= 0 {
		return
	}
	enough := time.NewTimer(l.options.Gather)
	defer enough.Stop()
	for !l.queue.closed() && l.Backlog().Entries < maxMoved {
		select {
		case <-l.queue.wake:
		case <-enough.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
