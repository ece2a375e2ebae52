package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"sync/atomic"
)

const (
	keySize   = 32
	nonceSize = 24
	tagSize   = 16
)

// xaes is XAES-256-GCM (C2SP): AES-256-GCM under a key derived from the first half
// of a 192-bit nonce. Random nonces of plain GCM wear a key out after 2^32 records,
// which a busy gateway writes in weeks; these do not.
type xaes struct {
	block cipher.Block
	k1    [aes.BlockSize]byte
	// current is the derived key that seals at present: deriving one for every
	// value would cost more than the sealing.
	current atomic.Pointer[derived]
}

// derived is AES-256-GCM under the key that the first half of a nonce gives.
type derived struct {
	half [12]byte
	aead cipher.AEAD
	used atomic.Uint32
}

// maxUses is how many values are sealed under one derived key. The other half of
// their nonces is random: after 2^24 of them the chance that two are equal is 2^-49.
const maxUses = 1 << 24

func newXAES(key [keySize]byte) *xaes {
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic("seal: " + err.Error()) // 32 bytes are always a key
	}
	x := &xaes{block: block}
	block.Encrypt(x.k1[:], x.k1[:])
	var msb byte
	for i := len(x.k1) - 1; i >= 0; i-- {
		x.k1[i], msb = x.k1[i]<<1|msb, x.k1[i]>>7
	}
	x.k1[len(x.k1)-1] ^= msb * 0x87
	return x
}

func (x *xaes) aead(nonce []byte) cipher.AEAD {
	var key [keySize]byte
	for half := range 2 {
		part := key[half*aes.BlockSize:][:aes.BlockSize]
		part[1], part[2] = byte(half+1), 'X'
		copy(part[4:], nonce[:12])
		for i, b := range x.k1 {
			part[i] ^= b
		}
		x.block.Encrypt(part, part)
	}
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic("seal: " + err.Error())
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic("seal: " + err.Error())
	}
	return aead
}

// seal appends a random nonce and the sealed plaintext to dst.
func (x *xaes) seal(dst, plaintext, data []byte) []byte {
	d := x.current.Load()
	if d == nil || d.used.Add(1) > maxUses {
		var nonce [nonceSize]byte
		_, _ = rand.Read(nonce[:]) // never fails
		d = &derived{half: [12]byte(nonce[:12]), aead: x.aead(nonce[:])}
		d.used.Store(1)
		x.current.Store(d)
	}
	dst = append(dst, d.half[:]...)
	at := len(dst)
	dst = append(dst, make([]byte, nonceSize-len(d.half))...)
	_, _ = rand.Read(dst[at:])
	return d.aead.Seal(dst, dst[at:], plaintext, data)
}

func (x *xaes) open(dst, nonce, sealed, data []byte) ([]byte, error) {
	aead := cipher.AEAD(nil)
	if d := x.current.Load(); d != nil && string(d.half[:]) == string(nonce[:12]) {
		aead = d.aead
	} else {
		aead = x.aead(nonce)
	}
	return aead.Open(dst, nonce[12:nonceSize], sealed, data)
}
