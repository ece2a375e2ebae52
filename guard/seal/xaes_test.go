package seal

import (
	"bytes"
	"encoding/hex"
	"testing"
)

// The vectors of C2SP's XAES-256-GCM.
func TestXAESVectors(t *testing.T) {
	for _, v := range []struct {
		key    byte
		data   string
		sealed string
	}{
		{0x01, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		{0x03, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		x := newXAES([keySize]byte(bytes.Repeat([]byte{v.key}, keySize)))
		nonce := []byte("ABCDEFGHIJKLMNOPQRSTUVWX")
		got := x.seal(nil, nonce, []byte("XAES-256-GCM"), []byte(v.data))
		if hex.EncodeToString(got) != v.sealed {
			t.Errorf("key %x: sealed %x, want %s", v.key, got, v.sealed)
		}
		plain, err := x.open(nil, nonce, got, []byte(v.data))
		if err != nil || string(plain) != "XAES-256-GCM" {
			t.Errorf("key %x: opened %q, %v", v.key, plain, err)
		}
	}
}
