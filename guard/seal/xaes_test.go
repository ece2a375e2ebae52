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
		got := x.aead(nonce).Seal(nil, nonce[12:], []byte("XAES-256-GCM"), []byte(v.data))
		if hex.EncodeToString(got) != v.sealed {
			t.Errorf("key %x: sealed %x, want %s", v.key, got, v.sealed)
		}
		plain, err := x.open(nil, nonce, got, []byte(v.data))
		if err != nil || string(plain) != "XAES-256-GCM" {
			t.Errorf("key %x: opened %q, %v", v.key, plain, err)
		}
	}
}

// A derived key seals many values, each under a nonce of its own, and is replaced
// after its last use. Values of earlier ones open.
func TestXAESDerivedKeysWearOut(t *testing.T) {
	x := newXAES([keySize]byte(bytes.Repeat([]byte{7}, keySize)))
	nonces := map[string]bool{}
	var sealed [][]byte
	for range 100 {
		sealed = append(sealed, x.seal(nil, []byte("value"), []byte("name")))
	}
	first := x.current.Load()
	first.used.Store(maxUses)
	for range 100 {
		sealed = append(sealed, x.seal(nil, []byte("value"), []byte("name")))
	}
	if x.current.Load() == first {
		t.Error("a worn-out key still seals")
	}
	halves := map[string]int{}
	for _, s := range sealed {
		nonces[string(s[:nonceSize])] = true
		halves[string(s[:12])]++
		plain, err := x.open(nil, s[:nonceSize], s[nonceSize:], []byte("name"))
		if err != nil || string(plain) != "value" {
			t.Fatalf("opened %q, %v", plain, err)
		}
	}
	if len(nonces) != 200 || len(halves) != 2 || halves[string(first.half[:])] != 100 {
		t.Errorf("%d nonces under %d derived keys", len(nonces), len(halves))
	}
}
