package caddymodule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// Of many open workflows the one that is due first is found without a look at the others: what has nothing new and
// has a plan is never due, an idle one when its time is over, and what is only known to be read less often when it may be read.
func TestOpenWorkflowsAreFoundByWhenTheyAreDue(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	now := time.Now()
	w := &boundaryWatch{open: map[string]*openWorkflow{}, with: time.Minute}
	for i := range 1000 {
		o := &openWorkflow{wid: fmt.Sprint(i), place: -1}
		w.open[o.wid] = o
		w.schedule(o)
	}
	for range 20_000 {
		o := w.open[fmt.Sprint(r.IntN(1000))]
		o.planned, o.unread, o.either, o.over = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(4) == 0, r.IntN(8) == 0
		o.last, o.next = now.Add(time.Duration(r.IntN(1000))*time.Second), now.Add(time.Duration(r.IntN(1000))*time.Second)
		w.schedule(o)
	}
	due := 0
	for _, o := range w.open {
		at, is := o.next, true
		switch {
		case o.over, o.planned && o.unread:
		case o.planned && !o.either:
			is = false
		case o.last.Add(time.Minute).After(o.next):
			at = o.last.Add(time.Minute)
		}
		if is != (o.place >= 0) || is && (w.due[o.place] != o || !o.due.Equal(at) || o.due.Before(w.due[0].due)) {
			t.Fatalf("%+v, due %v at %v", o, is, at)
		}
		if is {
			due++
		}
	}
	if due != len(w.due) || due == 0 {
		t.Errorf("%d are due, %d in the heap", due, len(w.due))
	}
}

// The gateways of a fleet look at a workflow one after the other, and share the workflows out: of each there is one that looks
// first. When one has left, the others take its turns.
func TestGatewaysTakeTurns(t *testing.T) {
	st := memory.New(memory.Options{})
	var all []*boundaryWatch
	for _, node := range []string{"a", "b", "c"} {
		w := &boundaryWatch{open: map[string]*openWorkflow{}, fleet: fleet.Of(st.Join(node)), node: node, with: time.Minute}
		all = append(all, w)
	}
	first := map[string]int{}
	turns := func(of ...*boundaryWatch) {
		t.Helper()
		clear(first)
		for _, w := range of {
			w.whoIsThere(t.Context())
		}
		for i := range 300 {
			var at []time.Duration
			for _, w := range of {
				at = append(at, w.turn(fmt.Sprint(i)))
				if at[len(at)-1] == 0 {
					first[w.node]++
				}
			}
			slices.Sort(at)
			for n, turn := range at {
				if turn != time.Duration(n)*nextTurn {
					t.Fatalf("workflow %d: turns %v", i, at)
				}
			}
		}
	}
	turns(all...)
	for _, w := range all {
		if first[w.node] < 50 {
			t.Errorf("%s looks first at %d of 300", w.node, first[w.node])
		}
	}
	left := all[0].fleet.Left()
	all[2].fleet.Shared.(*memory.Member).Remove()
	<-left
	turns(all[:2]...)

	now := time.Now()
	w := all[0]
	for i := range 100 {
		turn := w.turn(fmt.Sprint(i))
		planned := &openWorkflow{wid: fmt.Sprint(i), place: -1, planned: true, unread: true, last: now, next: now}
		idle := &openWorkflow{wid: fmt.Sprint(i), place: -1, last: now, next: now}
		w.schedule(planned)
		w.schedule(idle)
		if !planned.due.Equal(now.Add(turn)) || !idle.due.Equal(now.Add(time.Minute+turn)) {
			t.Fatalf("with the turn %v: %v and %v", turn, planned.due.Sub(now), idle.due.Sub(now))
		}
	}
	alone := &boundaryWatch{}
	alone.whoIsThere(t.Context())
	if alone.turn("x") != 0 {
		t.Error("a gateway that has its store alone waits")
	}
}
