package transport

import (
	"bytes"
	"io"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// maxAtOnce is the largest body that is put behind its header in one write, in bytes.
const maxAtOnce = 8 << 10

// lateBody is a small body that is read into memory once its request has a connection,
// and not before: a request that gets none is sent elsewhere, with the body unread.
//
// Go writes a header by itself where the body is not of a type that it knows to be in
// memory, since it might be long in coming: a second system call here, and a second
// wake-up of the upstream. A guarded call's body was read before it was claimed.
type lateBody struct {
	from   io.ReadCloser
	length int64
	buf    bytes.Buffer
	read   bool
}

// lateBodyOf gives req, which is the transport's own copy, such a body if it can: on
// HTTP/1 only, whose connections are always reported.
func (t *Transport) lateBodyOf(req *http.Request, attempt *sent.Attempt) *lateBody {
	if t.h2c || req.URL.Scheme != "http" || req.Body == nil || len(req.Trailer) > 0 ||
		req.ContentLength <= 0 || req.ContentLength > maxAtOnce {
		return nil
	}
	b := &lateBody{from: req.Body, length: req.ContentLength}
	req.Body = io.NopCloser(&b.buf)
	attempt.OnConn(b.fill)
	return b
}

// fill reads one byte more than was announced, to meet the end. What it finds too much
// or too little, or cannot read, Go's transport finds in its turn.
func (b *lateBody) fill() {
	if b.read {
		return
	}
	b.read = true
	_, _ = io.CopyN(&b.buf, b.from, b.length+1)
	_ = b.from.Close()
}

// close is the contract of RoundTripper for a body that was not read.
func (b *lateBody) close() {
	if b != nil && !b.read {
		_ = b.from.Close()
	}
}
