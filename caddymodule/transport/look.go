package transport

import (
	"bytes"
	"mime"
	"net/http"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// looker looks for a failure in the body of an answer that began well.
type looker interface {
	// see takes the next bytes. It returns what makes the answer a failure, in a few
	// words, or that the answer has turned out good so far.
	see(p []byte) (fault string, good bool)
	// end says that the body is whole.
	end() (fault string)
}

// lookInto says what kinds of bodies are looked into.
type lookInto struct {
	json, events bool
}

// looker is what looks into the body of res; nil if nothing does.
func (l lookInto) looker(c *circuits.Circuits, res *http.Response) looker {
	if !l.json && !l.events || res.Header.Get("Content-Encoding") != "" {
		return nil
	}
	kind, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	switch {
	case err != nil:
		return nil
	case l.events && kind == "text/event-stream":
		return new(events)
	case l.json && (kind == "application/json" || strings.HasSuffix(kind, "+json")) && res.ContentLength <= maxLook:
		return &document{circuits: c}
	}
	return nil
}

// maxLook is the longest JSON body that is looked into, in bytes.
const maxLook = 64 << 10

// document looks into a JSON body, at its end.
type document struct {
	circuits *circuits.Circuits
	body     []byte
	long     bool
}

func (d *document) see(p []byte) (fault string, good bool) {
	if d.long {
		return "", false
	}
	if len(d.body)+len(p) > maxLook {
		d.long, d.body = true, nil
		return "", true
	}
	d.body = append(d.body, p...)
	return "", false
}

func (d *document) end() string { return d.circuits.BodyFault(d.body) }

// events looks for an error in an event stream, line by line.
type events struct {
	line  []byte // the present one, its beginning
	begun bool   // the present event has a line
	cr    bool   // the last byte was \r, of which \n may be the other half
}

// maxLine is how much of a line is needed to know it, in bytes.
const maxLine = 64

func (e *events) see(p []byte) (fault string, good bool) {
	for _, b := range p {
		half := b == '\n' && e.cr
		e.cr = b == '\r'
		switch {
		case half:
		case b != '\n' && b != '\r':
			if len(e.line) < maxLine {
				e.line = append(e.line, b)
			}
		case len(e.line) == 0: // which ends an event
			good = good || e.begun
			e.begun = false
		default:
			if failed(e.line) {
				return "error event", good
			}
			e.begun = e.begun || e.line[0] != ':'
			e.line = e.line[:0]
		}
	}
	return "", good
}

func (e *events) end() string { return "" }

// failed reports whether a line of an event says that it is an error.
func failed(line []byte) bool {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "event":
		return string(value) == "error"
	case "data":
		for _, part := range []string{"{", `"error"`, ":"} {
			var ok bool
			if value, ok = bytes.CutPrefix(bytes.TrimLeft(value, " \t"), []byte(part)); !ok {
				return false
			}
		}
		return !bytes.HasPrefix(bytes.TrimLeft(value, " \t"), []byte("null"))
	}
	return false
}
