package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

type row struct {
	Name  string   `cbor:"name"`
	Texts []string `cbor:"texts,omitempty"`
	Parts [][]byte `cbor:"parts,omitempty"`
}

// kept is a store of entries, which are read and never written.
type kept struct {
	store.Store
	entries []store.Entry // by key
}

func (k *kept) Get(_ context.Context, key []byte) (store.Entry, error) {
	for _, e := range k.entries {
		if bytes.Equal(e.Key, key) {
			return e, nil
		}
	}
	return store.Entry{}, store.ErrNotFound
}

func (k *kept) Scan(_ context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for _, e := range k.entries {
			if bytes.Compare(e.Key, r.From) < 0 || bytes.Compare(e.Key, r.To) >= 0 {
				continue
			}
			if len(e.Value) == 0 { // the store cannot read it
				yield(store.Entry{Key: e.Key}, store.ErrDamaged)
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

var errMissing, errBad = errors.New("there is none"), errors.New("it cannot be read")

func tableOf(entries ...store.Entry) store.Table[row] {
	return store.Table[row]{Store: &kept{entries: entries}, Prefix: "r", Unreadable: errBad, Missing: errMissing}
}

// What cannot be read is an error that names the record, and keeps nobody from the others.
func TestTableReadsAroundWhatIsUnreadable(t *testing.T) {
	var entries []store.Entry
	for _, name := range []string{"a", "b", "c", "d"} {
		w := (&store.Table[row]{Prefix: "r"}).Put([]byte("r"+name), &row{Name: name}, store.Absent(), time.Time{})
		entries = append(entries, store.Entry{Key: w.Key, Value: w.Value, Version: 1})
	}
	entries[1].Value, entries[2].Value = entries[1].Value[:3], nil
	table := tableOf(entries...)
	if found, err := table.Get(t.Context(), table.Key([]byte("e"))); found.Record != nil || !errors.Is(err, errMissing) {
		t.Errorf("%+v, %v", found, err)
	}
	if found, err := table.Get(t.Context(), table.Key([]byte("d"))); err != nil || found.Record.Name != "d" || found.Version != 1 {
		t.Errorf("%+v, %v", found, err)
	}
	_, err := table.Get(t.Context(), table.Key([]byte("b")))
	if !errors.Is(err, errBad) || !strings.Contains(err.Error(), fmt.Sprintf("%x", "rb")) {
		t.Error(err)
	}
	var met []string
	for found, err := range table.All(t.Context()) {
		switch {
		case err == nil:
			met = append(met, found.Record.Name)
		case found.Record == nil && errors.Is(err, errBad) && strings.Contains(err.Error(), fmt.Sprintf("%x", found.Key)):
			met = append(met, "bad "+string(found.Key))
		default:
			t.Error(err)
		}
	}
	if want := "a, bad rb, bad rc, d"; strings.Join(met, ", ") != want {
		t.Errorf("%q, want %s", met, want)
	}
}

// A record that claims to be larger than it is is an error, before there is memory for it.
func TestTableReadsNoMoreThanThereIs(t *testing.T) {
	for name, b := range map[string]string{
		"no record":     "",
		"a long text":   "\xa1\x64name\x7b\x7f\xff\xff\xff\xff\xff\xff\xff",
		"many texts":    "\xa1\x65texts\x9b\x00\x00\x00\x7f\xff\xff\xff\xff",
		"many members":  "\xbb\x00\x00\x00\x7f\xff\xff\xff\xff",
		"nested":        "\xa1\x65parts" + strings.Repeat("\x81", 1000) + "\x00",
		"another kind":  "\xa1\x64name\x01",
		"more than one": "\xa1\x64name\x61a\x00",
	} {
		table := tableOf(store.Entry{Key: []byte("ra"), Value: []byte(b)})
		if allocated := testing.AllocsPerRun(1, func() {
			if found, err := table.Get(t.Context(), []byte("ra")); found.Record != nil || !errors.Is(err, errBad) {
				t.Errorf("%s: %+v, %v", name, found, err)
			}
		}); allocated > 100 {
			t.Errorf("%s: %v allocations", name, allocated)
		}
	}
}

// Readers skip members that they do not know.
func TestTableSkipsUnknownMembers(t *testing.T) {
	var read row
	b := store.Encode(nil, map[string]any{"name": "a", "of a newer build": []int{1, 2}})
	if err := store.Decode(b, &read); err != nil || read.Name != "a" {
		t.Errorf("%+v, %v", read, err)
	}
}

// What is decoded and is no record of its kind is unreadable, too.
func TestTableChecksRecords(t *testing.T) {
	table := tableOf(store.Entry{Key: []byte("ra"), Value: store.Encode(nil, row{})})
	table.Check = func(r *row) error {
		if r.Name == "" {
			return errors.New("it has no name")
		}
		return nil
	}
	if found, err := table.Get(t.Context(), []byte("ra")); found.Record != nil || !errors.Is(err, errBad) || !strings.Contains(err.Error(), "no name") {
		t.Errorf("%+v, %v", found, err)
	}
}
