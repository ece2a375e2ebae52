package badger

import (
	"encoding/binary"
	"errors"

	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

// A frame of the log holds the changes of one group. A change is a byte (deletes or not), two
// bytes length of the key, four bytes length of the value, the key and the value, both as
// Badger will have them.
const (
	changeHeader = 7
	changePut    = 1
	changeDelete = 2
)

var errChange = errors.New("a change in the log has an unknown form")

// appendChange adds a change; a nil value deletes.
func appendChange(b []byte, key string, value []byte) []byte {
	kind := byte(changePut)
	if value == nil {
		kind = changeDelete
	}
	b = append(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = append(b, key...)
	return append(b, value...)
}

// eachChange calls do for every change of a frame; key and value share its memory.
func eachChange(f wal.Frame, do func(key, value []byte)) error {
	for b := f.Contents; len(b) > 0; {
		if len(b) < changeHeader {
			return errChange
		}
		key, value := int(binary.BigEndian.Uint16(b[1:])), int(binary.BigEndian.Uint32(b[3:]))
		end := changeHeader + key + value
		if end > len(b) {
			return errChange
		}
		switch {
		case b[0] == changePut && value >= headerSize:
			do(b[changeHeader:changeHeader+key:changeHeader+key], b[changeHeader+key:end:end])
		case b[0] == changeDelete && value == 0:
			do(b[changeHeader:changeHeader+key:changeHeader+key], nil)
		default:
			return errChange
		}
		b = b[end:]
	}
	return nil
}

// readLog reads the log of the previous opening, and checks the form of all changes.
func (s *directory) readLog() (wal.Found, error) {
	return wal.Read(s.walDir(), s.manifest.current.Log, func(f wal.Frame) error {
		return eachChange(f, func(_, _ []byte) {})
	})
}

// replay applies the log to Badger. Badger's tables have everything up to the marker m,
// since layers are applied in order. Values in segments up to it may be missing, or be in the page
// cache only: those files are not synced with the tables. Like the last frame they are written
// again. It reports whether Badger was changed.
func (a *applier) replay(found wal.Found, m marker) (changed bool, err error) {
	l := newLayer()
	flush := func() error {
		changed = true
		err := a.apply(l)
		l = newLayer()
		return err
	}
	var again []*bulkValue
	size := 0 // of again
	writeAgain := func() error {
		err := a.bodies.writeAgain(again, a.countBulkSync)
		again, size = again[:0], 0
		return err
	}
	err = found.Replay(a.walDir(), a.logDisk(), func(f wal.Frame) error {
		var failure error
		err := eachChange(f, func(key, value []byte) {
			wanted := f.Seq > m.seq
			if !wanted && failure == nil {
				var there *bulkValue
				if there, wanted, failure = a.lacks(key, value); there != nil {
					again, size = append(again, there), size+len(there.value)
				}
			}
			if wanted {
				l.put(string(key), value)
			}
		})
		l.seq, l.version = f.Seq, f.Version
		if err = errors.Join(err, failure); err == nil && size >= maxLayer {
			err = writeAgain()
		}
		if err == nil && l.size >= maxLayer {
			err = flush()
		}
		return err
	})
	if err == nil {
		err = writeAgain()
	}
	if err == nil && (len(l.values) > 0 || l.seq > m.seq) {
		err = flush()
	}
	return changed, err
}

// lacks reports whether Badger points to value and its file does not have it. If the file has it,
// it returns where.
func (a *applier) lacks(key, value []byte) (there *bulkValue, lacks bool, err error) {
	if !apart(value) {
		return nil, false, nil
	}
	txn := a.db.NewTransactionAt(a.ts, false)
	defer txn.Discard()
	raw, err := lookUp(txn, key)
	if err != nil || raw == nil {
		return nil, false, err
	}
	stored, err := decode(raw)
	if err != nil {
		return nil, false, err
	}
	logged, err := decode(value)
	if err != nil || stored.version != logged.version || !stored.bulk {
		return nil, false, err // overwritten since, or in Badger itself
	}
	at := readPointer(stored.value)
	found, err := a.bodies.read(at, key[1:])
	if err != nil {
		return nil, true, nil // also where the disk cannot read it: the log has it
	}
	return &bulkValue{key: string(key[1:]), value: found, at: at}, false, nil
}
