package rollback

import (
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// How many changes of one document are undone, by one rollback and by one rollback each.
// What one rollback of one change reads grows with what follows from it.
const (
	chainAtOnce   = 100
	chainOneByOne = 25
)

// All changes of one document are undone, whether
// its ETags are versions, hashes of what stands there, or missing. An undo makes a version of
// its own, which is the one that the next undo meets.
func TestRollbackOfAChainOfChanges(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{
		App:  harness.Trusting(t, a) + "\nrollback {\n rate 1000\n }",
		Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}", Badger: true,
	})
	for _, place := range []string{"/versions/", "/docs/", "/plain/"} {
		for _, before := range []string{"", `{"n":0}`} {
			t.Run(fmt.Sprintf("%s%t", place, before != ""), func(t *testing.T) {
				t.Parallel() // they wait for the disk
				path := place + fmt.Sprint(before != "")
				lab.Write(path, before)
				s := g.Saga(a).In(t)
				back := func(b harness.RollbackBody) {
					b.ID = "urn:uuid:" + uuid.NewString()
					harness.Eventually(t, "the ledger is not behind all these changes", func() bool { return s.Ask(b).Slug() != "store-unavailable" })
					s.Finished(b.ID).Want(t, "completed")
				}
				if before == "" {
					checkpoints := s.Chain(path, chainAtOnce)
					back(harness.RollbackBody{Checkpoint: checkpoints[0], Scope: "sub_dag"})
				} else {
					checkpoints := s.Chain(path, chainOneByOne)
					for i := len(checkpoints) - 1; i >= 0; i-- {
						back(harness.RollbackBody{Checkpoint: checkpoints[i]})
					}
				}
				lab.WantDoc(path, before)
			})
		}
	}
}

// What a stranger wrote after an undo is left alone, also where it is what the undo wrote:
// nobody knows what hangs on it. Without versions that cannot be seen.
func TestRollbackOfAChainThatAStrangerBroke(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	const path = "/versions/x"
	for name, breaks := range map[string]func(s *harness.Saga, checkpoints []string){
		"after an undo": func(s *harness.Saga, checkpoints []string) {
			s.Back(harness.RollbackBody{Checkpoint: checkpoints[2]}).Want(s.T, "completed")
			lab.Write(path, lab.Doc(path))
		},
		"between two calls": func(s *harness.Saga, checkpoints []string) {
			s.Back(harness.RollbackBody{Checkpoint: checkpoints[2]}).Want(s.T, "completed")
			lab.Write(path, lab.Doc(path))
			last := s.Do(harness.Put(path, `{"n":9}`))
			s.Back(harness.RollbackBody{Checkpoint: last.Checkpoint}).Want(s.T, "completed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			lab.Write(path, `{"n":0}`)
			s := g.Saga(a).In(t)
			checkpoints := s.Chain(path, 3)
			breaks(s, checkpoints)
			stands := lab.Doc(path)
			s.Back(harness.RollbackBody{Checkpoint: checkpoints[1]}).Want(t, "escalated", "changed-since")
			lab.WantDoc(path, stands)
		})
	}
}

// An undo goes on from what an undo of before has left, whatever came and was undone in
// between, and after a restart.
func TestRollbackOfAChainWithChangesInBetween(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	app, site := harness.Trusting(t, a), "agent_proxy "+lab.Addr+" {\n"+harness.SagaActions+"\n}"
	g := harness.Launch(t, harness.Setup{App: app, Site: site})
	const path = "/versions/x"
	lab.Write(path, `{"n":0}`)
	s := g.Saga(a)
	checkpoints := s.Chain(path, 4)
	s.Back(harness.RollbackBody{Checkpoint: checkpoints[3]}).Want(t, "completed")
	more := []harness.SagaStep{s.Do(harness.Put(path, `{"n":7}`)), s.Do(harness.Request{Method: "DELETE", Path: path}), s.Do(harness.Put(path, `{"n":8}`))}
	harness.Stop(t)
	s.G = harness.Launch(t, harness.Setup{App: app, Site: site, Store: g.Store})
	for i := len(more) - 1; i >= 0; i-- {
		s.Back(harness.RollbackBody{Checkpoint: more[i].Checkpoint}).Want(t, "completed")
	}
	for i := 2; i >= 0; i-- {
		s.Back(harness.RollbackBody{Checkpoint: checkpoints[i]}).Want(t, "completed")
	}
	lab.WantDoc(path, `{"n":0}`)
}
