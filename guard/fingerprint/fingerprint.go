// Package fingerprint tells whether two requests are the same request, so that a
// key which is used again for another one is seen (422) and a retry that was only
// written differently is not taken for another.
//
// A fingerprint covers method, host, path, query, media type, content coding and
// body; never header fields, which differ from attempt to attempt. JSON bodies are
// compared by value, in the sense of RFC 8785 but with exact numbers; multipart
// bodies by their parts; everything else byte by byte.
package fingerprint

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io"
	"strings"
	"sync"
)

// domain separates these sums from all others. Sums are stored for as long as
// keys are: what makes another sum of the same request needs another domain, and
// code that still knows this one.
const domain = "agent-guard/fingerprint/v1"

// How a body was looked at. Part of the sum, so that no body of one mode can pass
// for one of another.
const (
	modeEmpty     = 'e'
	modeJSON      = 'j'
	modeMultipart = 'm'
	modeRaw       = 'r'
)

// maxKept is how much memory a pooled state may keep, in bytes.
const maxKept = 256 << 10

// Sum is the fingerprint of one request. Sums are comparable with ==.
type Sum [sha256.Size]byte

// String gives the sum in lower case hexadecimal.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Request is what of a request counts. Fields of the header that are absent are
// empty.
type Request struct {
	Method   string
	Host     string // in any case
	Path     string // escaped, as received
	RawQuery string // as received, without "?"

	// ContentType is taken without its parameters, but for the boundary of
	// multipart bodies.
	ContentType     string
	ContentEncoding string

	// Body is read from 0 to Size, in bytes. One that has a method
	// Bytes() ([]byte, bool), as *spool.Spool does, is not copied. May be nil
	// if Size is 0.
	Body io.ReaderAt
	Size int64
}

// Config says what does not count. A nil *Config excludes nothing. It must not be
// changed while it is in use.
type Config struct {
	// Exclude are places of JSON bodies that do not count: absent or present
	// with whatever value makes the same sum. An excluded array element counts
	// as removed. Other bodies are not affected.
	Exclude []Pointer
}

// state is what one Sum needs; it is pooled.
type state struct {
	canon
	head    []byte
	fields  []partField
	parts   hash.Hash // over all parts
	content hash.Hash // of one part, or of a raw body
}

var states = sync.Pool{New: func() any {
	return &state{parts: sha256.New(), content: sha256.New()}
}}

// Sum computes the fingerprint of req. The only errors are those of reading the
// body (io.ErrUnexpectedEOF if it is shorter than Size): a body that is not what
// its content type says is compared byte by byte.
func (c *Config) Sum(req Request) (Sum, error) {
	s := states.Get().(*state)
	defer s.free()
	if c != nil {
		s.exclude = c.Exclude
	}
	media, _, _ := strings.Cut(req.ContentType, ";")
	media = strings.ToLower(strings.Trim(media, " \t"))
	coding := strings.ToLower(strings.Trim(req.ContentEncoding, " \t"))
	if coding == "identity" {
		coding = ""
	}
	s.head = s.head[:0]
	for _, f := range [...]string{domain, req.Method, strings.ToLower(req.Host), req.Path, req.RawQuery, media, coding} {
		s.head = binary.AppendUvarint(s.head, uint64(len(f)))
		s.head = append(s.head, f...)
	}
	if err := s.body(req, media, coding); err != nil {
		return Sum{}, err
	}
	return sha256.Sum256(s.head), nil
}

// body appends the mode and what stands for the body in it.
func (s *state) body(req Request, media, coding string) error {
	if req.Size == 0 {
		s.head = append(s.head, modeEmpty)
		return nil
	}
	s.src.reset(req.Body, req.Size)
	switch {
	case coding != "":
	case isJSON(media):
		if s.document() {
			s.head = append(s.head, modeJSON)
			s.head = append(s.head, s.buf...)
			return nil
		}
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
	s.exclude = nil
	if cap(s.buf)+4*cap(s.offs)+cap(s.head)+4*cap(s.live) > maxKept {
		s.buf, s.offs, s.head, s.live = nil, nil, nil, nil
	}
	clear(s.fields[:cap(s.fields)])
	states.Put(s)
}

func isJSON(media string) bool {
	return media == "application/json" || (strings.HasSuffix(media, "+json") && strings.Contains(media, "/"))
}
