package ledger

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// marks says which entries of a full tile were pruned.
type marks struct {
	bits [tileWidth / 64]uint64
	// root is that of the tree that ends with the tile.
	root tlog.Hash
	// next is when the first of the others may go, in nanoseconds; 0 is not known. It is
	// not vouched for: the entries themselves tell.
	next int64
	// by is the key that vouches; empty is none.
	by string
}

func (m *marks) has(index int64) bool {
	i := index & (tileWidth - 1)
	return m.bits[i/64]>>(i%64)&1 == 1
}

func (m *marks) set(index int64) {
	i := index & (tileWidth - 1)
	m.bits[i/64] |= 1 << (i % 64)
}

func (m *marks) count() int {
	n := 0
	for _, b := range m.bits {
		n += bits.OnesCount64(b)
	}
	return n
}

// marksLine begins the fourth line of a head that vouches for what was pruned.
const marksLine = "pruned "

// text is what is signed: the head of the tree that ends with tile n, and a line more,
// which no plain head has.
func (m *marks) text(origin string, n int64) string {
	b := make([]byte, 0, tileWidth/8)
	for _, v := range m.bits {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return headText(origin, (n+1)<<tileHeight, m.root) + marksLine + base64.StdEncoding.EncodeToString(b) + "\n"
}

// parseMarks reads what text made, and nothing else.
func parseMarks(text string) (origin string, n int64, m marks, err error) {
	malformed := fmt.Errorf("%w: not a note of what was pruned", ErrProof)
	at := strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n") + 1
	head, err := parseHeadText(text[:at])
	if err != nil || head.Size == 0 || head.Size&(tileWidth-1) != 0 {
		return "", 0, m, malformed
	}
	line, ok := strings.CutPrefix(strings.TrimSuffix(text[at:], "\n"), marksLine)
	b, err := base64.StdEncoding.DecodeString(line)
	if !ok || err != nil || len(b) != tileWidth/8 {
		return "", 0, m, malformed
	}
	for i := range m.bits {
		m.bits[i] = binary.BigEndian.Uint64(b[8*i:])
	}
	n, m.root = head.Size>>tileHeight-1, head.Root
	if m.text(head.Origin, n) != text {
		return "", 0, m, malformed
	}
	return head.Origin, n, m, nil
}

// openMarks opens the note that vouches for what was pruned of one tile: one of the keys
// of the heads must have signed it. The error is ErrProof.
func openMarks(msg []byte, origin string, keys note.Verifiers) (n int64, m marks, err error) {
	if len(msg) > MaxHead {
		return 0, m, fmt.Errorf("%w: a note of %d bytes, at most %d", ErrProof, len(msg), MaxHead)
	}
	opened, err := note.Open(msg, keys)
	if err != nil {
		return 0, m, fmt.Errorf("%w: %w", ErrProof, err)
	}
	if !strictSignatures(string(msg[len(opened.Text):])) {
		return 0, m, fmt.Errorf("%w: malformed signatures", ErrProof)
	}
	of, n, m, err := parseMarks(opened.Text)
	if err != nil {
		return 0, m, err
	}
	if of != origin {
		return 0, marks{}, fmt.Errorf("%w: a note of the log %q", ErrProof, of)
	}
	m.by = opened.Sigs[0].Name + "+" + fmt.Sprintf("%08x", opened.Sigs[0].Hash)
	return n, m, nil
}

// vouch is what stands in the store of the marks of tile n, signed.
func (l *Log) vouch(n int64, m *marks) ([]byte, error) {
	msg, err := note.Sign(&note.Note{Text: m.text(l.origin, n)}, l.signer)
	if err != nil {
		return nil, fmt.Errorf("signing what was pruned: %w", err)
	}
	return append(binary.BigEndian.AppendUint64(nil, uint64(m.next)), msg...), nil
}

// storedMarks are the marks of a tile as they stand in the store, with the note in them;
// the zero version says that there are none.
func (s *shelf) storedMarks(ctx context.Context, n int64) (next int64, msg []byte, version store.Version, err error) {
	found, err := s.store.Get(ctx, s.prunedKey(n))
	if errors.Is(err, store.ErrNotFound) {
		return 0, nil, 0, nil
	}
	if err != nil {
		return 0, nil, 0, err
	}
	if len(found.Value) < 8 {
		return 0, nil, 0, fmt.Errorf("%w: the marks of what was pruned of tile %d", ErrTampered, n)
	}
	return int64(binary.BigEndian.Uint64(found.Value)), found.Value[8:], found.Version, nil
}

// pruned reads the marks of a tile, for which the key of the heads must vouch; the zero
// version says that there are none.
func (s *shelf) pruned(ctx context.Context, n int64) (marks, store.Version, error) {
	m, _, version, err := s.prunedNote(ctx, n)
	return m, version, err
}

// prunedNote also returns the note that vouches.
func (s *shelf) prunedNote(ctx context.Context, n int64) (marks, []byte, store.Version, error) {
	next, msg, version, err := s.storedMarks(ctx, n)
	if err != nil || version == 0 {
		return marks{}, nil, 0, err
	}
	of, m, err := openMarks(msg, s.origin, s.keys)
	if err == nil && of != n {
		err = fmt.Errorf("%w: it is of tile %d", ErrProof, of)
	}
	if err != nil {
		return marks{}, nil, 0, fmt.Errorf("%w: the note of what was pruned of tile %d: %w", ErrTampered, n, err)
	}
	m.next = next
	return m, msg, version, nil
}

// Voucher is a key that vouched for what was pruned.
type Voucher struct {
	// Key is its name and its hash, as in the signature of a head.
	Key string
	// Entries is the number of pruned entries that it vouched for.
	Entries int64
}

// vouchers counts by key, in the order in which they are met.
type vouchers []Voucher

func (v *vouchers) add(key string) {
	for i := range *v {
		if (*v)[i].Key == key {
			(*v)[i].Entries++
			return
		}
	}
	*v = append(*v, Voucher{Key: key, Entries: 1})
}
