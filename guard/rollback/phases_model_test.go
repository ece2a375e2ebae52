package rollback_test

import (
	"slices"
	"testing"
)

// A model of the two phases over two participants, checked over all interleavings with crashes of
// everybody and losses of every message (ADR 0083). Participant 0 is undone before participant 1,
// whose checkpoint is the one that was asked for.

// phasesState is a state of the model. What a crash takes is marked volatile.
type phasesState struct {
	up       bool
	answered [2]phasesAnswer // volatile, until it is accepted
	accepted bool
	refused  [2]bool // recorded with the acceptance
	aborted  bool    // recorded with the acceptance
	step     [2]phasesStep
	life     int  // of the coordinator: how often it has begun anew, at most one
	finished bool // with the result in completed
	complete bool
	gaveUp   bool    // once, before it was accepted: its requester may come again
	releases [2]bool // on their way, for as long as the network likes

	alive     [2]bool
	can       [2]bool // what stands in the way at a participant does not change
	reserved  [2]bool
	asked     [2]int // the id under which it was executed, and 0 is none
	undone    [2]int
	early     bool // participant 1 was undone before the step of 0 had ended
	uninvited bool // somebody was undone who had not prepared
}

type phasesAnswer int

const (
	unasked phasesAnswer = iota
	saysYes
	saysNo // or nothing
)

type phasesStep int

const (
	stepPending phasesStep = iota
	stepSent               // journaled before it is sent
	stepDone
	stepEscalated
)

func (s phasesStep) ended() bool { return s >= stepDone }

// phasesRules are what the protocol relies on; a test leaves out one after the other.
type phasesRules struct {
	oneID, barrier, keepsRefusals, onlySigned, aborts, executeWins bool
}

// next are the states that can follow.
func (r phasesRules) next(s phasesState) (all []phasesState) {
	add := func(change func(n *phasesState)) {
		n := s
		change(&n)
		all = append(all, n)
	}
	for i := range 2 {
		if s.reserved[i] {
			add(func(n *phasesState) { n.reserved[i] = false }) // it ends by itself
		}
		if s.alive[i] {
			add(func(n *phasesState) { n.alive[i] = false })
		} else {
			add(func(n *phasesState) { n.alive[i] = true })
		}
	}
	for i := range 2 {
		if !s.releases[i] {
			continue
		}
		add(func(n *phasesState) { n.releases[i] = false }) // it is lost
		if s.alive[i] {
			add(func(n *phasesState) {
				n.releases[i] = false
				if n.asked[i] == 0 || !r.executeWins {
					n.reserved[i], n.asked[i] = false, 0
				}
			})
		}
	}
	if s.finished {
		return all
	}
	if !s.up {
		add(func(n *phasesState) { n.up = true })
		return all
	}
	add(func(n *phasesState) { // it dies
		n.up, n.life = false, 1
		if !n.accepted {
			n.answered = [2]phasesAnswer{}
		} else if !r.keepsRefusals {
			n.refused = [2]bool{}
		}
	})
	if !s.accepted {
		for i := range 2 {
			if s.answered[i] != unasked {
				continue
			}
			add(func(n *phasesState) { n.answered[i] = saysNo }) // unreachable, or its answer is lost
			if s.alive[i] {
				add(func(n *phasesState) { n.reserved[i], n.answered[i] = n.can[i], saysNo })
				add(func(n *phasesState) {
					if n.reserved[i] = n.can[i]; n.can[i] {
						n.answered[i] = saysYes
					} else {
						n.answered[i] = saysNo
					}
				})
			}
		}
		if s.answered[0] != unasked && s.answered[1] != unasked {
			if !s.gaveUp {
				add(func(n *phasesState) {
					n.gaveUp, n.releases, n.answered = true, [2]bool{true, true}, [2]phasesAnswer{}
				})
			}
			add(func(n *phasesState) {
				n.accepted = true
				for i := range 2 {
					n.refused[i] = n.answered[i] == saysNo
				}
				n.aborted = n.refused[1] && r.aborts
			})
		}
		return all
	}
	for i := range 2 {
		switch {
		case s.step[i].ended(), i == 1 && r.barrier && !s.step[0].ended():
		case s.step[i] == stepPending && (s.refused[i] || s.aborted):
			add(func(n *phasesState) { n.step[i], n.releases[i] = stepEscalated, true })
		case s.step[i] == stepPending:
			add(func(n *phasesState) { n.step[i] = stepSent })
		default:
			add(func(n *phasesState) { n.step[i] = stepEscalated }) // its time is over
			if !r.onlySigned {
				add(func(n *phasesState) { n.step[i] = stepDone })
			}
			if !s.alive[i] {
				continue
			}
			arrives := func(n *phasesState) {
				id := 1
				if !r.oneID {
					id += n.life
				}
				if n.asked[i] != id { // the same id is the same result
					n.asked[i] = id
					n.undone[i]++
					n.early = n.early || i == 1 && !n.step[0].ended()
					n.uninvited = n.uninvited || !n.can[i]
				}
				n.reserved[i] = false
			}
			add(arrives) // and the answer is lost
			add(func(n *phasesState) { arrives(n); n.step[i] = stepDone })
		}
	}
	if s.step[0].ended() && s.step[1].ended() {
		add(func(n *phasesState) {
			n.finished, n.complete = true, n.step[0] == stepDone && n.step[1] == stepDone
		})
	}
	return all
}

// broken names the invariants that a state breaks.
func (s *phasesState) broken() (all []string) {
	for name, is := range map[string]bool{
		"undone twice":                       s.undone[0] > 1 || s.undone[1] > 1,
		"completed, and not undone":          s.complete && (s.undone[0] == 0 || s.undone[1] == 0),
		"done, and not undone":               s.step[0] == stepDone && s.undone[0] == 0 || s.step[1] == stepDone && s.undone[1] == 0,
		"out of order":                       s.early,
		"undone without having prepared":     s.uninvited,
		"undone although it was aborted":     s.aborted && s.undone[0]+s.undone[1] > 0,
		"undone below what cannot be":        !s.can[1] && s.undone[0]+s.undone[1] > 0,
		"finished, and a step has not ended": s.finished && !(s.step[0].ended() && s.step[1].ended()),
	} {
		if is {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

// explore visits every state, and returns the broken invariants and how many states there are.
// Where rest is set, a rollback that has ended with nothing reserved must be reachable from each.
func (r phasesRules) explore(t *testing.T, rest bool) (broken []string, states int) {
	var todo []phasesState
	for _, can := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
		todo = append(todo, phasesState{up: true, alive: [2]bool{true, true}, can: can})
	}
	before := map[phasesState][]phasesState{}
	for _, s := range todo {
		before[s] = nil
	}
	var ends []phasesState
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, what := range s.broken() {
			if !slices.Contains(broken, what) {
				broken = append(broken, what)
			}
		}
		if s.finished && s.reserved == [2]bool{} {
			ends = append(ends, s)
		}
		for _, n := range r.next(s) {
			_, met := before[n]
			before[n] = append(before[n], s)
			if !met {
				todo = append(todo, n)
			}
		}
	}
	if rest {
		reaches := map[phasesState]bool{}
		for len(ends) > 0 {
			s := ends[len(ends)-1]
			ends = ends[:len(ends)-1]
			if !reaches[s] {
				reaches[s] = true
				ends = append(ends, before[s]...)
			}
		}
		for s := range before {
			if !reaches[s] {
				t.Fatalf("it never ends: %+v", s)
			}
		}
	}
	slices.Sort(broken)
	return broken, len(before)
}

// The invariants hold in every state, and an end can be reached from each; without any one of the
// rules one of them does not.
func TestModelOfTwoPhases(t *testing.T) {
	rules := phasesRules{oneID: true, barrier: true, keepsRefusals: true, onlySigned: true, aborts: true, executeWins: true}
	broken, states := rules.explore(t, true)
	if len(broken) > 0 {
		t.Errorf("%q", broken)
	}
	if states < 1000 {
		t.Errorf("only %d states", states)
	}
	for _, less := range []struct {
		breaks string
		leave  func(r *phasesRules)
	}{
		{"undone twice", func(r *phasesRules) { r.oneID = false }},
		{"undone twice", func(r *phasesRules) { r.executeWins = false }},
		{"out of order", func(r *phasesRules) { r.barrier = false }},
		{"undone without having prepared", func(r *phasesRules) { r.keepsRefusals = false }},
		{"completed, and not undone", func(r *phasesRules) { r.onlySigned = false }},
		{"undone below what cannot be", func(r *phasesRules) { r.aborts = false }},
	} {
		left := rules
		less.leave(&left)
		if broken, _ := left.explore(t, false); !slices.Contains(broken, less.breaks) {
			t.Errorf("the model does not need the rule against %q: %q", less.breaks, broken)
		}
	}
}
