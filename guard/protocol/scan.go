package protocol

import (
	"bytes"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

const (
	// maxPath is how deep a value may stand to have a path.
	maxPath = 5
	// maxName is the longest name in a path, in bytes as written. Longer names match nothing.
	maxName = 64
	// maxDepth is how deep containers may nest. Deeper text has no paths any more.
	maxDepth = 1 << 10
)

type event uint8

const (
	more    event = iota // all bytes were taken
	begins               // the next byte begins a value
	ended                // a string, a number or a literal has ended
	closed               // an object or an array has ended
	unknown              // this is no JSON, or nests too deep
)

// scanner follows a JSON text that comes in pieces. It knows where it is, and keeps none of it. It
// does not validate: what is no JSON has some events or others.
type scanner struct {
	open      []byte                // the containers, '{' or '['
	names     [maxPath + 1]nameText // of the member in each of the outer ones
	in        byte                  // 's' in a string, 'k' in a name, 'v' in a number or literal; 0 between them
	escaped   bool                  // the next byte belongs to an escape
	wantsName bool                  // the next string is a name
	announced bool                  // begins was given for the value that comes
	broken    bool
}

// nameText is a name as written, with its quotes. Of one that is too long the size says so.
type nameText struct {
	size int
	text [maxName]byte
}

func (t *nameText) add(c byte) {
	if t.size < len(t.text) {
		t.text[t.size] = c
	}
	t.size = min(t.size+1, len(t.text)+1)
}

// name is that of the member in the innermost container. Those too deep for a path share the unused first one.
func (s *scanner) name() *nameText {
	if len(s.open) > maxPath {
		return &s.names[0]
	}
	return &s.names[len(s.open)]
}

// next takes bytes of p up to the next event.
func (s *scanner) next(p []byte) (n int, ev event) {
	if s.broken {
		return len(p), more
	}
	for ; n < len(p); n++ {
		c := p[n]
		switch s.in {
		case 's', 'k':
			name := s.in == 'k'
			if name {
				s.name().add(c)
			}
			switch {
			case s.escaped:
				s.escaped = false
			case c == '\\':
				s.escaped = true
			case c == '"':
				s.in = 0
				if !name {
					return n + 1, ended
				}
			case !name: // most of a text is in strings
				n += plain(p[n:]) - 1
			}
			continue
		case 'v':
			if strings.IndexByte(" \t\r\n,:]}", c) < 0 {
				continue
			}
			s.in = 0
			return n, ended
		}
		switch c {
		case ' ', '\t', '\r', '\n', ':':
			continue
		case ',':
			s.wantsName = len(s.open) > 0 && s.open[len(s.open)-1] == '{'
			continue
		case '}', ']':
			if s.broken = len(s.open) == 0; s.broken {
				return n, unknown
			}
			s.open, s.wantsName = s.open[:len(s.open)-1], false
			return n + 1, closed
		}
		if s.announced = !s.announced && (c != '"' || !s.wantsName); s.announced {
			return n, begins
		}
		if s.begin(c); s.broken {
			return n, unknown
		}
	}
	return n, more
}

// plain is how many bytes of a string are before the next quote or escape.
func plain(p []byte) int {
	if end := bytes.IndexByte(p, '"'); end >= 0 {
		p = p[:end]
	}
	if escape := bytes.IndexByte(p, '\\'); escape >= 0 {
		return escape
	}
	return len(p)
}

// begin enters what begins with c: a name, or a value.
func (s *scanner) begin(c byte) {
	switch {
	case c == '"' && s.wantsName:
		s.in, s.wantsName, s.name().size = 'k', false, 0
		s.name().add(c)
	case c == '"':
		s.in = 's'
	case c != '{' && c != '[':
		s.in = 'v'
	case len(s.open) == maxDepth:
		s.broken = true
	default:
		s.open, s.wantsName = append(s.open, c), c == '{'
		s.name().size = 0
	}
}

// paths are those that count, so that no path is made anew for each value.
var paths = func() map[string]string {
	all := map[string]string{}
	for _, path := range []string{
		"id", "method", "params.progressToken", "result", "error", "error.code", "error.data.status", "error.data.type",
		pathIsError, "result.resultType", "result.kind", "result.final", "result.message", "result.statusUpdate.final",
		"result.status.state", "result.task.status.state", "result.statusUpdate.status.state", "result.protocolVersion",
		"result.status", "result.task.status", "result.structuredContent.status", "result.task.taskId", "result.taskId",
		"result.id", "result.task.id", "result.statusUpdate.taskId", pathTool, "result.tools..name",
		"result.tools..annotations.readOnlyHint",
	} {
		all[path] = path
	}
	return all
}()

const (
	pathIsError = "result.isError"
	pathTool    = "result.tools."
)

// path is where the value is that next has announced, or that has just ended: the names from the
// outside, with a dot between them; an element of an array has an empty name. It is empty where it
// is none of paths. Where a name is empty or has a dot in it, no member is taken for another.
func (s *scanner) path() string {
	if len(s.open) == 0 || len(s.open) > maxPath {
		return ""
	}
	var b [maxPath * (maxName + 2)]byte
	p := b[:0]
	for depth := 1; depth <= len(s.open); depth++ {
		if depth > 1 {
			p = append(p, '.')
		}
		size := s.names[depth].size
		switch {
		case size == 0: // an element of an array
			continue
		case size > maxName:
			return ""
		}
		name := s.names[depth].text[:size]
		from := len(p)
		if bytes.IndexByte(name, '\\') >= 0 {
			p = append(p, jsonx.Unquote(name)...)
		} else {
			p = append(p, name[1:max(1, len(name)-1)]...)
		}
		if len(p) == from || bytes.IndexByte(p[from:], '.') >= 0 {
			return ""
		}
	}
	if bytes.EqualFold(p, []byte(pathIsError)) { // in any case, as some clients read it
		return pathIsError
	}
	return paths[string(p)]
}
