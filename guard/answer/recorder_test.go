package answer_test

import (
	"io"
	"net/http"
	"reflect"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// sink keeps a recording.
type sink struct {
	status  int
	header  map[string][]string
	body    string
	trailer map[string][]string
	cut     func() bool
}

func (s *sink) Start(status int, header map[string][]string) { s.status, s.header = status, header }
func (s *sink) Write(p []byte, needed bool) bool             { s.body += string(p); return true }
func (s *sink) Wait(ready <-chan struct{}) bool              { <-ready; return true }
func (s *sink) ReadBack(off int64) io.ReadCloser             { return &readBack{s, int(off)} }
func (s *sink) Cut() bool                                    { return s.cut() }
func (s *sink) SetTrailer(trailer map[string][]string)       { s.trailer = trailer }

func (s *sink) Judge(int) http.Header { return nil }

// readBack reads a sink's body.
type readBack struct {
	s   *sink
	off int
}

func (b *readBack) Read(p []byte) (int, error) {
	n := copy(p, b.s.body[b.off:])
	b.off += n
	return n, nil
}
func (b *readBack) Close() error { return nil }

func never() bool                                              { return false }
func always() bool                                             { return true }
func record(to http.ResponseWriter, r *http.Request) *recorded { return recordCut(to, r, never) }

// recorded is a recorder and what it has recorded.
type recorded struct {
	*answer.Recorder
	sink sink
}

func recordCut(to http.ResponseWriter, r *http.Request, cut func() bool) *recorded {
	rec := new(recorded)
	rec.sink.cut = cut
	rec.Recorder = newRecorder(newWriter(to, r), &rec.sink, answer.Field{Name: "Execution-Status", Value: "executed"})
	return rec
}

// Step 7: what is recorded is the difference that the call makes to the header.
func TestTheHeaderDifferenceIsRecorded(t *testing.T) {
	to := newClient()
	for name, value := range map[string]string{"Via": "1.1 Caddy", "X-Removed": "by the call", "X-Changed": "before", "X-Added": "one"} {
		to.header.Set(name, value)
	}
	rec := record(to, post())
	h := rec.Header()
	h.Del("X-Removed")
	h.Set("X-Changed", "after")
	h.Add("X-Added", "two")
	h.Set("X-New", "new")
	h["X-Emptied"] = nil
	rec.WriteHeader(201)
	h.Set("X-Late", "after the header has gone")

	want := map[string][]string{
		"X-Removed": nil, "X-Changed": {"after"}, "X-Added": {"one", "two"}, "X-New": {"new"},
	}
	if rec.sink.status != 201 || !reflect.DeepEqual(rec.sink.header, want) {
		t.Errorf("recorded %d %v, want 201 %v", rec.sink.status, rec.sink.header, want)
	}
	h.Set("X-New", "changed later")
	rec.Header()["X-Added"][0] = "changed later"
	if !reflect.DeepEqual(rec.sink.header, want) {
		t.Errorf("the recording changed with the header map: %v", rec.sink.header)
	}
}

// Handlers between the guard and its upstream may change values in place, as Caddy's `header` does.
func TestOurFieldsAreNotChangedInPlace(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	rec.Header()["Execution-Status"][0] = "replaced"
	rec.WriteHeader(200)
	if got := to.header.Get("Execution-Status"); got != "executed" {
		t.Errorf("the client sees Execution-Status %q", got)
	}
}

// Fields of one connection, one moment or one client are not replayed, and neither
// is what only the gateway says.
func TestFieldsThatAreNeverReplayed(t *testing.T) {
	names := []string{
		"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te",
		"Transfer-Encoding", "Upgrade", "Date", "Set-Cookie", "Set-Cookie2", "Server-Timing",
		"Execution-Id", "Execution-Status", "Execution-Checkpoint", "Idempotent-Replayed", "Trailer:X-Sum",
	}
	h := http.Header{"X-Kept": {"yes"}}
	for _, name := range names {
		h[name] = []string{"value"}
	}
	want := map[string][]string{"X-Kept": {"yes"}}
	if got := answer.Replayable(h); !reflect.DeepEqual(got, want) {
		t.Errorf("replayable: %v, want %v", got, want)
	}

	to := newClient()
	to.header.Set("Date", "now")
	rec := record(to, post())
	for _, name := range names {
		rec.Header()[name] = []string{"value"}
	}
	rec.Header().Del("Date")
	rec.WriteHeader(200)
	if len(rec.sink.header) != 0 {
		t.Errorf("recorded %v, want nothing", rec.sink.header)
	}
}

// No upstream says whether a call was executed or replayed.
func TestTheGuardsOwnFieldsAreTheGuards(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	rec.Header().Set("Execution-Status", "replayed")
	rec.Header().Set("Idempotent-Replayed", "true")
	rec.WriteHeader(200)
	if got := to.header.Get("Execution-Status"); got != "executed" {
		t.Errorf("Execution-Status %q, want executed", got)
	}
	if got := to.header.Get("Idempotent-Replayed"); got != "" {
		t.Errorf("Idempotent-Replayed %q, want none", got)
	}
}

func TestBytesGoToTheClientAndIntoTheRecording(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	rec.Header().Set("Content-Length", "6")
	_, _ = rec.Write([]byte("abc"))
	_, _ = rec.Write([]byte("def"))
	if _, whole := rec.Finish(); !whole {
		t.Error("a whole body is not called so")
	}
	if rec.sink.status != 200 || rec.sink.body != "abcdef" || rec.Status() != 200 {
		t.Errorf("recorded %d %q", rec.sink.status, rec.sink.body)
	}
	if len(to.log) > 0 { // it waits whole
		t.Errorf("the client has %q", to.log)
	}
	if want := []string{"status 200", "write abcdef"}; !rec.Release(t.Context(), 0) || !slices.Equal(to.log, want) {
		t.Errorf("the client has %q, want %q", to.log, want)
	}
}

// P6, P7: a small answer of known length waits whole, so that it can be replaced while its outcome is not recorded. One
// that is flushed, or too large, goes at once, but for its end.
func TestSmallAnswersWaitWhole(t *testing.T) {
	for name, c := range map[string]struct {
		length string
		flush  bool
		sent   string // before its end
	}{
		"small":             {"6", false, ""},
		"flushed":           {"6", true, "abcde"},
		"too large":         {"5000", false, "abcdef"},
		"of unknown length": {"", false, "abcdef"},
	} {
		to := newClient()
		to.header.Set("Via", "1.1 Caddy")
		rec := record(to, post())
		if c.length != "" {
			rec.Header().Set("Content-Length", c.length)
		}
		rec.Header().Set("X-Answer", "yes")
		_, _ = rec.Write([]byte("abc"))
		if c.flush {
			rec.Flush()
		}
		_, _ = rec.Write([]byte("def"))
		rec.Drain(t.Context())
		if string(to.body) != c.sent || rec.sink.body != "abcdef" || (len(to.log) > 0) != (c.sent != "") {
			t.Errorf("%s: the client has %q", name, to.log)
		}
		if c.sent != "" {
			continue
		}
		rec.Reset()
		if len(to.log) > 0 || to.header.Get("X-Answer") != "" || to.header.Get("Content-Length") != "" || to.header.Get("Via") == "" {
			t.Errorf("%s: once it is replaced the client has %q %v", name, to.log, to.header)
		}
	}
}

// P7: the client's leaving never loses a result.
func TestTheRecordingGoesOnWithoutTheClient(t *testing.T) {
	to := newClient()
	to.gone = true
	rec := record(to, post())
	_, _ = rec.Write([]byte("abc"))
	if err := rec.FlushError(); err != nil {
		t.Error(err)
	}
	_, _ = rec.Write([]byte("def"))
	if rec.sink.body != "abcdef" {
		t.Errorf("recorded %q", rec.sink.body)
	}
}

func TestWhole(t *testing.T) {
	for _, c := range []struct {
		name   string
		r      *http.Request
		status int
		length string
		body   string
		want   bool
	}{
		{"no length", post(), 200, "", "abc", true},
		{"the announced length", post(), 200, "3", "abc", true},
		{"short", post(), 200, "4", "abc", false},
		{"long", post(), 200, "2", "abc", false},
		{"nothing of something", post(), 200, "4", "", false},
		{"HEAD announces what it does not send", head(), 200, "4", "", true},
		{"304 does, too", post(), 304, "4", "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			rec := record(newClient(), c.r)
			if c.length != "" {
				rec.Header().Set("Content-Length", c.length)
			}
			rec.WriteHeader(c.status)
			if c.body != "" {
				_, _ = rec.Write([]byte(c.body))
			}
			if _, got := rec.Finish(); got != c.want {
				t.Errorf("Whole is %v, want %v", got, c.want)
			}
		})
	}
}

func TestInformationalAnswersAreNotRecorded(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	rec.WriteHeader(http.StatusEarlyHints)
	if rec.Status() != 0 || rec.sink.status != 0 {
		t.Errorf("103 is recorded as %d", rec.sink.status)
	}
	rec.WriteHeader(202)
	rec.WriteHeader(500) // superfluous
	if rec.Status() != 202 || rec.sink.status != 202 {
		t.Errorf("recorded %d, want 202", rec.sink.status)
	}
}

// "Sent or not": Caddy's own 499 after the fuse is not the upstream's answer.
func TestAnInterruptedCallHasNoAnswer(t *testing.T) {
	to := newClient()
	rec := recordCut(to, post(), always)
	rec.WriteHeader(499)
	_, _ = rec.Write([]byte("abc"))
	rec.Flush()
	rec.Finish()
	if !rec.Interrupted() || rec.Status() != 0 || rec.sink.status != 0 || rec.sink.body != "" || len(to.log) != 0 {
		t.Errorf("interrupted %v, recorded %d %q, sent %q", rec.Interrupted(), rec.sink.status, rec.sink.body, to.log)
	}

	rec = recordCut(newClient(), post(), never)
	rec.WriteHeader(499)
	if rec.Interrupted() || rec.sink.status != 499 {
		t.Error("an upstream's own 499 is not taken as its answer")
	}
}

// A call that is forwarded again, or refused, begins with the header of before.
func TestResetBringsTheHeaderBack(t *testing.T) {
	to := newClient()
	to.header.Set("Via", "1.1 Caddy")
	rec := record(to, post())
	rec.Header().Set("X-Upstream", "a")
	rec.Header().Del("Via")
	rec.Reset()
	if want := (http.Header{"Via": {"1.1 Caddy"}, "Execution-Status": {"executed"}}); !reflect.DeepEqual(to.header, want) {
		t.Errorf("header %v, want %v", to.header, want)
	}
}

func TestFinishOfAHandlerThatWroteNothing(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	rec.Header().Set("X-Kept", "yes")
	rec.Finish()
	if rec.sink.status != 200 || rec.sink.header["X-Kept"] == nil {
		t.Errorf("recorded %d %v, want 200 with X-Kept", rec.sink.status, rec.sink.header)
	}
}

// Step 7: trailers, announced or with net/http's prefix, are recorded by their own
// names.
func TestTrailersAreRecorded(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	h := rec.Header()
	h.Set("Trailer", "Grpc-Status, x-sum")
	h.Add("Trailer", "X-Absent")
	_, _ = rec.Write([]byte("abc"))
	h.Set("Grpc-Status", "0")
	h.Set("X-Sum", "42")
	h.Set(http.TrailerPrefix+"x-late", "yes")
	h.Set(http.TrailerPrefix+"Set-Cookie", "secret=1")
	rec.Finish()
	want := map[string][]string{"Grpc-Status": {"0"}, "X-Sum": {"42"}, "X-Late": {"yes"}}
	if !reflect.DeepEqual(rec.sink.trailer, want) {
		t.Errorf("recorded trailer %v, want %v", rec.sink.trailer, want)
	}
	if _, ok := rec.sink.header["X-Sum"]; ok {
		t.Errorf("the trailer stands in the recorded header: %v", rec.sink.header)
	}
}
