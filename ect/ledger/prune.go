package ledger

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// pruneStep is the largest number of entries of one commit. Larger commits, with four keys
// for each entry, would delay the calls that share the fsync.
const pruneStep = 42

// Prune removes the entries that were recorded before a time and whose KeepUntil has
// passed, and returns how many. Their leaf hashes stay for verification; their ids are
// free again. A note signed with the key of the heads lists them in the same commit.
// Entries of the last, unfinished tile stay. Damaged entries are logged and skipped. The
// error is one of the store; the number is correct even then.
func (l *Log) Prune(ctx context.Context, before time.Time) (int, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	now, err := l.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	total := 0
	for n := range l.now.Load().size >> tileHeight {
		pruned, younger, err := l.pruneTile(ctx, n, before, now)
		total += pruned
		if err != nil || younger {
			return total, err
		}
	}
	return total, nil
}

// pruneTile prunes one full tile. younger says that an entry in it was recorded at or after
// before, and so were all later ones.
func (l *Log) pruneTile(ctx context.Context, n int64, before, now time.Time) (pruned int, younger bool, err error) {
	m, err := l.pruned(ctx, n)
	if errors.Is(err, ErrTampered) {
		l.reportUnprunable(n<<tileHeight, err)
		return 0, false, nil
	}
	if err != nil || m.count() == tileWidth || m.next > now.UnixNano() {
		return 0, false, err
	}
	known := m.next
	gone, younger, err := l.findPrunable(ctx, n, &m, before, now)
	if err != nil || len(gone) == 0 && m.next == known {
		return 0, younger, err
	}
	signed, err := l.signatures(ctx, n)
	if err != nil {
		return 0, younger, err
	}
	hashes, root, err := l.proven(ctx, n)
	if errors.Is(err, ErrTampered) {
		l.reportUnprunable(n<<tileHeight, err)
		return 0, younger, nil
	}
	if err != nil {
		return 0, younger, err
	}
	m.root = root
	// The note signs the hashes of the pruned entries, so check them against the tree first.
	gone = slices.DeleteFunc(gone, func(p prunable) bool {
		if tlog.RecordHash(p.Leaf) == hashes[p.Index&(tileWidth-1)] {
			return false
		}
		l.reportUnprunable(p.Index, fmt.Errorf("%w: it does not fit its stored hash", ErrTampered))
		m.next = 0
		return true
	})
	for first := true; first || len(gone) > 0; first = false {
		step := gone[:l.prunedAtOnce(gone)]
		gone = gone[len(step):]
		if err := l.pruneCommit(ctx, n, &m, step, signed, len(gone) == 0); err != nil {
			return pruned, younger, err
		}
		pruned += len(step)
	}
	return pruned, younger, nil
}

// prunable is a stored entry that may be pruned.
type prunable struct {
	Entry
	version store.Version
}

// findPrunable lists the entries of a full tile that may be pruned, and sets m.next to the
// time when the first of the others may. Damaged entries are skipped.
func (l *Log) findPrunable(ctx context.Context, n int64, m *marks, before, now time.Time) (gone []prunable, younger bool, err error) {
	damaged := false
	next := int64(math.MaxInt64)
	for found, err := range l.scan(ctx, l.entries(n<<tileHeight, (n+1)<<tileHeight)) {
		e, err := l.scanned(found, err)
		if err != nil && !errors.Is(err, ErrTampered) {
			return nil, false, err
		}
		switch {
		case err != nil:
			l.reportUnprunable(indexIn(found.Key), err)
			damaged = true
		case !e.Recorded.Before(before):
			younger = true
		case e.KeepUntil.After(now):
			next = min(next, e.KeepUntil.UnixNano())
		default:
			gone = append(gone, prunable{e, found.Version})
		}
	}
	if damaged || younger || m.count()+len(gone) == tileWidth {
		next = 0 // unknown, because not all were read; or no entry is left
	}
	m.next = next
	return gone, younger, nil
}

// reportUnprunable logs once in each process why an entry cannot be pruned. l.pruning is
// held.
func (l *Log) reportUnprunable(index int64, why error) {
	if !l.reported.first(index) {
		return
	}
	l.options.Logger.Error("an entry of the ledger cannot be pruned and stays; the others go on",
		slog.Int64("entry", index), slog.Any("error", why))
}

// reported are entries that were reported, at most maxFaults.
type reported struct{ all map[int64]bool }

func (r *reported) first(index int64) bool {
	if r.all[index] || len(r.all) == maxFaults {
		return false
	}
	r.all[index] = true
	return true
}

// proven returns the leaf hashes of a full tile, and the root of the tree that ends with
// it, both proved against the signed head.
func (l *Log) proven(ctx context.Context, n int64) ([]tlog.Hash, tlog.Hash, error) {
	s := l.now.Load()
	hashes, err := l.leaves(ctx, s, n<<tileHeight, (n+1)<<tileHeight)
	root := s.root()
	if end := (n + 1) << tileHeight; err == nil && end != s.size {
		err = s.proved(ctx, l.logStore, func(r tlog.HashReader) (err error) {
			root, err = tlog.TreeHash(end, r)
			return err
		})
	}
	return hashes, root, err
}

// prunedAtOnce returns how many of the first entries fit into one commit.
func (l *Log) prunedAtOnce(gone []prunable) int {
	n, writes := 0, 1
	for n < min(len(gone), pruneStep) {
		writes += 5 + len(l.linkKeys(&gone[n].Event, gone[n].Index))
		if n > 0 && writes > store.MaxBatch {
			break
		}
		n++
	}
	return n
}

// pruneCommit removes entries with their stored signatures, and marks them in m.
func (l *Log) pruneCommit(ctx context.Context, n int64, m *marks, step []prunable, signed map[int64]bool, last bool) error {
	condition := store.Absent()
	if m.version != 0 {
		condition = store.VersionIs(m.version)
	}
	batch := make([]store.Write, 0, 1+4*len(step))
	given := make(map[string]bool)
	for i := range step {
		e := &step[i]
		m.set(e.Index)
		names := l.namesOf(e.Workflow, e.ID)
		batch = append(batch,
			// A full store accepts a batch that begins with an existing key, because pruning
			// makes room.
			store.Write{Key: l.entryKey(e.Index), Delete: true, If: store.VersionIs(e.version)},
			store.Write{Key: names.appendID(nil, spaceID), Delete: true},
		)
		if signed[e.Index] {
			batch = append(batch, store.Write{Key: signedKey(l.id, e.Index), Delete: true})
		}
		if e.Workflow != "" {
			batch = append(batch, store.Write{Key: names.appendWorkflow(nil, l.id, e.Index), Delete: true})
			// With KeepUntil the key expires by itself.
			if key := names.appendGiven(nil); e.KeepUntil.IsZero() && !given[string(key)] {
				given[string(key)] = true
				batch = append(batch, store.Write{Key: key, Delete: true})
			}
		}
		for _, key := range l.linkKeysIn(names.workflow, &e.Event, e.Index) {
			batch = append(batch, store.Write{Key: key, Delete: true})
		}
	}
	msg, err := note.Sign(&note.Note{Text: m.text(l.origin, n)}, l.signer)
	if err != nil {
		return fmt.Errorf("signing what was pruned: %w", err)
	}
	next := m.next
	if !last {
		next = 0
	}
	value := append(binary.BigEndian.AppendUint64(nil, uint64(next)), msg...)
	m.version, err = l.store.Commit(ctx, append(batch, store.Write{Key: l.prunedKey(n), If: condition, Value: value})...)
	return err
}

// marks says which entries of a full tile were pruned.
type marks struct {
	bits [tileWidth / 64]uint64
	root tlog.Hash // of the tree that ends with the tile
	// next is when the first of the other entries may be pruned, in nanoseconds since 1970;
	// 0 is unknown. It is not signed: it can be computed from the entries.
	next    int64
	by      string        // the key that signed the note; empty if there is none
	note    []byte        // as stored
	version store.Version // of the note in the store; 0 if there is none
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

// marksLine begins the fourth line of the note, which no plain head has.
const marksLine = "pruned "

// text returns the signed text: the head of the tree that ends with tile n, and the marks.
func (m *marks) text(origin string, n int64) string {
	b := make([]byte, 0, tileWidth/8)
	for _, v := range m.bits {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return headText(origin, (n+1)<<tileHeight, m.root) + marksLine + base64.StdEncoding.EncodeToString(b) + "\n"
}

// parseMarks accepts only the exact form that text returns.
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

// openMarks opens the note of one tile; one of keys must have signed it. The error is
// ErrProof.
func openMarks(msg []byte, origin string, keys note.Verifiers) (n int64, m marks, err error) {
	opened, err := openNote(msg, keys)
	if err != nil {
		return 0, m, err
	}
	of, n, m, err := parseMarks(opened.Text)
	if err != nil {
		return 0, m, err
	}
	if of != origin {
		return 0, marks{}, fmt.Errorf("%w: a note of the log %q", ErrProof, of)
	}
	m.by = fmt.Sprintf("%s+%08x", opened.Sigs[0].Name, opened.Sigs[0].Hash)
	return n, m, nil
}

// storedMarks reads the stored marks without verifying the note: next, note and version.
func (s *logStore) storedMarks(ctx context.Context, n int64) (m marks, err error) {
	found, err := s.store.Get(ctx, s.prunedKey(n))
	if errors.Is(err, store.ErrNotFound) {
		return m, nil
	}
	if err != nil {
		return m, err
	}
	if m.version = found.Version; len(found.Value) < 8 {
		return m, fmt.Errorf("%w: the marks of what was pruned of tile %d", ErrTampered, n)
	}
	m.next, m.note = int64(binary.BigEndian.Uint64(found.Value)), found.Value[8:]
	return m, nil
}

// pruned reads the marks of a tile and verifies their note. The error is ErrTampered, with the version alone, or
// one of the store.
func (s *logStore) pruned(ctx context.Context, n int64) (marks, error) {
	stored, err := s.storedMarks(ctx, n)
	if err != nil || stored.version == 0 {
		return marks{version: stored.version}, err
	}
	of, m, err := openMarks(stored.note, s.origin, s.keys)
	if err == nil && of != n {
		err = fmt.Errorf("%w: it is of tile %d", ErrProof, of)
	}
	if err != nil {
		return marks{version: stored.version}, fmt.Errorf("%w: the note of what was pruned of tile %d: %w", ErrTampered, n, err)
	}
	m.next, m.note, m.version = stored.next, stored.note, stored.version
	return m, nil
}

// Voucher is a key that signed notes of pruned entries.
type Voucher struct {
	// Key is the name and the hash of the key, as in the signature of a head.
	Key string `json:"key"`
	// Entries is the number of pruned entries that it signed for.
	Entries int64 `json:"entries"`
}

// vouchers counts entries by key, in the order of first appearance.
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

// resealPage is the number of values that are read in one snapshot.
const resealPage = 256

// Reseal encrypts values under older keys anew with the newest, and returns how many. It can
// be stopped at any time; the next run starts over. Afterwards the log needs only the newest
// key, except for events that a process without that key recorded meanwhile. Values that
// cannot be decrypted stay, and are the error: ErrTampered.
func (l *Log) Reseal(ctx context.Context) (int, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	var damaged error
	r := store.NewResealer(l.store, l.sealer)
	r.OnDamaged = func(found store.Entry, err error) {
		damaged = errors.Join(damaged, fmt.Errorf("%w: %q: %w", ErrTampered, found.Key[:2], err))
	}
	for _, kind := range []byte{spaceEntry, spaceSigned} {
		r.Bulk = kind == spaceEntry
		if err := r.Walk(ctx, logKey(kind, l.id, 0), resealPage, r.Reseal); err != nil {
			return r.Resealed, err
		}
	}
	return r.Resealed, damaged
}
