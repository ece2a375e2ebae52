package graph

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Undos are what is kept for undoing calls. *checkpoint.Vault is one.
type Undos interface {
	// Open reads what is kept for a checkpoint, and verifies it.
	Open(ctx context.Context, id string, want checkpoint.Want) (*checkpoint.Checkpoint, error)
	// Mark tells how far an undo has come.
	Mark(ctx context.Context, id string) (checkpoint.Mark, error)
}

// checkpointDocument is a checkpoint with its verification status (cascade 4.2.2). Its
// members are an API.
type checkpointDocument struct {
	ID       string          `json:"jti"`
	Workflow string          `json:"wid,omitempty"`
	Issuer   string          `json:"iss,omitempty"`
	Token    string          `json:"token,omitempty"`
	Claims   json.RawMessage `json:"claims,omitempty"`

	Verification checkpointVerification `json:"verification"`
	// Reversible says that it can be undone, as far as is known now; Way how, and Reason
	// why not, in a fixed word.
	Reversible bool   `json:"reversible"`
	Way        string `json:"way,omitempty"`
	Reason     string `json:"reason,omitempty"`

	Undo      checkpointUndo       `json:"undo"`
	Execution *checkpointExecution `json:"execution,omitempty"`
}

type checkpointVerification struct {
	// Signature is valid, invalid, unsigned, or unknown where the key is not held any
	// more.
	Signature string `json:"signature"`
	// Snapshot is matches, mismatch, none where the token has no out_hash, released where
	// the call never ran, or missing. It is found out when it is asked for.
	Snapshot string    `json:"snapshot"`
	Hash     string    `json:"out_hash,omitempty"`
	Expired  bool      `json:"expired"`
	Expires  time.Time `json:"expires,omitzero"`
}

type checkpointUndo struct {
	State    string    `json:"state"`
	Rollback string    `json:"rollback_id,omitempty"`
	At       time.Time `json:"at,omitzero"`
}

type checkpointExecution struct {
	State  string `json:"state"`
	Status int    `json:"status,omitempty"`
}

const (
	// freshTime is how long a checkpoint is waited for that is not known yet: it has its
	// place in the tree a moment after its call. Unknown and foreign ones take as long.
	freshTime = 2 * time.Second
	// firstLook is after how long it is looked for again, and each time after twice as long,
	// lookEvery at most: whose it is, is found out by reading its workflow.
	firstLook = 20 * time.Millisecond
	lookEvery = 640 * time.Millisecond
)

func notInWorkflow() error {
	return problem.New(problem.NotInWorkflow, "Nothing of it is known for the identity that asks.")
}

// checkpoint answers with a checkpoint and what can be verified of it now.
func (q *question) checkpoint() error {
	id, err := segment(q.name, "id")
	if err != nil {
		return err
	}
	p, err := parseParams(q.r.URL, "wait")
	if err != nil {
		return err
	}
	wait := freshTime
	if p.values.Has("wait") {
		if wait, err = p.wait(); err != nil {
			return err
		}
	}
	e, err := q.findCheckpoint(id, wait)
	if err != nil {
		return err
	}
	ext := extOf(e)
	expires := e.Time.Add(TTLOf(ext))
	if !time.Now().Before(expires) {
		return problem.New(problem.CheckpointExpired, "It could be undone until "+expires.UTC().Format(time.RFC3339)+".")
	}
	doc := checkpointDocument{ID: e.ID, Workflow: e.Workflow, Issuer: e.Issuer}
	doc.Verification.Expires = expires.UTC()
	doc.Reversible, _ = ext.Bool(ect.MemberReversible)
	if !e.Unsigned {
		doc.Token = string(e.Payload)
	}
	doc.Claims = claimsOf(e)
	doc.Verification.Signature = q.signature(e)
	if err := q.kept(e, &doc); err != nil {
		return err
	}
	return q.writeJSON(http.StatusOK, doc)
}

// findCheckpoint finds the checkpoint with an id that the reader may see.
func (q *question) findCheckpoint(id string, wait time.Duration) (*ledger.Entry, error) {
	ctx, cancel := q.wait(q.r.Context(), wait)
	defer cancel()
	for pause := firstLook; ; pause = min(2*pause, lookEvery) {
		all, err := q.Log.Find(q.r.Context(), id)
		if err != nil {
			return nil, err
		}
		for i := range all {
			e := &all[i]
			if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint || NobodysWord(e) {
				continue
			}
			may, err := q.mayRead(q.r.Context(), e, q.who)
			if may || err != nil {
				return e, err
			}
		}
		again := time.NewTimer(pause)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			if err := q.r.Context().Err(); err != nil {
				return nil, err
			}
			return nil, notInWorkflow()
		}
	}
}

// claimsOf are the decoded claims of an entry's token.
func claimsOf(e *ledger.Entry) json.RawMessage {
	payload := string(e.Payload)
	if parts := strings.Split(payload, "."); len(parts) == 3 {
		payload = parts[1]
	}
	if plain, err := base64.RawURLEncoding.DecodeString(payload); err == nil {
		payload = string(plain)
	}
	if !json.Valid([]byte(payload)) {
		return nil
	}
	return json.RawMessage(payload)
}

// signature tells whether the token's signature holds.
func (q *question) signature(e *ledger.Entry) string {
	switch {
	case levelOf(e) == "" || levelOf(e) == "L1":
		return "unsigned"
	case q.Verified == nil || !q.own(e):
		return "unknown" // it held when it was presented
	}
	err := q.Verified(q.r.Context(), string(e.Payload))
	refusal := (*ect.Error)(nil)
	switch {
	case err == nil:
		return "valid"
	case errors.As(err, &refusal) && refusal.Code == ect.CodeSignature:
		return "invalid"
	}
	return "unknown"
}

// kept fills in what is kept for undoing the call of a checkpoint, and how the call
// stands.
func (q *question) kept(e *ledger.Entry, doc *checkpointDocument) error {
	v := &doc.Verification
	v.Snapshot, doc.Undo.State = "none", checkpoint.Standing.String()
	sum, ok := outputOf(e)
	if !ok || q.Undos == nil || !q.own(e) {
		return nil
	}
	v.Hash = ect.HashOf(sum).String()
	mark, err := q.Undos.Mark(q.r.Context(), e.ID)
	switch {
	case err == nil:
		doc.Undo = checkpointUndo{mark.State.String(), mark.Rollback, mark.At.UTC()}
		if mark.State == checkpoint.Standing {
			doc.Undo.At = time.Time{}
		}
	case errors.Is(err, checkpoint.ErrTampered):
		doc.Undo.State = "unreadable"
	default:
		return err
	}
	c, err := q.Undos.Open(q.r.Context(), e.ID, checkpoint.Want{Sum: sum, Expires: v.Expires})
	switch {
	case err == nil:
		v.Snapshot = "matches"
	case errors.Is(err, checkpoint.ErrReleased):
		v.Snapshot, doc.Reversible, doc.Reason = "released", false, "released"
		return nil
	case errors.Is(err, checkpoint.ErrTampered):
		v.Snapshot, doc.Reversible, doc.Reason = "mismatch", false, "tampered"
		return nil
	case errors.Is(err, checkpoint.ErrExpired):
		return problem.New(problem.CheckpointExpired, "What was kept for undoing it was purged.")
	case errors.Is(err, checkpoint.ErrUnknown):
		v.Snapshot, doc.Reversible, doc.Reason = "missing", false, "missing"
		return nil
	default:
		return err
	}
	doc.Way, doc.Reason = c.Snapshot.Way.String(), string(c.Snapshot.Reason)
	doc.Reversible = c.Snapshot.Reversible()
	if c.Result != nil && c.Result.Reason != "" {
		doc.Reversible, doc.Reason = false, string(c.Result.Reason)
	}
	if q.Execution == nil {
		return nil
	}
	state, status, err := q.Execution(q.r.Context(), c.Snapshot.Execution)
	if err == nil && state != "" {
		doc.Execution = &checkpointExecution{state, status}
	}
	if err == nil && state == guard.StateInDoubt.String() && undo.Lacks(c) {
		doc.Reversible, doc.Reason = false, string(checkpoint.ReasonAbsent) // its answer was lost
	}
	return err
}

// outputOf is the out_hash of an entry's token.
func outputOf(e *ledger.Entry) (sum [sha256.Size]byte, there bool) {
	var claims struct {
		Hash string `json:"out_hash"`
	}
	if json.Unmarshal(claimsOf(e), &claims) != nil {
		return sum, false
	}
	plain, err := base64.RawURLEncoding.DecodeString(claims.Hash)
	if err != nil || len(plain) != len(sum) {
		return sum, false
	}
	return [sha256.Size]byte(plain), true
}
