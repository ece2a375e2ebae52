// Package load makes HTTP/1.1 requests as fast as a gateway takes them, with as
// little work of its own as can be: the generator shares the processors with what
// it measures.
package load

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Job is one round of load.
type Job struct {
	// Addr is host:port of the server.
	Addr string
	// Request is what is sent.
	Request Request
	// Conns is the number of connections, each with one request at a time.
	Conns int
	// For is how long new requests begin, and Limit how many at most; 0 is no limit.
	For   time.Duration
	Limit int
	// Least is how many requests are made even where that takes longer than For, which
	// it may by overtime times.
	Least int
	// Status is the status of every answer; another one ends the round.
	Status int
	// Line is a header line that the first answer of each connection has, if set:
	// proof that what is measured is what is meant.
	Line string
	// First says that answers are streams of events in chunks, whose Latencies end with the
	// first event. All of each is read.
	First bool
}

// over says that the request with this number, counted from 1, is not made any more. The
// first one is, however late: a busy machine may begin a round after its time.
func (j *Job) over(elapsed time.Duration, number int) bool {
	switch {
	case number == 1:
		return false
	case j.Limit > 0 && number > j.Limit:
		return true
	}
	return elapsed >= j.For && (number > j.Least || elapsed >= j.longest())
}

// longest is how long new requests begin at most.
func (j *Job) longest() time.Duration {
	if j.Least == 0 {
		return j.For
	}
	return overtime * j.For
}

// Result is what came of a round.
type Result struct {
	// Requests that were answered, and the time that they took together.
	Requests int
	Elapsed  time.Duration
	// Latencies of all requests, in no order.
	Latencies []time.Duration
}

// Rate is the requests per second.
func (r Result) Rate() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Requests) / r.Elapsed.Seconds()
}

// overtime times For is the end of a round whose requests are not made by then.
const overtime = 5

// patience bounds one answer. It is far from what a working gateway needs.
const patience = 30 * time.Second

// Run makes a round. Connections are made, and used once, before its clock starts.
// The first error ends it.
func Run(ctx context.Context, j Job) (Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	clients := make([]*client, 0, j.Conns)
	defer func() {
		for _, c := range clients {
			_ = c.conn.Close()
		}
	}()
	for i := range j.Conns {
		c, err := dial(ctx, &j, i)
		if err != nil {
			return Result{}, err
		}
		clients = append(clients, c)
	}
	stop := context.AfterFunc(ctx, func() {
		for _, c := range clients {
			_ = c.conn.SetDeadline(time.Unix(1, 0))
		}
	})
	defer stop()

	each(clients, func(c *client) {
		if err := c.first(); err != nil {
			cancel(err)
		}
	})
	var begun atomic.Int64
	start := time.Now()
	if ctx.Err() == nil {
		each(clients, func(c *client) {
			if err := c.repeat(start, &begun); err != nil {
				cancel(err)
			}
		})
	}
	result := Result{Elapsed: time.Since(start)}
	if err := context.Cause(ctx); err != nil {
		return Result{}, fmt.Errorf("load on %s: %w", j.Addr, err)
	}
	for _, c := range clients {
		result.Latencies = append(result.Latencies, c.took...)
	}
	result.Requests = len(result.Latencies)
	return result, nil
}

func each(clients []*client, do func(*client)) {
	var all sync.WaitGroup
	for _, c := range clients {
		all.Go(func() { do(c) })
	}
	all.Wait()
}
