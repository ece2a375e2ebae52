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
	case repeats(body):
		says.add(unexpected) // two readers could take it for two results
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
	ECTExt map[string]json.RawMessage `json:"ect_ext"` // ext in the other spelling
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
	switch _, act, prefixed := strings.Cut(r.Action, ":"); {
	case strings.HasSuffix(r.Action, "rollback_escalated"):
		s.add(escalated)
	case r.Action == "error", prefixed && act == "error":
		s.add(unexpected)
	}
	statuses, effects := []json.RawMessage{r.Status, r.Old}, []json.RawMessage{r.Effect}
	for _, ext := range []map[string]json.RawMessage{r.Ext, r.ECTExt} {
		statuses = append(statuses, ext["cascade.status"], ext["atd.status"], ext["aerr.status"])
		effects = append(effects, ext["agent_guard.effect"])
	}
	for _, status := range statuses {
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
	for _, effect := range effects {
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

// repeats reports that a member of a JSON object stands in it twice, or more than once in
// different case, which encoding/json takes for the same.
func repeats(body []byte) bool {
	d := json.NewDecoder(bytes.NewReader(body))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return false
	}
	seen := map[string]bool{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return false
		}
		text, _ := name.(string)
		if text = strings.ToLower(text); seen[text] {
			return true
		}
		seen[text] = true
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return false
		}
	}
	return false
}
