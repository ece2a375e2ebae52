package soak

import (
	"fmt"
	"io"

	"github.com/agent-guard/caddy-agent-guard/bench/ledger"
)

// Report is what came of a run.
type Report struct {
	Seed    uint64 `json:"seed"`
	Kills   int    `json:"kills"`
	Reloads int    `json:"reloads"`
	// Calls that were begun, answers that were replays, attempts without an answer.
	Calls    int64 `json:"calls"`
	Replays  int64 `json:"replays"`
	Losses   int64 `json:"losses"`
	Segments int64 `json:"segments_dropped"`
	// Fresh is the gateway before the load, Idle after it.
	Fresh   Sample   `json:"fresh"`
	Idle    Sample   `json:"idle"`
	Samples []Sample `json:"samples"`
	// Audit is the oracle's word.
	Audit *ledger.Audit `json:"audit"`
	// Judged is the number of samples of the last life; too few show no growth.
	Judged int `json:"judged"`
	// Growth says what the gateway used ever more of; none is what is wanted.
	Growth []string `json:"growth,omitempty"`
}

// Good reports that no promise was broken and nothing has grown.
func (r *Report) Good() bool { return len(r.Audit.Breaches) == 0 && len(r.Growth) == 0 }

// listed is how many of a long list are printed.
const listed = 20

// Text prints the report.
func (r *Report) Text(w io.Writer) {
	a := r.Audit
	fmt.Fprintf(w, "seed %d: %d kills, %d reloads; %d calls, %d replays, %d attempts without an answer\n",
		r.Seed, r.Kills, r.Reloads, r.Calls, r.Replays, r.Losses)
	fmt.Fprintf(w, "fresh: %s\nidle:  %s; %d segments of results dropped in its last life\n", r.Fresh, r.Idle, r.Segments)
	fmt.Fprintf(w, "ledger: %d executions; %d calls acknowledged, %d in doubt, %d given up\n",
		a.Executions, a.Acknowledged, a.Doubtful, a.Open)
	for i, d := range a.InDoubt {
		if i == listed {
			fmt.Fprintf(w, "  and %d more\n", len(a.InDoubt)-listed)
			break
		}
		fmt.Fprintf(w, "  in doubt: %s, executed %d times\n", d.ID, d.Executed)
	}
	for i, b := range a.Breaches {
		if i == listed {
			fmt.Fprintf(w, "  and %d more\n", len(a.Breaches)-listed)
			break
		}
		fmt.Fprintf(w, "BROKEN: %s\n", b)
	}
	for _, g := range r.Growth {
		fmt.Fprintf(w, "GROWTH: %s\n", g)
	}
	if r.Judged < enough {
		fmt.Fprintf(w, "%d samples of the last life are too few to show growth\n", r.Judged)
	}
	if r.Good() {
		fmt.Fprintln(w, "good: every acknowledged call was executed exactly once, none twice, and no growth was seen")
	}
}
