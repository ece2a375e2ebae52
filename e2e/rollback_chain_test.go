package e2e

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
)

// How many changes of one document are undone, by one rollback and by one rollback each.
// What one rollback of one change reads grows with what follows from it.
const (
	chainAtOnce   = 100
	chainOneByOne = 25
)

// chain changes a document again and again, each time following from the change before. Two
// changes in ten write what stands there already.
func (s *saga) chain(path string, n int) (checkpoints []string) {
	s.t.Helper()
	var after []string
	for i := range n {
		step := s.do(put(path, fmt.Sprintf(`{"n":%d}`, (i+i%5/4)+1)), after...)
		checkpoints, after = append(checkpoints, step.checkpoint), []string{step.checkpoint}
	}
	return checkpoints
}

// All changes of one document are undone, whether
// its ETags are versions, hashes of what stands there, or missing. An undo makes a version of
// its own, which is the one that the next undo meets.
func TestRollbackOfAChainOfChanges(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	g := launch(t, setup{
		app:  trusting(t, a) + "\nrollback {\n rate 1000\n }",
		site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}", badger: true,
	})
	for _, place := range []string{"/versions/", "/docs/", "/plain/"} {
		for _, before := range []string{"", `{"n":0}`} {
			t.Run(fmt.Sprintf("%s%t", place, before != ""), func(t *testing.T) {
				t.Parallel() // they wait for the disk
				path := place + fmt.Sprint(before != "")
				lab.write(path, before)
				s := g.saga(a).in(t)
				back := func(b rollbackBody) {
					b.ID = "urn:uuid:" + uuid.NewString()
					eventually(t, "the ledger is not behind all these changes", func() bool { return s.ask(b).slug() != "store-unavailable" })
					s.finished(b.ID).want(t, "completed")
				}
				if before == "" {
					checkpoints := s.chain(path, chainAtOnce)
					back(rollbackBody{Checkpoint: checkpoints[0], Scope: "sub_dag"})
				} else {
					checkpoints := s.chain(path, chainOneByOne)
					for i := len(checkpoints) - 1; i >= 0; i-- {
						back(rollbackBody{Checkpoint: checkpoints[i]})
					}
				}
				lab.wantDoc(path, before)
			})
		}
	}
}

// What a stranger wrote after an undo is left alone, also where it is what the undo wrote:
// nobody knows what hangs on it. Without versions that cannot be seen.
func TestRollbackOfAChainThatAStrangerBroke(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	const path = "/versions/x"
	for name, breaks := range map[string]func(s *saga, checkpoints []string){
		"after an undo": func(s *saga, checkpoints []string) {
			s.back(rollbackBody{Checkpoint: checkpoints[2]}).want(s.t, "completed")
			lab.write(path, lab.doc(path))
		},
		"between two calls": func(s *saga, checkpoints []string) {
			s.back(rollbackBody{Checkpoint: checkpoints[2]}).want(s.t, "completed")
			lab.write(path, lab.doc(path))
			last := s.do(put(path, `{"n":9}`))
			s.back(rollbackBody{Checkpoint: last.checkpoint}).want(s.t, "completed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			lab.write(path, `{"n":0}`)
			s := g.saga(a).in(t)
			checkpoints := s.chain(path, 3)
			breaks(s, checkpoints)
			stands := lab.doc(path)
			s.back(rollbackBody{Checkpoint: checkpoints[1]}).want(t, "escalated", "changed-since")
			lab.wantDoc(path, stands)
		})
	}
}

// An undo goes on from what an undo of before has left, whatever came and was undone in
// between, and after a restart.
func TestRollbackOfAChainWithChangesInBetween(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	app, site := trusting(t, a), "agent_proxy "+lab.addr+" {\n"+sagaActions+"\n}"
	g := launch(t, setup{app: app, site: site})
	const path = "/versions/x"
	lab.write(path, `{"n":0}`)
	s := g.saga(a)
	checkpoints := s.chain(path, 4)
	s.back(rollbackBody{Checkpoint: checkpoints[3]}).want(t, "completed")
	more := []sagaStep{s.do(put(path, `{"n":7}`)), s.do(request{method: "DELETE", path: path}), s.do(put(path, `{"n":8}`))}
	stop(t)
	s.g = launch(t, setup{app: app, site: site, store: g.store})
	for i := len(more) - 1; i >= 0; i-- {
		s.back(rollbackBody{Checkpoint: more[i].checkpoint}).want(t, "completed")
	}
	for i := 2; i >= 0; i-- {
		s.back(rollbackBody{Checkpoint: checkpoints[i]}).want(t, "completed")
	}
	lab.wantDoc(path, `{"n":0}`)
}
