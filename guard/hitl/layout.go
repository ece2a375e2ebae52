package hitl

import (
	"encoding/binary"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The store's keys of escalations. Nothing of a caller is readable in them; only times,
// levels and states are plain.
//
//	h e id                        the escalation, sealed
//	h t opened id                 index: all by age; the value is level and state
//	h w workflow opened id        index: a workflow's by age; the same value
//	h u level due id              index: those to be delivered
const (
	space           = 'h'
	kindRecord      = 'e'
	kindAge         = 't'
	kindWorkflow    = 'w'
	kindUndelivered = 'u'
)

// idOf is the escalation of an occasion. It is a UUID of version 8 (RFC 9562), whose bits
// are the maker's own.
func (d *Desk) idOf(key string) uuid.UUID {
	hash := d.sealer.Index("escalation", key)
	id := uuid.UUID(hash[:16])
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

func recordKey(id uuid.UUID) []byte { return append([]byte{space, kindRecord}, id[:]...) }

func appendPlace(b []byte, at time.Time, id uuid.UUID) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(at.UnixNano()))
	return append(b, id[:]...)
}

func ageKey(opened time.Time, id uuid.UUID) []byte {
	return appendPlace([]byte{space, kindAge}, opened, id)
}

func (d *Desk) workflowPrefix(workflow string) []byte {
	hash := d.sealer.Index("escalation workflow", shorten(workflow, maxText))
	return append([]byte{space, kindWorkflow}, hash[:16]...)
}

// undelivered is the part of the index that holds one level.
func undelivered(l Level) []byte { return []byte{space, kindUndelivered, byte(l)} }

func dueKey(l Level, due time.Time, id uuid.UUID) []byte { return appendPlace(undelivered(l), due, id) }

const placeSize = 8 + 16

// placeIn is the time and the id at the end of an index entry's key.
func placeIn(name []byte) (time.Time, uuid.UUID) {
	end := name[len(name)-placeSize:]
	return time.Unix(0, int64(binary.BigEndian.Uint64(end))).UTC(), uuid.UUID(end[8:])
}

// expires is when the escalation is forgotten: never, while somebody has to be told.
func (e *Escalation) expires(keep time.Duration) time.Time {
	if e.State == Open {
		return time.Time{}
	}
	return e.Changed.Add(keep)
}

// put is the batch that brings an escalation from old to new, index entries included.
// old is nil where there is none yet. The record comes first.
func (d *Desk) put(id uuid.UUID, old, new *Escalation, condition store.Condition) []store.Write {
	name, expires := recordKey(id), new.expires(time.Duration(d.keep.Load()))
	batch := make([]store.Write, 1, 5)
	batch[0] = store.Write{Key: name, If: condition, Value: d.sealer.Seal(nil, new.encode(nil), name), Expires: expires}
	if old == nil || old.State != new.State || !old.Changed.Equal(new.Changed) {
		value := []byte{byte(new.Level), byte(new.State)}
		batch = append(batch, store.Write{Key: ageKey(new.Opened, id), Value: value, Expires: expires})
		if new.Workflow != "" {
			of := appendPlace(d.workflowPrefix(new.Workflow), new.Opened, id)
			batch = append(batch, store.Write{Key: of, Value: value, Expires: expires})
		}
	}
	if old != nil && old.due() && !(new.due() && old.Delivery.Next.Equal(new.Delivery.Next)) {
		batch = append(batch, store.Write{Key: dueKey(old.Level, old.Delivery.Next, id), Delete: true})
	}
	if new.due() && !(old != nil && old.due() && old.Delivery.Next.Equal(new.Delivery.Next)) {
		batch = append(batch, store.Write{Key: dueKey(new.Level, new.Delivery.Next, id)})
	}
	return batch
}

// due reports whether somebody has yet to be told.
func (e *Escalation) due() bool { return e.State == Open && !e.Delivery.Next.IsZero() }
