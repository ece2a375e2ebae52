package checkpoint

import (
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

func fullSnapshot() Snapshot {
	at := time.Unix(1_800_000_000, 123).UTC()
	m := Message{Header: map[string][]string{"A": {"", "x"}, "B": nil}, ContentType: "t", Body: []byte("body")}
	return Snapshot{
		Undo: []byte(`{"guard":"g"}`),
		ID:   "id", Workflow: "w", Caller: execution.CallerHash{1}, Execution: execution.Key{2}, First: "f", Action: "a", Upstream: "u",
		Way: Irreversible, Reason: ReasonTooLarge, Created: at, Expires: at.Add(time.Hour), Credentials: 7,
		Request: Request{Method: "PUT", Host: "h", Path: "/p", Query: "q", Message: m},
		Image:   &Image{Exists: true, Status: 200, ETag: "e", Message: m},
	}
}

func fullResult() Result {
	s := fullSnapshot()
	return Result{Status: 201, Upstream: 202, Reason: ReasonUnkept, Answer: s.Request.Message, Image: s.Image}
}

// filled reports an empty member, so that a new one is not forgotten.
func filled(t *testing.T, v any) {
	t.Helper()
	at := reflect.Indirect(reflect.ValueOf(v))
	for i := range at.NumField() {
		if at.Field(i).IsZero() {
			t.Errorf("the test leaves %s of %s empty", at.Type().Field(i).Name, at.Type())
		}
	}
}

func TestSnapshotKeepsEveryField(t *testing.T) {
	s := fullSnapshot()
	for _, v := range []any{s, s.Request, s.Request.Message, s.Image} {
		filled(t, v)
	}
	got, err := decodeSnapshot(s.encode())
	if err != nil {
		t.Fatal(err)
	}
	got.Created, got.Expires = got.Created.UTC(), got.Expires.UTC()
	if !reflect.DeepEqual(*got, s) {
		t.Errorf("got  %+v\nwant %+v", *got, s)
	}
}

func TestResultKeepsEveryField(t *testing.T) {
	r := fullResult()
	filled(t, r)
	got, err := decodeResult(r.encode())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*got, r) {
		t.Errorf("got  %+v\nwant %+v", *got, r)
	}
}

// An image of nothing is an image: what did not exist is deleted by the undo.
func TestImageOfNothing(t *testing.T) {
	s := fullSnapshot()
	s.Image = &Image{}
	got, err := decodeSnapshot(s.encode())
	if err != nil || got.Image == nil || got.Image.Exists {
		t.Errorf("%+v, %v", got.Image, err)
	}
}

// A newer build may add fields, and an older one still reads what it knows.
func TestReadersSkipUnknownTags(t *testing.T) {
	s := fullSnapshot()
	e := encoder{s.encode()}
	e.string(200, "from a newer build")
	got, err := decodeSnapshot(e.b)
	if err != nil || got.Upstream != "u" {
		t.Errorf("%+v, %v", got, err)
	}
}

// Two equal snapshots have different hashes, so that a hash confirms no guess.
func TestEqualSnapshotsHaveDifferentHashes(t *testing.T) {
	s := fullSnapshot()
	one, two := split(s.encode()), split(s.encode())
	if one.sum == two.sum {
		t.Error("the hash tells whether two snapshots are equal")
	}
}

// Whatever cannot be read is an error: never a panic, never a state that was not written.
func FuzzDecode(f *testing.F) {
	s, r := fullSnapshot(), fullResult()
	m := Mark{State: Undone, Rollback: "r", At: s.Created}
	f.Add(s.encode())
	f.Add(r.encode())
	f.Add(m.encode())
	f.Add(split(s.encode()).encode())
	f.Add(split(make([]byte, 3*pieceSize)).encode())
	f.Add(account{created: s.Created, bytes: 5}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := decodeSnapshot(b); err == nil {
			if s.ID == "" || s.Way.String() == "unknown" {
				t.Errorf("read %+v", s)
			}
			again, err := decodeSnapshot(s.encode())
			if err != nil || !reflect.DeepEqual(s, again) {
				t.Errorf("%+v became %+v, %v", s, again, err)
			}
		}
		if m, err := decodeMark(b); err == nil && (m.State == Standing || m.State.String() == "unknown" || m.Rollback == "") {
			t.Errorf("read %+v", m)
		}
		if p, err := decodePart(b); err == nil && (p.pieces < 0 || p.pieces > maxPieces) {
			t.Errorf("read %+v", p)
		}
		_, _ = decodeResult(b)
		_, _ = decodeCredentials(b)
		_, _ = decodeAccount(b)
	})
}

// What is remembered of workflows is bounded; those for whom something waits stay.
func TestIdleUsagesAreForgotten(t *testing.T) {
	var u usages
	of := func(i int) scope {
		s := scope{kind: kindWorkflow}
		binary.BigEndian.PutUint32(s.hash[:], uint32(i))
		return s
	}
	busy := u.of(of(0))
	for i := range maxUsages - 1 {
		u.giveBack(u.of(of(1 + i)))
	}
	if u.known(of(1)) == nil {
		t.Error("forgotten without need")
	}
	u.giveBack(u.of(of(maxUsages)))
	if u.known(of(1)) != nil || len(u.m) != 2 {
		t.Errorf("%d are remembered", len(u.m))
	}
	if u.known(of(0)) != busy {
		t.Error("one for whom something waits is forgotten")
	}
}
