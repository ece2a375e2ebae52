package load

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
)

// Request is the request of a round.
type Request struct {
	Method, Path string
	// Body is sent with Content-Type application/json, if there is one.
	Body []byte
	// Key is the value of Idempotency-Key; empty is none. Fresh gives every
	// request a key of its own instead.
	Key   string
	Fresh bool
}

// Payment is a POST with a JSON body of n bytes.
func Payment(n int) Request {
	const head, tail = `{"amount":1999,"currency":"eur","note":"`, `"}`
	body := head + strings.Repeat("n", max(n-len(head)-len(tail), 0)) + tail
	return Request{Method: http.MethodPost, Path: "/v1/charges", Body: []byte(body)}
}

// keyLength is that of a UUID, because some take nothing else.
const keyLength = 36

var (
	keyPrefix = func() string {
		var b [4]byte
		_, _ = rand.Read(b[:]) // never fails
		return hex.EncodeToString(b[:]) + "-0000-4000-8000-"
	}()
	keyNumber atomic.Uint64
)

// NewKey makes a key that no other call of this process has, and hardly one of
// another, in the form of a UUID.
func NewKey() string { return string(appendKey(make([]byte, 0, keyLength))) }

func appendKey(b []byte) []byte {
	b = append(b, keyPrefix...)
	n := keyNumber.Add(1)
	var number [6]byte
	for i := range number {
		number[i] = byte(n >> (8 * (len(number) - 1 - i)))
	}
	return hex.AppendEncode(b, number[:])
}

// wire is a request as it is sent; key is where its fresh key goes, or nil.
type wire struct {
	all, key []byte
}

func (r Request) wire(host string) wire {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n", r.Method, r.Path, host)
	if len(r.Body) > 0 {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(r.Body))
	}
	at := 0
	if r.Fresh {
		r.Key = NewKey()
	}
	if r.Key != "" {
		b.WriteString("Idempotency-Key: ")
		at = b.Len()
		b.WriteString(r.Key + "\r\n")
	}
	b.WriteString("\r\n")
	b.Write(r.Body)
	w := wire{all: b.Bytes()}
	if r.Fresh {
		w.key = w.all[at : at+keyLength]
	}
	return w
}

// next is the bytes of the next request.
func (w wire) next() []byte {
	if w.key != nil {
		appendKey(w.key[:0])
	}
	return w.all
}
