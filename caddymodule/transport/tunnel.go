package transport

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// tunnel is what an upgrade has made of a connection. That of a WebSocket is judged by
// how it was closed (section 7.1); of other protocols nothing is known but that the
// upstream was there.
type tunnel struct {
	*call
	io.Writer
	websocket  bool
	fromServer frames
	mu         sync.Mutex
	toServer   frames      // guarded by mu
	leaving    atomic.Bool // the client's side has ended, or has said so
}

func newTunnel(c *call, duplex io.ReadWriteCloser) *tunnel {
	return &tunnel{
		call: c, Writer: duplex,
		websocket: strings.EqualFold(c.res.Header.Get("Upgrade"), "websocket"),
	}
}

// Read follows the upstream's side.
func (t *tunnel) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if t.websocket {
		t.fromServer.see(p[:n])
	}
	if err != nil {
		t.settle(t.outcome())
	}
	return n, err
}

// outcome judges the end of the upstream's side.
func (t *tunnel) outcome() breaker.Outcome {
	switch code := t.fromServer.code; {
	case code >= 1011 && code <= 1014: // internal error, restart, try again later, bad gateway
		return breaker.Outcome{Class: breaker.InBand, Cause: fmt.Sprintf("websocket closed with %d", code)}
	case code == 0 && t.websocket && t.ctx.Err() == nil && !t.leaving.Load():
		return breaker.Outcome{Class: breaker.InBand, Cause: "websocket cut off"}
	}
	return breaker.Outcome{Class: breaker.Success}
}

// Write follows the client's side.
func (t *tunnel) Write(p []byte) (int, error) {
	if t.websocket {
		t.mu.Lock() // a shutdown of the gateway's writes beside the client
		if t.toServer.see(p); t.toServer.code != 0 {
			t.leaving.Store(true)
		}
		t.mu.Unlock()
	}
	return t.Writer.Write(p)
}

// CloseWrite ends the client's side alone, which reverse_proxy asks for by this name.
func (t *tunnel) CloseWrite() error {
	t.leaving.Store(true)
	if half, ok := t.Writer.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return fmt.Errorf("CloseWrite: %w", http.ErrNotSupported)
}

// Close ends both sides. What the upstream says after it is of no interest.
func (t *tunnel) Close() error {
	t.leaving.Store(true)
	return t.call.Close()
}

// frames follows one side of a WebSocket up to its close frame (RFC 6455, section 5.2).
type frames struct {
	code int // of the close frame; 1005 if it has none, 0 before it

	head    [14]byte
	have    int    // bytes of head
	payload uint64 // bytes of the frame that are still to come
	status  []byte // of a close frame
}

// noStatus is the code of a close frame without one (RFC 6455, section 7.4.1).
const noStatus = 1005

func (f *frames) see(p []byte) {
	for len(p) > 0 && f.code == 0 {
		need := f.headSize()
		if f.have < need {
			n := copy(f.head[f.have:need], p)
			f.have, p = f.have+n, p[n:]
			if f.have < f.headSize() {
				continue
			}
			f.payload = f.length()
			if f.closes() && f.payload < 2 {
				f.code = noStatus
			} else if f.payload == 0 {
				f.have = 0
			}
			continue
		}
		n := int(min(f.payload, uint64(len(p))))
		if f.closes() {
			f.status = append(f.status, p[:min(n, 2-len(f.status))]...)
			if len(f.status) == 2 {
				f.code = f.closeCode()
				return
			}
		}
		f.payload, p = f.payload-uint64(n), p[n:]
		if f.payload == 0 {
			f.have = 0
		}
	}
}

func (f *frames) closes() bool { return f.head[0]&0x0f == 8 }
func (f *frames) masked() bool { return f.head[1]&0x80 != 0 }

// headSize is that of the present frame's head, as far as it is known.
func (f *frames) headSize() int {
	if f.have < 2 {
		return 2
	}
	size := 2
	switch f.head[1] & 0x7f {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	if f.masked() {
		size += 4
	}
	return size
}

func (f *frames) length() uint64 {
	switch short := f.head[1] & 0x7f; short {
	case 126:
		return uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		return binary.BigEndian.Uint64(f.head[2:])
	default:
		return uint64(short)
	}
}

func (f *frames) closeCode() int {
	if f.masked() {
		mask := f.head[f.have-4:]
		f.status[0] ^= mask[0]
		f.status[1] ^= mask[1]
	}
	if code := int(binary.BigEndian.Uint16(f.status)); code >= 1000 {
		return code
	}
	return noStatus // there is no such code
}
