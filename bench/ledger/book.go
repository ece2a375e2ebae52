// Package ledger judges a run by the only truth about what was executed: the
// upstream's own list, held against what the clients were told.
package ledger

import (
	"fmt"
	"sync"
)

// Fate is what a client was told of a call.
type Fate uint8

// The fates.
const (
	// Open: the client never learned what came of it.
	Open Fate = iota
	// Acknowledged: the client saw the end of an answer that says that it ran.
	Acknowledged
	// Doubtful: the gateway says that nobody knows.
	Doubtful
)

// entry is what is known of a call; effect is the number of the execution that its
// answer was of, 0 where no answer said.
type entry struct {
	fate   Fate
	effect int
}

// Book is what all clients were told. It is safe for concurrent use.
type Book struct {
	mu       sync.Mutex
	calls    map[string]entry
	breaches []string
}

// NewBook makes an empty book.
func NewBook() *Book { return &Book{calls: map[string]entry{}} }

// Begin notes that a call is about to be made.
func (b *Book) Begin(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls[id] = entry{}
}

// Acknowledge notes an answer that says that the call ran, as the execution with this
// number. All answers of a call are of one execution.
func (b *Book) Acknowledge(id string, effect int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch was := b.calls[id]; {
	case was.fate == Doubtful:
		b.breach("%s was in doubt, and then answered", id)
	case was.fate == Acknowledged && was.effect != effect:
		b.breach("%s was answered with execution %d, and then with %d", id, was.effect, effect)
	}
	b.calls[id] = entry{Acknowledged, effect}
}

// Doubt notes that the gateway says that nobody knows.
func (b *Book) Doubt(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.calls[id].fate == Acknowledged {
		b.breach("%s was answered, and then in doubt", id)
	}
	b.calls[id] = entry{fate: Doubtful}
}

// Breach notes something that a client saw and must not see.
func (b *Book) Breach(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.breach(format, args...)
}

func (b *Book) breach(format string, args ...any) {
	b.breaches = append(b.breaches, fmt.Sprintf(format, args...))
}

// Counts are the calls of each fate at this moment.
func (b *Book) Counts() (acknowledged, doubtful, open int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.calls {
		switch e.fate {
		case Acknowledged:
			acknowledged++
		case Doubtful:
			doubtful++
		default:
			open++
		}
	}
	return acknowledged, doubtful, open
}
