package hitl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Participant is another gateway that keeps new calls of the escalation's workflow from beginning as
// long as this one does (ATD, "Interaction with HITL").
type Participant struct {
	// Agent is its identity, at most 2,048 bytes.
	Agent string `json:"agent"`
	// State is what it is told. Confirmed is what it has confirmed last, at that time; empty is nothing.
	State     hold      `json:"state"`
	Confirmed hold      `json:"confirmed,omitempty"` // see State
	At        time.Time `json:"at,omitzero"`         // see State
	// Since is when it has failed to confirm what holds now, and Reason why, in a fixed word; zero
	// where it has not failed.
	Since  time.Time `json:"unreachable_since,omitzero"`
	Reason string    `json:"reason,omitempty"` // see Since

	address `json:"-" cbor:"address"`
}

// NewParticipant is a participant that takes part in rollbacks at a URI, of at most 2,048 bytes.
func NewParticipant(agent, uri string) Participant {
	return Participant{Agent: agent, address: address{URI: uri}}
}

// address is what is stored of a participant, and shown to nobody.
type address struct {
	// URI is where it takes part in rollbacks.
	URI string
	// Refused says that it does not know how to be held, and is not asked again.
	Refused bool
}

// hold is what participants are told of an escalation. A later one is never taken back.
type hold string

// The holds. The later one is the greater word.
const (
	// Holding: new calls of the workflow do not begin.
	holding hold = "held"
	// Lifted: they may again.
	lifted hold = "lifted"
)

// Hold is what its participants are told; empty is nothing yet.
func (e *Escalation) Hold() hold {
	switch {
	case e.Held, e.Notice && e.Final:
		return holding
	case e.Status == Approved, e.Status == Withdrawn:
		return lifted
	}
	return ""
}

// settled reports whether a participant needs to hear nothing more.
func (p *Participant) settled(now hold) bool { return now == "" || p.Refused || p.Confirmed >= now }

// unsettled reports whether some participant has not confirmed what holds now.
func (e *Escalation) unsettled() bool {
	hold := e.Hold()
	return slices.ContainsFunc(e.Participants, func(p Participant) bool { return !p.settled(hold) })
}

const (
	// maxParticipants bounds those of one escalation, so that it fits its record and its commit.
	maxParticipants = 64
	// longestPause bounds the wait between two attempts to reach a participant.
	longestPause = time.Minute
	// maxReaching bounds the attempts that run at once.
	maxReaching = 8
)

// lift ends what an escalation of an occasion holds, whatever was decided about it. If none was
// opened yet, it is recorded as lifted, so that o opens nothing any more: messages may overtake
// each other.
func (d *Store) lift(ctx context.Context, o Opening) (Escalation, error) {
	o.Notice, o.Lifted = true, true
	e, err := d.Open(ctx, o)
	if err != nil || !e.Held {
		return e, err
	}
	return d.change(ctx, e.ID, func(e *Escalation, now time.Time) (*Escalation, error) {
		if !e.Held {
			return nil, nil
		}
		return e.ended(Withdrawn, now), nil
	})
}

// Reaching are the escalations of a workflow that participants are told of, the newest first, at most
// a page of them.
func (d *Store) Reaching(ctx context.Context, workflow string) ([]Escalation, error) {
	page, err := d.List(ctx, Filter{Workflow: workflow}, "", listChunk)
	return slices.DeleteFunc(page.Escalations, func(e Escalation) bool { return len(e.Participants) == 0 }), err
}

// maxUnconfirmed bounds the escalations that Unconfirmed looks at.
const maxUnconfirmed = 1000

// Unconfirmed is of how many escalations each participant, by its identity, has not confirmed what holds,
// among the first 1,000 that somebody has not confirmed. Who does not know holds is not counted.
func (d *Store) Unconfirmed(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	r := store.Prefix([]byte{space, kindReach})
	r.Limit = maxUnconfirmed
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		e, _, err := d.read(ctx, uuid.UUID(entry.Key[2:]))
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnreadable):
			continue
		case err != nil:
			return nil, err
		}
		for i, hold := 0, e.Hold(); i < len(e.Participants); i++ {
			if p := &e.Participants[i]; !p.settled(hold) {
				counts[p.Agent]++
			}
		}
	}
	return counts, nil
}

// RefusedHold is the error of a participant that has answered and does not do what it is told.
type RefusedHold struct {
	// Reason is a fixed word.
	Reason string
	// Final says that asking again is of no use.
	Final bool
}

// Error implements error.
func (e *RefusedHold) Error() string { return "hitl: the participant refuses: " + e.Reason }

// Outreach is how participants are reached. All but OnAnswer are required.
type Outreach struct {
	// Inform tells a participant what holds. It is called concurrently, at least once for each change,
	// also after a restart; its errors are recorded as a word, *RefusedHold by its own.
	Inform func(ctx context.Context, p *Participant, e *Escalation) error
	// OnAnswer gets a participant whose record has changed, with its escalation. It is called
	// concurrently.
	OnAnswer func(p Participant, e Escalation)
	// OnError gets errors of the store.
	OnError func(error)
}

// Reach tells participants what holds, each until it has confirmed that, until ctx is done or the
// store is closed.
//
// What is told is read from the record each time, and is one of two states of which the second is
// final: neither a repetition nor another order changes what comes of it, so no attempt needs a lease.
func (d *Store) Reach(ctx context.Context, o Outreach) {
	r := &reach{Store: d, o: o, tries: map[target]*try{}, ended: make(chan struct{}, 1), slots: make(chan struct{}, maxReaching)}
	var running sync.WaitGroup
	defer running.Wait()
	fleet.Job{
		Fleet: d.fleet, News: d.changed, Wake: r.ended, Retry: storePause, Failed: o.OnError,
		Do: func(ctx context.Context, _ bool) (time.Duration, error) {
			wait, err := r.round(ctx, &running)
			return max(wait, 1), err
		},
	}.Run(ctx)
}

// target is a participant of an escalation.
type target struct {
	id    uuid.UUID
	agent string
	uri   string
}

// in is the place of the target among the participants of an escalation; negative if it is none.
func (at target) in(e *Escalation) int {
	return slices.IndexFunc(e.Participants, func(p Participant) bool { return p.Agent == at.agent && p.URI == at.uri })
}

// try is the state of the attempts at a target; a restart begins anew.
type try struct {
	running bool
	failed  int
	next    time.Time
}

type reach struct {
	*Store
	o Outreach

	mu    sync.Mutex
	tries map[target]*try
	ended chan struct{} // an attempt has
	slots chan struct{}
}

// round begins what is due, and returns the time until the next is.
func (r *reach) round(ctx context.Context, running *sync.WaitGroup) (time.Duration, error) {
	wait := longestPause
	var ids []uuid.UUID
	for entry, err := range r.store.Scan(ctx, store.Prefix([]byte{space, kindReach})) {
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
		ids = append(ids, uuid.UUID(bytes.Clone(entry.Key[2:])))
	}
	for _, id := range ids {
		e, _, err := r.read(ctx, id)
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnreadable):
			continue // a damaged record holds here, and says nothing of others
		case err != nil:
			return 0, err
		}
		hold := e.Hold()
		for i := range e.Participants {
			p := &e.Participants[i]
			if p.settled(hold) {
				continue
			}
			at := target{id, p.Agent, p.URI}
			wait = min(wait, r.begin(ctx, running, at, func() error { return r.attempt(ctx, at) }))
		}
	}
	return wait, nil
}

// begin begins an attempt at a target if it is due, and returns the time until the next one is.
func (r *reach) begin(ctx context.Context, running *sync.WaitGroup, at target, attempt func() error) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tries[at]
	if t == nil {
		t = new(try)
		r.tries[at] = t
	}
	left := time.Until(t.next)
	switch {
	case t.running:
		return longestPause
	case left > 0:
		return left
	}
	t.running = true
	running.Go(func() {
		r.slots <- struct{}{}
		defer func() { <-r.slots }()
		err := attempt()
		r.mu.Lock()
		defer r.mu.Unlock()
		t.running = false
		if err == nil {
			delete(r.tries, at) // there may be news already
		} else {
			t.failed++
			t.next = time.Now().Add(min(time.Second<<min(t.failed-1, 10), longestPause))
		}
		select {
		case r.ended <- struct{}{}:
		default:
		}
	})
	return longestPause
}

func (r *reach) attempt(ctx context.Context, at target) error {
	e, _, err := r.read(ctx, at.id) // the look that found it may be older than what an attempt has recorded
	if err != nil {
		return err
	}
	i := at.in(e)
	if i < 0 || e.Participants[i].settled(e.Hold()) {
		return nil
	}
	err = r.o.Inform(ctx, &e.Participants[i], e)
	recording, done := context.WithTimeout(context.WithoutCancel(ctx), recordPatience)
	defer done()
	if err == nil || ctx.Err() == nil {
		err = errors.Join(err, r.heard(recording, at, e.Hold(), err)) // what is not recorded is told once more
	}
	return err
}

// heard records what came of an attempt to tell a participant of a hold.
func (r *reach) heard(ctx context.Context, at target, said hold, failure error) error {
	var p Participant
	e, err := r.update(ctx, at.id, func(e *Escalation, now time.Time) (*Escalation, error) {
		i := at.in(e)
		if i < 0 {
			return nil, nil
		}
		p = e.Participants[i]
		refused := (*RefusedHold)(nil)
		switch {
		case failure == nil:
			p.Confirmed, p.At, p.Since, p.Reason = max(p.Confirmed, said), now, time.Time{}, ""
		case p.Confirmed >= said:
			return nil, nil
		default:
			reason := "unreachable"
			if errors.As(failure, &refused) {
				reason, p.Refused = refused.Reason, refused.Final
			}
			if p.Since.IsZero() {
				p.Since = now
			} else if p.Reason == reason && !p.Refused {
				return nil, nil
			}
			p.Reason = reason
		}
		next := *e
		next.Participants = slices.Clone(e.Participants)
		next.Participants[i] = p
		return &next, nil
	})
	if e != nil && r.o.OnAnswer != nil {
		r.o.OnAnswer(p, *e)
	}
	return err
}
