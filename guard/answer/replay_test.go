package answer_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// replayed is a recorded answer.
func replayed(status int, header map[string][]string, body io.Reader, trailer map[string][]string) answer.Answer {
	return answer.Answer{
		Head: &execution.Head{Status: status, Header: header}, Body: body,
		Trailer: func() map[string][]string { return trailer },
	}
}

func TestPlayBringsTheRecordedAnswerBack(t *testing.T) {
	to := newClient()
	to.header.Set("Via", "1.1 Caddy")
	to.header.Set("X-Removed", "from outside")
	recorded := map[string][]string{"Content-Length": {"6"}, "X-Removed": nil, "X-Two": {"a", "b"}}
	src := replayed(201, recorded, iotest.OneByteReader(strings.NewReader("abcdef")), nil)
	err := answer.Play(newWriter(to, post()), post(), src, answer.Field{Name: "Idempotent-Replayed", Value: "true"})
	if err != nil {
		t.Fatal(err)
	}
	want := http.Header{"Via": {"1.1 Caddy"}, "Content-Length": {"6"}, "X-Two": {"a", "b"}, "Idempotent-Replayed": {"true"}}
	if !reflect.DeepEqual(to.header, want) || to.log[0] != "status 201" || string(to.body) != "abcdef" {
		t.Errorf("played %v %q %q, want %v", to.header, to.log, to.body, want)
	}
	to.header["X-Two"][0] = "changed"
	if recorded["X-Two"][0] != "a" {
		t.Error("the played header is the recording's own")
	}
}

func TestPlayOfAnEmptyAnswer(t *testing.T) {
	to := newClient()
	if err := answer.Play(newWriter(to, post()), post(), replayed(204, nil, http.NoBody, nil)); err != nil {
		t.Fatal(err)
	}
	if want := []string{"status 204"}; !slices.Equal(to.log, want) {
		t.Errorf("played %q, want %q", to.log, want)
	}
}

// *Attach*: a follower sees every byte as it comes.
func TestALiveAnswerIsFlushed(t *testing.T) {
	to := newClient()
	src := replayed(200, nil, io.MultiReader(strings.NewReader("one"), strings.NewReader("two")), nil)
	src.Live = true
	if err := answer.Play(newWriter(to, post()), post(), src); err != nil {
		t.Fatal(err)
	}
	if want := []string{"status 200", "flush", "write one", "flush", "write two", "flush"}; !slices.Equal(to.log, want) {
		t.Errorf("played %q, want %q", to.log, want)
	}
}

// *Attach*: a truncated owner truncates its followers: the end is not released.
func TestACutAnswerIsNotEnded(t *testing.T) {
	cut := errors.New("cut")
	for _, c := range []struct {
		name   string
		header map[string][]string
		sent   bool
		want   []string
	}{
		{"with a length", map[string][]string{"Content-Length": {"3"}}, true, []string{"status 200", "flush", "write ab", "flush"}},
		{"without", nil, true, []string{"status 200", "flush", "write abc", "flush"}},
		{"with the header held", map[string][]string{"Content-Length": {"0"}}, false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			to := newClient()
			to.header.Set("Via", "1.1 Caddy")
			w := newWriter(to, post())
			body := io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(cut))
			src := replayed(200, c.header, body, map[string][]string{"X-Sum": {"1"}})
			src.Live = true
			err := answer.Play(w, post(), src, answer.Field{Name: "X-Mark", Value: "yes"})
			if !errors.Is(err, cut) || w.Sent() != c.sent || !slices.Equal(to.log, c.want) {
				t.Errorf("%v, sent %v %q; want %v, %v %q", err, w.Sent(), to.log, cut, c.sent, c.want)
			}
			if c.sent {
				return
			}
			// Nothing was sent: another answer can take the place.
			if want := (http.Header{"Via": {"1.1 Caddy"}}); !reflect.DeepEqual(to.header, want) {
				t.Errorf("the header keeps %v, want %v", to.header, want)
			}
			w.WriteHeader(409)
			_, _ = w.Write([]byte("no"))
			w.Release()
			if want := []string{"status 409", "write no"}; !slices.Equal(to.log, want) {
				t.Errorf("the other answer is %q, want %q", to.log, want)
			}
		})
	}
}

// The outcome of a recorded answer is known: nothing of it is held back.
func TestARecordedAnswerGoesWhole(t *testing.T) {
	to := newClient()
	src := replayed(200, map[string][]string{"Content-Length": {"3"}}, io.MultiReader(strings.NewReader("abc"), strings.NewReader("more")), nil)
	if err := answer.Play(newWriter(to, post()), post(), src); err != nil {
		t.Fatal(err)
	}
	if want := []string{"status 200", "write abc"}; !slices.Equal(to.log, want) {
		t.Errorf("played %q, want %q", to.log, want)
	}
}

// endless would be played for ever to a client that stays.
type endless struct{ reads int }

func (e *endless) Read(p []byte) (int, error) {
	e.reads++
	return copy(p, "x"), nil
}

func TestPlayStopsWhenTheClientHasLeft(t *testing.T) {
	to := newClient()
	to.gone = true
	body := new(endless)
	if err := answer.Play(newWriter(to, post()), post(), replayed(200, nil, body, nil)); err != nil {
		t.Error(err)
	}
	if body.reads != 1 {
		t.Errorf("%d reads for a client that had left", body.reads)
	}
}

// Over a real connection, announced or not, trailers arrive as trailers.
func TestTrailersArePlayed(t *testing.T) {
	for name, header := range map[string]map[string][]string{
		"announced":     {"Trailer": {"X-Sum"}},
		"not announced": nil,
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				src := replayed(200, header, strings.NewReader("abc"), map[string][]string{"X-Sum": {"42"}})
				if err := answer.Play(newWriter(w, r), r, src); err != nil {
					t.Error(err)
				}
			}))
			defer server.Close()
			res, err := server.Client().Get(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err != nil || string(body) != "abc" || res.Trailer.Get("X-Sum") != "42" || res.Header.Get("X-Sum") != "" {
				t.Errorf("%q, %v, trailer %v, header %v", body, err, res.Trailer, res.Header)
			}
		})
	}
}

func gzipped(text string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write([]byte(text)) // into memory
	_ = z.Close()
	return b.Bytes()
}

// A recorded answer may be gzipped because its first caller accepted that; a retry
// that does not gets it plain.
func TestGzipIsUnpackedForWhoDoesNotAcceptIt(t *testing.T) {
	packed := gzipped("hello")
	for _, c := range []struct {
		name     string
		accept   string
		encoding string
		etag     string
		plain    bool
		want     string // ETag
	}{
		{"accepted", "gzip", "gzip", `"a"`, false, `"a"`},
		{"not accepted", "identity", "gzip", `"a"`, true, `W/"a"`},
		{"no field", "", "gzip", `"a"`, true, `W/"a"`},
		{"a weak tag stays", "br", "GZIP", `W/"a"`, true, `W/"a"`},
		{"no tag", "br", "gzip", "", true, ""},
		{"the old name", "br", "x-gzip", "", true, ""},
		{"refused by weight", "gzip;q=0", "gzip", "", true, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := post()
			if c.accept != "" {
				r.Header.Set("Accept-Encoding", c.accept)
			}
			header := map[string][]string{"Content-Encoding": {c.encoding}, "Content-Length": {"29"}}
			if c.etag != "" {
				header["Etag"] = []string{c.etag}
			}
			to := newClient()
			if err := answer.Play(newWriter(to, r), r, replayed(200, header, bytes.NewReader(packed), nil)); err != nil {
				t.Fatal(err)
			}
			_, encoded := to.header["Content-Encoding"]
			_, length := to.header["Content-Length"]
			if encoded == c.plain || length == c.plain {
				t.Errorf("header %v, plain should be %v", to.header, c.plain)
			}
			if c.plain && string(to.body) != "hello" || !c.plain && !bytes.Equal(to.body, packed) {
				t.Errorf("body %q", to.body)
			}
			if got := to.header.Get("Etag"); got != c.want {
				t.Errorf("ETag %q, want %q", got, c.want)
			}
		})
	}
}

func TestACutGzipIsNotPlayedAsWhole(t *testing.T) {
	header := map[string][]string{"Content-Encoding": {"gzip"}}
	body := gzipped("hello")[:20]
	if err := answer.Play(newWriter(newClient(), post()), post(), replayed(200, header, bytes.NewReader(body), nil)); err == nil {
		t.Error("played to the end")
	}
}

func TestEmptyBodiesMarkedAsGzip(t *testing.T) {
	header := map[string][]string{"Content-Encoding": {"gzip"}}
	for _, status := range []int{200, 204} {
		to := newClient()
		if err := answer.Play(newWriter(to, post()), post(), replayed(status, header, http.NoBody, nil)); err != nil || len(to.body) != 0 {
			t.Errorf("%d: %v, body %q", status, err, to.body)
		}
	}
}

// leaver is a client whose connection still has what it was given to write when the
// write has failed, as HTTP/2 has where the stream is reset.
type leaver struct {
	*client
	kept []byte
}

func (l *leaver) Write(p []byte) (int, error) {
	l.kept = p
	return 0, errors.New("the stream is reset")
}

// P3: the memory of an answer is not another caller's as long as a connection may
// still read it.
func TestP3MemoryOfAFailedWriteIsNotUsedAgain(t *testing.T) {
	const mine = "mine, and nobody else's"
	for range 100 { // the pool does not always give back what was put last
		gone := &leaver{client: newClient()}
		if err := answer.Play(newWriter(gone, post()), post(), replayed(200, nil, strings.NewReader(mine), nil)); err != nil {
			t.Fatal(err)
		}
		other := replayed(200, nil, strings.NewReader(strings.Repeat("x", 2*len(mine))), nil)
		if err := answer.Play(newWriter(newClient(), post()), post(), other); err != nil {
			t.Fatal(err)
		}
		if string(gone.kept) != mine {
			t.Fatalf("the connection of one caller writes %q of another's answer", gone.kept)
		}
	}
}
