package ledger

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Audit is the result of holding a ledger against a book.
type Audit struct {
	// Executions are the lines of the ledger.
	Executions int `json:"executions"`
	// Acknowledged, Doubtful and Open are the calls by what their clients know.
	Acknowledged int `json:"acknowledged"`
	Doubtful     int `json:"doubtful"`
	Open         int `json:"open"`
	// InDoubt are the ids in doubt, sorted, and how often each was executed.
	InDoubt []Doubt `json:"in_doubt,omitempty"`
	// Breaches are the places where a promise was broken; none is what is wanted.
	Breaches []string `json:"breaches,omitempty"`
}

// Doubt is a call in doubt and what the ledger says of it.
type Doubt struct {
	ID       string `json:"id"`
	Executed int    `json:"executed"`
}

// Check reads a ledger, whose lines are a number that counts up and an id, and holds
// it against the book: what was acknowledged was executed exactly once, what is in
// doubt or open at most once, and nothing that no client has asked for.
func (b *Book) Check(ledger io.Reader) (*Audit, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := &Audit{Breaches: slices.Clone(b.breaches)}
	breach := func(format string, args ...any) { a.Breaches = append(a.Breaches, fmt.Sprintf(format, args...)) }

	executed := make(map[string]int, len(b.calls)) // id -> times
	lines := bufio.NewScanner(ledger)
	for lines.Scan() {
		a.Executions++
		number, id, ok := strings.Cut(lines.Text(), " ")
		if !ok || number != strconv.Itoa(a.Executions) {
			return nil, fmt.Errorf("line %d of the ledger is %q", a.Executions, lines.Text())
		}
		executed[id]++
		call, known := b.calls[id]
		switch {
		case !known:
			breach("%q was executed, and no client has called it", id)
		case executed[id] == 2: // tell each once
			breach("%s was executed more than once", id)
		case call.fate == Acknowledged && call.effect != 0 && call.effect != a.Executions:
			breach("%s was executed as %d and answered as %d", id, a.Executions, call.effect)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	for id, call := range b.calls {
		switch call.fate {
		case Acknowledged:
			a.Acknowledged++
			if executed[id] == 0 {
				breach("%s was acknowledged and never executed", id)
			}
		case Doubtful:
			a.Doubtful++
			a.InDoubt = append(a.InDoubt, Doubt{id, executed[id]})
		default:
			a.Open++
		}
	}
	slices.SortFunc(a.InDoubt, func(x, y Doubt) int { return strings.Compare(x.ID, y.ID) })
	return a, nil
}
