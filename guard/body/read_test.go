package body_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// failsAfter reads text, then fails.
func failsAfter(text string, err error) io.Reader {
	return io.MultiReader(strings.NewReader(text), readerFunc(func([]byte) (int, error) { return 0, err }))
}

// What is read is the whole body; what cannot be read is refused, and takes no memory from then on.
func TestReadBody(t *testing.T) {
	broken := errors.New("broken off")
	grpc := "\x00\x00\x00\x00\x03abc"
	for _, c := range []struct {
		name   string
		from   io.Reader // of the body
		length int64     // as declared, or -1
		how    body.Reading
		wanted func([]byte) bool
		want   string
		slug   string // of the problem
		status int
		err    error
	}{
		{name: "whole", from: strings.NewReader("amount=1"), length: 8, want: "amount=1"},
		{name: "as long as may be", from: strings.NewReader(strings.Repeat("a", 5000)), length: -1, want: strings.Repeat("a", 5000)},
		{name: "empty", from: http.NoBody, how: body.Reading{Incremental: true}},
		{name: "declared too long", from: strings.NewReader("a"), length: 5001, slug: "body-too-large", status: 413},
		{name: "too long", from: strings.NewReader(strings.Repeat("a", 5001)), length: -1, slug: "body-too-large", status: 413},
		{name: "too long for request_body", from: failsAfter("a", &http.MaxBytesError{Limit: 1}), length: -1, slug: "body-too-large", status: 413},
		{name: "too slow", from: failsAfter("a", os.ErrDeadlineExceeded), length: -1, slug: "body-timeout", status: 408},
		{name: "broken off", from: failsAfter("a", broken), length: 2, err: broken},
		{name: "incremental", from: strings.NewReader("a"), length: 1, how: body.Reading{Incremental: true}, slug: "stream-refused", status: 501},
		{name: "one message", from: strings.NewReader(grpc), length: -1, how: body.Reading{OneMessage: true}, want: grpc},
		{name: "a second message", from: io.MultiReader(strings.NewReader(grpc), strings.NewReader("\x00")), length: -1,
			how: body.Reading{OneMessage: true}, slug: "stream-refused", status: 403},
		{name: "unwanted and whole", from: strings.NewReader("a"), length: 1,
			wanted: func([]byte) bool { return false }, want: "a"},
		{name: "broken off at the start", from: failsAfter("", broken), length: 2, wanted: func([]byte) bool { return true }, err: broken},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest("POST", "/", nil)
			r.Body, r.ContentLength = io.NopCloser(c.from), c.length
			if c.from == http.NoBody {
				r.Body = http.NoBody
			}
			c.how.Limit, c.how.Budget = 5000, body.NewBudget(1<<20)
			got, _, err := body.Read(r, c.how, c.wanted)
			var p *problem.Problem
			switch {
			case c.slug != "":
				if !errors.As(err, &p) || p.Kind().Slug != c.slug || p.Status != c.status && p.Kind().Status != c.status {
					t.Errorf("%v; want %s", err, c.slug)
				}
			case c.err != nil:
				if !errors.Is(err, c.err) || errors.As(err, &p) {
					t.Errorf("%v; want %v", err, c.err)
				}
			case err != nil:
				t.Fatal(err)
			}
			if (got == nil) != (err != nil) {
				t.Fatalf("a spool: %t, %v", got != nil, err)
			}
			if got != nil {
				sent := &http.Request{Header: http.Header{"Expect": {"100-continue"}}, TransferEncoding: []string{"chunked"}}
				got.PutInto(sent)
				text, err := io.ReadAll(sent.Body)
				if string(text) != c.want || err != nil || sent.ContentLength != int64(len(c.want)) || len(sent.Header)+len(sent.TransferEncoding) > 0 {
					t.Errorf("%q, %v; want %q; %d bytes, %v", text, err, c.want, sent.ContentLength, sent.Header)
				}
				_, _ = sent.Body.Close(), got.Close()
			}
			if n := c.how.Budget.Used(); n != 0 {
				t.Errorf("%d bytes of memory remain in use", n)
			}
		})
	}
}

// A body that is not wanted, and that has not all come, is as if nothing was read of it.
func TestUnwantedBody(t *testing.T) {
	text := strings.Repeat("amount=1;", 10000)
	r := httptest.NewRequest("POST", "/", io.MultiReader(strings.NewReader(text[:100]), strings.NewReader(text[100:])))
	shown := ""
	how := body.Reading{Limit: 1 << 20}
	unwanted := func(start []byte) bool { shown = string(start); return false }
	if got, _, err := body.Read(r, how, unwanted); got != nil || err != nil || shown != text[:100] {
		t.Fatalf("a spool: %t, %v; shown %q", got != nil, err, shown)
	}
	got, _, err := body.Read(r, how, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	whole := make([]byte, len(text))
	if _, err := got.ReadAt(whole, 0); err != nil || string(whole) != text || got.Size() != int64(len(text)) {
		t.Errorf("%d bytes, %v", got.Size(), err)
	}
}
