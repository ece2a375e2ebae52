package ect

import (
	"math"
	"mime"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

const (
	// maxAction is the greatest length of exec_act, in bytes.
	maxAction = 256
	// maxDate is the last second of the year 9999. Later dates are mistakes of the
	// writer, most often milliseconds.
	maxDate = 253402300799
	// maxAudience is how many names aud may have.
	maxAudience = 100
)

// compact is a token in its compact form: a JWS, or for level L1 the claims alone. The signature and, for it,
// header and payload are not decoded.
type compact struct {
	head              header
	payload           string
	signed, signature string // header and payload with the dot between them
	unsigned          bool
}

func split(raw string) (c compact, ok bool) {
	encoded := raw
	if c.unsigned = strings.Count(raw, ".") != 2; !c.unsigned {
		first, last := strings.IndexByte(raw, '.'), strings.LastIndexByte(raw, '.')
		c.signed, c.signature, encoded = raw[:last], raw[last+1:], raw[first+1:last]
		text, valid := decode64(raw[:first])
		if c.head, ok = parseHeader(text); !ok || !valid {
			return c, false
		}
	}
	payload, ok := decode64(encoded)
	c.payload = string(payload)
	return c, ok
}

// header is the protected header of a token.
type header struct {
	typ, alg, kid string
	critical      bool
}

func parseHeader(text []byte) (h header, ok bool) {
	s := jsonx.Scanner{JSON: string(text)}
	ok = s.Document(func(name string) bool {
		var ok bool
		switch name {
		case "typ":
			h.typ, ok = s.Text()
		case "alg":
			h.alg, ok = s.Text()
		case "kid":
			h.kid, ok = s.Text()
		case "crit":
			h.critical = true
			_, ok = s.Value()
		default:
			// Keys inside the token are ignored: only configured ones count.
			_, ok = s.Value()
		}
		return ok
	})
	return h, ok
}

// check takes steps 2 and 3 of the verification, before any key is looked up.
func (h *header) check(allowed []Algorithm) (Algorithm, error) {
	if !isTokenType(h.typ) {
		return 0, refuse(CodeType)
	}
	alg, err := ParseAlgorithm(h.alg)
	switch {
	case err != nil || !slices.Contains(allowed, alg):
		return 0, refuse(CodeAlgorithm)
	case h.critical:
		return 0, refuse(CodeCritical)
	case h.kid == "" || len(h.kid) > maxURI || !printable(h.kid):
		return 0, refuse(CodeKeyID)
	}
	return alg, nil
}

// claimSet is the decoded payload, before the rules that depend on the verifier.
type claimSet struct {
	content
	inputText, outputText string
	hasInput, hasOutput   bool
	hasAction             bool
	hasWorkflow           bool
	invalid               []Code // claims that are JSON, but malformed
}

// read reads the payload and brings ids into the form in which they are compared. Unknown
// claims are skipped, but must be unambiguous JSON. A claim that is JSON but malformed is
// left out and noted: the step that needs it refuses it.
func (c *claimSet) read(payload string) error {
	c.payload = payload
	var code Code
	s := jsonx.Scanner{JSON: payload}
	ok := s.Document(func(name string) bool {
		from := s.At
		wrong, ok := c.claim(&s, name)
		if ok {
			return true
		}
		s.At = from
		if _, ok = s.Value(); ok {
			c.invalid = append(c.invalid, wrong)
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
	if event, ok := ParseEvent(c.action); ok {
		c.event = event
	}
	for _, id := range []*string{&c.id, &c.workflow} {
		if canonical, ok := canonicalUUID(*id); ok {
			*id = canonical
		}
	}
	c.input, _ = parseHash(c.inputText)
	c.output, _ = parseHash(c.outputText)
	return nil
}

// claim reads one claim; code is its refusal.
func (c *claimSet) claim(s *jsonx.Scanner, name string) (code Code, ok bool) {
	switch name {
	case "iss":
		c.issuer, ok = s.Text()
		return CodeIssuer, ok
	case "aud":
		c.audience, ok = readAudience(s)
		return CodeAudience, ok
	case "iat":
		c.issuedAt, ok = readDate(s)
		return CodeIssuedAt, ok
	case "exp":
		c.expires, ok = readDate(s)
		return CodeExpires, ok
	case "jti":
		c.id, ok = s.Text()
		return CodeID, ok
	case "wid":
		c.workflow, ok = s.Text()
		c.hasWorkflow = true
		return CodeWorkflow, ok
	case "exec_act":
		c.action, ok = s.Text()
		c.hasAction = true
		return CodeAction, ok
	case "par", "pred":
		return CodeParents, c.readParents(s)
	case "ext", "ect_ext":
		return CodeExt, c.readExtensions(s)
	case "inp_hash":
		c.inputText, ok = s.Text()
		c.hasInput = true
		return CodeInputHash, ok
	case "out_hash":
		c.outputText, ok = s.Text()
		c.hasOutput = true
		return CodeOutputHash, ok
	}
	_, ok = s.Value()
	return CodeMalformed, ok
}

// decode is read for callers without further steps: a malformed claim is refused.
func (c *claimSet) decode(payload string) error {
	if err := c.read(payload); err != nil {
		return err
	}
	if len(c.invalid) > 0 {
		return refuse(c.invalid[0])
	}
	return nil
}

func (c *claimSet) isInvalid(code Code) bool { return slices.Contains(c.invalid, code) }

// readParents reads par or pred. A token with both must agree with itself.
func (c *claimSet) readParents(s *jsonx.Scanner) bool {
	list, ok := s.Texts(math.MaxInt)
	for i, id := range list {
		if canonical, is := canonicalUUID(id); is {
			list[i] = canonical
		}
	}
	if !ok || slices.Contains(list, "") || c.parents != nil && !slices.Equal(c.parents, list) {
		return false
	}
	c.parents = list
	return true
}

// readExtensions enforces the limits as received: the size, and the depth including the
// object itself.
func (c *claimSet) readExtensions(s *jsonx.Scanner) bool {
	if s.Peek() != '{' {
		return false
	}
	raw, depth, ok := s.Raw()
	if !ok || len(raw) > maxExt || depth > maxExtDepth || c.ext != "" && !jsonx.Same(c.ext, raw) {
		return false
	}
	c.ext = raw
	return true
}

// readAudience reads a string or a list of strings.
func readAudience(s *jsonx.Scanner) ([]string, bool) {
	if s.Peek() == '"' {
		v, ok := s.Text()
		if !ok || v == "" {
			return nil, false
		}
		return []string{v}, true
	}
	list, ok := s.Texts(maxAudience)
	if !ok || len(list) == 0 || slices.Contains(list, "") {
		return nil, false
	}
	return list, true
}

// readDate reads a NumericDate, which the draft restricts to whole seconds.
func readDate(s *jsonx.Scanner) (int64, bool) {
	text, ok := s.Number()
	if !ok {
		return 0, false
	}
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v <= 0 || v > maxDate {
		return 0, false
	}
	return v, true
}

// check takes steps 11, the claims are present, and 12, they have their form. With anyID, ids need
// not be UUIDs.
func (c *claimSet) check(anyID bool) error {
	switch {
	case c.id == "":
		return refuse(CodeID)
	case !c.hasAction || c.isInvalid(CodeAction):
		return refuse(CodeAction)
	case c.isInvalid(CodeParents) || c.parents == nil:
		return refuse(CodeParents)
	case !canonical(&c.id, anyID):
		return refuse(CodeID)
	case c.hasWorkflow && !canonical(&c.workflow, anyID):
		return refuse(CodeWorkflow)
	case !validAction(c.action):
		return refuse(CodeAction)
	}
	if err := c.checkParents(anyID); err != nil {
		return err
	}
	switch {
	case c.hasInput && c.input.IsZero():
		return refuse(CodeInputHash)
	case c.hasOutput && c.output.IsZero():
		return refuse(CodeOutputHash)
	case c.isInvalid(CodeExt) || !c.Ext().consistent():
		return refuse(CodeExt)
	}
	return nil
}

// canonical checks an id and brings it into lower case.
func canonical(id *string, anyID bool) bool {
	if lower, ok := canonicalUUID(*id); ok {
		*id = lower
		return true
	}
	return anyID && *id != "" && len(*id) <= maxAction && printable(*id)
}

// checkParents takes the part of step 14 that needs no graph.
func (c *claimSet) checkParents(anyID bool) error {
	if len(c.parents) > MaxParents {
		return refuse(CodeTooManyParents)
	}
	for i, id := range c.parents {
		switch {
		case !canonical(&id, anyID):
			return refuse(CodeParents)
		case id == c.id:
			return refuse(CodeCycle)
		case slices.Contains(c.parents[:i], id):
			return refuse(CodeDuplicateParent)
		}
	}
	return nil
}

// validAction checks that an action is a name that fits on one line.
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

// FieldName is the header field that carries tokens.
const FieldName = "Execution-Context"

const (
	// maxField is the size of one token in the header field, in bytes.
	maxField = 8 << 10
	// maxFields is the size of all fields together, in bytes.
	maxFields = 16 << 10
	// maxBody is the size of a body of tokens, in bytes.
	maxBody = 1 << 20
)

// ParseFields returns the tokens in the lines of the header field, in their order, each
// of at most 8 KiB and all together of 16 KiB. Lines that were joined with commas are
// split again (RFC 9110, 5.3): no token has a comma. The error is CodeTooLarge.
func ParseFields(lines []string) ([]string, error) {
	var tokens []string
	size := 0
	for _, line := range lines {
		if size += len(line); size > maxFields {
			return nil, refuse(CodeTooLarge)
		}
		for token := range strings.SplitSeq(line, ",") {
			token = strings.Trim(token, " \t")
			if len(token) > maxField {
				return nil, refuse(CodeTooLarge)
			}
			if token != "" {
				tokens = append(tokens, token)
			}
		}
	}
	return tokens, nil
}

// ParseBody returns the tokens of a body: one, as application/wimse-exec+jwt or exec+jwt,
// or a JSON array of at most MaxParents; 1 MiB in all. ours is false for other types. The
// error is CodeTooLarge, CodeMalformed or CodeMissing.
func ParseBody(contentType string, body []byte) (tokens []string, ours bool, err error) {
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return nil, false, nil
	}
	switch media {
	case MediaType, typePrefix + laterType:
		token := strings.Trim(string(body[:min(len(body), maxBody)]), " \t\r\n")
		if len(token) > maxToken {
			return nil, true, refuse(CodeTooLarge)
		}
		if token == "" {
			return nil, true, refuse(CodeMissing)
		}
		return []string{token}, true, nil
	case "application/json":
		tokens, err = parseTokenArray(body)
		return tokens, true, err
	}
	return nil, false, nil
}

func parseTokenArray(body []byte) ([]string, error) {
	if len(body) > maxBody {
		return nil, refuse(CodeTooLarge)
	}
	s := jsonx.Scanner{JSON: string(body)}
	var tokens []string
	ok := s.Whole(func() (ok bool) {
		tokens, ok = s.Texts(MaxParents)
		return ok
	})
	if !ok || slices.Contains(tokens, "") {
		return nil, refuse(CodeMalformed)
	}
	if len(tokens) == 0 {
		return nil, refuse(CodeMissing)
	}
	return tokens, nil
}
