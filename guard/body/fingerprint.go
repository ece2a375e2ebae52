package body

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// domain separates these sums from all others. Sums are stored for as long as keys: a change that
// gives a request another sum needs another domain, and code that still knows this one.
const domain = "agent-guard/fingerprint/v1"

// The domains of sums of requests that name the node that they are, of those that have operands, and of whole ones.
const (
	domainNode     = "agent-guard/fingerprint/v1/node"
	domainOperands = "agent-guard/fingerprint/v1/operands"
	domainWhole    = "agent-guard/fingerprint/v1/whole"
)

// The mode in which a body was read. It is part of the sum, so that bodies of different modes are never equal.
const (
	modeEmpty     = 'e'
	modeJSON      = 'j'
	modeMultipart = 'm'
	modeRaw       = 'r'
)

// maxKept is how much memory a pooled state may keep, in bytes.
const maxKept = 256 << 10

// Fingerprint is the hash of what a request means: method, host, path, query, media type, content coding and body, the
// node of a plan that it names, and the header fields that say what is to be done (Operand). Fields.Whole adds the
// others that count without a key. JSON bodies are compared by value, in the sense of RFC 8785 but with exact numbers;
// multipart bodies by their parts; everything else byte by byte. Fingerprints are comparable with ==.
type Fingerprint [sha256.Size]byte

// Request has the parts of a request that are compared. Absent header fields are empty.
type Request struct {
	Method   string
	Host     string // in any case
	Path     string // escaped, as received
	RawQuery string // as received, without "?"

	// ContentType is taken without its parameters, but for the boundary of multipart bodies.
	ContentType     string
	ContentEncoding string

	// Node is the node of its workflow's plan that the request names; empty if it names none.
	Node string

	// Header has the operands, by the classes of Comparison.Fields. Names are canonical.
	Header http.Header

	// Body is read from 0 to Size, in bytes. One that has a method Bytes() ([]byte, bool), as
	// *Spool does, is not copied. May be nil if Size is 0.
	Body io.ReaderAt
	Size int64
}

// Comparison says what of a request counts. A nil one excludes nothing. It must not be changed while it is in use.
type Comparison struct {
	// Fields are the classes of header fields. Nil has no operands.
	Fields *Fields
	// Exclude are values of JSON bodies that do not affect the sum, whether present or absent. An
	// excluded array element counts as removed. Other bodies are not affected.
	Exclude []jsonx.Pointer
	// Members are the names of members of a JSON body that Read returns: of the body itself, not of values in it.
	Members []string
}

// Member is a member of a JSON body.
type Member struct {
	Name string
	// Value is its string, or its number as it is written; empty for null.
	Value string
	// Err is ErrNotScalar, jsonx.ErrAmbiguous, or ErrValueTooLong; else nil.
	Err error
}

// state is what one fingerprint needs; it is pooled.
type state struct {
	canon
	head    []byte
	names   []string // of header fields
	fields  []partField
	parts   hash.Hash // over all parts
	content hash.Hash // of one part, or of a raw body
}

var states = sync.Pool{New: func() any {
	return &state{parts: sha256.New(), content: sha256.New()}
}}

// Read computes the fingerprint of req, and returns the Members that its body has, from the same pass over it; a body
// that is no JSON, by its media type or its bytes, has none. The only errors are those of reading the body
// (io.ErrUnexpectedEOF if it is shorter than Size): a body that is not what its content type says is compared byte by
// byte.
func (c *Comparison) Read(req Request) (Fingerprint, []Member, error) {
	s := states.Get().(*state)
	defer s.free()
	s.names = s.names[:0]
	if c != nil {
		s.exclude, s.members = c.Exclude, c.Members
		s.names = c.Fields.operands(s.names, req.Header)
	}
	media, _, _ := strings.Cut(req.ContentType, ";")
	media = strings.ToLower(strings.Trim(media, " \t"))
	coding := strings.ToLower(strings.Trim(req.ContentEncoding, " \t"))
	if coding == "identity" {
		coding = ""
	}
	s.head = s.head[:0]
	fields := [...]string{domain, req.Method, strings.ToLower(req.Host), req.Path, req.RawQuery, media, coding, req.Node}
	named := fields[:]
	switch {
	case len(s.names) > 0:
		named[0] = domainOperands
	case req.Node == "":
		named = named[:len(named)-1]
	default:
		named[0] = domainNode
	}
	for _, f := range named {
		s.head = appendText(s.head, f)
	}
	if len(s.names) > 0 {
		s.head = appendFields(s.head, s.names, req.Header)
	}
	if err := s.body(req, media, coding); err != nil {
		return Fingerprint{}, nil, err
	}
	return sha256.Sum256(s.head), s.found, nil
}

// body appends the mode and the encoding of the body in it.
func (s *state) body(req Request, media, coding string) error {
	if req.Size == 0 {
		s.head = append(s.head, modeEmpty)
		return nil
	}
	s.src.reset(req.Body, req.Size)
	switch {
	case coding != "":
	case IsJSON(media):
		if s.document() {
			s.head = append(s.head, modeJSON)
			s.head = append(s.head, s.buf...)
			return nil
		}
		s.found = nil
	case strings.HasPrefix(media, "multipart/"):
		if b, ok := boundary(req.ContentType); ok && s.multipart(b) {
			s.head = append(s.head, modeMultipart)
			s.head = s.parts.Sum(s.head)
			return nil
		}
	}
	if s.src.err != nil {
		return s.src.err
	}
	s.src.reset(req.Body, req.Size)
	s.content.Reset()
	for s.src.more() {
		s.content.Write(s.src.win[s.src.i:])
		s.src.i = len(s.src.win)
	}
	if s.src.err != nil {
		return s.src.err
	}
	s.head = append(s.head, modeRaw)
	s.head = s.content.Sum(s.head)
	return nil
}

// free gives s back without what belongs to the request.
func (s *state) free() {
	s.src.reset(nil, 0)
	s.exclude, s.members, s.found, s.only = nil, nil, nil, false
	if cap(s.buf)+4*cap(s.offs)+cap(s.head)+4*cap(s.live) > maxKept {
		s.buf, s.offs, s.head, s.live = nil, nil, nil, nil
	}
	clear(s.fields[:cap(s.fields)])
	clear(s.names[:cap(s.names)])
	states.Put(s)
}

// IsJSON reports whether the body of a media type, in lower case and without parameters, is JSON: also by the two names
// that JSON-RPC over HTTP has beside application/json.
func IsJSON(media string) bool {
	switch media {
	case "application/json", "application/json-rpc", "application/jsonrequest":
		return true
	}
	return strings.HasSuffix(media, "+json") && strings.Contains(media, "/")
}

// follow gives the exclusions that lead further, through the member with the given encoded name
// or, with a nil name, through the array element i, and whether one of them ends there.
func (c *canon) follow(live []int32, depth int, name []byte, i int64) (below []int32, drop bool) {
	from := len(c.live)
	for _, x := range live {
		tokens := c.exclude[x]
		if len(tokens) <= depth {
			continue
		}
		if name != nil {
			if !named(name, tokens[depth]) {
				continue
			}
		} else if n, ok := jsonx.Index(tokens[depth]); !ok || n != i {
			continue
		}
		drop = drop || len(tokens) == depth+1
		c.live = append(c.live, x)
	}
	return c.live[from:len(c.live):len(c.live)], drop
}

// named reports whether the encoded name is that of token.
func named(name []byte, token string) bool {
	if len(token) <= maxInline {
		return name[0] == tagString && string(name[2:]) == token
	}
	if name[0] == tagString {
		return false
	}
	sum := sha256.Sum256([]byte(token))
	return bytes.Equal(sum[:], name[1:])
}

// windowSize is how much of a body is looked at in one piece where it does not lie in memory. It is at least twice as
// large as anything that must be seen in one piece: a number, an escape, the headers of a part.
const windowSize = 64 << 10

var errSize = errors.New("fingerprint: the size of the body is negative, or there is none")

// source is a moving window over a body.
type source struct {
	win  []byte // what can be seen
	i    int    // the next byte of win
	r    io.ReaderAt
	off  int64 // of the first byte of r that is not in win yet
	size int64
	err  error // read error; the end of the body is none
	buf  *[windowSize]byte
}

func (s *source) reset(r io.ReaderAt, size int64) {
	*s = source{r: r, size: size, buf: s.buf}
	if size < 0 || (r == nil && size > 0) {
		s.size, s.err = 0, errSize
		return
	}
	// A body that may be contiguous in memory, such as a spool's.
	if h, ok := r.(interface{ Bytes() (p []byte, ok bool) }); ok {
		if p, ok := h.Bytes(); ok && int64(len(p)) >= size {
			s.win, s.off = p[:size], size
		}
	}
}

// fill extends the window. The bytes from i on are kept and move to the front. It
// returns false at the end and after an error, which is in s.err.
func (s *source) fill() bool {
	if s.off >= s.size || s.err != nil {
		return false
	}
	if s.buf == nil {
		s.buf = new([windowSize]byte)
	}
	n := copy(s.buf[:], s.win[s.i:])
	s.i = 0
	room := s.buf[n:]
	room = room[:min(int64(len(room)), s.size-s.off)]
	s.win = s.buf[:n]
	if len(room) == 0 {
		return false
	}
	m, err := s.r.ReadAt(room, s.off)
	s.off += int64(m)
	s.win = s.buf[:n+m]
	if m < len(room) {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		s.err = err
		return false
	}
	return true
}

// need extends the window to n bytes, or as many as there are left.
func (s *source) need(n int) {
	for len(s.win)-s.i < n && s.fill() {
	}
}

// more reports whether there is a next byte, and extends the window to it.
func (s *source) more() bool {
	return s.i < len(s.win) || s.fill()
}

// space skips JSON white space and returns the next byte without taking it; 0 at
// the end, which is no byte of valid JSON.
func (s *source) space() byte {
	for {
		for s.i < len(s.win) {
			switch c := s.win[s.i]; c {
			case ' ', '\t', '\n', '\r':
				s.i++
			default:
				return c
			}
		}
		if !s.fill() {
			return 0
		}
	}
}

// take takes a byte if it comes next, behind white space.
func (s *source) take(c byte) bool {
	ok := s.i < len(s.win) && s.win[s.i] == c || s.space() == c
	if ok {
		s.i++
	}
	return ok
}

// next moves to the next value or name in an array or object of which the opening bracket is taken, and
// takes the closing one. Not ok: there is neither.
func (s *source) next(closing byte, first bool) (more, ok bool) {
	switch c := s.space(); {
	case c == closing:
		s.i++
		return false, true
	case first:
		return true, true
	case c == ',':
		s.i++
		return true, true
	}
	return false, false
}

// maxValue is the longest string that Lookup returns, in bytes.
const maxValue = 64 << 10

// The errors of a Lookup that could read the body. They do not contain the body.
var (
	// ErrNotJSON: the body is not JSON: invalid as of RFC 8259, invalid UTF-8,
	// lone surrogates, or nested more than 512 deep.
	ErrNotJSON = errors.New("the body is not valid JSON")
	// ErrNotScalar: the value is an object, an array, true or false.
	ErrNotScalar = errors.New("the value is neither a string nor a number")
	// ErrValueTooLong: the string is longer than 64 KiB.
	ErrValueTooLong = errors.New("the value is too long")
)

// Lookup returns the string, or the number as it is written, at p in a JSON body of size bytes. An empty body, an
// absent value and null are not found. The errors are those above and jsonx.ErrAmbiguous, of which the first fault
// counts, and, if the body cannot be read, its own. Like Comparison.Read it reads the whole body in one pass and does
// not keep it.
func Lookup(body io.ReaderAt, size int64, p jsonx.Pointer) (value string, found bool, err error) {
	if size == 0 {
		return "", false, nil
	}
	s := states.Get().(*state)
	defer s.free()
	s.src.reset(body, size)
	s.exclude, s.only = []jsonx.Pointer{p}, true
	ok := s.document()
	switch {
	case s.src.err != nil:
		return "", false, s.src.err
	case len(s.found) > 0 && s.found[0].Err != nil:
		return "", false, s.found[0].Err
	case !ok:
		return "", false, ErrNotJSON
	case len(s.found) == 0:
		return "", false, nil
	}
	return s.found[0].Value, true, nil
}

const (
	maxBoundary   = 70       // RFC 2046, section 5.1.1
	maxPadding    = 256      // white space after a boundary, in bytes
	maxPartHeader = 16 << 10 // header of one part, in bytes
)

// partField is one field of a part's header. Both point into the window or buf.
type partField struct{ name, value []byte }

// boundary gives the boundary of a multipart content type.
func boundary(contentType string) (b string, ok bool) {
	_, params, err := mime.ParseMediaType(contentType)
	b = params["boundary"]
	if err != nil || b == "" || len(b) > maxBoundary || b[len(b)-1] == ' ' {
		return "", false
	}
	for i := range len(b) {
		if b[i] < ' ' || b[i] > '~' {
			return "", false
		}
	}
	return b, true
}

// multipart hashes the parts of the source's body into s.parts: of each part the header, by lower case names, and the
// content. The boundary, which clients make anew for every attempt, the preamble and the epilogue do not count. Not ok:
// it is not exactly as RFC 2046 has it (CRLF only, no folded fields, closed), so that readers might disagree about its
// parts; or src.err is set.
func (s *state) multipart(boundary string) (ok bool) {
	s.parts.Reset()
	delim := []byte("\r\n--" + boundary)
	s.src.need(len(delim) - 2)
	if bytes.HasPrefix(s.src.win[s.src.i:], delim[2:]) {
		s.src.i += len(delim) - 2
	} else if !s.src.until(delim, nil) {
		return false
	}
	for {
		last, ok := s.src.delimiterEnd()
		if !ok || last {
			return ok
		}
		if !s.partHeader() {
			return false
		}
		s.content.Reset()
		if !s.src.until(delim, s.content) {
			return false
		}
		s.buf = s.content.Sum(s.buf[:0])
		s.parts.Write(s.buf)
	}
}

// until takes everything up to and with delim, and writes what is before it to h.
func (s *source) until(delim []byte, h hash.Hash) bool {
	for {
		w := s.win[s.i:]
		n, found := len(w)-len(delim)+1, false
		if j := bytes.Index(w, delim); j >= 0 {
			n, found = j, true
		}
		if n > 0 {
			if h != nil {
				h.Write(w[:n])
			}
			s.i += n
		}
		if found {
			s.i += len(delim)
			return true
		}
		if !s.fill() {
			return false
		}
	}
}

// delimiterEnd takes the rest of a delimiter line.
func (s *source) delimiterEnd() (last, ok bool) {
	s.need(maxPadding + 4)
	w := s.win[s.i:]
	w = w[:min(len(w), maxPadding+4)]
	rest, last := bytes.CutPrefix(w, []byte("--"))
	rest = bytes.TrimLeft(rest, " \t")
	if last && len(rest) == 0 && len(w) < maxPadding+4 {
		return true, s.err == nil
	}
	if !bytes.HasPrefix(rest, []byte("\r\n")) {
		return false, false
	}
	s.i += len(w) - len(rest) + 2
	return last, true
}

// partHeader hashes the header of the next part and takes it with its empty line.
func (s *state) partHeader() bool {
	src := &s.src
	src.need(maxPartHeader)
	w := src.win[src.i:]
	w = w[:min(len(w), maxPartHeader)]
	if bytes.HasPrefix(w, []byte("\r\n")) {
		src.i += 2
		s.parts.Write([]byte{0})
		return true
	}
	end := bytes.Index(w, []byte("\r\n\r\n"))
	if end < 0 {
		return false
	}
	src.i += end + 4
	s.fields = s.fields[:0]
	for line := range bytes.SplitSeq(w[:end], []byte("\r\n")) {
		name, value, ok := bytes.Cut(line, []byte(":")) // a folded line begins with white space, which no name has
		if !ok || !httpguts.ValidHeaderFieldName(string(name)) || bytes.ContainsAny(value, "\r\n\x00") {
			return false
		}
		s.fields = append(s.fields, partField{bytes.ToLower(name), bytes.Trim(value, " \t")})
	}
	slices.SortStableFunc(s.fields, func(a, b partField) int { return bytes.Compare(a.name, b.name) })
	s.buf = binary.AppendUvarint(s.buf[:0], uint64(len(s.fields)))
	for _, f := range s.fields {
		s.buf = binary.AppendUvarint(s.buf, uint64(len(f.name)))
		s.buf = append(s.buf, f.name...)
		s.buf = binary.AppendUvarint(s.buf, uint64(len(f.value)))
		s.buf = append(s.buf, f.value...)
	}
	s.parts.Write(s.buf)
	return true
}
