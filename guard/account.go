package guard

import (
	"time"
)

// account is what an index entry tells of a settled execution, so that counting a
// caller's needs no record to be opened. Nothing in it is the caller's.
type account struct {
	state   State
	created time.Time
	// record and result are bytes: of the record before it is sealed, until the
	// entry itself expires, and of the answer beside it, until resultExpires.
	record, result int64
	resultExpires  time.Time
}

func accountOf(r *Record, record int) account {
	a := account{state: r.State, created: r.Created, record: int64(record), result: r.Result.Size}
	if a.result > 0 {
		a.resultExpires = r.Result.Expires
	}
	return a
}

// The tags of an account's fields, under the rules of a record's.
const (
	tagAccountState = 1 + iota
	tagAccountCreated
	tagAccountRecord
	tagAccountResult
	tagAccountResultExpires
)

func (a account) encode() []byte {
	e := encoder{make([]byte, 0, 48)}
	e.int(tagAccountState, int64(a.state))
	e.time(tagAccountCreated, a.created)
	e.int(tagAccountRecord, a.record)
	e.int(tagAccountResult, a.result)
	e.time(tagAccountResultExpires, a.resultExpires)
	return e.b
}

func decodeAccount(b []byte) (account, error) {
	var a account
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagAccountState:
			a.state = State(d.int())
		case tagAccountCreated:
			a.created = d.time()
		case tagAccountRecord:
			a.record = d.int()
		case tagAccountResult:
			a.result = d.int()
		case tagAccountResultExpires:
			a.resultExpires = d.time()
		}
	}
	return a, d.err
}
