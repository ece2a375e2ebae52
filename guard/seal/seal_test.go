package seal_test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

func TestP8SealedValuesOpenOnlyUnderTheirName(t *testing.T) {
	ring := seal.Generate()
	plain := []byte("card 4242")
	sealed := ring.Seal(nil, plain, []byte("x/1"))
	if bytes.Contains(sealed, []byte("4242")) {
		t.Fatal("plain text in the sealed value")
	}
	if len(sealed) != len(plain)+seal.Overhead {
		t.Fatalf("overhead is %d, stated %d", len(sealed)-len(plain), seal.Overhead)
	}
	if got, err := ring.Open(nil, sealed, []byte("x/1")); err != nil || !bytes.Equal(got, plain) {
		t.Fatalf("Open = %q, %v", got, err)
	}
	if _, err := ring.Open(nil, sealed, []byte("x/2")); !errors.Is(err, seal.ErrOpen) {
		t.Fatalf("opened under another name: %v", err)
	}
	if _, err := seal.Generate().Open(nil, sealed, []byte("x/1")); !errors.Is(err, seal.ErrOpen) {
		t.Fatalf("opened with another ring: %v", err)
	}
	for i := range sealed {
		altered := bytes.Clone(sealed)
		altered[i] ^= 1
		if _, err := ring.Open(nil, altered, []byte("x/1")); !errors.Is(err, seal.ErrOpen) {
			t.Fatalf("opened with byte %d altered: %v", i, err)
		}
	}
	if _, err := ring.Open(nil, sealed[:seal.Overhead-1], []byte("x/1")); !errors.Is(err, seal.ErrOpen) {
		t.Fatalf("opened a stump: %v", err)
	}
}

func TestSealNeverRepeats(t *testing.T) {
	ring := seal.Generate()
	if bytes.Equal(ring.Seal(nil, []byte("a"), nil), ring.Seal(nil, []byte("a"), nil)) {
		t.Fatal("two seals of one value are equal")
	}
}

func TestIndexSeparatesPartsAndDomains(t *testing.T) {
	ring := seal.Generate()
	seen := map[[32]byte]string{}
	for _, parts := range [][]string{
		{"d"}, {"d", ""}, {"d", "", ""}, {"d", "ab", "c"}, {"d", "a", "bc"}, {"d", "abc"}, {"e", "abc"}, {"da", "bc"},
		{"d", strings.Repeat("x", 300)}, {"d", strings.Repeat("x", 301)},
	} {
		sum := ring.Index(parts[0], parts[1:]...)
		if other, ok := seen[sum]; ok {
			t.Errorf("%q collides with %s", parts, other)
		}
		seen[sum] = strings.Join(parts, "|")
		if sum != ring.Index(parts[0], parts[1:]...) {
			t.Errorf("%q is not stable", parts)
		}
		if sum == seal.Generate().Index(parts[0], parts[1:]...) {
			t.Errorf("%q does not depend on the key", parts)
		}
	}
}

func TestRingSurvivesItsText(t *testing.T) {
	ring := seal.Generate()
	sealed := ring.Seal(nil, []byte("v"), []byte("n"))
	text, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	again, err := seal.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.Open(nil, sealed, []byte("n")); err != nil || string(got) != "v" {
		t.Fatalf("Open = %q, %v", got, err)
	}
	if again.Index("d", "p") != ring.Index("d", "p") {
		t.Fatal("index key changed")
	}
}

func TestParseDerivesBothKeysFromOneSecret(t *testing.T) {
	secret := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))
	a, err := seal.Parse([]byte(secret + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := seal.Parse([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.Open(nil, a.Seal(nil, []byte("v"), nil), nil); err != nil || string(got) != "v" {
		t.Fatalf("Open = %q, %v", got, err)
	}
	if a.Index("d", "p") != b.Index("d", "p") {
		t.Fatal("the index key is not derived from the secret")
	}
}

func TestParseSaysWhatIsWrongWithoutShowingKeys(t *testing.T) {
	const key = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
	for text, want := range map[string]string{
		"":                                    "empty",
		"hello":                               "neither",
		"AAAA":                                "neither",
		"{":                                   "JSON",
		`{"version":2}`:                       "version 2",
		`{"version":1,"index":"AAAA"}`:        "index key has 3 bytes",
		`{"version":1,"surprise":1}`:          "JSON",
		`{"version":1,"index":"` + key + `"}`: "newest sealing key",
		`{"version":1,"index":"` + key + `","newest":1,"sealing":[{"id":1,"key":"AAAA"}]}`:                                              "sealing key 1 has 3 bytes",
		`{"version":1,"index":"` + key + `","newest":1,"sealing":[{"id":2,"key":"` + key + `"}]}`:                                       "newer",
		`{"version":1,"index":"` + key + `","newest":0,"sealing":[{"key":"` + key + `"}]}`:                                              "has no id",
		`{"version":1,"index":"` + key + `","newest":1,"sealing":[{"id":1,"created":"today","key":"` + key + `"}]}`:                     "RFC 3339",
		`{"version":1,"index":"` + key + `","newest":1,"sealing":[{"id":1,"created":"0000-01-01T00:00:00+01:00","key":"` + key + `"}]}`: "RFC 3339",
		`{"version":1,"index":"` + key + `","newest":1,"sealing":[{"id":1,"key":"` + key + `"},{"id":1,"key":"` + key + `"}]}`:          "twice",
	} {
		_, err := seal.Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%.20s) = %v, want %q", text, err, want)
		}
		if err != nil && strings.Contains(err.Error(), key) {
			t.Errorf("the error shows the key: %v", err)
		}
	}
}

func TestCreateIsPrivateAndNeverOverwrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "guard.key")
	ring, err := seal.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, want 0600", info.Mode())
	}
	loaded, err := seal.Load(path)
	if err != nil || loaded.Index("d") != ring.Index("d") {
		t.Fatalf("Load = %v", err)
	}
	if _, err := seal.Create(path); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second Create = %v, want fs.ErrExist", err)
	}
	if _, err := seal.Load(path + ".none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Load of nothing = %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".key-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func FuzzParse(f *testing.F) {
	text, _ := seal.Generate().MarshalText()
	f.Add(text)
	f.Add([]byte("AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="))
	f.Add([]byte(`{"version":1,"index":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","newest":7,"sealing":[` +
		`{"id":7,"created":"2026-11-20T09:00:00+02:00","key":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		ring, err := seal.Parse(text)
		if err != nil {
			return
		}
		sealed := ring.Seal(nil, text, nil)
		next, err := ring.Rotated()
		if err != nil {
			return // its numbers are used up
		}
		again, err := next.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		read, err := seal.Parse(again)
		if err != nil {
			t.Fatalf("%v\n%s", err, again)
		}
		for _, r := range []*seal.Ring{ring, next, read} {
			if _, err := r.Open(nil, sealed, nil); err != nil {
				t.Fatal(err)
			}
		}
		if read.Index("d") != ring.Index("d") {
			t.Fatal("the index key changed")
		}
	})
}

func BenchmarkSeal(b *testing.B) {
	ring := seal.Generate()
	value, dst := make([]byte, 300), make([]byte, 0, 400)
	b.ReportAllocs()
	for b.Loop() {
		dst = ring.Seal(dst[:0], value, []byte("name"))
	}
}

func BenchmarkIndex(b *testing.B) {
	ring := seal.Generate()
	b.ReportAllocs()
	for b.Loop() {
		ring.Index("execution", "caller", "default", "POST", "/v1/charges", "0123456789")
	}
}

// Opening a value where it stands gives what opening it elsewhere does, under its name alone.
func TestOpenInPlace(t *testing.T) {
	r := seal.Generate()
	name := []byte("name")
	for _, plain := range []string{"", "a", strings.Repeat("long ", 1000)} {
		sealed := r.Seal(nil, []byte(plain), name)
		got, err := r.Open(sealed[:0], sealed, name)
		if err != nil || string(got) != plain {
			t.Errorf("%.10q: %.10q, %v", plain, got, err)
		}
		if sealed = r.Seal([]byte("before"), []byte(plain), name); len(plain) > 0 {
			sealed[len(sealed)-1] ^= 1
		}
		if got, err := r.Open(sealed[6:6], sealed[6:], []byte("another")); err != seal.ErrOpen || got != nil {
			t.Errorf("%.10q under another name: %.10q, %v", plain, got, err)
		}
	}
	sealed := r.Seal(nil, []byte("plain"), name)
	allocs := testing.AllocsPerRun(100, func() {
		again := append(make([]byte, 0, 128), sealed...)
		_, _ = r.Open(again[:0], again, name)
	})
	if allocs > 1 {
		t.Errorf("%v allocations, want that of the test's copy at most", allocs)
	}
}
