package badger

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"time"
)

// A census is what a table holds, by the time from which Badger may drop it. A table
// never changes, so one count is right for as long as the table lives. What a newer
// entry in another table has replaced is not known and counts as living.
type census struct {
	// Bytes is the size of the table.
	Bytes int64 `json:"bytes"`
	// Expiring is in the order of time. What stays for ever is not in it.
	Expiring []expiring `json:"expiring,omitempty"`
}

// expiring are bytes that may be dropped from a time on, Unix seconds; deletions, and
// what they or others in the same table have replaced, from zero on.
type expiring struct {
	From  int64 `json:"from"`
	Bytes int64 `json:"bytes"`
}

// dead is how many bytes of the table compaction could drop now, by the clock that
// Badger drops by.
func (c census) dead(now time.Time) (sum int64) {
	for _, e := range c.Expiring {
		if e.From > now.Unix() {
			break
		}
		sum += e.Bytes
	}
	return sum
}

const (
	// finest is the width of the narrowest bucket of expiries, in seconds.
	finest = 15 * 60
	// mostBuckets of a census, and two, so that what is known of a table stays small.
	mostBuckets = 32
)

// counting adds up bytes by bucket, entry by entry in the order of a table.
type counting struct {
	buckets map[int64]int64
	key     []byte // of the last entry, without its version
}

const (
	badgerDeleted = 1 << 0 // in an entry's meta byte
	badgerVersion = 8      // bytes at the end of a key
	never         = -1
)

var errEntries = errors.New("entries are garbled although the checksum matches")

// block counts the entries of a block: the entries, the offset of each, little endian
// as on all systems that Badger runs on, and their number. An entry: 2 bytes each for
// how much of its key is as in the first one's and for the length of the rest, that
// rest, meta, user meta, expiry, value.
func (c *counting) block(b []byte) error {
	end := len(b) - 4
	if end < 0 {
		return errEntries
	}
	n := int(binary.BigEndian.Uint32(b[end:]))
	if n < 0 || n > end/4 {
		return errEntries
	}
	offsets := end - 4*n
	var first []byte // the first key
	for i := range n {
		from, to := int(binary.LittleEndian.Uint32(b[offsets+4*i:])), offsets
		if i+1 < n {
			to = int(binary.LittleEndian.Uint32(b[offsets+4*i+4:]))
		}
		if from < 0 || from+4 > to || to > offsets {
			return errEntries
		}
		shared, rest := int(binary.LittleEndian.Uint16(b[from:])), int(binary.LittleEndian.Uint16(b[from+2:]))
		at := from + 4 + rest
		if at+2 > to || shared > len(first) || shared+rest < badgerVersion {
			return errEntries
		}
		if i == 0 {
			first = b[from+4 : at]
		}
		expires, size := binary.Uvarint(b[at+2 : to])
		if size <= 0 {
			return errEntries
		}
		bucket := int64(never)
		switch {
		case c.again(first[:shared], b[from+4:at]) || b[at]&badgerDeleted != 0:
			bucket = 0
		case expires > 0:
			bucket = (int64(expires) + finest - 1) / finest * finest
		}
		c.buckets[bucket] += int64(to-from) + 4
	}
	return nil
}

// again reports whether the key, which is given in two parts, is that of the last
// entry in an older version.
func (c *counting) again(shared, rest []byte) bool {
	n := len(shared) + len(rest) - badgerVersion
	s := min(n, len(shared))
	same := len(c.key) == n && bytes.Equal(c.key[:s], shared[:s]) && bytes.Equal(c.key[s:], rest[:n-s])
	if !same {
		c.key = append(append(c.key[:0], shared[:s]...), rest[:n-s]...)
	}
	return same
}

// census is what was counted of a table of size bytes, in few buckets of about as many
// bytes each. They end late rather than early: what is called dead is dead.
func (c *counting) census(size int64) census {
	out := census{Bytes: size}
	var all []expiring
	var total int64
	for from, n := range c.buckets {
		if from != never {
			all = append(all, expiring{From: from, Bytes: n})
			total += n
		}
	}
	slices.SortFunc(all, func(a, b expiring) int { return cmp.Compare(a.From, b.From) })
	var sum int64
	for i, e := range all {
		sum += e.Bytes
		if sum*mostBuckets > total || e.From == 0 || i == len(all)-1 {
			out.Expiring = append(out.Expiring, expiring{From: e.From, Bytes: sum})
			sum = 0
		}
	}
	return out
}
