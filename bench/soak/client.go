package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/ledger"
)

// tally counts what clients do, for the lines that tell of it.
type tally struct {
	calls, replays, losses, doubts atomic.Int64
}

// client calls, retries what was lost with the same key until it knows what came of
// it, and now and then calls again what it knows already.
type client struct {
	number int
	addr   string
	keep   time.Duration
	pause  time.Duration // between the beginnings of two calls
	random *rand.Rand
	http   *http.Client
	book   *ledger.Book
	tally  *tally
	known  []known // the last calls that were answered
}

type known struct {
	id     string
	effect int
	begun  time.Time
}

// memory is how many answered calls a client remembers.
const memory = 64

func newClient(o Options, number int, addr string, book *ledger.Book, t *tally) *client {
	c := &client{
		number: number, addr: addr, keep: o.Keep, book: book, tally: t,
		random: rand.New(rand.NewPCG(o.Seed, uint64(number)+1)),
		http:   &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2}},
	}
	if o.Rate > 0 {
		c.pause = time.Duration(float64(o.Clients) / o.Rate * float64(time.Second))
	}
	return c
}

// run calls until load ends; the last call is brought to its end while ctx lasts.
func (c *client) run(ctx context.Context, load <-chan struct{}) {
	defer c.http.CloseIdleConnections()
	next := time.Now().Add(time.Duration(c.random.Float64() * float64(c.pause)))
	for n := 0; ; n++ {
		select {
		case <-load:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Until(next)):
		}
		// Who fell behind does not catch up: that would be another load.
		next = later(next, time.Now()).Add(c.pause)
		c.call(ctx, fmt.Sprintf("client-%d-call-%d", c.number, n))
		if c.random.IntN(4) == 0 {
			c.again(ctx)
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// call makes a call, sometimes twice at once, and retries it until it is known what
// came of it, or until its key might be free again.
func (c *client) call(ctx context.Context, id string) {
	begun := time.Now()
	c.book.Begin(id)
	c.tally.calls.Add(1)
	var twin sync.WaitGroup
	if c.random.IntN(8) == 0 {
		twin.Go(func() { c.note(id, begun, try(ctx, c.http, c.addr, id)) })
	}
	wait := time.NewTicker(20 * time.Millisecond)
	defer wait.Stop()
	for time.Since(begun) < c.keep/2-attemptBound && ctx.Err() == nil {
		a := try(ctx, c.http, c.addr, id)
		c.note(id, begun, a)
		if a.outcome != lost {
			if a.outcome == ran {
				c.remember(known{id, a.effect, begun})
			}
			break
		}
		c.tally.losses.Add(1)
		<-wait.C
	}
	twin.Wait()
}

// note enters an attempt in the book.
func (c *client) note(id string, begun time.Time, a attempt) {
	switch a.outcome {
	case ran:
		if a.replayed {
			c.tally.replays.Add(1)
		}
		c.book.Acknowledge(id, a.effect)
	case doubt:
		c.tally.doubts.Add(1)
		c.book.Doubt(id)
	case absurd:
		c.book.Breach("%s, %s after its begin: %s", id, time.Since(begun).Round(time.Millisecond), a.text)
	}
}

func (c *client) remember(k known) {
	if len(c.known) < memory {
		c.known = append(c.known, k)
		return
	}
	c.known[c.random.IntN(memory)] = k
}

// again calls what was answered: while its result is kept, that is a replay of the
// same execution, whatever has happened to the gateway since.
func (c *client) again(ctx context.Context) {
	if len(c.known) == 0 {
		return
	}
	k := c.known[c.random.IntN(len(c.known))]
	if time.Since(k.begun) > c.keep/2-attemptBound {
		return
	}
	a := try(ctx, c.http, c.addr, k.id)
	c.note(k.id, k.begun, a)
	if a.outcome == ran && !a.replayed {
		c.book.Breach("%s was answered, and then executed again", k.id)
	}
}
