package checkpoint

import (
	"encoding/hex"
	"reflect"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
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
	return Result{Status: 201, Upstream: 202, Reason: reasonUnkept, Answer: s.Request.Message, Image: s.Image}
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
	var got Result
	if err := unsalted(r.encode(), &got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, r) {
		t.Errorf("got  %+v\nwant %+v", got, r)
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
func TestReadersSkipUnknownFields(t *testing.T) {
	newer := struct {
		Snapshot
		More string `cbor:"200,keyasint"`
	}{fullSnapshot(), "from a newer build"}
	got, err := decodeSnapshot(salted(&newer, 0))
	if err != nil || got.Upstream != "u" {
		t.Errorf("%+v, %v", got, err)
	}
}

// Bytes that are no UTF-8 stay as they are: an undo sends them once more.
func TestAnyBytes(t *testing.T) {
	s := fullSnapshot()
	s.Request.Path, s.Request.Header["A"] = "/\xff", []string{"\x80\xfe"}
	got, err := decodeSnapshot(s.encode())
	if err != nil || got.Request.Path != s.Request.Path || !reflect.DeepEqual(got.Request.Header, s.Request.Header) {
		t.Errorf("%+v, %v", got, err)
	}
}

// Two equal snapshots have different hashes, so that a hash confirms no guess.
func TestEqualSnapshotsHaveDifferentHashes(t *testing.T) {
	s := fullSnapshot()
	one, two := split(s.encode()), split(s.encode())
	if one.Sum == two.Sum {
		t.Error("the hash tells whether two snapshots are equal")
	}
}

// Whatever cannot be read is an error: never a panic, never a state that was not written.
func FuzzDecode(f *testing.F) {
	s, r := fullSnapshot(), fullResult()
	f.Add(s.encode())
	f.Add(r.encode())
	f.Add(store.Encode(nil, &Mark{State: Undone, Rollback: "r", At: s.Created}))
	f.Add(store.Encode(nil, split(s.encode())))
	f.Add(store.Encode(nil, split(make([]byte, 1<<20))))
	f.Add(store.Encode(nil, account{Created: s.Created, Bytes: 5}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := decodeSnapshot(b); err == nil {
			if s.ID == "" || s.Way.String() == "unknown" {
				t.Errorf("read %+v", s)
			}
			again, err := decodeSnapshot(s.encode())
			if err != nil || again.ID != s.ID || again.Way != s.Way || !again.Expires.Equal(s.Expires) {
				t.Errorf("%+v became %+v, %v", s, again, err)
			}
		}
		if m := new(Mark); store.Decode(b, m) == nil && m.check() == nil && m.State.String() == "unknown" {
			t.Errorf("read %+v", m)
		}
		_ = store.Decode(b, new(part))
		_ = unsalted(b, new(Result))
		_ = store.Decode(b, new(map[string][]string))
		_ = store.Decode(b, new(account))
	})
}

// What stands in stores of earlier builds stays as it is, byte for byte, behind the random
// bytes.
func TestStoredBytes(t *testing.T) {
	s, r := fullSnapshot(), fullResult()
	for _, m := range []*Message{&s.Request.Message, &s.Image.Message, &r.Answer, &r.Image.Message} {
		m.Header = map[string][]string{"A": {"", "x"}} // of several the order is not fixed
	}
	nothing := s
	nothing.Image, nothing.Request = &Image{}, Request{}
	small := &part{Sum: [32]byte{1}, Size: 300, Inline: []byte("inline"), Counted: []byte{kindCaller, kindWorkflow}}
	large := &part{Sum: [32]byte{1}, Size: 1 << 20, Salt: []byte("saltsalt"), Released: true}
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"snapshot":    {s.encode()[saltSize:], "af01626964026177035001000000000000000000000000000000045820020000000000000000000000000000000000000000000000000000000000000012616605616106617507040869746f6f2d6c6172676509781e323032372d30312d31355430383a30303a30302e3030303030303132335a0a781e323032372d30312d31355430393a30303a30302e3030303030303132335a0f070ba7016350555402616803622f7004617105a16141826061780761740844626f64790ca609f50a18c80b616505a16141826061780761740844626f6479104d7b226775617264223a2267227d"},
		"nothing":     {nothing.encode()[saltSize:], "af01626964026177035001000000000000000000000000000000045820020000000000000000000000000000000000000000000000000000000000000012616605616106617507040869746f6f2d6c6172676509781e323032372d30312d31355430383a30303a30302e3030303030303132335a0a781e323032372d30312d31355430393a30303a30302e3030303030303132335a0f070ba00ca0104d7b226775617264223a2267227d"},
		"result":      {r.encode()[saltSize:], "a50d18c91118ca08686e6f742d6b6570740ea305a16141826061780761740844626f64790ca609f50a18c80b616505a16141826061780761740844626f6479"},
		"no result":   {(&Result{}).encode()[saltSize:], "a10ea0"},
		"small part":  {store.Encode(nil, small), "a401582001000000000000000000000000000000000000000000000000000000000000000219012c0346696e6c696e6505426f77"},
		"large part":  {store.Encode(nil, large), "a40158200100000000000000000000000000000000000000000000000000000000000000021a00100000044873616c7473616c7406f5"},
		"mark":        {store.Encode(nil, &Mark{State: Undone, Rollback: "r", At: s.Created, Doubt: "d"}), "a4010202617203781e323032372d30312d31355430383a30303a30302e3030303030303132335a046164"},
		"left":        {s.left(), "a70158200200000000000000000000000000000000000000000000000000000000000000025001000000000000000000000000000000036177046161056350555406616807622f70"},
		"credentials": {store.Encode(nil, map[string][]string{"A": {"", "x"}}), "a1614182606178"},
		"account":     {store.Encode(nil, account{Created: s.Created, Bytes: 300}), "a201781e323032372d30312d31355430383a30303a30302e3030303030303132335a0219012c"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, c.want)
		}
	}
}

// What opens but says nothing that can be is an error, whatever is wrong.
func TestBrokenRecords(t *testing.T) {
	if want := "checkpoint: a record in the store cannot be read by this build"; errEncoding.Error() != want {
		t.Errorf("%q, want %q", errEncoding, want)
	}
	for name, b := range map[string]string{
		"nothing":     "",
		"half":        "\xa1\x01",
		"no map":      "\x01",
		"more behind": "\xa2\x01\x61i\x07\x01\x00",
		"no way":      "\xa1\x01\x61i",
		"no id":       "\xa1\x07\x01",
	} {
		if _, err := decodeSnapshot(append(make([]byte, saltSize), b...)); err == nil {
			t.Errorf("%s was read", name)
		}
	}
	if _, err := decodeSnapshot(make([]byte, saltSize-1)); err != errEncoding {
		t.Errorf("half the random bytes: %v", err)
	}
}

// When what stands was made is remembered for a rate only, and until that has taken it into account.
func TestTimesForARateAreForgotten(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	for life := range 2 {
		v := New(st, ring)
		s := fullSnapshot()
		s.ID = string(rune('a' + life))
		p, err := v.Prepare(t.Context(), s, nil, Terms{TTL: MinTTL, Caller: Quota{Count: 9}})
		if err == nil {
			err = p.Commit(t.Context(), st)
		}
		if err != nil {
			t.Fatal(err)
		}
		if made := v.held.Known(p.handle.scopes[0]).State.made; len(made) > 0 {
			t.Errorf("life %d: %v", life, made)
		}
	}
}
