package admin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// The decisions about an execution in doubt.
const (
	// DecisionApplied: it was executed.
	DecisionApplied = "applied"
	// DecisionNotApplied: it was not, and cannot be any more.
	DecisionNotApplied = "not_applied"
)

// Decision is what POST executions/{key}/resolve takes.
type Decision struct {
	// Decision is applied or not_applied.
	Decision string `json:"decision"`
	// Operator says who decides: 256 bytes at most. It is recorded and logged.
	Operator string `json:"operator"`
	// Reason says on what evidence: 1,024 bytes at most. It is recorded and logged.
	Reason string `json:"reason"`
	// Result is the answer that retries get from now on. It goes with applied only;
	// without one they are told that the call was executed and its result is gone.
	Result *Answer `json:"result,omitempty"`
}

// maxDecision is the most bytes of a request: a body of 256 KiB in the widest form
// that JSON has for it, and room for the rest.
const maxDecision = 2 << 20

// resolve answers POST executions/{key}/resolve.
func (a *API) resolve(name string) handler {
	return func(r *http.Request, st Store, p *params) (any, error) {
		if err := p.done(); err != nil {
			return nil, err
		}
		var d Decision
		if err := d.read(r.Body); err != nil {
			return nil, err
		}
		head, body, err := d.check()
		if err != nil {
			return nil, refuse(http.StatusBadRequest, "%v", err)
		}
		g := st.Guard()
		key, err := find(r.Context(), st, name)
		if err != nil {
			return nil, err
		}
		found, err := g.Look(r.Context(), key)
		if err != nil {
			return nil, err
		}
		if found.Standing != guard.Doubtful {
			return nil, refuse(http.StatusConflict, "the execution is not in doubt: it is %s", found.State())
		}
		decided := guard.Resolution{Applied: d.Decision == DecisionApplied, Operator: d.Operator, Reason: d.Reason}
		evidence, landed := st.Testify(r.Context(), key, found.Record, decided)
		if err := landed(g.Resolve(r.Context(), found, decided, head, body, evidence...)); err != nil {
			return nil, err
		}
		st.Resolved(key, found.Record, decided)
		return look(r.Context(), st, key)
	}
}

// read decodes strictly: a misspelled member must not be a decision without it.
func (d *Decision) read(from io.Reader) error {
	text, err := io.ReadAll(io.LimitReader(from, maxDecision+1))
	switch {
	case err != nil:
		return refuse(http.StatusBadRequest, "reading the request: %v", err)
	case len(text) > maxDecision:
		return refuse(http.StatusRequestEntityTooLarge, "the request has more than %d bytes", maxDecision)
	case !utf8.Valid(text):
		return refuse(http.StatusBadRequest, "the request is not UTF-8; give a body that is none in body_base64")
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(d); err != nil {
		return refuse(http.StatusBadRequest, "the request is no decision: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return refuse(http.StatusBadRequest, "something stands behind the decision")
	}
	return nil
}

// check returns the answer that d gives, if any.
func (d *Decision) check() (*guard.Head, []byte, error) {
	switch {
	case d.Decision != DecisionApplied && d.Decision != DecisionNotApplied:
		return nil, nil, fmt.Errorf("decision: %q is unknown; use %s or %s", d.Decision, DecisionApplied, DecisionNotApplied)
	case d.Operator == "":
		return nil, nil, errors.New("operator: who decides must be named")
	case d.Reason == "":
		return nil, nil, errors.New("reason: say what you have found out, and where")
	case d.Result == nil:
		return nil, nil, nil
	case d.Decision == DecisionNotApplied:
		return nil, nil, errors.New("result: what was not applied has none; its key becomes free, and a retry runs")
	}
	head, body, err := d.Result.read()
	if err != nil {
		return nil, nil, fmt.Errorf("result: %w", err)
	}
	return head, body, nil
}
