package transport_test

import (
	"encoding/binary"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// What in an event stream is an error, and when a stream has turned out good.
func TestEvents(t *testing.T) {
	for _, tt := range []struct {
		stream string
		fault  bool
		good   bool
	}{
		{"data: 1\n\n", false, true},
		{"data: 1\r\n\r\n", false, true},
		{"data: 1\r\r", false, true},
		{"data: 1\r\n", false, false},
		{": keep-alive\n\n", false, false},
		{"\n\n\n", false, false},
		{"event: error\n\n", true, false},
		{"event:error\r\n", true, false},
		{"event: errors\n\n", false, true},
		{"data: 1\n\nevent: error\n", true, true},
		{`data: {"error":{"code":529}}` + "\n", true, false},
		{`data:{ "error" : "overloaded"}` + "\n", true, false},
		{`data: {"error":null,"id":1}` + "\n\n", false, true},
		{`data: {"errors":[]}` + "\n\n", false, true},
		{`data: {"id":1,"error":"late"}` + "\n\n", false, true},
		{"data: event: error\n\n", false, true},
	} {
		for step := 1; step <= len(tt.stream); step++ {
			fault, good := transport.SeeEvents([]byte(tt.stream), step)
			if (fault != "") != tt.fault || good != tt.good {
				t.Errorf("%q in steps of %d: fault %q, good %v", tt.stream, step, fault, good)
			}
		}
	}
}

// frame is one frame of a WebSocket.
func frame(opcode byte, masked bool, payload []byte) []byte {
	b := []byte{0x80 | opcode}
	mask := byte(0)
	if masked {
		mask = 0x80
	}
	switch n := len(payload); {
	case n < 126:
		b = append(b, mask|byte(n))
	case n <= 0xffff:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(n))
	}
	if !masked {
		return append(b, payload...)
	}
	key := []byte{1, 2, 3, 4}
	b = append(b, key...)
	for i, c := range payload {
		b = append(b, c^key[i%4])
	}
	return b
}

// Section 7.1: the close code of a WebSocket is found behind frames of every size,
// however the bytes come.
func TestFrames(t *testing.T) {
	away := binary.BigEndian.AppendUint16(nil, 1012)
	for _, tt := range []struct {
		name string
		last []byte
		want int
	}{
		{"none", nil, 0},
		{"close", frame(8, false, append(away, "bye"...)), 1012},
		{"close without a reason", frame(8, false, away), 1012},
		{"masked close", frame(8, true, append(away, "bye"...)), 1012},
		{"close without a code", frame(8, false, nil), 1005},
		{"masked close without a code", frame(8, true, nil), 1005},
	} {
		var stream []byte
		for _, size := range []int{0, 1, 125, 126, 0xffff, 0x10000} {
			stream = append(stream, frame(2, false, make([]byte, size))...)
			stream = append(stream, frame(1, true, make([]byte, size))...)
		}
		stream = append(stream, tt.last...)
		for _, step := range []int{1, 2, 3, 7, 1000, len(stream)} {
			if got := transport.SeeFrames(stream, step); got != tt.want {
				t.Errorf("%s in steps of %d: code %d, want %d", tt.name, step, got, tt.want)
			}
		}
	}
}

// Whatever an upstream sends, and however it is cut, is read alike.
func FuzzLook(f *testing.F) {
	f.Add([]byte("data: {\"error\":1}\r\n\r\nevent: error\n\n"), 3)
	f.Add(append(frame(1, false, make([]byte, 200)), frame(8, true, []byte{3, 243})...), 1)
	f.Add([]byte{0x88, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4, 5, 6}, 2)
	f.Add([]byte("8\xff00000000\x03\x0300\x03\x030"), 1) // a close code of 0 behind a mask
	f.Fuzz(func(t *testing.T, stream []byte, step int) {
		step = max(1, step)
		if a, b := transport.SeeFrames(stream, step), transport.SeeFrames(stream, len(stream)+1); a != b {
			t.Errorf("close code %d and %d", a, b)
		}
		a, good := transport.SeeEvents(stream, step)
		b, also := transport.SeeEvents(stream, len(stream)+1)
		if a != b || a == "" && good != also {
			t.Errorf("events: %q %v and %q %v", a, good, b, also)
		}
	})
}
