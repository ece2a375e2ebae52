package seal_test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

func accept(uint32) error { return nil }

func created(t *testing.T) (*seal.Ring, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "guard.key")
	ring, err := seal.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	return ring, path
}

func rotate(t *testing.T, ring *seal.Ring, path string) uint32 {
	t.Helper()
	id, err := ring.Rotate(path, accept)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func rotated(t *testing.T, ring *seal.Ring) *seal.Ring {
	t.Helper()
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func load(t *testing.T, path string) *seal.Ring {
	t.Helper()
	ring, err := seal.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// opens fails the test where ring does not open what was sealed as "v".
func opens(t *testing.T, ring *seal.Ring, sealed []byte) {
	t.Helper()
	if got, err := ring.Open(nil, sealed, []byte("n")); err != nil || string(got) != "v" {
		t.Errorf("a value under key %d: %q, %v", ring.KeyOf(sealed), got, err)
	}
}

func sealed(ring *seal.Ring) []byte { return ring.Seal(nil, []byte("v"), []byte("n")) }

// P1: the index key never rotates. P8: what is new is sealed with the new key, what is
// old still opens, in this process and in the next.
func TestP1RotationKeepsTheIndex(t *testing.T) {
	ring, path := created(t)
	index := ring.Index("execution", "caller", "id")
	var values [][]byte
	for want := range uint32(4) {
		if want > 0 {
			if id := rotate(t, ring, path); id != want+1 {
				t.Fatalf("rotated to %d, want %d", id, want+1)
			}
		}
		value := sealed(ring)
		if got := ring.KeyOf(value); got != want+1 {
			t.Errorf("sealed under %d, want %d", got, want+1)
		}
		values = append(values, value)
		for _, r := range []*seal.Ring{ring, load(t, path)} {
			if r.Index("execution", "caller", "id") != index {
				t.Error("P1: the index key changed")
			}
			for _, v := range values {
				opens(t, r, v)
			}
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("P8: the key file: %v, %v", info.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".key-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestKeysShowNoKey(t *testing.T) {
	ring, path := created(t)
	rotate(t, ring, path)
	for _, r := range []*seal.Ring{ring, load(t, path)} {
		keys := r.Keys()
		if len(keys) != 2 || keys[0].ID != 1 || keys[0].Seals || keys[1].ID != 2 || !keys[1].Seals {
			t.Fatalf("keys %+v", keys)
		}
		for _, k := range keys {
			if age := time.Since(k.Created); age < 0 || age > time.Hour {
				t.Errorf("key %d was created at %v", k.ID, k.Created)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		shown := fmt.Sprintf("%+v %#v", keys, keys)
		for _, part := range strings.FieldsFunc(string(text), func(r rune) bool { return r == '"' }) {
			if raw, err := base64.StdEncoding.DecodeString(part); err == nil && len(raw) == 32 && strings.Contains(shown, part) {
				t.Error("P8: the list shows a key")
			}
		}
	}
	// Rings of before are read without the time.
	old, err := seal.Parse([]byte(`{"version":1,"index":"` + thirtyTwo + `","newest":1,"sealing":[{"id":1,"key":"` + thirtyTwo + `"}]}`))
	if err != nil || !old.Keys()[0].Created.IsZero() {
		t.Errorf("a ring without times: %v", err)
	}
}

const thirtyTwo = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="

// A crash between the new file and the first use of its key loses nothing.
func TestRotationIsInTheFileBeforeItIsUsed(t *testing.T) {
	ring, path := created(t)
	crash := errors.New("crash")
	old := sealed(ring)
	_, err := ring.Rotate(path, func(id uint32) error {
		again := load(t, path)
		if again.KeyOf(sealed(again)) != id {
			t.Error("the file does not seal with the new key yet")
		}
		opens(t, again, old)
		if got := ring.KeyOf(sealed(ring)); got != 1 {
			t.Errorf("key %d is used before it was announced", got)
		}
		return crash
	})
	if !errors.Is(err, crash) {
		t.Fatal(err)
	}
	between := sealed(ring)
	if ring.KeyOf(between) != 1 {
		t.Error("the new key is used in spite of the error")
	}
	next := load(t, path)
	opens(t, next, old)
	opens(t, next, between)
	// The next attempt takes the unused key over and adds its own.
	if id := rotate(t, ring, path); id != 3 {
		t.Errorf("rotated to %d", id)
	}
	opens(t, load(t, path), sealed(ring))
	opens(t, ring, sealed(next))
}

// Whatever somebody else has put into the file stays there.
func TestRotationMerges(t *testing.T) {
	ring, path := created(t)
	if id := rotate(t, load(t, path), path); id != 2 {
		t.Fatalf("rotated to %d", id)
	}
	theirs := sealed(load(t, path))
	if id := rotate(t, ring, path); id != 3 {
		t.Errorf("rotated to %d, want 3: 2 is somebody else's", id)
	}
	for _, r := range []*seal.Ring{ring, load(t, path)} {
		opens(t, r, theirs)
		opens(t, r, sealed(ring))
	}

	// A key that was made apart, under a number that is taken, is not overwritten.
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	fork := bytes.Replace(before, []byte(keyOf(t, before, 2)), []byte(thirtyTwo), 1)
	if err := os.WriteFile(path, fork, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(path, accept); err == nil || !strings.Contains(err.Error(), "sealing key 2 is another one") {
		t.Errorf("a forked file: %v", err)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, fork) {
		t.Errorf("a file that was refused was written: %v", err)
	}
	if got := ring.KeyOf(sealed(ring)); got != 3 {
		t.Errorf("sealing with %d after an error", got)
	}
}

// keyOf is the text of a sealing key in a ring file.
func keyOf(t *testing.T, text []byte, id int) string {
	t.Helper()
	_, row, ok := strings.Cut(string(text), fmt.Sprintf(`"id": %d,`, id))
	_, row, ok2 := strings.Cut(row, `"key": "`)
	key, _, ok3 := strings.Cut(row, `"`)
	if !ok || !ok2 || !ok3 {
		t.Fatalf("no key %d in the file", id)
	}
	return key
}

func TestRotationRefusesAnotherFile(t *testing.T) {
	ring, path := created(t)
	for name, damage := range map[string]struct {
		do   func() error
		want error
	}{
		"another index": {func() error {
			if err := os.Remove(path); err != nil {
				return err
			}
			_, err := seal.Create(path)
			return err
		}, seal.ErrIndex},
		"no file":     {func() error { return os.Remove(path) }, fs.ErrNotExist},
		"no ring":     {func() error { return os.WriteFile(path, []byte("hello"), 0o600) }, nil},
		"a directory": {func() error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) }, nil},
	} {
		if err := damage.do(); err != nil {
			t.Fatal(err)
		}
		_, err := ring.Rotate(path, accept)
		if err == nil || damage.want != nil && !errors.Is(err, damage.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if ring.KeyOf(sealed(ring)) != 1 {
			t.Fatalf("%s: a key that is in no file is used", name)
		}
		_ = os.RemoveAll(path)
		text, _ := ring.MarshalText()
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A file of 32 bytes becomes one of the JSON form, with the derived keys in it.
func TestRotationOfADerivedRing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "guard.key")
	if err := os.WriteFile(path, []byte(thirtyTwo+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ring := load(t, path)
	old, index := sealed(ring), ring.Index("d")
	rotate(t, ring, path)
	next := load(t, path)
	opens(t, next, old)
	opens(t, next, sealed(ring))
	if next.Index("d") != index {
		t.Error("P1: the index key changed")
	}
}

// A symbolic link to the file stays one.
func TestRotationFollowsLinks(t *testing.T) {
	ring, path := created(t)
	link := filepath.Join(t.TempDir(), "link.key")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	rotate(t, ring, link)
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info.Mode(), err)
	}
	opens(t, load(t, path), sealed(ring))
}

// Rotations at once, of rings in other processes too, come one after the other, and
// none of their keys is lost.
func TestRotationsAtOnce(t *testing.T) {
	ring, path := created(t)
	other := load(t, path)
	var ids sync.Map
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for {
				r := []*seal.Ring{ring, other}[i%2]
				id, err := r.Rotate(path, accept)
				if errors.Is(err, seal.ErrBusy) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if _, twice := ids.LoadOrStore(id, r); twice {
					t.Errorf("key %d was made twice", id)
				}
				return
			}
		})
	}
	wg.Wait()
	final := load(t, path)
	if got := final.KeyIDs(); len(got) != 9 || got[8] != 9 {
		t.Errorf("keys %v, want 1 to 9", got)
	}
	opens(t, final, sealed(ring))
	opens(t, final, sealed(other))
}

// Seal, Open and Index go on while the keys change.
func TestSealingDuringRotations(t *testing.T) {
	ring, path := created(t)
	index := ring.Index("d")
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for round := 0; !stop.Load() || round < 10; round++ {
				v := sealed(ring)
				opens(t, ring, v)
				if ring.Index("d") != index {
					t.Error("P1: the index key changed")
				}
			}
		})
	}
	for n := range 5 {
		rotate(t, ring, path)
		if n == 2 { // a reload in between
			if _, err := ring.Adopt(load(t, path), nil, accept); err != nil {
				t.Error(err)
			}
		}
	}
	stop.Store(true)
	wg.Wait()
}

func TestAdopt(t *testing.T) {
	ring := seal.Generate()
	old := sealed(ring)
	next := rotated(t, ring)
	if got := ring.KeyIDs(); !slices.Equal(got, []uint32{1}) {
		t.Fatalf("Rotated changed the ring itself: %v", got)
	}
	var announced []uint32
	note := func(id uint32) error {
		announced = append(announced, id)
		if ring.KeyOf(sealed(ring)) == id {
			t.Errorf("key %d is used before it was announced", id)
		}
		return nil
	}
	for _, want := range []bool{true, false} { // the second is the reload that changes nothing
		if changed, err := ring.Adopt(next, nil, note); err != nil || changed != want {
			t.Fatalf("Adopt = %v, %v", changed, err)
		}
	}
	if !slices.Equal(announced, []uint32{2}) {
		t.Errorf("announced %v, want 2 once", announced)
	}
	opens(t, ring, old)
	opens(t, next, sealed(ring))

	refuse := func(other *seal.Ring, needed []uint32, want string) {
		t.Helper()
		if _, err := ring.Adopt(other, needed, note); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Adopt: %v, want %q", err, want)
		}
		opens(t, ring, old)
		if ring.KeyOf(sealed(ring)) != 2 {
			t.Error("a ring that was refused is used")
		}
	}
	refuse(seal.Generate(), nil, "another index key")
	text, err := next.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	fork, err := seal.Parse(bytes.Replace(text, []byte(keyOf(t, text, 2)), []byte(thirtyTwo), 1))
	if err != nil {
		t.Fatal(err)
	}
	refuse(fork, nil, "sealing key 2 is another one")

	// Only key 1: the newest is always needed.
	var missing *seal.MissingError
	first := without(t, text, 2)
	if _, err := ring.Adopt(first, nil, note); !errors.As(err, &missing) || !slices.Equal(missing.IDs, []uint32{2}) {
		t.Errorf("a ring without the newest: %v", err)
	}
	// Only key 2: as long as key 1 is needed, not.
	second := without(t, text, 1)
	refuse(second, []uint32{1}, "lacks sealing key 1,")
	if changed, err := ring.Adopt(second, nil, note); err != nil || !changed {
		t.Errorf("giving up key 1: %v, %v", changed, err)
	}
	if _, err := ring.Open(nil, old, []byte("n")); !errors.Is(err, seal.ErrOpen) {
		t.Errorf("a key that was given up opens: %v", err)
	}

	// An announcement that fails leaves everything as it was.
	down := errors.New("the store is down")
	if _, err := ring.Adopt(rotated(t, ring), nil, func(uint32) error { return down }); !errors.Is(err, down) {
		t.Error(err)
	}
	if got := ring.KeyIDs(); !slices.Equal(got, []uint32{2}) {
		t.Errorf("keys %v after an announcement that failed", got)
	}
}

// Once a key was chosen, later ones only open until they are chosen too: from before others hear of them, and
// whatever becomes of that.
func TestUseChoosesTheKeyThatSeals(t *testing.T) {
	ring, path := created(t)
	if !ring.Use(1) || ring.Use(9) {
		t.Fatal("Use")
	}
	theirs := load(t, path)
	rotate(t, theirs, path)
	under2 := sealed(theirs)
	down := errors.New("the store is down")
	seals := func(want uint32, ids ...uint32) {
		t.Helper()
		if got := ring.KeyOf(sealed(ring)); got != want || !slices.Equal(ring.KeyIDs(), ids) {
			t.Errorf("it seals with %d of %v; want %d of %v", got, ring.KeyIDs(), want, ids)
		}
	}
	calls := 0
	hear := func(err error) func(uint32) error {
		return func(uint32) error {
			calls++
			opens(t, ring, under2)
			seals(1, 2, 1)
			return err
		}
	}
	if _, err := ring.Adopt(theirs, nil, hear(fmt.Errorf("%w: %w", seal.ErrRefused, down))); !errors.Is(err, down) {
		t.Error(err)
	}
	seals(1, 1)
	if _, err := ring.Adopt(theirs, nil, hear(down)); !errors.Is(err, down) { // they may count on it
		t.Error(err)
	}
	seals(1, 2, 1)
	if changed, err := ring.Adopt(theirs, nil, hear(nil)); err != nil || changed || calls != 2 {
		t.Errorf("%t %v, %d calls", changed, err, calls)
	}
	seals(1, 2, 1)
	if id := rotate(t, ring, path); id != 3 {
		t.Errorf("rotated to %d", id)
	}
	seals(1, 2, 3, 1)
	if !ring.Use(2) {
		t.Error("Use")
	}
	seals(2, 1, 3, 2)
	if !ring.Use(1) { // it stays
		t.Error("Use")
	}
	seals(2, 1, 3, 2)
	if changed, err := ring.Adopt(theirs, nil, func(uint32) error { return nil }); err != nil || !changed {
		t.Errorf("a key that does not seal is given up: %t %v", changed, err)
	}
	seals(2, 1, 2)
	if ring.Check(2) != theirs.Check(2) || ring.Check(2) == ring.Check(1) || ring.Check(3) != "" || len(ring.Check(1)) != 32 {
		t.Errorf("checks %q and %q", ring.Check(1), ring.Check(2))
	}
	text, err := ring.MarshalText()
	if err != nil || load(t, path).KeyIDs()[2] != 3 || strings.Contains(string(text), ring.Check(1)) {
		t.Error(err)
	}
}

// without is the ring of a text less one of its two keys.
func without(t *testing.T, text []byte, id int) *seal.Ring {
	t.Helper()
	s := string(text)
	from := strings.Index(s, fmt.Sprintf(`"id": %d,`, id))
	open := strings.LastIndexByte(s[:from], '{')
	end := from + strings.IndexByte(s[from:], '}') + 1
	s = s[:open] + s[end:]
	s = strings.NewReplacer("[\n\t\t,", "[", ",\n\t\t\n\t]", "]").Replace(s)
	if id == 2 {
		s = strings.Replace(s, `"newest": 2`, `"newest": 1`, 1)
	}
	ring, err := seal.Parse([]byte(s))
	if err != nil {
		t.Fatalf("%v\n%s", err, s)
	}
	return ring
}

func ExampleRing_Rotated() {
	ring := seal.Generate()
	old := ring.Seal(nil, []byte("4200 EUR"), []byte("x/1"))

	next, err := ring.Rotated()
	if err != nil {
		panic(err)
	}
	plain, err := next.Open(nil, old, []byte("x/1"))
	fmt.Println(string(plain), err)
	fmt.Println(next.KeyOf(next.Seal(nil, plain, []byte("x/1"))))
	// Output:
	// 4200 EUR <nil>
	// 2
}
