package template

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// what a placeholder reads.
type what uint8

const (
	requestPath what = iota
	requestSegment
	requestQuery
	requestHeader
	requestBody
	responseStatus
	responseHeader
	responseBody
	executionID
	workflowID
	rollbackID
	checkpointID
)

// name is a placeholder's name, read.
type name struct {
	text    string // as written
	what    what
	arg     string // name in a query or header, pointer
	segment int
	tokens  []string // of the pointer
}

var plainNames = map[string]what{
	"request.path": requestPath, "response.status": responseStatus,
	"execution.id": executionID, "workflow.id": workflowID,
	"rollback.id": rollbackID, "checkpoint.id": checkpointID,
}

// namesWithArg are the beginnings of names that go on.
var namesWithArg = []struct {
	prefix string
	what   what
}{
	{"request.path.", requestSegment},
	{"request.query.", requestQuery},
	{"request.header.", requestHeader},
	{"request.json.", requestBody},
	{"response.header.", responseHeader},
	{"response.json.", responseBody},
}

const knownNames = "request.path, request.path.N, request.query.NAME, request.header.NAME, request.json./POINTER, " +
	"response.status, response.header.NAME, response.json./POINTER, execution.id, workflow.id, rollback.id, checkpoint.id"

// credentials are what a caller is known by (DESIGN, "Caller").
var credentials = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}

func parseName(text string) (*name, *ParseError) {
	if w, ok := plainNames[text]; ok {
		return &name{text: text, what: w}, nil
	}
	for _, known := range namesWithArg {
		if arg, ok := strings.CutPrefix(text, known.prefix); ok {
			n := &name{text: text, what: known.what, arg: arg}
			return n, n.readArg()
		}
	}
	if text == "request.json" || text == "response.json" {
		return nil, bad(0, "{%s} is not one value; name one by JSON pointer, like {%s./id}", text, text)
	}
	return nil, bad(0, "placeholder {%s} is unknown; there are %s; write {{ for a brace", text, knownNames)
}

func (n *name) readArg() *ParseError {
	switch n.what {
	case requestSegment:
		i, err := strconv.Atoi(n.arg)
		if err != nil || strconv.Itoa(i) != n.arg || i < 0 {
			return bad(0, "{%s}: %q is no segment of a path; count from 0, like {request.path.1}", n.text, n.arg)
		}
		n.segment = i
	case requestQuery:
		if n.arg == "" {
			return bad(0, "{%s}: the name is missing; write it as it is decoded, like {request.query.id}", n.text)
		}
	case requestHeader, responseHeader:
		if !isToken(n.arg) {
			return bad(0, "{%s}: %q is no name of a header field; write one like {response.header.Location}", n.text, n.arg)
		}
		n.arg = http.CanonicalHeaderKey(n.arg)
		if n.what == requestHeader && slices.Contains(credentials, n.arg) {
			return bad(0, "{%s}: templates cannot hand on the caller's credentials; which ones an undo carries is set by undo_auth", n.text)
		}
	default:
		if !strings.HasPrefix(n.arg, "/") {
			return bad(0, "{%s}: %q is no JSON pointer to a value; begin it with a slash, like {response.json./id}", n.text, n.arg)
		}
		if _, err := fingerprint.ParsePointer(n.arg); err != nil {
			return bad(0, "{%s}: %v", n.text, err)
		}
		for token := range strings.SplitSeq(n.arg[1:], "/") {
			n.tokens = append(n.tokens, unescapeToken.Replace(token))
		}
	}
	return nil
}

// unescapeToken decodes a token of a pointer (RFC 6901, section 4). A Replacer goes
// over the text once, so that ~01 is ~1.
var unescapeToken = strings.NewReplacer("~1", "/", "~0", "~")

// isToken reports that s is a token as of RFC 9110, section 5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		if c := s[i]; !isAlphanumeric(c) && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}
