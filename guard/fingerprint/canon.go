package fingerprint

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"slices"
)

// The encoding of a JSON value. It is the same for all writings of a value and
// for no two values, and no encoding is the beginning of another:
//
//	null, false, true   'z', 'f', 't'
//	number              'n' length text            text as of appendNumber
//	string              's' length UTF-8
//	array               'a' length elements        in their order
//	object              'o' length (name value)*   by encoded name; equal names in their order
//
// length is one byte. What is longer than maxInline has an upper case tag and
// the SHA-256 of its contents instead of length and contents. So a document is a
// Merkle tree whose small branches are written out, which saves most of the hashing,
// and no value costs its container more than 130 bytes. Sums are stored: none of
// this may change without a new domain.
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
	exclude []Pointer

	buf   []byte      // encodings of the members and elements of open containers
	offs  []uint32    // where the members of open objects begin in buf
	live  []int32     // indices into exclude: what can still match, per open container
	text  hash.Hash   // of the long string being read
	lists []hash.Hash // by depth, of the long arrays being read
}

// document encodes the whole document into buf. Not ok: it is not JSON in our
// strict sense, or src.err is set.
func (c *canon) document() (ok bool) {
	c.buf, c.offs, c.live = c.buf[:0], c.offs[:0], c.live[:0]
	whole := false
	for i, p := range c.exclude {
		c.live = append(c.live, int32(i))
		whole = whole || len(p.tokens) == 0
	}
	if !c.value(0, c.live) || c.src.space() != 0 || c.src.more() || c.src.err != nil {
		return false
	}
	if whole {
		c.buf = append(c.buf[:0], tagExcluded)
	}
	return true
}

// value encodes the next value. live are the exclusions whose first depth tokens
// lead here.
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
		if ok {
			start := c.open(tagNumber)
			c.buf = appendNumber(c.buf, tok)
			c.seal(start)
		}
		return ok
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
	if c.text == nil {
		c.text = sha256.New()
	}
	c.text.Reset()
	for !done {
		c.text.Write(c.buf[start+2:])
		if c.buf, done, ok = c.src.text(c.buf[:start+2], flushAt); !ok {
			return false
		}
	}
	c.sealHash(start, c.text)
	return true
}

func (c *canon) array(depth int, live []int32) bool {
	start := c.open(tagArray)
	if c.src.space() == ']' {
		c.src.i++
		c.seal(start)
		return true
	}
	long := false
	for i := int64(0); ; i++ {
		begin, mark := len(c.buf), len(c.live)
		below, drop := live, false
		if len(live) > 0 {
			below, drop = c.follow(live, depth, nil, i)
		}
		if !c.value(depth+1, below) {
			return false
		}
		c.live = c.live[:mark]
		if drop {
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
		switch c.src.space() {
		case ',':
			c.src.i++
		case ']':
			c.src.i++
			if long {
				c.sealHash(start, c.lists[depth])
			} else {
				c.seal(start)
			}
			return true
		default:
			return false
		}
	}
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
	start, first := c.open(tagObject), len(c.offs)
	if c.src.space() == '}' {
		c.src.i++
		c.seal(start)
		return true
	}
	for {
		if c.src.space() != '"' {
			return false
		}
		c.src.i++
		begin, mark := len(c.buf), len(c.live)
		if !c.string() || c.src.space() != ':' {
			return false
		}
		c.src.i++
		below, drop := live, false
		if len(live) > 0 {
			below, drop = c.follow(live, depth, c.buf[begin:], -1)
		}
		if !c.value(depth+1, below) {
			return false
		}
		c.live = c.live[:mark]
		if drop {
			c.buf = c.buf[:begin]
		} else {
			c.offs = append(c.offs, uint32(begin))
		}
		if len(c.buf)+4*len(c.offs) > maxOpen {
			return false
		}
		switch c.src.space() {
		case ',':
			c.src.i++
		case '}':
			c.src.i++
			c.sort(start+2, c.offs[first:])
			c.offs = c.offs[:first]
			c.seal(start)
			return true
		default:
			return false
		}
	}
}

// sort brings the members, which begin at offs and fill buf from start on, into
// the order of their names.
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
