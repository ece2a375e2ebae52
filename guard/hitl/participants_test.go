package hitl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// listener is what participants have heard, and what they answer.
type listener struct {
	mu    sync.Mutex
	heard []string
	fails map[string]error
	news  []string
}

// answered notes what is new of a participant.
func (w *listener) answered(p hitl.Participant, e hitl.Escalation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.news = append(w.news, fmt.Sprint(p.Agent, " ", e.Hold(), " ", p.Reason, p.Refused))
}

func (w *listener) hear(_ context.Context, p *hitl.Participant, e *hitl.Escalation) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = append(w.heard, p.Agent+" "+string(e.Hold()))
	return w.fails[p.Agent]
}

func (w *listener) count(what string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, one := range w.heard {
		if one == what {
			n++
		}
	}
	return n
}

// ATD "Interaction with HITL": what holds a workflow is told to each participant until it has confirmed,
// and so is that it is lifted, over restarts; nobody is told what he has confirmed.
func TestParticipantsAreToldUntilTheyConfirm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, ring := memory.New(memory.Options{}), seal.Generate()
		w := &listener{fails: map[string]error{"b": errors.New("down"), "c": &hitl.RefusedHold{Reason: "unsupported", Final: true}}}
		var d *hitl.Store
		var stop context.CancelFunc
		var over chan struct{}
		start := func() {
			d = hitl.NewStore(st, ring)
			if _, err := d.Load(t.Context()); err != nil {
				t.Fatal(err)
			}
			var running context.Context
			running, stop = context.WithCancel(t.Context())
			over = make(chan struct{})
			of, done := d, over
			go func() {
				defer close(done)
				of.Reach(running, hitl.Outreach{Inform: w.hear, OnError: func(err error) { t.Error(err) }, OnAnswer: w.answered})
			}()
		}
		restart := func() { stop(); <-over; start() }
		start()
		e, err := d.Open(t.Context(), hitl.Opening{
			Key: "k", Level: hitl.Pause, Cause: hitl.CauseOther, Summary: "s", Workflow: "w",
			Participants: []hitl.Participant{hitl.NewParticipant("a", "u"), hitl.NewParticipant("b", "u"), hitl.NewParticipant("c", "u")},
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if w.count("a held") != 1 || w.count("b held") < 10 || w.count("c held") != 1 {
			t.Fatalf("%v", w.heard)
		}
		seen, err := d.Reaching(t.Context(), "w")
		if err != nil || len(seen) != 1 {
			t.Fatalf("%+v, %v", seen, err)
		}
		p := seen[0].Participants
		if p[0].Confirmed != hitl.Holding || p[1].Confirmed != "" || p[1].Since.IsZero() || p[1].Reason != "unreachable" || !p[2].Refused || p[2].Reason != "unsupported" {
			t.Errorf("%+v", p)
		}
		if open, err := d.Unconfirmed(t.Context()); err != nil || len(open) != 1 || open["b"] != 1 {
			t.Errorf("%v, %v", open, err)
		}
		before := w.count("b held")
		restart()
		synctest.Wait()
		if w.count("b held") != before+1 || w.count("a held") != 1 {
			t.Errorf("after a restart: %v", w.heard)
		}
		stop()
		<-over
		if _, err := d.Decide(t.Context(), e.ID, hitl.Vote{By: "ann", Every: true, Approve: true}); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		delete(w.fails, "b")
		w.mu.Unlock()
		start() // killed between the commit and the message
		time.Sleep(2 * time.Minute)
		if w.count("a lifted") != 1 || w.count("b lifted") != 1 || w.count("c lifted") != 0 {
			t.Errorf("%v", w.heard)
		}
		seen, err = d.Reaching(t.Context(), "w")
		if err != nil || slices.ContainsFunc(seen[0].Participants[:2], func(p hitl.Participant) bool { return p.Confirmed != hitl.Lifted || !p.Since.IsZero() }) {
			t.Errorf("%+v, %v", seen, err)
		}
		if open, err := d.Unconfirmed(t.Context()); err != nil || len(open) != 0 {
			t.Errorf("%v, %v", open, err)
		}
		slices.Sort(w.news)
		if want := []string{"a held false", "a lifted false", "b held unreachablefalse", "b lifted false", "c held unsupportedtrue"}; !slices.Equal(w.news, want) {
			t.Errorf("%q", w.news)
		}
		stop()
		<-over
	})
}

// staleReads lets the first read behind the next look at what participants have to hear wait for go, with what it has
// read.
type staleReads struct {
	store.Store
	mu    sync.Mutex
	armed chan struct{} // go, for the next look
	next  chan struct{} // go, for the next read
}

func (s *staleReads) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	s.mu.Lock()
	if s.armed != nil && bytes.HasPrefix(r.From, []byte("hr")) {
		s.armed, s.next = nil, s.armed
	}
	s.mu.Unlock()
	return s.Store.Scan(ctx, r)
}

func (s *staleReads) Get(ctx context.Context, key []byte) (store.Entry, error) {
	found, err := s.Store.Get(ctx, key)
	s.mu.Lock()
	held := s.next
	s.next = nil
	s.mu.Unlock()
	if held != nil {
		<-held
	}
	return found, err
}

// A participant that confirms while its record is being looked at hears nothing twice.
func TestParticipantIsNotToldWhatItHasJustConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &staleReads{Store: memory.New(memory.Options{})}
		d := hitl.NewStore(st, seal.Generate())
		confirms, heard := make(chan struct{}), 0
		running, stop := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() {
			defer close(over)
			d.Reach(running, hitl.Outreach{OnError: func(err error) { t.Error(err) }, Inform: func(context.Context, *hitl.Participant, *hitl.Escalation) error {
				heard++
				<-confirms
				return nil
			}})
		}()
		open := func(key string, p ...hitl.Participant) {
			t.Helper()
			if _, err := d.Open(t.Context(), hitl.Opening{Key: key, Level: hitl.Pause, Cause: hitl.CauseOther, Summary: "s", Workflow: "w", Participants: p}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		open("k", hitl.NewParticipant("a", "u"))
		read := make(chan struct{})
		st.mu.Lock()
		st.armed = read
		st.mu.Unlock()
		open("another one") // has all of them looked at
		close(confirms)
		synctest.Wait()
		close(read)
		synctest.Wait()
		if stop(); heard != 1 {
			t.Errorf("it has heard it %d times", heard)
		}
		<-over
	})
}

// A participant's hold: repeated and late messages change nothing, whatever people have said meanwhile,
// and nobody is asked about what is final.
func TestLiftedIsForGood(t *testing.T) {
	d := hitl.NewStore(memory.New(memory.Options{}), seal.Generate())
	o := hitl.Opening{Key: "k", Level: hitl.Pause, Cause: hitl.CauseOther, Summary: "s", Workflow: "w"}
	blocks := func() bool {
		e, _, err := d.Blocks(t.Context(), "w")
		if err != nil {
			t.Fatal(err)
		}
		return e != nil
	}
	e, err := d.Open(t.Context(), o)
	if err != nil || !blocks() {
		t.Fatal(err)
	}
	if _, err := d.Decide(t.Context(), e.ID, hitl.Vote{By: "ann", Every: true, Reason: "no"}); err != nil || !blocks() {
		t.Fatal(err)
	}
	for range 2 {
		if e, err := d.Lift(t.Context(), o); err != nil || e.Held || blocks() {
			t.Fatalf("%+v, %v", e, err)
		}
		if e, err := d.Open(t.Context(), o); err != nil || e.Held || blocks() {
			t.Fatalf("%+v, %v", e, err)
		}
	}
	o.Key = "overtaken"
	if e, err := d.Lift(t.Context(), o); err != nil || e.Held || e.State == hitl.Open {
		t.Fatalf("%+v, %v", e, err)
	}
	if e, err := d.Open(t.Context(), o); err != nil || e.Held || blocks() {
		t.Fatalf("%+v, %v", e, err)
	}
	o.Key, o.Final, o.Notice = "final", true, true
	e, err = d.Open(t.Context(), o)
	if err != nil || !blocks() || e.State == hitl.Open || e.Status == hitl.Pending {
		t.Fatalf("%+v, %v", e, err)
	}
	if _, err := d.Decide(t.Context(), e.ID, hitl.Vote{By: "ann", Every: true, Approve: true}); err == nil || !blocks() {
		t.Errorf("it is resumed: %v", err)
	}
}

// The entry of the outbox is in the commit that opens the escalation, or decides it; the record stays
// until all have confirmed.
func TestParticipantsStandInTheSameCommit(t *testing.T) {
	st := memory.New(memory.Options{})
	d := hitl.NewStore(st, seal.Generate())
	entries := func() (n int) {
		for _, err := range st.Scan(t.Context(), store.Prefix([]byte("hr"))) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		return n
	}
	o := hitl.Opening{
		Key: "k", Level: hitl.Stop, Cause: hitl.CauseOther, Summary: "s", Workflow: "w", Notice: true, Lifted: true, Final: true,
		Participants: []hitl.Participant{hitl.NewParticipant("a", "u")},
	}
	p, err := d.Prepare(t.Context(), o)
	if err != nil || entries() != 0 {
		t.Fatal(err)
	}
	if err := p.Commit(t.Context(), st); err != nil || entries() != 1 {
		t.Fatalf("%d, %v", entries(), err)
	}
	if e := p.Escalation(); e.Held || e.Hold() != hitl.Holding || e.State == hitl.Open {
		t.Errorf("%+v", e)
	}
	o.Key = "many"
	for i := range 65 {
		o.Participants = append(o.Participants, hitl.NewParticipant(fmt.Sprint(i), "u"))
	}
	if _, err := d.Prepare(t.Context(), o); !errors.Is(err, hitl.ErrOpening) {
		t.Errorf("%v", err)
	}
}
