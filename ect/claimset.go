package ect

import (
	"slices"
	"strconv"
	"unicode"
)

const (
	// maxAction is the greatest length of exec_act.
	maxAction = 256
	// maxDate is the last second of the year 9999: later is a mistake of the writer,
	// most often milliseconds.
	maxDate = 253402300799
	// maxAudience is how many may be meant by one token.
	maxAudience = 100
)

// claimSet is the payload of a token as it was decoded, before any rule is asked that
// needs to know who asks.
type claimSet struct {
	content
	parentsOf             [len(spellings)]bool // which spellings of the parents are there
	inputText, outputText string
	hasInput, hasOutput   bool
	hasAction             bool
	hasWorkflow           bool
	faults                []Code // of claims that are JSON and nothing else
}

// read reads the payload, and brings ids into the form in which they are compared.
// Claims that mean nothing here are skipped, but must be JSON that cannot be read in
// two ways. A claim that is JSON, and not what it should be, is left out and noted: it is
// refused at the step that asks for it.
func (c *claimSet) read(payload string, written Spelling) error {
	c.payload = payload
	var code Code
	s := scanner{s: payload}
	ok := s.document(func(name string) bool {
		from := s.i
		wrong, ok := c.claim(&s, name)
		if ok {
			return true
		}
		s.i = from
		if _, ok = s.value(); ok {
			c.faults = append(c.faults, wrong)
		} else {
			code = wrong
		}
		return ok
	})
	switch {
	case code != "":
		return refuse(code)
	case !ok:
		return refuse(CodeMalformed)
	}
	c.spelling = written
	if c.parentsOf[Draft00] != c.parentsOf[Draft01] {
		c.spelling = Draft00
		if c.parentsOf[Draft01] {
			c.spelling = Draft01
		}
	}
	if event, ok := ParseEvent(c.action); ok {
		c.event = event
	}
	for _, id := range []*string{&c.id, &c.workflow} {
		if canonical, ok := canonicalUUID(*id); ok {
			*id = canonical
		}
	}
	c.input, _ = ParseHash(c.inputText)
	c.output, _ = ParseHash(c.outputText)
	return nil
}

// claim reads one claim. If it is wrong it is as one that is not there.
func (c *claimSet) claim(s *scanner, name string) (wrong Code, ok bool) {
	switch name {
	case "iss":
		c.issuer, ok = s.text()
		return CodeIssuer, ok
	case "aud":
		c.audience, ok = s.audience()
		return CodeAudience, ok
	case "iat":
		c.issuedAt, ok = s.date()
		return CodeIssuedAt, ok
	case "exp":
		c.expires, ok = s.date()
		return CodeExpires, ok
	case "jti":
		c.id, ok = s.text()
		return CodeID, ok
	case "wid":
		c.workflow, ok = s.text()
		c.hasWorkflow = true
		return CodeWorkflow, ok
	case "exec_act":
		c.action, ok = s.text()
		c.hasAction = true
		return CodeAction, ok
	case "par", "pred":
		return CodeParents, c.readParents(s, name)
	case "ext", "ect_ext":
		return CodeExt, c.readExtensions(s)
	case "inp_hash":
		c.inputText, ok = s.text()
		c.hasInput = true
		return CodeInputHash, ok
	case "out_hash":
		c.outputText, ok = s.text()
		c.hasOutput = true
		return CodeOutputHash, ok
	}
	_, ok = s.value()
	return CodeMalformed, ok
}

// decode reads the payload for those who take no steps: a claim that is wrong is refused.
func (c *claimSet) decode(payload string, written Spelling) error {
	if err := c.read(payload, written); err != nil {
		return err
	}
	if len(c.faults) > 0 {
		return refuse(c.faults[0])
	}
	return nil
}

// faulty reports that a claim is there and is not what it should be.
func (c *claimSet) faulty(code Code) bool { return slices.Contains(c.faults, code) }

// readParents reads either spelling. Both are one claim, or a contradiction.
func (c *claimSet) readParents(s *scanner, name string) bool {
	list := []string{}
	ok := s.elements(func() bool {
		id, ok := s.text()
		if canonical, is := canonicalUUID(id); is {
			id = canonical
		}
		list = append(list, id)
		return ok && id != ""
	})
	if !ok || c.parents != nil && !slices.Equal(c.parents, list) {
		return false
	}
	c.parents = list
	if name == spellings[Draft00].parents {
		c.parentsOf[Draft00] = true
	} else {
		c.parentsOf[Draft01] = true
	}
	return true
}

func (c *claimSet) readExtensions(s *scanner) bool {
	raw, ok := s.readExt()
	if !ok || c.ext != "" && !sameJSON(c.ext, raw) {
		return false
	}
	c.ext = raw
	return true
}

// audience reads a string or a list of strings.
func (s *scanner) audience() ([]string, bool) {
	if s.peek() == '"' {
		v, ok := s.text()
		if !ok || v == "" {
			return nil, false
		}
		return []string{v}, true
	}
	var list []string
	ok := s.elements(func() bool {
		v, ok := s.text()
		list = append(list, v)
		return ok && v != "" && len(list) <= maxAudience
	})
	if !ok {
		return nil, false
	}
	return list, len(list) > 0
}

// date reads a NumericDate, which the draft has as whole seconds.
func (s *scanner) date() (int64, bool) {
	text, ok := s.number()
	if !ok {
		return 0, false
	}
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v <= 0 || v > maxDate {
		return 0, false
	}
	return v, true
}

// forms are the rules of step 12 that a configuration may loosen.
type forms struct {
	anyID      bool // ids need not be UUIDs
	lenient    bool // no parents means none
	maxParents int
}

// check holds that the claims are there, which is step 11, and have their form, 12.
func (c *claimSet) check(f forms) error {
	if c.id == "" {
		return refuse(CodeID)
	}
	if !c.hasAction || c.faulty(CodeAction) {
		return refuse(CodeAction)
	}
	if c.faulty(CodeParents) || c.parents == nil && !f.lenient {
		return refuse(CodeParents)
	}
	if c.parents == nil {
		c.parents = []string{}
	}
	if !f.canonical(&c.id) {
		return refuse(CodeID)
	}
	if c.hasWorkflow && !f.canonical(&c.workflow) {
		return refuse(CodeWorkflow)
	}
	if !validAction(c.action) {
		return refuse(CodeAction)
	}
	if err := c.checkParents(f); err != nil {
		return err
	}
	if c.hasInput && c.input.IsZero() {
		return refuse(CodeInputHash)
	}
	if c.hasOutput && c.output.IsZero() {
		return refuse(CodeOutputHash)
	}
	if c.faulty(CodeExt) || !c.Ext().consistent() {
		return refuse(CodeExt)
	}
	return nil
}

// canonical holds the form of an id.
func (f forms) canonical(id *string) bool {
	if canonical, ok := canonicalUUID(*id); ok {
		*id = canonical
		return true
	}
	return f.anyID && *id != "" && len(*id) <= maxAction && printable(*id)
}

// checkParents holds what can be said of the parents without looking them up: of step
// 14, that no parent is named twice, and none is the token itself.
func (c *claimSet) checkParents(f forms) error {
	if len(c.parents) > f.maxParents {
		return refuse(CodeTooManyParents)
	}
	for i, id := range c.parents {
		if !f.canonical(&id) {
			return refuse(CodeParents)
		}
		if id == c.id {
			return refuse(CodeCycle)
		}
		if slices.Contains(c.parents[:i], id) {
			return refuse(CodeDuplicateParent)
		}
	}
	return nil
}

// validAction holds that an action is a name that can stand on a line of its own.
func validAction(v string) bool {
	if v == "" || len(v) > maxAction {
		return false
	}
	for _, r := range v {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return false
		}
	}
	return true
}

// Decisions of a policy (pol_decision).
const (
	approved = "approved"
	rejected = "rejected"
	pending  = "pending_human_review"
)

// checkPolicy holds the rules of the policy companion: a decision names its policy, is
// one that there is, and was not made after the token.
func (c *claimSet) checkPolicy() error {
	ext := c.Ext()
	if raw, ok := ext.Raw("pol_decision"); ok {
		decision, _ := unquote(raw)
		policy, named := ext.Text("pol")
		if decision != approved && decision != rejected && decision != pending || !named || policy == "" {
			return refuse(CodePolicy)
		}
	}
	if raw, ok := ext.Raw("pol_timestamp"); ok {
		at, isInt := ext.Int("pol_timestamp")
		if raw == "" || !isInt || at > c.issuedAt {
			return refuse(CodePolicy)
		}
	}
	return nil
}
