package execution

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// An export is JSON, compressed by gzip, whose checksum and end tell a whole one: the form, and a line for each entry.
type (
	exportHead struct {
		Export string `json:"export"`
		Layout string `json:"layout"`
	}
	exportEntry struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value,omitempty"`
		// Expires is in microseconds of Unix time, which is what every store keeps; 0 is never.
		Expires int64 `json:"expires,omitempty"`
	}
)

var exportForm = exportHead{Export: "agent-guard store", Layout: layoutVersion}

// layoutImporting is the layout of a store into which an export is being imported. Every build refuses to open it:
// what it does not have yet would run again (P1).
const layoutImporting = "importing"

// Errors of Export and Import.
var (
	// errNoSource: there is nothing to export.
	errNoSource = errors.New("there is no store of a gateway to export")
	// errTarget: the target holds something.
	errTarget = errors.New("the target is not empty; name an empty one")
	// errUnfinished: an import into the store did not end.
	errUnfinished = errors.New("guard: an import into this store did not end; remove the store, and import again")
	// errExport: it is not a whole export, or one of another form.
	errExport = errors.New("it is no whole export of a store in this build's form")
	// errDiffers: the store does not hold what was imported.
	errDiffers = errors.New("the store differs from the export; did something else write to it?")
)

const (
	// A batch of an import is smaller than it may be, so that it is made durable within a statement's time.
	importBytes = 1 << 20 // of keys and ordinary values
	importLarge = 8 << 20 // of large ones
	// largeFrom is the size from which on a value that expires is written as a large one.
	largeFrom = 16 << 10
	// clockTolerance is how far the clock of a store may be behind that by which it drops what has expired.
	clockTolerance = 2 * time.Second
)

// Export writes every living entry of a gateway's store: its key, its value as it is sealed, and its expiry. It
// returns their number. Nobody else may write to the store meanwhile. Only what Export has written without an error
// is a whole export.
func Export(ctx context.Context, from store.Store, to io.Writer) (entries int64, err error) {
	layout, err := from.Get(ctx, metaKey("layout"))
	if errors.Is(err, store.ErrNotFound) {
		return 0, errNoSource
	}
	if err == nil {
		err = checkLayout(layout)
	}
	if err != nil {
		return 0, fmt.Errorf("reading the store: %w", err)
	}
	compressed, _ := gzip.NewWriterLevel(to, gzip.BestSpeed) // fails for an unknown level
	out := json.NewEncoder(compressed)
	err = out.Encode(exportForm)
	for e, scanErr := range living(from.Scan(ctx, store.Range{})) {
		if errors.Is(scanErr, store.ErrDamaged) {
			// P1: a call whose record is left out would run again.
			return 0, fmt.Errorf("a value of the store is damaged, and without it its call would run again; "+
				"restore the store from a backup first: %w", scanErr)
		}
		if err = errors.Join(err, scanErr); err != nil {
			return 0, err
		}
		entries++
		err = out.Encode(toExport(e))
	}
	// Proves that nobody has taken the store over: one that was commits nothing. One without space is as its lock says.
	nothing := store.Write{Key: metaKey("exported"), If: store.Absent(), Delete: true}
	if _, commitErr := from.Commit(ctx, nothing); !errors.Is(commitErr, store.ErrFull) {
		err = errors.Join(err, commitErr)
	}
	if err != nil {
		return 0, err
	}
	return entries, compressed.Close()
}

// living are the entries of a scan without the layout.
func living(scan iter.Seq2[store.Entry, error]) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for e, err := range scan {
			if !bytes.Equal(e.Key, metaKey("layout")) && !yield(e, err) {
				return
			}
		}
	}
}

func toExport(e store.Entry) exportEntry {
	x := exportEntry{Key: e.Key, Value: e.Value}
	if !e.Expires.IsZero() {
		x.Expires = e.Expires.UnixMicro()
	}
	return x
}

func (x exportEntry) expires() time.Time {
	if x.Expires == 0 {
		return time.Time{}
	}
	return time.UnixMicro(x.Expires)
}

// checkLayout returns why a store of this layout cannot be used.
func checkLayout(layout store.Entry) error {
	switch string(layout.Value) {
	case layoutVersion:
		return nil
	case layoutImporting:
		return errUnfinished
	}
	return fmt.Errorf("%w: layout %q, this build knows %q", errLayout, layout.Value, layoutVersion)
}

// exported are the entries of an export.
func exported(from io.ReadSeeker) iter.Seq2[exportEntry, error] {
	return func(yield func(exportEntry, error) bool) {
		_, err := from.Seek(0, io.SeekStart)
		if err != nil {
			yield(exportEntry{}, err)
			return
		}
		var head exportHead
		compressed, err := gzip.NewReader(from)
		if err == nil {
			in := json.NewDecoder(compressed)
			if err = in.Decode(&head); err == nil && head != exportForm {
				err = fmt.Errorf("it is a %q of layout %q", head.Export, head.Layout)
			}
			for err == nil {
				var x exportEntry
				if err = in.Decode(&x); errors.Is(err, io.EOF) {
					return
				}
				if err == nil && !yield(x, nil) {
					return
				}
			}
		}
		yield(exportEntry{}, fmt.Errorf("%w: %w", errExport, err))
	}
}

// Import fills an empty store with an export, compares each entry, and returns their number. Versions are the store's
// own. Until all is compared no gateway opens the store, and an import that fails leaves it so. Nobody else may write
// to the store meanwhile. kept are the prefixes of keys whose values are written once and stay; see store.Write.Bulk.
func Import(ctx context.Context, to store.Store, from io.ReadSeeker, kept []string) (entries int64, err error) {
	for _, err := range exported(from) { // before anything is written
		if err != nil {
			return 0, err
		}
		entries++
	}
	empty, err := Fresh(ctx, to)
	if err == nil && !empty {
		err = errTarget
	}
	if err != nil {
		return 0, err
	}
	layout := metaKey("layout")
	mark, err := to.Commit(ctx, store.Write{Key: layout, Value: []byte(layoutImporting), If: store.Absent()})
	if err == nil {
		err = fill(ctx, to, from, kept)
	}
	if err == nil {
		err = compare(ctx, to, from)
	}
	if err == nil {
		_, err = to.Commit(ctx, store.Write{Key: layout, Value: []byte(layoutVersion), If: store.VersionIs(mark)})
	}
	return entries, err
}

// fill writes an export in batches.
func fill(ctx context.Context, to store.Store, from io.ReadSeeker, kept []string) error {
	var batch []store.Write
	ordinary, large := 0, 0 // bytes
	for x, err := range exported(from) {
		if err != nil {
			return err
		}
		w := importWrite(x, kept)
		o, l := len(w.Key)+len(w.Value), 0
		if w.Large() {
			o, l = len(w.Key), len(w.Value)
		}
		if len(batch) == store.MaxBatch || ordinary+o > importBytes || large+l > importLarge {
			if _, err := to.Commit(ctx, batch...); err != nil {
				return err
			}
			batch, ordinary, large = nil, 0, 0
		}
		batch, ordinary, large = append(batch, w), ordinary+o, large+l
	}
	if len(batch) == 0 {
		return nil
	}
	_, err := to.Commit(ctx, batch...)
	return err
}

// importWrite is an entry as it is written. An export does not say whether a value was written with Bulk.
func importWrite(x exportEntry, kept []string) store.Write {
	w := store.Write{Key: x.Key, Value: x.Value, Expires: x.expires()}
	if !w.Expires.IsZero() {
		w.Bulk = len(w.Value) >= largeFrom
		return w
	}
	for _, prefix := range kept {
		w.Bulk = w.Bulk || strings.HasPrefix(string(x.Key), prefix)
	}
	return w
}

// compare returns errDiffers unless the store holds what the export has, but for what has expired.
func compare(ctx context.Context, to store.Store, from io.ReadSeeker) error {
	next, stop := iter.Pull2(living(to.Scan(ctx, store.Range{})))
	defer stop()
	have, err, more := next()
	for want, fileErr := range exported(from) {
		if err = errors.Join(err, fileErr); err != nil {
			return err
		}
		if more && bytes.Equal(have.Key, want.Key) {
			if !bytes.Equal(have.Value, want.Value) || toExport(have).Expires != want.Expires {
				return errDiffers
			}
			have, err, more = next()
			continue
		}
		now, err := to.Now(ctx)
		if err != nil {
			return err
		}
		if want.Expires == 0 || now.Add(clockTolerance).Before(want.expires()) {
			return errDiffers
		}
	}
	if err == nil && more {
		err = errDiffers
	}
	return err
}
