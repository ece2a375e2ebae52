package ledger

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

// full is a store that accepts only changes of existing keys, as a full badger store does.
type full struct{ store.Store }

func (s full) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if batch[0].If.Holds(nil) { // the first write may begin something
		return 0, store.ErrFull
	}
	return s.Store.Commit(ctx, batch...)
}

// A full store can be pruned, and waiting events still reach the tree.
func TestPruneMakesRoom(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	for n := range tileWidth {
		mustAppend(t, l, testEvent(n))
	}
	l = mustOpen(t, testOptions(full{mem}))
	mustPrune(t, l, tileWidth)
	mustVerify(t, l)
}

// TestPruningElsewhereIsNoAlteration: who verifies or exports a log that another process prunes meanwhile, between
// whatever two reads, finds no fault.
func TestPruningElsewhereIsNoAlteration(t *testing.T) {
	base := memory.New(memory.Options{})
	owner := mustOpen(t, placing(base))
	for n := range 2 * tileWidth {
		if n == tileWidth {
			mustPrune(t, owner, tileWidth/2)
		}
		e := shown(n)
		if n%2 == 1 {
			e.KeepUntil = time.Now().Add(2 * time.Hour)
		}
		mustAppend(t, owner, e)
	}
	must(owner.StoreSignatures(t.Context(), func([]byte) bool { return true }))(t)
	some := must(owner.Entry(t.Context(), tileWidth+20))(t)
	must(owner.Prune(t.Context(), some.Recorded))(t)
	all := contents(t, base)
	for name, read := range map[string]func(l *Log) error{
		"verify": func(l *Log) error {
			r, err := l.Verify(t.Context())
			if len(r.Vouchers) != 1 || r.Vouchers[0].Entries != r.Pruned || r.Pruned+r.Entries != 2*tileWidth {
				t.Errorf("%+v", r.Contents)
			}
			return errors.Join(err, faultsOf(&r))
		},
		"export": func(l *Log) error {
			var b bytes.Buffer
			if _, err := l.Export(t.Context(), &b); err != nil {
				return err
			}
			_, err := VerifyExport(&b, testOrigin, testKeys, nil)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for at, last := 0, false; !last; at++ {
				if at > 10 { // then the same for each entry
					at += 12
				}
				mem := filled(t, all)
				owner, reads := mustOpen(t, placing(mem)), -tileWidth*2
				l := mustOpen(t, placing(&hooked{mem, func(store.Range) {
					if reads++; reads == at {
						mustPrune(t, owner, -1)
					}
				}}))
				reads = 0
				if err := read(l); err != nil {
					t.Errorf("pruned before read %d: %v", at, err)
				}
				last = reads < at
			}
		})
	}
}

// excised are the writes that remove an entry with all its index keys. They need no secret:
// the store's keys show what belongs together.
func excised(t *testing.T, st store.Store, index int64) (batch []store.Write) {
	t.Helper()
	for _, e := range contents(t, st) {
		switch e.Key[1] {
		case spaceEntry, spaceWorkflow:
			if indexIn(e.Key) != index {
				continue
			}
		case spaceID:
			if where, ok := decodeLocation(e.Value); !ok || where.index != index {
				continue
			}
		default:
			continue
		}
		batch = append(batch, store.Write{Key: e.Key, Delete: true})
	}
	return batch
}

// noted is the value of marks, signed.
func noted(t *testing.T, origin string, signer note.Signer, n int64, m *marks) []byte {
	t.Helper()
	msg := must(note.Sign(&note.Note{Text: m.text(origin, n)}, signer))(t)
	return append(make([]byte, 8), msg...)
}

// The key of the heads signs what was pruned: a deleted entry with forged marks does not
// look pruned.
func TestPrunedIsVouchedFor(t *testing.T) {
	const victim = 5
	other, _ := newHeadKey("other.example")
	base := func(t *testing.T) (Options, *Log) {
		o := testOptions(memory.New(memory.Options{}))
		l := mustOpen(t, o)
		for n := range 2*tileWidth + 8 {
			e := testEvent(n)
			if n != 3 && n != tileWidth+victim {
				e.KeepUntil = time.Now().Add(time.Hour)
			}
			mustAppend(t, l, e)
		}
		return o, l
	}
	marked := func(t *testing.T, l *Log) *marks {
		t.Helper()
		root := must(tlog.TreeHash(tileWidth, l.now.Load().hashes(t.Context(), l.logStore)))(t)
		m := &marks{root: root}
		m.set(victim)
		return m
	}
	for name, forge := range map[string]func(*testing.T, Options, *Log) []byte{
		"nothing": nil,
		"plain marks": func(_ *testing.T, _ Options, _ *Log) []byte {
			m := binary.BigEndian.AppendUint64(nil, 1<<victim)
			return append(m, make([]byte, tileWidth/8)...)
		},
		"marks of somebody else": func(t *testing.T, _ Options, l *Log) []byte {
			return noted(t, testOrigin, other, 0, marked(t, l))
		},
		"marks of another log": func(t *testing.T, _ Options, l *Log) []byte {
			return noted(t, "another", testSigner, 0, marked(t, l))
		},
		"marks of another tree": func(t *testing.T, _ Options, l *Log) []byte {
			m := marked(t, l)
			m.root = tlog.Hash{1}
			return noted(t, testOrigin, testSigner, 0, m)
		},
		"marks of another tile": func(t *testing.T, _ Options, l *Log) []byte {
			mustPrune(t, l, 2)
			found := must(l.store.Get(t.Context(), l.prunedKey(1)))(t)
			return found.Value
		},
	} {
		t.Run(name, func(t *testing.T) {
			o, l := base(t)
			var value []byte
			if forge != nil {
				value = forge(t, o, l)
			}
			batch := excised(t, o.Store, victim)
			if value != nil {
				batch = append(batch, store.Write{Key: l.prunedKey(0), Value: value})
			}
			if _, err := o.Store.Commit(t.Context(), batch...); err != nil {
				t.Fatal(err)
			}
			r, err := verifyStored(t, o)
			index := int64(victim)
			if name == "marks of another tree" {
				index = 0
			}
			if err != nil || !faultsNaming(&r, index) {
				t.Errorf("entry %d is not named: %v%s", index, err, allFaults(&r))
			}
			var b bytes.Buffer
			if _, err := l.Export(t.Context(), &b); err == nil {
				_, err = VerifyExport(&b, testOrigin, testKeys, nil)
				if !errors.Is(err, ErrProof) || name != "marks of another tree" {
					t.Errorf("exported, and verified as %v", err)
				}
			}
		})
	}
	o, l := base(t)
	mustPrune(t, l, 2)
	r := mustVerify(t, l)
	want := Voucher{Key: "ledger.example+" + keyHash(), Entries: 2}
	if len(r.Vouchers) != 1 || r.Vouchers[0] != want {
		t.Errorf("vouched for by %v", r.Vouchers)
	}
	if x, err := VerifyExport(bytes.NewReader(exported(t, l)), testOrigin, testKeys, nil); err != nil || len(x.Vouchers) != 1 || x.Vouchers[0] != want {
		t.Errorf("exported, vouched for by %v: %v", x.Vouchers, err)
	}
	// A key that has taken over knows the one before it, as for heads.
	next, keys := newHeadKey("next.example")
	old := must(testKeys.Verifier("ledger.example", testSigner.KeyHash()))(t)
	now := must(keys.Verifier("next.example", next.KeyHash()))(t)
	o.HeadSigner, o.HeadKeys = next, note.VerifierList(now, old)
	if r := mustVerify(t, mustOpen(t, o)); len(r.Vouchers) != 1 || r.Vouchers[0] != want {
		t.Errorf("vouched for by %v", r.Vouchers)
	}
}

func keyHash() string {
	return fmt.Sprintf("%08x", testSigner.KeyHash())
}

// Content that was removed from an export does not look pruned.
func TestExportEmptied(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	for n := range tileWidth + 4 {
		e := testEvent(n)
		if n%2 == 0 {
			e.KeepUntil = time.Now().Add(time.Hour)
		}
		mustAppend(t, l, e)
	}
	before := exported(t, l)
	mustPrune(t, l, tileWidth/2)
	after := exported(t, l)
	refuse := func(what, named string, lines ...[]byte) {
		t.Helper()
		_, err := VerifyExport(bytes.NewReader(bytes.Join(lines, nil)), testOrigin, testKeys, nil)
		if !errors.Is(err, ErrProof) || !strings.Contains(err.Error(), named) {
			t.Errorf("%s: %v", what, err)
		}
	}
	lines := func(text []byte) [][]byte {
		l := bytes.SplitAfter(text, []byte("\n"))
		return l[:len(l)-1]
	}
	emptied := func(line []byte) []byte {
		leaf := must(exportBase64.DecodeString(string(bytes.TrimSpace(line[len(exportEntry):]))))(t)
		hash := tlog.RecordHash(leaf)
		return []byte(exportPruned + exportBase64.EncodeToString(hash[:]) + "\n")
	}
	for _, at := range []int{0, 5, tileWidth - 1, tileWidth, tileWidth + 3} {
		l := lines(before)
		l[2+at] = emptied(l[2+at])
		refuse("never pruned", "entry "+strconv.Itoa(at)+": its content is missing", l...)
	}
	const gaps = 2
	cut := lines(after)
	if !bytes.HasPrefix(cut[gaps], []byte(exportGaps)) {
		t.Fatalf("%q", cut[gaps])
	}
	at := gaps + 1 + 4
	cut[at] = emptied(cut[at])
	refuse("beside others", "entry 4: its content is missing", cut...)
	refuse("without the note", "entry 1: its content is missing", append(append([][]byte{}, lines(after)[:gaps]...), lines(after)[gaps+1:]...)...)
	refuse("the note twice", "does not belong here", append(append([][]byte{}, lines(after)[:gaps+1]...), lines(after)[gaps:]...)...)
	end := gaps + 1 + tileWidth
	refuse("the note of another tile", "it is of tile 0", append(append(append([][]byte{}, lines(after)[:end]...), cut[gaps]), lines(after)[end:]...)...)
	refuse("the note in the middle", "does not belong here", append(append(append([][]byte{}, lines(after)[:at]...), cut[gaps]), lines(after)[at:]...)...)
	back := lines(after)
	back[gaps+1+1] = lines(before)[2+1]
	refuse("put back", "entry 1: there, and vouched for as pruned", back...)
}

// Pruning skips an entry that does not open, and reports it once.
func TestPruneGoesOnPastDamage(t *testing.T) {
	mem := memory.New(memory.Options{})
	var log bytes.Buffer
	o := testOptions(mem)
	o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 3*tileWidth)
	broken := []store.Write{
		{Key: l.entryKey(7), Value: []byte("broken")},
		{Key: l.entryKey(tileWidth + 9), Value: testRing.Seal(nil, (&Event{ID: "x"}).encodeLeaf(nil, 1, time.Time{}), l.entryKey(tileWidth+9))},
		// Sealed with the right key, and not what the tree has.
		{Key: l.entryKey(tileWidth + 11), Value: testRing.Seal(nil, (&Event{ID: "x"}).encodeLeaf(nil, tileWidth+11, time.Unix(1, 0)), l.entryKey(tileWidth+11))},
	}
	kept := must(mem.Get(t.Context(), l.entryKey(7)))(t)
	if _, err := mem.Commit(t.Context(), broken...); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{3*tileWidth - 3, 0, 0} {
		if n, err := l.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != want {
			t.Errorf("%d pruned instead of %d by the %d. pass: %v", n, want, i+1, err)
		}
	}
	if n := strings.Count(log.String(), "level=ERROR"); n != 3 {
		t.Errorf("%d reports instead of 3:\n%s", n, log.String())
	}
	r, err := verifyStored(t, o)
	if err != nil || !faultsNaming(&r, 7) || !faultsNaming(&r, tileWidth+9) || !faultsNaming(&r, tileWidth+11) {
		t.Errorf("%v%s", err, allFaults(&r))
	}
	// Back from a backup, it goes as the others did.
	if _, err := mem.Commit(t.Context(), store.Write{Key: l.entryKey(7), Value: kept.Value}); err != nil {
		t.Fatal(err)
	}
	mustPrune(t, l, 1)
	// Marks that do not hold are left as they are, with their tile.
	if _, err := mem.Commit(t.Context(), store.Write{Key: l.prunedKey(1), Value: []byte("not marks")}); err != nil {
		t.Fatal(err)
	}
	appendEvents(t, l, 3*tileWidth, 4*tileWidth)
	mustPrune(t, l, tileWidth)
}

// Values that the store reports as damaged are named and passed over: everything else is pruned,
// verified and extended.
func TestDamagedValuesStopNothing(t *testing.T) {
	mem := memory.New(memory.Options{})
	var log bytes.Buffer
	bad := &storetest.Damaged{Store: mem, Keys: map[string]bool{}}
	o := testOptions(bad)
	o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	l := mustOpen(t, o)
	const size = 3 * tileWidth
	appendEvents(t, l, 0, size)
	for _, index := range []int64{7, 8, tileWidth, size - 2, size - 1} {
		bad.Keys[string(l.entryKey(index))] = true
	}
	before := l.now.Load().recorded
	l = mustOpen(t, o) // with the newest entry damaged
	if got := l.now.Load().recorded; got.IsZero() || got.After(before) {
		t.Errorf("the last entry that can be read was recorded at %v, the last one at %v", got, before)
	}
	if _, err := l.Entry(t.Context(), 7); !errors.Is(err, ErrTampered) {
		t.Errorf("a damaged entry: %v", err)
	}
	if _, err := l.Export(t.Context(), io.Discard); !errors.Is(err, ErrTampered) || !strings.Contains(err.Error(), "entry 7") {
		t.Errorf("exported: %v", err)
	}
	r, err := verifyStored(t, o)
	if err != nil || r.Entries != size || !faultsNaming(&r, 7) || !faultsNaming(&r, 8) || !faultsNaming(&r, tileWidth) || !faultsNaming(&r, size-1) {
		t.Errorf("%d entries, %v%s", r.Entries, err, allFaults(&r))
	}
	for i, want := range []int{size - 5, 0} {
		if n, err := l.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != want {
			t.Errorf("%d pruned instead of %d by the %d. pass: %v", n, want, i+1, err)
		}
	}
	if n := strings.Count(log.String(), "level=ERROR"); n != 5 {
		t.Errorf("%d reports instead of 5:\n%s", n, log.String())
	}
	appendEvents(t, l, size, size+2)
	// Of the last tile, which is not full, there is nothing to prove the others with.
	bad.Keys[string(l.entryKey(size))] = true
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrTampered) {
		t.Errorf("opened without an entry of the last tile: %v", err)
	}
}
