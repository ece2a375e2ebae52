package rollback_test

import (
	"slices"
	"testing"
)

// A model of the two phases over two participants and the people who are asked, checked over all
// interleavings with crashes of everybody and losses of every message (ADR 0083). Participant 0 is
// undone before participant 1, whose checkpoint is the one that was asked for.

// phasesState is a state of the model. What a crash takes is marked volatile.
type phasesState struct {
	up       bool
	answered [2]phasesAnswer // volatile, until it is accepted
	accepted bool
	refused  [2]bool // recorded with the acceptance
	aborted  bool    // recorded with the acceptance
	step     [2]phasesStep
	life     uint8 // of the coordinator: how often it has begun anew, at most one
	finished bool  // with the result in completed
	complete bool
	gaveUp   bool             // once, before it was accepted: its requester may come again
	releases [2]bool          // on their way, for as long as the network likes
	due      bool             // the time of the rollback, and of each question, is over
	consent  [3]phasesConsent // to each level, and to undoing a part only
	seen     uint8            // the question, plus one, that somebody has seen pending, and decides
	changed  bool             // what is undone is no longer the plan that was shown

	alive     [2]bool
	can       [2]bool // what stands in the way at a participant does not change
	steady    bool    // nobody but the coordinator dies, and no release comes late
	severe    [2]bool // its level has something of severity critical in it that was not asked for
	reserved  [2]bool
	asked     [2]uint8 // the id under which it was executed, and 0 is none
	undone    [2]uint8
	early     bool // participant 1 was undone before the step of 0 had ended
	uninvited bool // somebody was undone who had not prepared

	unasked bool // something was begun that people had to be asked about, and had not approved
	late    bool // something was begun when the time was over
	twice   bool // a question was asked twice, or decided twice
}

type phasesAnswer uint8

const (
	unasked phasesAnswer = iota
	saysYes
	saysNo // or nothing
)

type phasesStep uint8

const (
	stepPending phasesStep = iota
	stepSent               // journaled before it is sent
	stepDone
	stepEscalated
)

func (s phasesStep) ended() bool { return s >= stepDone }

// partOnly is the question whether a part is undone where the target cannot be.
const partOnly = 2

// phasesConsent is what is recorded of a question: of the escalation, and with heard of the rollback.
type phasesConsent uint8

const (
	notAsked phasesConsent = iota
	pending
	approved
	denied // or expired
	heardYes
	heardNo
)

// needs reports whether people have to be asked at this point before level i goes on.
func (s *phasesState) needs(question int) bool {
	if question == partOnly {
		return s.refused[1]
	}
	return s.severe[question] && !s.refused[question] && (question == 0 || s.step[0].ended())
}

// stopped reports that nothing is begun any more.
func (s *phasesState) stopped() bool {
	return s.aborted || s.consent[0] == heardNo || s.consent[1] == heardNo || s.due
}

// people are the states that can follow from what people do, and from what the coordinator hears.
func (r phasesRules) people(s phasesState, add func(func(n *phasesState))) {
	for q := range s.consent {
		switch c := s.consent[q]; {
		case c == notAsked && s.up && s.accepted && s.needs(q) && !s.stopped() && (q == partOnly || !s.needs(partOnly) || s.consent[partOnly] == heardYes):
			add(func(n *phasesState) { n.consent[q] = pending }) // in one commit with the rollback's own record
		case c == pending && !s.due && s.seen == 0:
			add(func(n *phasesState) { n.seen = uint8(q) + 1 })
		case c == pending && s.due:
			add(func(n *phasesState) { n.consent[q] = denied })
		case (c == approved || c == denied) && s.up:
			add(func(n *phasesState) { // recorded before anything is done because of it
				if n.consent[q] = heardNo; c == approved && !n.due && (q != partOnly || !n.changed || !r.replans) {
					n.consent[q] = heardYes
				}
				n.aborted = n.aborted || q == partOnly && n.consent[q] == heardNo
			})
		}
		if s.seen == uint8(q)+1 {
			add(func(n *phasesState) { n.seen = 0 }) // it is lost, or the person leaves
			if c := s.consent[q]; c == pending || !r.decidesOnce && c != notAsked {
				for _, says := range []phasesConsent{approved, denied} {
					add(func(n *phasesState) {
						n.twice = n.twice || n.consent[q] != pending
						n.seen, n.consent[q] = 0, says
					})
				}
			}
		}
	}
	if c := s.consent[partOnly]; !s.changed && (c == pending || c == approved) {
		add(func(n *phasesState) { n.changed = true })
	}
	if s.accepted && !s.due {
		add(func(n *phasesState) { n.due = true })
	}
}

// phasesRules are what the protocol relies on; a test leaves out one after the other.
type phasesRules struct {
	oneID, barrier, keepsRefusals, onlySigned, executeWins bool
	asks, keepsQuestions, decidesOnce, replans, inTime     bool
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
		switch {
		case s.steady:
		case s.alive[i]:
			add(func(n *phasesState) { n.alive[i] = false })
		default:
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
	r.people(s, add)
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
		for q, c := range n.consent {
			if !r.keepsQuestions && (c == pending || c == approved || c == denied) {
				n.consent[q], n.twice = notAsked, true // it asks again, though somebody may have decided
			}
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
			if !s.gaveUp && !s.steady {
				add(func(n *phasesState) {
					n.gaveUp, n.releases, n.answered = true, [2]bool{true, true}, [2]phasesAnswer{}
				})
			}
			add(func(n *phasesState) {
				n.accepted = true
				for i := range 2 {
					n.refused[i] = n.answered[i] == saysNo
				}
				n.aborted = n.refused[1] && n.refused[0] // nobody is asked where there is no rest
			})
		}
		return all
	}
	for i := range 2 {
		asks := false // people, and has not heard them
		for _, q := range []int{i, partOnly} {
			asks = asks || s.needs(q) && s.consent[q] != heardYes
		}
		switch {
		case s.step[i].ended(), i == 1 && r.barrier && !s.step[0].ended():
		case s.step[i] == stepPending && (s.refused[i] && (i == 0 || !asks) || s.aborted || s.stopped() && r.inTime):
			add(func(n *phasesState) { n.step[i], n.releases[i] = stepEscalated, true })
		case s.step[i] == stepPending && asks && (r.asks || s.refused[i]):
		case s.step[i] == stepPending:
			add(func(n *phasesState) { n.step[i], n.unasked, n.late = stepSent, n.unasked || asks, n.late || n.due })
		default:
			add(func(n *phasesState) { n.step[i] = stepEscalated }) // its time is over
			if !r.onlySigned {
				add(func(n *phasesState) { n.step[i] = stepDone })
			}
			if !s.alive[i] {
				continue
			}
			arrives := func(n *phasesState) {
				id := uint8(1)
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
	for _, invariant := range [...]struct {
		broken string
		is     bool
	}{
		{"undone twice", s.undone[0] > 1 || s.undone[1] > 1},
		{"completed, and not undone", s.complete && (s.undone[0] == 0 || s.undone[1] == 0)},
		{"done, and not undone", s.step[0] == stepDone && s.undone[0] == 0 || s.step[1] == stepDone && s.undone[1] == 0},
		{"out of order", s.early},
		{"undone without having prepared", s.uninvited},
		{"undone although it was aborted", s.aborted && s.undone[0]+s.undone[1] > 0},
		{"undone below what cannot be", !s.can[1] && s.undone[0]+s.undone[1] > 0 && s.consent[partOnly] != heardYes},
		{"begun, and people had to be asked", s.unasked},
		{"begun when the time was over", s.late},
		{"asked or decided twice", s.twice},
		{"undone after a denial", s.consent[partOnly] == heardNo && s.undone[0]+s.undone[1] > 0 || s.consent[0] == heardNo && s.undone[0] > 0 || s.consent[1] == heardNo && s.undone[1] > 0},
		{"undone by another plan", s.changed && s.undone[0] > 0},
		{"finished, and a step has not ended", s.finished && !(s.step[0].ended() && s.step[1].ended())},
	} {
		if invariant.is {
			all = append(all, invariant.broken)
		}
	}
	return all
}

// explore visits every state, and returns the broken invariants and how many states there are. A
// rollback that has ended with nothing reserved must be reachable from each. With until it stops where
// that is broken.
func (r phasesRules) explore(t *testing.T, until string) (broken []string, states int) {
	var todo []phasesState
	for _, can := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
		for _, severe := range [][2]bool{{false, false}, {true, false}, {false, true}} {
			todo = append(todo, phasesState{up: true, alive: [2]bool{true, true}, can: can, severe: severe, steady: severe != [2]bool{}})
		}
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
			if what == until {
				return broken, len(before)
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
	if until == "" {
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
	rules := phasesRules{
		oneID: true, barrier: true, keepsRefusals: true, onlySigned: true, executeWins: true,
		asks: true, keepsQuestions: true, decidesOnce: true, replans: true, inTime: true,
	}
	broken, states := rules.explore(t, "")
	if len(broken) > 0 {
		t.Errorf("%q", broken)
	}
	if t.Logf("%d states", states); states < 10_000 {
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
		{"undone below what cannot be", func(r *phasesRules) { r.asks = false }},
		{"begun, and people had to be asked", func(r *phasesRules) { r.asks = false }},
		{"asked or decided twice", func(r *phasesRules) { r.keepsQuestions = false }},
		{"asked or decided twice", func(r *phasesRules) { r.decidesOnce = false }},
		{"undone by another plan", func(r *phasesRules) { r.replans = false }},
		{"begun when the time was over", func(r *phasesRules) { r.inTime = false }},
	} {
		left := rules
		less.leave(&left)
		if broken, _ := left.explore(t, less.breaks); !slices.Contains(broken, less.breaks) {
			t.Errorf("the model does not need the rule against %q: %q", less.breaks, broken)
		}
	}
}
