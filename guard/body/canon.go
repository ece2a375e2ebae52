package body

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"slices"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// The encoding of a JSON value. It is the same for all texts of a value, different
// for different values, and no encoding is a prefix of another:
//
//	null, false, true   'z', 'f', 't'
//	number              'n' length text            text as of jsonx.AppendNumber
//	string              's' length UTF-8
//	array               'a' length elements        in their order
//	object              'o' length (name value)*   by encoded name; equal names in their order
//
// length is one byte. What is longer than maxInline has an upper case tag and the SHA-256 of its contents instead of
// length and contents. So a document is a Merkle tree whose small branches are written out, which saves most of the
// hashing, and no value costs its container more than 130 bytes. Sums are stored: none of this may change without a new
// domain.
const (
	maxInline = 128
	// maxOpen is how many bytes of members of open objects are held at most. A
	// document with more of them counts as raw bytes.
	maxOpen = 16 << 20
	// flushAt is when the elements of an array go into its running hash.
	flushAt = 4 << 10

	tagArray    = 'a'
	tagNumber   = 'n'
	tagObject   = 'o'
	tagString   = 's'
	tagExcluded = 'x' // the whole document, never a part
)

// canon turns the JSON document of a source into its encoding, in one pass.
type canon struct {
	src     source
	exclude []jsonx.Pointer
	members []string // to be found
	found   []Member
	only    bool // the one exclusion is what is looked for, up to the first fault, and nothing else is kept

	buf   []byte      // encodings of the members and elements of open containers
	offs  []uint32    // where the members of open objects begin in buf
	live  []int32     // indices into exclude: what can still match, per open container
	text  hash.Hash   // of the long string being read
	lists []hash.Hash // by depth, of the long arrays being read
}

// document encodes the whole document into buf. Not ok: it is not JSON in our strict sense, or src.err is set.
func (c *canon) document() (ok bool) {
	c.buf, c.offs, c.live, c.found = c.buf[:0], c.offs[:0], c.live[:0], nil
	whole := false
	for i, p := range c.exclude {
		c.live = append(c.live, int32(i))
		whole = whole || len(p) == 0
	}
	read := c.value
	if whole && c.only {
		read = c.sought
	}
	if !read(0, c.live) || c.src.space() != 0 || c.src.more() || c.src.err != nil {
		return false
	}
	if whole {
		c.buf = append(c.buf[:0], tagExcluded)
	}
	return true
}

// value encodes the next value. live are the exclusions whose first depth tokens lead here.
func (c *canon) value(depth int, live []int32) bool {
	switch b := c.src.space(); b {
	case '{':
		c.src.i++
		return depth < maxDepth && c.object(depth, live)
	case '[':
		c.src.i++
		return depth < maxDepth && c.array(depth, live)
	case '"':
		c.src.i++
		return c.string()
	case 't':
		c.buf = append(c.buf, 't')
		return c.src.literal("true")
	case 'f':
		c.buf = append(c.buf, 'f')
		return c.src.literal("false")
	case 'n':
		c.buf = append(c.buf, 'z')
		return c.src.literal("null")
	default:
		tok, ok := c.src.number()
		return ok && c.number(tok)
	}
}

// open begins a value with contents; seal ends it.
func (c *canon) open(tag byte) (start int) {
	start = len(c.buf)
	c.buf = append(c.buf, tag, 0)
	return start
}

// seal sets the length of the contents, or puts their hash in their place.
func (c *canon) seal(start int) {
	contents := c.buf[start+2:]
	if len(contents) <= maxInline {
		c.buf[start+1] = byte(len(contents))
		return
	}
	sum := sha256.Sum256(contents)
	c.buf[start] -= 'a' - 'A'
	c.buf = append(c.buf[:start+1], sum[:]...)
}

// sealHash ends a value whose contents went into h, but for the last ones.
func (c *canon) sealHash(start int, h hash.Hash) {
	h.Write(c.buf[start+2:])
	c.buf[start] -= 'a' - 'A'
	c.buf = h.Sum(c.buf[:start+1])
}

// size is the length of the encoding at the beginning of b.
func size(b []byte) int {
	switch b[0] {
	case 'z', 'f', 't':
		return 1
	case tagArray, tagNumber, tagObject, tagString:
		return 2 + int(b[1])
	default:
		return 1 + sha256.Size
	}
}

func (c *canon) string() (ok bool) {
	start := c.open(tagString)
	done := false
	if c.buf, done, ok = c.src.text(c.buf, maxInline+1); !ok {
		return false
	}
	if done {
		c.seal(start)
		return true
	}
	return c.longString(start)
}

// longString goes on with a string whose text in buf is not all of it.
func (c *canon) longString(start int) (ok bool) {
	if c.text == nil {
		c.text = sha256.New()
	}
	c.text.Reset()
	for done := false; !done; {
		c.text.Write(c.buf[start+2:])
		if c.buf, done, ok = c.src.text(c.buf[:start+2], flushAt); !ok {
			return false
		}
	}
	c.sealHash(start, c.text)
	return true
}

func (c *canon) array(depth int, live []int32) bool {
	start, long := c.open(tagArray), false
	for i := int64(0); ; i++ {
		if more, ok := c.src.next(']', i == 0); !ok {
			return false
		} else if !more {
			break
		}
		begin, mark := len(c.buf), len(c.live)
		below, drop := live, false
		if len(live) > 0 {
			below, drop = c.follow(live, depth, nil, i)
		}
		read := c.value
		if drop && c.only {
			read = c.sought
		}
		if !read(depth+1, below) {
			return false
		}
		c.live = c.live[:mark]
		if drop || c.only {
			c.buf = c.buf[:begin]
		}
		if len(c.buf)-start > flushAt {
			if !long {
				long = true
				c.list(depth).Reset()
			}
			c.lists[depth].Write(c.buf[start+2:])
			c.buf = c.buf[:start+2]
		}
	}
	if long {
		c.sealHash(start, c.lists[depth])
	} else {
		c.seal(start)
	}
	return true
}

func (c *canon) list(depth int) hash.Hash {
	for len(c.lists) <= depth {
		c.lists = append(c.lists, nil)
	}
	if c.lists[depth] == nil {
		c.lists[depth] = sha256.New()
	}
	return c.lists[depth]
}

func (c *canon) object(depth int, live []int32) bool {
	start, first, met := c.open(tagObject), len(c.offs), false
	for i := 0; ; i++ {
		if more, ok := c.src.next('}', i == 0); !ok {
			return false
		} else if !more {
			break
		}
		begin, mark := len(c.buf), len(c.live)
		if !c.src.take('"') || !c.string() || !c.src.take(':') {
			return false
		}
		below, drop := live, false
		if len(live) > 0 {
			below, drop = c.follow(live, depth, c.buf[begin:], -1)
		}
		if c.only && len(below) > 0 {
			if met {
				c.found = []Member{{Err: jsonx.ErrAmbiguous}}
				return false
			}
			met = true
		}
		if !c.member(depth+1, below, c.buf[begin:], drop) {
			return false
		}
		c.live = c.live[:mark]
		if drop || c.only {
			c.buf = c.buf[:begin]
		} else {
			c.offs = append(c.offs, uint32(begin))
		}
		if len(c.buf)+4*len(c.offs) > maxOpen {
			return false
		}
	}
	c.sort(start+2, c.offs[first:])
	c.offs = c.offs[:first]
	c.seal(start)
	return true
}

// member encodes the value of a member with this encoded name, and keeps it if it is to be found. drop says that an
// exclusion ends there.
func (c *canon) member(depth int, live []int32, name []byte, drop bool) (ok bool) {
	if c.only && drop {
		return c.sought(depth, live)
	}
	i := -1
	if depth == 1 && len(c.members) > 0 {
		i = slices.IndexFunc(c.members, func(wanted string) bool { return named(name, wanted) })
	}
	if i < 0 {
		return c.value(depth, live)
	}
	m := Member{Name: c.members[i]}
	if _, ok = c.scalar(&m, depth, live); !ok {
		return false
	}
	for i := range c.found {
		if c.found[i].Name == m.Name {
			c.found[i].Err = jsonx.ErrAmbiguous
			return true
		}
	}
	c.found = append(c.found, m)
	return true
}

// sought reads the value that Lookup looks for.
func (c *canon) sought(depth int, live []int32) bool {
	m := Member{}
	there, ok := c.scalar(&m, depth, live)
	if there {
		c.found = append(c.found, m)
	}
	return ok && m.Err == nil
}

// scalar encodes the next value, and notes in m what it is. there is false for null.
func (c *canon) scalar(m *Member, depth int, live []int32) (there, ok bool) {
	switch c.src.space() {
	case '"':
		c.src.i++
		start, done := c.open(tagString), false
		if c.buf, done, ok = c.src.text(c.buf, maxValue+1); !ok {
			return true, false
		}
		if done {
			m.Value = string(c.buf[start+2:])
			c.seal(start)
			return true, true
		}
		m.Err = ErrValueTooLong
		return true, c.longString(start)
	case '{', '[', 't', 'f':
		m.Err = ErrNotScalar
		return true, c.value(depth, live)
	case 'n':
		return false, c.value(depth, live)
	}
	tok, ok := c.src.number()
	m.Value = string(tok)
	return true, ok && c.number(tok)
}

// number encodes a number.
func (c *canon) number(tok []byte) bool {
	start := c.open(tagNumber)
	c.buf = jsonx.AppendNumber(c.buf, tok)
	c.seal(start)
	return true
}

// sort brings the members, which begin at offs and fill buf from start on, into the order of their names.
func (c *canon) sort(start int, offs []uint32) {
	buf := c.buf
	less := func(a, b uint32) int {
		x, y := buf[a:], buf[b:]
		if r := bytes.Compare(x[:size(x)], y[:size(y)]); r != 0 {
			return r
		}
		return int(a) - int(b)
	}
	if slices.IsSortedFunc(offs, less) {
		return
	}
	slices.SortFunc(offs, less)
	end := len(buf)
	for _, o := range offs {
		m := buf[o:]
		name := size(m)
		buf = append(buf, m[:name+size(m[name:])]...)
	}
	copy(buf[start:], buf[end:])
	c.buf = buf[:end]
}

const (
	// maxDepth is how deep containers may nest. Deeper documents count as raw bytes.
	maxDepth = 512
	// maxNumber is the longest text of a number, in bytes. Longer ones are no
	// numbers that anybody computes with: such a document counts as raw bytes.
	maxNumber = 32 << 10
)

// text appends the decoded text of a string, of which the opening quote is taken. It stops after about limit bytes with
// done false; then it is to be called again. Not ok is what RFC 8259 forbids, and what decoders disagree about: invalid
// UTF-8 and lone surrogates, which many replace by one and the same character.
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
			s.need(len(`\ud83d\ude00`))
			r, size := jsonx.Escape(s.win[s.i:])
			if size <= 0 {
				return dst, false, false
			}
			dst = utf8.AppendRune(dst, r)
			s.i += size
			limit -= utf8.RuneLen(r)
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

// plain are the bytes that a string has unescaped.
var plain = func() (t [256]bool) {
	for c := 0x20; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

// number takes the number at the window's place and gives it as written. It stays valid until the window moves.
func (s *source) number() (tok []byte, ok bool) {
	s.need(maxNumber + 1)
	n := jsonx.NumberSize(s.win[s.i:])
	tok = s.win[s.i : s.i+n]
	s.i += n
	return tok, 0 < n && n <= maxNumber
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
