//go:build unix

package e2e

import (
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// expect notes what the ledger must tell of a call.
func (r *crashRun) expect(a procAnswer, outcome string) error {
	checkpoint := a.header.Get("Execution-Checkpoint")
	if checkpoint == "" {
		return errors.New("the answer names no checkpoint")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkpoints[checkpoint] = outcome
	return nil
}

// procLedger is what exported ledgers say, proved against their heads.
type procLedger struct {
	checkpoints map[string]bool
	outcomes    map[string][]string // by checkpoint
	entries     int64
}

// ledgersOf reads the ledgers of gateways on one store: each has its own, and the outcome of a call may be
// in another one than its checkpoint.
func ledgersOf(t *testing.T, sites ...*procSite) procLedger {
	t.Helper()
	recorded := procLedger{checkpoints: map[string]bool{}, outcomes: map[string][]string{}}
	nodes := map[string][]string{}
	for _, s := range sites {
		recorded.entries += s.exported(t, func(token *ect.Unverified) {
			if token.Event() == ect.EventCheckpoint {
				recorded.checkpoints[token.ID()] = true
			}
			if outcome, ok := token.Ext().Text("agent_guard.outcome"); ok {
				parents := token.Parents()
				checkpoint := parents[len(parents)-1]
				nodes[checkpoint] = append(nodes[checkpoint], outcome)
			}
		})
	}
	for checkpoint := range recorded.checkpoints {
		recorded.outcomes[checkpoint] = nodes[checkpoint]
	}
	return recorded
}

// exported exports the gateway's ledger, proves it
// against its head, and has each of its tokens visited. It returns how many there are.
func (s *procSite) exported(t *testing.T, visit func(*ect.Unverified)) int64 {
	t.Helper()
	head := procDocument[struct{ Origin, Key string }](t, s.operate(t, "ledger", "head", "-o", "json").says(t))
	s.operate(t, "ledger", "check").says(t)
	file := s.path("ledger.export")
	_ = os.Remove(file)
	s.operate(t, "ledger", "export", "--out", file).says(t)
	from, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	verifier, err := note.NewVerifier(head.Key)
	if err != nil {
		t.Fatal(err)
	}
	exported, err := ledger.VerifyExport(from, head.Origin, note.VerifierList(verifier), func(e ledger.Entry) error {
		token, err := ect.ParseInsecure(string(e.Payload))
		if err == nil {
			visit(token)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return exported.Entries
}

// verifyLedger holds that the ledger is as it was written, and says of every call what
// its caller was told: evidence and state are one commit.
func (r *crashRun) verifyLedger() {
	recorded := ledgersOf(r.t, r.sites...)
	for checkpoint, want := range r.checkpoints {
		got := recorded.outcomes[checkpoint]
		completed := 0
		for _, outcome := range got {
			if outcome == "completed" {
				completed++
			}
		}
		switch {
		case !recorded.checkpoints[checkpoint]:
			r.t.Errorf("P2: the checkpoint %s is not in the ledger", checkpoint)
		case !slices.Contains(got, want) || want != "completed" && completed > 0 || completed > 1:
			r.t.Errorf("of %s the ledger says %q, its caller has seen %q", checkpoint, got, want)
		}
	}
	for checkpoint, got := range recorded.outcomes {
		if len(got) == 0 {
			r.t.Errorf("no outcome is recorded of %s", checkpoint)
		}
	}
	r.t.Logf("%d entries in the ledger", recorded.entries)
}
