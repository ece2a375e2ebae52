package checkpoint

import (
	"encoding/hex"
	"reflect"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
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
	s.OnError = true
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
	e := store.Encoder{B: s.encode()}
	e.String(200, "from a newer build")
	got, err := decodeSnapshot(e.B)
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
	for _, empty := range []byte{tagRequest, tagImage, tagUndo} { // fields that no writer leaves
		b := store.Encoder{B: s.encode()}
		store.Field(&b, empty, "")
		f.Add(b.B)
	}
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
		if m, err := decodeMark(b); err == nil && (m.State == Active || m.State.String() == "unknown" || m.Rollback == "") {
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

// What stands in stores of earlier builds stays as it is, byte for byte, behind the random
// bytes.
func TestStoredBytes(t *testing.T) {
	s, r := fullSnapshot(), fullResult()
	nothing := s
	nothing.Image, nothing.Request = &Image{}, Request{}
	secret := encodeCredentials(map[string][]string{"B": nil, "A": {"", "x"}, "": {"y"}})
	small := &part{sum: [32]byte{1}, size: 300, inline: []byte("inline"), counted: []byte{kindCaller, kindWorkflow}}
	large := &part{sum: [32]byte{1}, size: 1 << 20, salt: []byte("saltsalt"), pieces: 4, released: true}
	mark := Mark{State: Undone, Rollback: "r", At: s.Created, Doubt: "d"}
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"snapshot":    {s.encode()[saltSize:], "01026964020177031001000000000000000000000000000000042002000000000000000000000000000000000000000000000000000000000000001201660501610601750701080809746f6f2d6c617267650909f681a0bbd29df1fa310a09f681e5c698eff2fa310f010e0b23010350555402016803022f7004017105014106000601780501420701740804626f64790c1e0901020a0290030b016505014106000601780501420701740804626f6479100d7b226775617264223a2267227d"},
		"nothing":     {nothing.encode()[saltSize:], "01026964020177031001000000000000000000000000000000042002000000000000000000000000000000000000000000000000000000000000001201660501610601750701080809746f6f2d6c617267650909f681a0bbd29df1fa310a09f681e5c698eff2fa310f010e0c00100d7b226775617264223a2267227d"},
		"result":      {r.encode()[saltSize:], "0d0292031102940308086e6f742d6b6570740e1405014106000601780501420701740804626f64790c1e0901020a0290030b016505014106000601780501420701740804626f6479"},
		"no result":   {(&Result{}).encode()[saltSize:], ""},
		"small part":  {small.encode(), "012001000000000000000000000000000000000000000000000000000000000000000202d8040306696e6c696e6507026f77"},
		"large part":  {large.encode(), "01200100000000000000000000000000000000000000000000000000000000000000020480808001040873616c7473616c74050108060102"},
		"mark":        {mark.encode(), "0101040201720309f681a0bbd29df1fa31040164"},
		"left":        {s.left(), "031001000000000000000000000000000000042002000000000000000000000000000000000000000000000000000000000000000201770501610b0c010350555402016803022f70"},
		"credentials": {secret, "05000601790501410600060178050142"},
		"account":     {account{created: s.Created, bytes: 300}.encode(), "0109f681a0bbd29df1fa310202d804"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, c.want)
		}
	}
}

// What opens but cannot be read is errEncoding, whatever is wrong, and also within a field.
func TestBrokenFields(t *testing.T) {
	if want := "checkpoint: a record in the store cannot be read by this build"; errEncoding.Error() != want {
		t.Errorf("%q, want %q", errEncoding, want)
	}
	for name, b := range map[string]string{
		"no length":             "\x02",
		"a length too long":     "\x02\x02a",
		"an endless length":     "\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"no number":             "\x09\x00",
		"half a number":         "\x09\x01\x80",
		"two numbers":           "\x09\x02\x04\x04",
		"half a caller":         "\x03\x02ab",
		"a cut request":         "\x0b\x02\x01\x05",
		"a value without name":  "\x0b\x03\x06\x01x",
		"no way":                "\x01\x01i",
		"no id":                 "\x07\x01\x02",
		"a number in the image": "\x0c\x02\x0a\x00",
	} {
		if _, err := decodeSnapshot(append(make([]byte, saltSize), b...)); err != errEncoding {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := decodeSnapshot(make([]byte, saltSize-1)); err != errEncoding {
		t.Errorf("half the random bytes: %v", err)
	}
}
