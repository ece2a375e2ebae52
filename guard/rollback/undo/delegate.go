package undo

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
)

// fieldToken is the field in which an answer has its token.
const fieldToken = "Execution-Context"

// badness orders what the places of an answer say: the worst counts.
var badness = map[reading]int{"": 0, done: 1, pending: 2, escalated: 3, refused: 4, partial: 5, unexpected: 6}

// delegateSays reads a delegate's 2xx, in the words of each draft: what its body says, and
// what the token says that comes with it. Done is only what is called completed, or says
// nothing at all, as the contract has it; what cannot be read is unexpected (P6).
func delegateSays(a *Answer) note {
	if a.Cut {
		return noted(unexpected, a.Status) // what it says may stand behind the cut
	}
	body := bytes.TrimSpace(a.Body)
	var says saying
	var document report
	switch {
	case len(body) == 0:
	case json.Unmarshal(body, &document) == nil:
		says.hear(&document)
	case token(string(body), &document):
		says.hear(&document)
	case body[0] != '{':
		says.add(meaning(word(a)))
	}
	if says.worst == "" {
		says.worst = unexpected // it speaks, and not of this
		if len(body) == 0 {
			says.worst = done
		}
	}
	// A token that nobody has verified can make it worse, and never better.
	var signed report
	if token(a.Header.Get(fieldToken), &signed) {
		says.hear(&signed)
	}
	if document.ECT != "" && token(document.ECT, &signed) {
		says.hear(&signed)
	}
	if says.doubt && says.worst == done {
		says.worst = unexpected // it contradicts itself
	}
	n := noted(says.worst, a.Status)
	n.unknown = n.unknown || says.doubt
	return n
}

// report is what a rollback's result says, in a document or in a token. What is no text is
// read as far as it is there.
type report struct {
	Action string                     `json:"exec_act"`
	ECT    string                     `json:"ect"`
	State  json.RawMessage            `json:"state"`
	Status json.RawMessage            `json:"status"`
	Effect json.RawMessage            `json:"effect"`
	Old    json.RawMessage            `json:"cascade.status"`
	Ext    map[string]json.RawMessage `json:"ext"`
}

// saying is what an answer says, so far.
type saying struct {
	worst reading
	doubt bool // the effect is mixed or unknown
}

func (s *saying) add(r reading) {
	if badness[r] > badness[s.worst] {
		s.worst = r
	}
}

func (s *saying) hear(r *report) {
	if string(r.State) == `"executing"` {
		s.add(pending)
	}
	if strings.HasSuffix(r.Action, "rollback_escalated") {
		s.add(escalated)
	}
	for _, status := range []json.RawMessage{r.Status, r.Old, r.Ext["cascade.status"], r.Ext["atd.status"], r.Ext["aerr.status"]} {
		if len(status) == 0 || string(status) == "null" {
			continue
		}
		var text string
		if json.Unmarshal(status, &text) != nil {
			s.add(unexpected)
			continue
		}
		s.add(meaning(strings.ToLower(text)))
	}
	for _, effect := range []json.RawMessage{r.Effect, r.Ext["agent_guard.effect"]} {
		s.doubt = s.doubt || string(effect) == `"mixed"` || string(effect) == `"unknown"`
	}
}

// meaning is what a status is, in a word of the drafts (cascade 4.4.2) or of LRA.
func meaning(word string) reading {
	switch {
	case word == "completed", word == "compensated":
		return done
	case word == "executing", underWay(word):
		return pending
	case word == "escalated":
		return escalated
	case word == "partial":
		return partial
	case failed(word):
		return refused
	}
	return unexpected
}

// token reads the claims of a token into r, unverified.
func token(raw string, r *report) bool {
	claims := raw
	if parts := strings.Split(raw, "."); len(parts) == 3 {
		claims = parts[1]
	}
	b, err := base64.RawURLEncoding.DecodeString(claims)
	return err == nil && len(b) > 0 && json.Unmarshal(b, r) == nil
}
