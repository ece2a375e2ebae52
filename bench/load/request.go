package load

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
)

// Request is the request of a round.
type Request struct {
	Method, Path string
	// Body is sent with Content-Type application/json, if there is one.
	Body []byte
	// Own gives each connection a body of its own, in which its number takes the place of the last four
	// n, and a key of its own where Key is one of NewKey: its number stands in digits that are 0 in all others.
	Own bool
	// Header are further lines of the header, each with its end.
	Header string
	// Field is the header field that tells one call from another; empty is
	// Idempotency-Key.
	Field string
	// Key is its value; empty is none.
	Key string
	// Keys, if set, appends the next request's key instead: always as many bytes.
	Keys func([]byte) []byte
}

// Payment is a POST with a JSON body of n bytes.
func Payment(n int) Request {
	const head, tail = `{"amount":1999,"currency":"eur","note":"`, `"}`
	body := head + strings.Repeat("n", max(n-len(head)-len(tail), 0)) + tail
	return Request{Method: http.MethodPost, Path: "/v1/charges", Body: []byte(body)}
}

// Message is a POST of a message of MCP that changes nothing, of n bytes.
func Message(n int) Request {
	const head, tail = `{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"file:///`, `"}}`
	body := head + strings.Repeat("n", max(n-len(head)-len(tail), 0)) + tail
	return Request{Method: http.MethodPost, Path: "/mcp", Body: []byte(body)}
}

// ToolCall is a POST of a tools/call of MCP, of n bytes, that is answered with a stream of events.
func ToolCall(n int) Request {
	const head, tail = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"note":"`, `"}}}`
	body := head + strings.Repeat("n", max(n-len(head)-len(tail), 0)) + tail
	return Request{Method: http.MethodPost, Path: "/mcp/stream", Body: []byte(body)}
}

// KeyLength is that of a UUID, because some take nothing else.
const KeyLength = 36

// ownDigits is where the number of a connection stands in its key, in three digits.
const ownDigits = len("00000000-0000-4000-8")

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
func NewKey() string { return string(Fresh(make([]byte, 0, KeyLength))) }

// Fresh appends what NewKey makes.
func Fresh(b []byte) []byte { return NumberedKey(b, keyPrefix, keyNumber.Add(1)) }

// Each appends the numbered keys with this prefix in turn, from 0 to n-1 and from 0 again.
func Each(prefix string, n int) func([]byte) []byte {
	var next atomic.Uint64
	return func(b []byte) []byte { return NumberedKey(b, prefix, (next.Add(1)-1)%uint64(n)) }
}

// AnyOf appends any of the n numbered keys with this prefix.
func AnyOf(prefix string, n int) func([]byte) []byte {
	return func(b []byte) []byte { return NumberedKey(b, prefix, mathrand.Uint64N(uint64(n))) }
}

// NumberedKey appends a key of KeyLength bytes, 24 of which are the prefix's.
func NumberedKey(b []byte, prefix string, n uint64) []byte {
	b = append(b, prefix...)
	var number [6]byte
	for i := range number {
		number[i] = byte(n >> (8 * (len(number) - 1 - i)))
	}
	return hex.AppendEncode(b, number[:])
}

// wire is a request as it is sent; key is where its next key goes.
type wire struct {
	all, key []byte
	keys     func([]byte) []byte
}

func (r Request) wire(host string, number int) wire {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n%s", r.Method, r.Path, host, r.Header)
	if at := bytes.LastIndexByte(r.Body, 'n') - 3; r.Own && at > 0 {
		r.Body = bytes.Clone(r.Body)
		copy(r.Body[at:], fmt.Sprintf("%04d", number))
	}
	if len(r.Body) > 0 {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(r.Body))
	}
	if r.Own && len(r.Key) == KeyLength {
		r.Key = fmt.Sprintf("%s%03x%s", r.Key[:ownDigits], number, r.Key[ownDigits+3:])
	}
	at := 0
	if r.Keys != nil {
		r.Key = string(r.Keys(nil)) // says how long they are, and is not sent
	}
	if r.Key != "" {
		b.WriteString(cmp.Or(r.Field, "Idempotency-Key") + ": ")
		at = b.Len()
		b.WriteString(r.Key + "\r\n")
	}
	b.WriteString("\r\n")
	b.Write(r.Body)
	w := wire{all: b.Bytes(), keys: r.Keys}
	if r.Keys != nil {
		w.key = w.all[at : at+len(r.Key)]
	}
	return w
}

// next is the bytes of the next request.
func (w wire) next() []byte {
	if w.keys != nil {
		w.keys(w.key[:0])
	}
	return w.all
}
