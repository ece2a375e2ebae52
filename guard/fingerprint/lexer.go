package fingerprint

import (
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// maxDepth is how deep containers may nest. Deeper documents count as raw
	// bytes.
	maxDepth = 512
	// maxNumber is the longest text of a number, in bytes. Longer ones are no
	// numbers that anybody computes with: such a document counts as raw bytes.
	maxNumber = 32 << 10
)

// text appends the decoded text of a string, of which the opening quote is taken.
// It stops after about limit bytes with done false; then it is to be called
// again. Not ok is what RFC 8259 forbids, and what decoders disagree about:
// invalid UTF-8 and lone surrogates, which many replace by one and the same
// character.
func (s *source) text(dst []byte, limit int) (out []byte, done, ok bool) {
	for limit > 0 {
		w := s.win[s.i:]
		w = w[:min(len(w), limit)]
		n := 0
		for n < len(w) && plain[w[n]] {
			n++
		}
		dst = append(dst, w[:n]...)
		s.i += n
		limit -= n
		if n == len(w) {
			if limit > 0 && !s.more() {
				return dst, false, false
			}
			continue
		}
		switch c := w[n]; {
		case c == '"':
			s.i++
			return dst, true, true
		case c == '\\':
			was := len(dst)
			if dst, ok = s.escape(dst); !ok {
				return dst, false, false
			}
			limit -= len(dst) - was
		case c >= utf8.RuneSelf:
			s.need(utf8.UTFMax)
			r, size := utf8.DecodeRune(s.win[s.i:])
			if r == utf8.RuneError && size == 1 {
				return dst, false, false
			}
			dst = append(dst, s.win[s.i:s.i+size]...)
			s.i += size
			limit -= size
		default: // control character
			return dst, false, false
		}
	}
	return dst, false, true
}

// plain are the bytes that stand for themselves in a string.
var plain = func() (t [256]bool) {
	for c := 0x20; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

// escape appends what the escape at the window's place stands for.
func (s *source) escape(dst []byte) (out []byte, ok bool) {
	s.need(len(`\ud83d\ude00`))
	w := s.win[s.i:]
	if len(w) < 2 {
		return dst, false
	}
	var c byte
	switch w[1] {
	case '"', '\\', '/':
		c = w[1]
	case 'b':
		c = '\b'
	case 'f':
		c = '\f'
	case 'n':
		c = '\n'
	case 'r':
		c = '\r'
	case 't':
		c = '\t'
	case 'u':
		r, ok := hex4(w)
		if !ok {
			return dst, false
		}
		s.i += 6
		if utf16.IsSurrogate(r) {
			low, ok := hex4(w[6:])
			if r = utf16.DecodeRune(r, low); !ok || r == utf8.RuneError {
				return dst, false
			}
			s.i += 6
		}
		return utf8.AppendRune(dst, r), true
	default:
		return dst, false
	}
	s.i += 2
	return append(dst, c), true
}

// hex4 reads \uXXXX at the beginning of w.
func hex4(w []byte) (r rune, ok bool) {
	if len(w) < 6 || w[0] != '\\' || w[1] != 'u' {
		return 0, false
	}
	for _, c := range w[2:6] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// skipText takes the rest of a string. scratch is overwritten.
func (s *source) skipText(scratch []byte) (out []byte, ok bool) {
	for done := false; !done; {
		if scratch, done, ok = s.text(scratch[:0], 1<<10); !ok {
			return scratch, false
		}
	}
	return scratch, true
}

// number takes the number at the window's place and gives it as written. It stays
// valid until the window moves.
func (s *source) number() (tok []byte, ok bool) {
	n := 0
	// at gives the byte after n, 0 at the end. Filling keeps what was seen.
	at := func() byte {
		if s.i+n >= len(s.win) && !s.fill() {
			return 0
		}
		return s.win[s.i+n]
	}
	digits := func() bool {
		from := n
		for c := at(); '0' <= c && c <= '9'; c = at() {
			if n++; n > maxNumber {
				return false
			}
		}
		return n > from
	}
	if at() == '-' {
		n++
	}
	if at() == '0' {
		n++
	} else if !digits() {
		return nil, false
	}
	if at() == '.' {
		n++
		if !digits() {
			return nil, false
		}
	}
	if c := at(); c == 'e' || c == 'E' {
		n++
		if c := at(); c == '+' || c == '-' {
			n++
		}
		if !digits() {
			return nil, false
		}
	}
	tok = s.win[s.i : s.i+n]
	s.i += n
	return tok, true
}

// literal takes word.
func (s *source) literal(word string) bool {
	s.need(len(word))
	w := s.win[s.i:]
	if len(w) < len(word) || string(w[:len(word)]) != word {
		return false
	}
	s.i += len(word)
	return true
}
