package guard

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func fullRecord() Record {
	at := time.Unix(1_800_000_000, 123).UTC()
	r := Record{
		State: StateCompleted, ID: "id", Origin: OriginMinted, Guard: "g", Action: "a", Host: "h", Method: "POST", Path: "/p",
		Workflow: "w", Checkpoint: "k", Node: "n", Boot: "b", Created: at, Deadline: at.Add(1), Settled: at.Add(2), Cause: CauseStatus,
		Status: 201, KeepResult: time.Hour, KeepKey: 2 * time.Hour,
		Result: StoredResult{Kept: true, Inline: []byte("inline"), Pieces: 3, Size: 4, Expires: at.Add(3)},
	}
	r.Claim[0], r.Fingerprint[1], r.Caller[2], r.Result.Sum[3] = 1, 2, 3, 4
	return r
}

func utc(r *Record) {
	for _, t := range []*time.Time{&r.Created, &r.Deadline, &r.Settled, &r.Result.Expires} {
		*t = t.UTC()
	}
}

func TestRecordKeepsEveryField(t *testing.T) {
	full := fullRecord()
	v := reflect.ValueOf(full)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the test leaves %s empty", v.Type().Field(i).Name)
		}
	}
	got, err := decodeRecord(full.encode(nil))
	if err != nil {
		t.Fatal(err)
	}
	utc(got)
	if !reflect.DeepEqual(*got, full) {
		t.Errorf("got  %+v\nwant %+v", *got, full)
	}
}

// The largest record stays an ordinary value: what promises rest on is kept where
// a store sees the error of its sync (P2).
func TestP2LargestRecordIsAnOrdinaryValue(t *testing.T) {
	r := fullRecord()
	long := strings.Repeat("x", 1<<20)
	r.ID, r.Guard, r.Action = shorten(long, maxRecordedID), shorten(long, maxRecordedText), shorten(long, maxRecordedText)
	r.Method, r.Path, r.Workflow = r.Guard, r.Guard, r.Guard
	r.Result.Inline = make([]byte, maxInline)
	if n := len(r.encode(nil)); n > 4096 || n > store.MaxValue {
		t.Errorf("%d bytes", n)
	}
}

// Records that a newer build wrote can be read: unknown fields are skipped.
func TestRecordSkipsUnknownFields(t *testing.T) {
	full := fullRecord()
	e := encoder{full.encode(nil)}
	e.string(200, "of a newer build")
	got, err := decodeRecord(e.b)
	if err != nil || got.ID != "id" {
		t.Errorf("%+v, %v", got, err)
	}
}

func FuzzDecodeRecord(f *testing.F) {
	full := fullRecord()
	f.Add(full.encode(nil))
	f.Add([]byte{})
	f.Add([]byte{tagState, 1, 2, tagID, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		again, err := decodeRecord(r.encode(nil))
		if err != nil {
			t.Fatal(err)
		}
		if string(again.encode(nil)) != string(r.encode(nil)) {
			t.Fatal("not stable")
		}
	})
}

func FuzzDecodeHead(f *testing.F) {
	h := Head{Status: 200, Size: 7, Header: map[string][]string{"A": {"", "b"}, "Gone": nil}, Trailer: map[string][]string{"T": {"x"}}}
	f.Add(h.encode(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHead(b)
		if err != nil {
			return
		}
		again, err := decodeHead(h.encode(nil))
		if err != nil || again.Status != h.Status || len(again.Header) > len(h.Header) {
			t.Fatalf("%+v, %v", again, err)
		}
	})
}
