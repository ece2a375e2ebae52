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
}

// decode reads the payload, and brings ids into the form in which they are compared.
// Claims that mean nothing here are skipped, but must be JSON that cannot be read in
// two ways.
func (c *claimSet) decode(payload string, written Spelling) error {
	c.payload = payload
	var code Code
	s := scanner{s: payload}
	ok := s.document(func(name string) bool {
		ok := true
		wrong := CodeMalformed
		switch name {
		case "iss":
			c.issuer, ok = s.text()
			wrong = CodeIssuer
		case "aud":
			c.audience, ok = s.audience()
			wrong = CodeAudience
		case "iat":
			c.issuedAt, ok = s.date()
			wrong = CodeIssuedAt
		case "exp":
			c.expires, ok = s.date()
			wrong = CodeExpires
		case "jti":
			c.id, ok = s.text()
			wrong = CodeID
		case "wid":
			c.workflow, ok = s.text()
			c.hasWorkflow = true
			wrong = CodeWorkflow
		case "exec_act":
			c.action, ok = s.text()
			c.hasAction = true
			wrong = CodeAction
		case "par", "pred":
			ok = c.readParents(&s, name)
			wrong = CodeParents
		case "ext", "ect_ext":
			ok = c.readExtensions(&s)
			wrong = CodeExt
		case "inp_hash":
			c.inputText, ok = s.text()
			c.hasInput = true
			wrong = CodeInputHash
		case "out_hash":
			c.outputText, ok = s.text()
			c.hasOutput = true
			wrong = CodeOutputHash
		default:
			_, ok = s.value()
		}
		if !ok {
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
		return []string{v}, ok && v != ""
	}
	var list []string
	ok := s.elements(func() bool {
		v, ok := s.text()
		list = append(list, v)
		return ok && v != "" && len(list) <= maxAudience
	})
	return list, ok && len(list) > 0
}

// date reads a NumericDate, which the draft has as whole seconds.
func (s *scanner) date() (int64, bool) {
	text, ok := s.number()
	if !ok {
		return 0, false
	}
	v, err := strconv.ParseInt(text, 10, 64)
	return v, err == nil && v > 0 && v <= maxDate
}

// forms are the rules of step 12 that a configuration may loosen.
type forms struct {
	anyID      bool // ids need not be UUIDs
	lenient    bool // no parents means none
	maxParents int
}

// check holds that the claims are there and have their form: steps 11 and 12.
func (c *claimSet) check(f forms) error {
	if c.id == "" {
		return refuse(CodeID)
	}
	if !c.hasAction || !validAction(c.action) {
		return refuse(CodeAction)
	}
	if c.parents == nil {
		if !f.lenient {
			return refuse(CodeParents)
		}
		c.parents = []string{}
	}
	if !f.canonical(&c.id) {
		return refuse(CodeID)
	}
	if c.hasWorkflow && !f.canonical(&c.workflow) {
		return refuse(CodeWorkflow)
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
	if !c.Ext().consistent() {
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

// checkParents holds what can be said of the parents without looking them up.
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
