package checkpoint

import "time"

// account is what an index entry tells of a standing checkpoint, so that counting opens
// no snapshot. Nothing in it is a caller's.
type account struct {
	created time.Time
	bytes   int64
}

const (
	tagAccountCreated = 1 + iota
	tagAccountBytes
)

func (a account) encode() []byte {
	e := encoder{make([]byte, 0, 24)}
	e.time(tagAccountCreated, a.created)
	e.int(tagAccountBytes, a.bytes)
	return e.b
}

func decodeAccount(b []byte) (account, error) {
	var a account
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagAccountCreated:
			a.created = d.time()
		case tagAccountBytes:
			a.bytes = d.int()
		}
	}
	return a, d.err
}
