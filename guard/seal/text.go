package seal

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// ringFile is the text of a ring. Binary members are standard base64.
type ringFile struct {
	Version int          `json:"version"`
	Index   []byte       `json:"index"`
	Newest  uint32       `json:"newest"`
	Sealing []sealingRow `json:"sealing"`
}

type sealingRow struct {
	ID      uint32 `json:"id"`
	Created string `json:"created,omitempty"` // RFC 3339
	Key     []byte `json:"key"`
}

// MarshalText writes the ring as the JSON that Parse reads.
func (r *Ring) MarshalText() ([]byte, error) {
	keys := r.keys.Load()
	f := ringFile{Version: 1, Index: r.index[:], Newest: keys.newest}
	for _, id := range slices.Sorted(maps.Keys(keys.sealing)) {
		row := sealingRow{ID: id, Key: keys.sealing[id].raw[:]}
		if created := keys.sealing[id].created; !created.IsZero() {
			row.Created = created.Format(time.RFC3339)
		}
		f.Sealing = append(f.Sealing, row)
	}
	text, err := json.MarshalIndent(f, "", "\t")
	return append(text, '\n'), err
}

// Parse reads a ring: the JSON of MarshalText, or the standard base64 of 32 random
// bytes (`openssl rand -base64 32`), from which both keys are derived. Errors say
// what is wrong and never show key material.
func Parse(text []byte) (*Ring, error) {
	text = bytes.TrimSpace(text)
	if len(text) == 0 {
		return nil, errors.New("seal: the key is empty; give the key ring's JSON or 32 random bytes in base64")
	}
	if text[0] != '{' {
		return derive(text)
	}
	var f ringFile
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, errors.New("seal: the key ring is not the JSON that the gateway wrote")
	}
	switch {
	case f.Version != 1:
		return nil, fmt.Errorf("seal: key ring of version %d; this build reads version 1", f.Version)
	case len(f.Index) != keySize:
		return nil, fmt.Errorf("seal: the index key has %d bytes, it needs %d", len(f.Index), keySize)
	}
	keys := &keySet{newest: f.Newest, sealing: make(map[uint32]*sealingKey, len(f.Sealing))}
	for _, row := range f.Sealing {
		if err := keys.add(row); err != nil {
			return nil, err
		}
	}
	if keys.sealing[f.Newest] == nil {
		return nil, fmt.Errorf("seal: the newest sealing key, %d, is missing", f.Newest)
	}
	return newRing([keySize]byte(f.Index), keys), nil
}

// add reads one row into a set that is being made.
func (k *keySet) add(row sealingRow) error {
	if len(row.Key) != keySize {
		return fmt.Errorf("seal: sealing key %d has %d bytes, it needs %d", row.ID, len(row.Key), keySize)
	}
	if row.ID == 0 {
		return errors.New("seal: a sealing key has no id; they are numbered from 1")
	}
	if k.sealing[row.ID] != nil || row.ID > k.newest {
		return fmt.Errorf("seal: sealing key %d stands twice or is newer than the newest", row.ID)
	}
	var created time.Time
	if row.Created != "" {
		at, err := time.Parse(time.RFC3339, row.Created)
		if created = at.UTC(); err != nil || created.Year() < 1 || created.Year() > 9999 { // which could not be written again
			return fmt.Errorf("seal: the time at which sealing key %d was created is not in the form of RFC 3339", row.ID)
		}
	}
	k.sealing[row.ID] = newKey([keySize]byte(row.Key), created)
	return nil
}

func derive(text []byte) (*Ring, error) {
	secret, err := base64.StdEncoding.DecodeString(string(text))
	if err != nil || len(secret) != keySize {
		return nil, errors.New("seal: the key is neither a key ring's JSON nor 32 bytes in standard base64; make one with `openssl rand -base64 32`")
	}
	part := func(info string) [keySize]byte {
		key, err := hkdf.Key(sha256.New, secret, nil, "agent-guard "+info, keySize)
		if err != nil {
			panic("seal: " + err.Error()) // the length is a constant that HKDF allows
		}
		return [keySize]byte(key)
	}
	sealing := newKey(part("sealing 1"), time.Time{})
	return newRing(part("index"), &keySet{newest: 1, sealing: map[uint32]*sealingKey{1: sealing}}), nil
}
