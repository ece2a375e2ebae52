package rollback

import (
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// head is what is recorded of a rollback besides its plan and its steps. Readers skip
// members that they do not know.
type head struct {
	ID          string     `json:"id"`
	Checkpoint  string     `json:"checkpoint"`
	Workflow    string     `json:"workflow,omitempty"`
	Scope       plan.Scope `json:"scope"`
	Reason      string     `json:"reason,omitempty"`
	Urgency     string     `json:"urgency,omitempty"`
	Requester   string     `json:"requester,omitempty"`
	Operator    string     `json:"operator,omitempty"`
	Token       string     `json:"token,omitempty"`
	Content     []byte     `json:"content"`
	State       State      `json:"state"`
	Status      Status     `json:"status,omitempty"`
	Asked       time.Time  `json:"asked"`
	Due         time.Time  `json:"due"`
	Finished    time.Time  `json:"finished,omitzero"`
	TimedOut    bool       `json:"timed_out,omitempty"`
	Unknown     bool       `json:"unknown,omitempty"`
	Mixed       bool       `json:"mixed,omitempty"`
	Start       string     `json:"start,omitempty"`
	Complete    string     `json:"complete,omitempty"`
	Before      []byte     `json:"before,omitempty"`
	After       []byte     `json:"after,omitempty"`
	Escalations []string   `json:"escalations,omitempty"`
	// Joined is the wider rollback to which this one gives way, Halted says that it has.
	Joined string `json:"joined,omitempty"`
	Halted bool   `json:"halted,omitempty"`
	// Behind are those that come first, Absorbed those that give way to this one.
	Behind   []string `json:"behind,omitempty"`
	Absorbed []string `json:"absorbed,omitempty"`
	// Steps and Pieces count what stands beside it; Hash is that of the plan.
	Steps  int    `json:"steps"`
	Pieces int    `json:"pieces"`
	Hash   []byte `json:"hash"`
}

// open reports whether it takes steps still.
func (h *head) open() bool { return h.State == Executing && !h.Halted }

// stops reports whether it terminates its workflow (cascade 4.1.3).
func (h *head) stops() bool { return h.Scope == plan.FullWorkflow && h.Workflow != "" }

// rollback is the head as others see it, without plan and steps.
func (h *head) rollback() *Rollback {
	r := &Rollback{
		ID: h.ID, Checkpoint: h.Checkpoint, Workflow: h.Workflow, Scope: h.Scope, Reason: h.Reason, Urgency: h.Urgency,
		Requester: h.Requester, Operator: h.Operator, State: h.State, Status: h.Status,
		Asked: h.Asked, Due: h.Due, Finished: h.Finished, TimedOut: h.TimedOut, Unknown: h.Unknown, Mixed: h.Mixed,
		Joined: h.Joined, Start: h.Start, Complete: h.Complete, Escalations: h.Escalations,
	}
	copy(r.Before[:], h.Before)
	copy(r.After[:], h.After)
	return r
}

// content is the hash of what makes two requests the same. Another token may ask for the
// same once more.
func (r *Request) content() []byte {
	sum := sha256.New()
	for _, text := range []string{r.Checkpoint, string(r.Scope), r.Reason, r.Urgency, r.By, r.Operator} {
		_, _ = sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text)))) // never fails
		_, _ = sum.Write([]byte(text))
	}
	return sum.Sum(nil)
}

// stepRecord is what is recorded of a step. What the plan says of it is not.
type stepRecord struct {
	State      StepState `json:"state"`
	Status     Status    `json:"status,omitempty"`
	Cancelled  bool      `json:"cancelled,omitempty"`
	Unknown    bool      `json:"unknown,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	HTTPStatus int       `json:"http_status,omitempty"`
	Attempts   int       `json:"attempts,omitempty"`
	Before     []byte    `json:"before,omitempty"`
	After      []byte    `json:"after,omitempty"`
	Token      string    `json:"token,omitempty"`
	Escalation string    `json:"escalation,omitempty"`
	Ended      time.Time `json:"ended,omitzero"`
	Cause      string    `json:"cause,omitempty"`
	Root       string    `json:"root,omitempty"`
}

func (s *Step) encode() ([]byte, error) {
	return json.Marshal(stepRecord{
		s.State, s.Status, s.Cancelled, s.Unknown, s.Reason, s.HTTPStatus, s.Attempts,
		some(s.Before), some(s.After), s.Token, s.Escalation, s.Ended, s.Cause, s.root,
	})
}

func (s *Step) decode(b []byte) error {
	var r stepRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return err
	}
	switch r.State {
	case StepRunning, StepDone:
	default:
		return fmt.Errorf("step state %q", r.State)
	}
	s.State, s.Status, s.Cancelled, s.Unknown, s.Reason = r.State, r.Status, r.Cancelled, r.Unknown, r.Reason
	s.HTTPStatus, s.Attempts, s.Token, s.Escalation, s.Ended = r.HTTPStatus, r.Attempts, r.Token, r.Escalation, r.Ended
	s.Cause, s.root = r.Cause, r.Root
	copy(s.Before[:], r.Before)
	copy(s.After[:], r.After)
	return nil
}

// some is a hash, or nothing where it is zero.
func some(sum [32]byte) []byte {
	if sum == [32]byte{} {
		return nil
	}
	return sum[:]
}

// planned is a plan with what is known besides: whose the steps are, in their order.
type planned struct {
	Plan   *plan.Plan `json:"plan"`
	Agents []string   `json:"agents"`
}

// pieceSize is how much of a plan is stored in one value.
const pieceSize = 48 << 10

// maxPlan bounds a stored plan that is read back, in bytes.
const maxPlan = 64 << 20

// encode packs the plan: the ids of a large one are mostly the same bytes.
func (p *planned) encode() ([]byte, error) {
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if err := json.NewEncoder(w).Encode(p); err != nil {
		return nil, err
	}
	err = w.Close()
	return b.Bytes(), err
}

func decodePlanned(b []byte) (*planned, error) {
	r := flate.NewReader(bytes.NewReader(b))
	p := new(planned)
	if err := json.NewDecoder(io.LimitReader(r, maxPlan)).Decode(p); err != nil {
		return nil, err
	}
	if p.Plan == nil {
		return nil, fmt.Errorf("no plan")
	}
	return p, r.Close()
}

// steps are those of the plan, none begun, and the places of each level's.
func (p *planned) steps() (steps []Step, levels [][]int) {
	for i, level := range p.Plan.Levels {
		var places []int
		for _, s := range level {
			step := Step{Checkpoint: s.Checkpoint, Level: i, What: s.What, State: StepPending}
			if len(steps) < len(p.Agents) {
				step.Agent = p.Agents[len(steps)]
			}
			places = append(places, len(steps))
			steps = append(steps, step)
		}
		levels = append(levels, places)
	}
	return steps, levels
}
