package seal

import (
	"crypto/aes"
	"crypto/cipher"
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
}

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

func (x *xaes) seal(dst, nonce, plaintext, data []byte) []byte {
	return x.aead(nonce).Seal(dst, nonce[12:nonceSize], plaintext, data)
}

func (x *xaes) open(dst, nonce, sealed, data []byte) ([]byte, error) {
	return x.aead(nonce).Open(dst, nonce[12:nonceSize], sealed, data)
}
