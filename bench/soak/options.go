// Package soak keeps a gateway under load for a while, kills and reloads it at
// random, watches what it uses, and asks at the end what was executed.
package soak

import (
	"errors"
	"time"
)

// Options say what to do.
type Options struct {
	// For is how long the load lasts.
	For time.Duration
	// Seed decides when what happens, and what clients do.
	Seed uint64
	// Clients call at the same time, together at most Rate new calls per second; a
	// Rate of 0 is no limit.
	Clients int
	Rate    float64
	// Every is the mean time between two disturbances: a kill or a reload.
	Every time.Duration
	// Keep is how long keys stay taken; results are kept for half of it.
	Keep time.Duration
	// Dir is a directory on the file system to use.
	Dir string
}

// Default is what the command does if it is not told otherwise.
var Default = Options{For: 5 * time.Minute, Seed: 1, Clients: 32, Rate: 1000, Every: 12 * time.Second, Keep: 40 * time.Second}

// attemptBound is how long one attempt of a call may take.
const attemptBound = 5 * time.Second

func (o Options) check() error {
	switch {
	case o.For < time.Second:
		return errors.New("for: at least 1s")
	case o.Clients < 1:
		return errors.New("clients: at least 1")
	case o.Rate < 0:
		return errors.New("rate: not negative")
	case o.Every < 100*time.Millisecond:
		return errors.New("every: at least 100ms")
	case o.Keep < 4*attemptBound:
		// Else a retry could come after its key is free again, and would rightly run.
		return errors.New("keep: at least " + (4 * attemptBound).String())
	}
	return nil
}
