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

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Participant is another gateway that keeps new calls of the escalation's workflow from beginning as
// long as this one does (ATD, "Interaction with HITL").
type Participant struct {
	// Agent is its identity, and URI where it takes part in rollbacks; 2,048 bytes each.
	Agent, URI string
	// Confirmed is what it has confirmed last, at that time; zero is nothing.
	Confirmed Hold
	At        time.Time // see Confirmed
	// Since is when it has failed to confirm what holds now, and Reason why, in a fixed word; zero
	// where it has not failed.
	Since  time.Time
	Reason string // see Since
	// Refused says that it does not know how to be held, and is not asked again.
	Refused bool
}

// Hold is what participants are told of an escalation. A later one is never taken back.
type Hold uint8

// The holds.
const (
	// Holding: new calls of the workflow do not begin.
	Holding Hold = 1 + iota
	// Lifted: they may again.
	Lifted
)

// String is the word used in documents.
func (h Hold) String() string { return [...]string{"", "held", "lifted"}[h%3] }

// Hold is what its participants are told; zero is nothing yet.
func (e *Escalation) Hold() Hold {
	switch {
	case e.Held, e.Notice && e.Final:
		return Holding
	case e.Status == Approved, e.Status == Withdrawn:
		return Lifted
	}
	return 0
}

// settled reports whether a participant needs to hear nothing more.
func (p *Participant) settled(now Hold) bool { return now == 0 || p.Refused || p.Confirmed >= now }

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

// The tags of a participant's fields.
const (
	tagAgent = 1 + iota
	tagURI
	tagConfirmed
	tagConfirmedAt
	tagSince
	tagWhy
	tagRefused
)

func (p *Participant) encode() []byte {
	to := store.Encoder{}
	to.String(tagAgent, p.Agent)
	to.String(tagURI, p.URI)
	to.Int(tagConfirmed, int64(p.Confirmed))
	to.Time(tagConfirmedAt, p.At)
	to.Time(tagSince, p.Since)
	to.String(tagWhy, p.Reason)
	to.Bool(tagRefused, p.Refused)
	return to.B
}

func decodeParticipant(b []byte) (p Participant, err error) {
	from := store.Decoder{B: b, Broken: errEncoding}
	for from.Next() {
		switch from.Tag {
		case tagAgent:
			p.Agent = string(from.Field)
		case tagURI:
			p.URI = string(from.Field)
		case tagConfirmed:
			p.Confirmed = Hold(small(&from))
		case tagConfirmedAt:
			p.At = from.Time().UTC()
		case tagSince:
			p.Since = from.Time().UTC()
		case tagWhy:
			p.Reason = string(from.Field)
		case tagRefused:
			p.Refused = from.Int() != 0
		}
	}
	return p, from.Err
}

// Lift ends what an escalation of an occasion holds, whatever was decided about it. If none was
// opened yet, it is recorded as lifted, so that o opens nothing any more: messages may overtake
// each other.
func (d *Store) Lift(ctx context.Context, o Opening) (Escalation, error) {
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

// RefusedHold is the error of a participant that has answered and does not do what it is told.
type RefusedHold struct {
	// Reason is a fixed word.
	Reason string
	// Final says that asking again is of no use.
	Final bool
}

// Error implements error.
func (e *RefusedHold) Error() string { return "hitl: the participant refuses: " + e.Reason }

// Reach tells participants what holds, each until it has confirmed that, until ctx is done or the
// store is closed. inform is called concurrently, at least once for each change, also after a restart;
// its errors are recorded as a word, *RefusedHold by its own. onError gets errors of the store.
//
// What is told is read from the record each time, and is one of two states of which the second is
// final: neither a repetition nor another order changes what comes of it, so no attempt needs a lease.
func (d *Store) Reach(ctx context.Context, inform func(ctx context.Context, p *Participant, e *Escalation) error, onError func(error)) {
	r := &reach{Store: d, inform: inform, tries: map[target]*try{}, ended: make(chan struct{}, 1), slots: make(chan struct{}, maxReaching)}
	var running sync.WaitGroup
	defer running.Wait()
	for ctx.Err() == nil {
		news := d.changed() // before the look
		wait, err := r.round(ctx, &running)
		if errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy) {
			return
		}
		if err != nil {
			if ctx.Err() == nil {
				onError(err)
			}
			wait = storePause
		}
		timer := time.NewTimer(wait)
		select {
		case <-news:
		case <-r.ended:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// target is a participant of an escalation.
type target struct {
	id    uuid.UUID
	agent string
	uri   string
}

// try is the state of the attempts at a target; a restart begins anew.
type try struct {
	running bool
	failed  int
	next    time.Time
}

type reach struct {
	*Store
	inform func(ctx context.Context, p *Participant, e *Escalation) error

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
			r.mu.Lock()
			t := r.tries[at]
			if t == nil {
				t = new(try)
				r.tries[at] = t
			}
			left := time.Until(t.next)
			begins := !t.running && left <= 0
			t.running = t.running || begins
			if !t.running {
				wait = min(wait, left)
			}
			r.mu.Unlock()
			if begins {
				running.Go(func() { r.attempt(ctx, at, t, p, e) })
			}
		}
	}
	return wait, nil
}

func (r *reach) attempt(ctx context.Context, at target, t *try, p *Participant, e *Escalation) {
	r.slots <- struct{}{}
	defer func() { <-r.slots }()
	err := r.inform(ctx, p, e)
	recording, done := context.WithTimeout(context.WithoutCancel(ctx), recordPatience)
	defer done()
	if err == nil || ctx.Err() == nil {
		err = errors.Join(err, r.heard(recording, at, e.Hold(), err)) // what is not recorded is told once more
	}
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
}

// heard records what came of an attempt to tell a participant of a hold.
func (r *reach) heard(ctx context.Context, at target, said Hold, failure error) error {
	for {
		old, version, err := r.read(ctx, at.id)
		if err != nil {
			return err
		}
		now, err := r.now(ctx)
		if err != nil {
			return err
		}
		e := *old
		e.Participants = slices.Clone(old.Participants)
		i := slices.IndexFunc(e.Participants, func(p Participant) bool { return p.Agent == at.agent && p.URI == at.uri })
		if i < 0 {
			return nil
		}
		p := &e.Participants[i]
		refused := (*RefusedHold)(nil)
		switch {
		case failure == nil:
			p.Confirmed, p.At, p.Since, p.Reason = max(p.Confirmed, said), now, time.Time{}, ""
		case p.Confirmed >= said:
			return nil
		default:
			reason := "unreachable"
			if errors.As(failure, &refused) {
				reason, p.Refused = refused.Reason, refused.Final
			}
			if p.Since.IsZero() {
				p.Since = now
			} else if p.Reason == reason && !p.Refused {
				return nil
			}
			p.Reason = reason
		}
		_, err = r.store.Commit(ctx, r.put(at.id, old, &e, store.VersionIs(version))...)
		var lost *store.Conflict
		if !errors.As(err, &lost) {
			return err
		}
	}
}
