package fingerprint

import (
	"bytes"
	"encoding/binary"
	"hash"
	"mime"
	"slices"
	"strings"
)

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

// multipart hashes the parts of the source's body into s.parts: of each part the
// header, by lower case names, and the content. The boundary, which clients make
// anew for every attempt, the preamble and the epilogue do not count. Not ok: it
// is not exactly as RFC 2046 has it (CRLF only, no folded fields, closed), so
// that readers might disagree about its parts; or src.err is set.
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
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || !isToken(name) || bytes.ContainsAny(value, "\r\n\x00") {
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

// isToken reports whether name is a field name (RFC 9110, section 5.6.2). It also
// keeps away folded lines, which begin with white space.
func isToken(name []byte) bool {
	for _, c := range name {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return len(name) > 0
}
