// Package table measures the guard against a bare reverse_proxy and against a handler as
// people write it by hand, and prints what it found as one table of ratios.
package table

import (
	"errors"
	"fmt"
	"time"
)

// Options say how long to measure, and where.
type Options struct {
	// Rounds is the number of pairs of rounds of each row, Round how long one takes.
	Rounds int
	Round  time.Duration
	// Limit is the largest number of requests in a round; 0 is no limit.
	Limit int
	// Sustained is how long the load of a sustained row lasts, and SustainedCalls how many
	// calls it makes at least, which may take longer; a Sustained of 0 leaves these rows out.
	Sustained      time.Duration
	SustainedCalls int
	// Keys is the number of recorded calls of which replays of many keys are.
	Keys int
	// Dir is a directory on the file system to measure, for the stores.
	Dir string
	// GOGC and GOMEMLIMIT are those of every process.
	GOGC, GOMEMLIMIT string
	// Rows matches the rows to measure, as "POST, outcome awaited @64"; empty is all.
	Rows string
}

// leastRound is how long the two rounds of the reference take that a sustained load is
// between: long enough to be worth the same.
func (o Options) leastRound() time.Duration { return max(o.Round, o.Sustained/4) }

// Default takes about six minutes, Quick half a minute, and says less: it has no
// sustained rows, and fewer keys. Comparing is for a few rows of two gateways.
var (
	Default = Options{
		Rounds: 9, Round: 400 * time.Millisecond, Limit: 50_000,
		Sustained: 20 * time.Second, SustainedCalls: 60_000, Keys: 100_000, GOGC: "100", GOMEMLIMIT: "off",
	}
	Quick = Options{
		Rounds: 3, Round: 120 * time.Millisecond, Limit: 50_000,
		Keys: 5_000, GOGC: "100", GOMEMLIMIT: "off",
	}
	Comparing = Options{
		Rounds: 9, Round: 400 * time.Millisecond, Limit: 50_000,
		SustainedCalls: 60_000, Keys: 100_000, GOGC: "100", GOMEMLIMIT: "off",
	}
)

func (o Options) check() error {
	switch {
	case o.Rounds < 1:
		return errors.New("rounds: at least 1")
	case o.Round < time.Millisecond:
		return fmt.Errorf("round: %s is too short", o.Round)
	case o.Sustained < 0 || o.SustainedCalls < 0:
		return errors.New("sustained: not negative")
	case o.Keys < 1:
		return errors.New("keys: at least 1")
	case o.Dir == "":
		return errors.New("no directory")
	}
	return nil
}

// env is what every process gets.
func (o Options) env() []string {
	return []string{"GOGC=" + o.GOGC, "GOMEMLIMIT=" + o.GOMEMLIMIT}
}
