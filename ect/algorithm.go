package ect

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
)

// Algorithm is a signature algorithm. There is none without a key pair, so that "none"
// and HMAC cannot even be configured.
type Algorithm uint8

// The algorithms. Only ES256 is accepted where nothing else is configured.
const (
	ES256 Algorithm = iota + 1
	ES384
	EdDSA
)

// Algorithms are all that can be allowed.
func Algorithms() []Algorithm { return []Algorithm{ES256, ES384, EdDSA} }

// ParseAlgorithm reads the name that the header parameter alg has.
func ParseAlgorithm(name string) (Algorithm, error) {
	if alg, ok := algorithmNamed(name); ok {
		return alg, nil
	}
	return 0, fmt.Errorf("ect: no signature algorithm is called %q; there are ES256, ES384 and EdDSA", name)
}

func algorithmNamed(name string) (Algorithm, bool) {
	switch name {
	case "ES256":
		return ES256, true
	case "ES384":
		return ES384, true
	case "EdDSA":
		return EdDSA, true
	}
	return 0, false
}

func (a Algorithm) String() string {
	switch a {
	case ES256:
		return "ES256"
	case ES384:
		return "ES384"
	case EdDSA:
		return "EdDSA"
	}
	return "none"
}

// algorithms is a set of them.
type algorithms uint8

func (s algorithms) has(a Algorithm) bool { return s&(1<<a) != 0 }

func algorithmSet(list []Algorithm) (algorithms, error) {
	var s algorithms
	for _, a := range list {
		if a < ES256 || a > EdDSA {
			return 0, fmt.Errorf("ect: there is no signature algorithm %d", a)
		}
		s |= 1 << a
	}
	return s, nil
}

// signatureSize is the length of a raw signature: r and s side by side, or Ed25519's.
func (a Algorithm) signatureSize() int {
	if a == ES384 {
		return 96
	}
	return 64
}

// algorithmOf is the one that a public key can be used with.
func algorithmOf(public crypto.PublicKey) (Algorithm, bool) {
	switch key := public.(type) {
	case *ecdsa.PublicKey:
		switch key.Curve {
		case elliptic.P256():
			return ES256, true
		case elliptic.P384():
			return ES384, true
		}
	case ed25519.PublicKey:
		return EdDSA, len(key) == ed25519.PublicKeySize
	}
	return 0, false
}

// digest appends what is signed in place of the text itself.
func (a Algorithm) digest(dst, text []byte) []byte {
	if a == ES384 {
		sum := sha512.Sum384(text)
		return append(dst, sum[:]...)
	}
	sum := sha256.Sum256(text)
	return append(dst, sum[:]...)
}

// verify checks a raw signature. The standard library is called directly: a library
// for JWS spends as much again on what surrounds the call (ADR 0020).
func (a Algorithm) verify(public crypto.PublicKey, text, signature []byte) bool {
	if len(signature) != a.signatureSize() {
		return false
	}
	switch key := public.(type) {
	case ed25519.PublicKey:
		return ed25519.Verify(key, text, signature)
	case *ecdsa.PublicKey:
		var sum [sha512.Size384]byte
		var der [maxDER]byte
		return ecdsa.VerifyASN1(key, a.digest(sum[:0], text), toDER(der[:0], signature))
	}
	return false
}

// sign appends the raw signature of text.
func (a Algorithm) sign(dst []byte, private crypto.Signer, text []byte) ([]byte, error) {
	switch key := private.(type) {
	case ed25519.PrivateKey:
		return append(dst, ed25519.Sign(key, text)...), nil
	case *ecdsa.PrivateKey:
		var sum [sha512.Size384]byte
		der, err := ecdsa.SignASN1(rand.Reader, key, a.digest(sum[:0], text))
		if err != nil {
			return nil, err
		}
		return fromDER(dst, der, a.signatureSize()/2)
	}
	return nil, errors.New("ect: this kind of key cannot sign")
}

// maxDER is the longest DER of a signature: two integers of 48 octets and a zero each,
// with their heads, and the head of the sequence.
const maxDER = 2 + 2*(2+1+48)

// toDER writes a raw signature as the standard library wants it. All lengths are below
// 128, so each takes one octet.
func toDER(dst, raw []byte) []byte {
	dst = append(dst, 0x30, 0)
	half := len(raw) / 2
	dst = appendInteger(dst, raw[:half])
	dst = appendInteger(dst, raw[half:])
	dst[1] = byte(len(dst) - 2)
	return dst
}

func appendInteger(dst, octets []byte) []byte {
	for len(octets) > 1 && octets[0] == 0 {
		octets = octets[1:]
	}
	if octets[0]&0x80 != 0 {
		dst = append(dst, 2, byte(len(octets)+1), 0)
	} else {
		dst = append(dst, 2, byte(len(octets)))
	}
	return append(dst, octets...)
}

var errDER = errors.New("ect: the signature just made has an unexpected form")

// fromDER appends the raw form of what the standard library has made.
func fromDER(dst, der []byte, size int) ([]byte, error) {
	if len(der) < 2 || der[0] != 0x30 || int(der[1]) != len(der)-2 {
		return nil, errDER
	}
	der = der[2:]
	for range 2 {
		if len(der) < 2 || der[0] != 2 || int(der[1]) > len(der)-2 {
			return nil, errDER
		}
		octets := der[2 : 2+int(der[1])]
		der = der[2+len(octets):]
		for len(octets) > 0 && octets[0] == 0 {
			octets = octets[1:]
		}
		if len(octets) > size {
			return nil, errDER
		}
		for range size - len(octets) {
			dst = append(dst, 0)
		}
		dst = append(dst, octets...)
	}
	return dst, nil
}
