package rollback

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Participant is another gateway, or agent, that takes part in both phases of a rollback: it has
// a checkpoint of its own for what it did for the call.
type Participant struct {
	// Agent is its identity, Checkpoint its own checkpoint, as the answer to the call has named it.
	Agent, Checkpoint string
	// Of are the checkpoints of the call; the participant's follows from one of them. None says that
	// the checkpoint's own token is in the ledger, and nothing has to be examined.
	Of []string
	// Rollback is the id of its part of the rollback. It is made of the id of the whole and of the
	// checkpoint, since to some agents one id is one checkpoint (cascade 4.3.4).
	Rollback string
	// PartOf is the id of the whole.
	PartOf string
	// Phase is what it is asked for; requests of one phase have one token.
	Phase string
}

// The phases of a rollback (cascade 4.3.2), and the reading of one.
const (
	phaseDry     = "dry" // a prepare that reserves nothing
	phasePrepare = "prepare"
	// PhaseExecute carries it out.
	PhaseExecute = "execute"
	phaseRelease = "release" // ends what prepare has reserved
	// PhaseStatus reads a rollback.
	PhaseStatus = "status"
)

// fieldCheckpoint is the field of an answer in which a gateway names its checkpoint.
const fieldCheckpoint = "Execution-Checkpoint"

// NamedCheckpoint is what is recorded of the answer of a participant: the checkpoint that it has
// named; without one the call cannot be undone.
func NamedCheckpoint(id string) (checkpoint.Message, checkpoint.Reason) {
	if id == "" || len(id) > maxText/2 || strings.ContainsFunc(id, notVisible) {
		return checkpoint.Message{}, checkpoint.ReasonAbsent
	}
	return checkpoint.Message{Header: map[string][]string{fieldCheckpoint: {id}}}, ""
}

// participant reports whether the call is undone by an agent that takes part in both phases.
func (j *job) participant() bool { return j.delegated() && j.spec.Agent != "" }

// asked is the participant with what it is asked for; nil if there is none, or if its checkpoint
// is not known.
func (j *job) asked(phase string) *Participant {
	result := j.task.Checkpoint.Result
	if !j.participant() || result == nil || len(result.Answer.Header[fieldCheckpoint]) != 1 {
		return nil
	}
	id := result.Answer.Header[fieldCheckpoint][0]
	var of []string
	if !j.task.Foreign {
		of = []string{j.call.ID, j.call.Root()}
	}
	part := uuid.NewSHA1(uuid.NameSpaceURL, []byte("urn:uuid:"+j.task.whole()+"#"+id))
	return &Participant{
		Agent: j.spec.Agent, Checkpoint: id, Of: of, Rollback: part.String(), PartOf: j.task.whole(), Phase: phase,
	}
}

// participating is the request to a participant for its part.
func (j *job) participating(ctx context.Context, phase string) (*Outgoing, error) {
	p := j.asked(phase)
	if p == nil {
		return nil, requestError{reasonUnfilled}
	}
	named := phase
	if phase == phaseDry || phase == phasePrepare {
		named = "" // as in Figure 9
	}
	var decides *precedence
	if j.task.Precedence.ID != "" {
		decides = &j.task.Precedence
	}
	body, err := json.Marshal(struct {
		Rollback   string `json:"rollback_id"`
		Checkpoint string `json:"checkpoint_id"`
		Phase      string `json:"phase,omitempty"`
		Dry        bool   `json:"dry_run,omitempty"`
		// What it did for the call includes what it had others do.
		Scope  Scope  `json:"scope"`
		PartOf string `json:"part_of"`
		// So that all participants decide between this rollback and others in the same way.
		Precedence *precedence `json:"precedence,omitempty"`
		Reason     string      `json:"reason,omitempty"`
	}{"urn:uuid:" + p.Rollback, p.Checkpoint, named, phase == phaseDry, SubDAG, "urn:uuid:" + p.PartOf, decides, j.task.Reason})
	if err != nil {
		return nil, requestError{reasonUnfilled}
	}
	to := j.spec.Delegate
	if phase != PhaseExecute { // a look too: who does not know dry_run would carry it out
		to += "/prepare"
	}
	return j.completeRequest(ctx, Outgoing{
		Method: http.MethodPost, URL: to, Body: body, Delegated: true, Participant: p,
		Header: http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {phase + " " + j.idempotencyKey()}},
	})
}

// proven reads the answers of a participant: what came of its part is what it has signed, whatever else
// it answers, and not known where it has signed nothing (P6).
func (j *job) proven(read func(*Answer) note) func(*Answer) note {
	if !j.participant() {
		return read
	}
	return func(a *Answer) note {
		if a.Proven {
			n := signedResult(a)
			n.Completion, j.Completion = a.Completion, a.Completion
			return n
		}
		n := read(a)
		var problem struct {
			Type   string `json:"type"`
			Winner string `json:"conflicting_rollback_id"`
		}
		if a.Status == http.StatusConflict && json.Unmarshal(a.Body, &problem) == nil &&
			strings.HasSuffix(problem.Type, "/rollback-conflict") && problem.Winner != "" {
			return note{Reading: busy} // cascade 4.3.4: another one is there first, and nothing was begun
		}
		if n.Reading == refused {
			j.peerReason = PeerReason(a)
		}
		if n.Reading == done || a.Status/100 == 2 && n.Reading != pending { // 410 too: what it does not know it has not undone
			n = noted(unexpected, a.Status)
		}
		return n
	}
}

// Prepare asks whether the undo can be done (cascade 4.3.2, phase 1): the target of a restore, once, or the
// participant, until the task is due. It returns a fixed word for why it cannot, or none. A dry task reserves
// nothing there.
func (u *undoer) Prepare(ctx context.Context, t undoTask) (obstacle string, err error) {
	if err := t.check(); err != nil {
		return "", err
	}
	phase := phasePrepare
	if t.Dry {
		phase = phaseDry
	}
	j, err := u.newJob(t)
	switch {
	case err == nil && j.call.Way == checkpoint.Restore:
		why, err := j.compare(ctx)
		return string(why), err
	case err != nil || !j.participant():
		return "", nil // what is wrong with it is an obstacle of the plan
	}
	pace := j.pace(j.o.Poll)
	for {
		out, err := j.participating(ctx, phase)
		if why := (requestError{}); errors.As(err, &why) {
			return string(why.why), nil
		}
		if err != nil {
			return "", err
		}
		winner := ""
		n, _ := j.send(ctx, out, func(a *Answer) note {
			why, id := prepared(a)
			winner = id
			return note{Reading: reading(why), after: retryAfter(a.Header)}
		})
		switch {
		case winner != "":
			return "", &ConflictError{Winner: winner}
		case n.reason != "":
			return string(n.reason), nil
		case n.Reading == done:
			return "", nil
		case n.Reading != lost && n.Reading != unsent && n.Reading != busy:
			return string(n.Reading), nil
		}
		again, err := pace.wait(ctx, n.after)
		if errors.Is(err, errQuit) {
			return "", err
		}
		if !again || err != nil || j.overdue() {
			return string(ReasonUnreachable), nil
		}
	}
}

// Release tells whoever undoes the call that it is not asked to, so that it reserves nothing any
// more, until it has answered or the task is due. What it reserves ends by itself in any case.
func (u *undoer) Release(ctx context.Context, t undoTask) error {
	if err := t.check(); err != nil {
		return err
	}
	j, err := u.newJob(t)
	if err != nil || !j.participant() {
		return nil
	}
	pace := j.pace(j.o.Poll)
	for {
		out, err := j.participating(ctx, phaseRelease)
		if err != nil {
			return err
		}
		n, _ := j.send(ctx, out, func(a *Answer) note { return note{Reading: common(a.Status), after: retryAfter(a.Header)} })
		if n.reason != "" || n.Reading.final() { // it knows of nothing, or has begun to execute
			return nil
		}
		if again, err := pace.wait(ctx, n.after); err != nil || !again {
			return err
		}
	}
}

// prepared is the answer to prepare: done, busy, or why the participant cannot prepare; and the
// rollback that takes precedence there.
func prepared(a *Answer) (why, winner string) {
	var doc struct {
		Status string `json:"status"`
		Reason string `json:"reason_code"`
		Winner string `json:"conflicting_rollback_id"`
		Agents []struct {
			Reason string `json:"reason"`
		} `json:"agents"`
	}
	known := json.Unmarshal(a.Body, &doc) == nil && !a.Cut
	switch {
	case a.Status == http.StatusOK && known && doc.Status == "prepared":
		return string(done), ""
	case known && doc.Status == "cannot_prepare":
		reason := doc.Reason
		for _, agent := range doc.Agents {
			if reason == "" {
				reason = agent.Reason
			}
		}
		if id, err := uuid.Parse(doc.Winner); err == nil {
			return reason, id.String()
		}
		if r := reading(reason); fixedWord(reason) && r != done && r != busy && r != lost && r != unsent {
			return reason, ""
		}
		return string(ReasonRefused), ""
	case a.Status == http.StatusUnauthorized, a.Status == http.StatusForbidden:
		return string(ReasonUnauthorized), ""
	case a.Status == http.StatusTooManyRequests, a.Status >= 500, a.Status == http.StatusConflict && known:
		return string(busy), "" // such as `workflow-paused`
	}
	return string(PeerReason(a)), ""
}

// PeerReason is why a participant refuses, by the type of the problem that it answers with, such as
// rollback-mismatch; ReasonRefused where it says none.
func PeerReason(a *Answer) Reason {
	var problem struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(a.Body, &problem) != nil || !strings.Contains(problem.Type, "/") {
		return ReasonRefused
	}
	word := problem.Type[strings.LastIndexByte(problem.Type, '/')+1:]
	if !fixedWord(word) || !strings.Contains(word, "-") { // no word of this package
		return ReasonRefused
	}
	return Reason(word)
}

// fixedWord reports whether a text may be shown as a reason. It is another's text.
func fixedWord(text string) bool {
	return text != "" && len(text) <= longestWord && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz-") == ""
}
