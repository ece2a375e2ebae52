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
	// Dir is a directory on the file system to measure, for the stores.
	Dir string
	// GOGC and GOMEMLIMIT are those of every process.
	GOGC, GOMEMLIMIT string
	// Rows matches the rows to measure, as "POST, outcome awaited @64"; empty is all.
	Rows string
}

// Default takes about three minutes, Quick half a minute, and says less.
var (
	Default = Options{Rounds: 9, Round: 400 * time.Millisecond, Limit: 50_000, GOGC: "100", GOMEMLIMIT: "off"}
	Quick   = Options{Rounds: 3, Round: 150 * time.Millisecond, Limit: 50_000, GOGC: "100", GOMEMLIMIT: "off"}
)

func (o Options) check() error {
	switch {
	case o.Rounds < 1:
		return errors.New("rounds: at least 1")
	case o.Round < time.Millisecond:
		return fmt.Errorf("round: %s is too short", o.Round)
	case o.Dir == "":
		return errors.New("no directory")
	}
	return nil
}

// env is what every process gets.
func (o Options) env() []string {
	return []string{"GOGC=" + o.GOGC, "GOMEMLIMIT=" + o.GOMEMLIMIT}
}
