package undo

import "crypto/sha256"

// Follow is follow, for a request to url with a host.
func Follow(url, host, location string) string {
	return follow(&Outgoing{URL: url, Host: host}, location)
}

// HashPlainly leaves out the salts of hashes.
func (u *Undoer) HashPlainly() {
	u.hash = func(_ string, state []byte) [32]byte { return sha256.Sum256(state) }
}

// Unkept counts the answers that the store has not taken.
func (u *Undoer) Unkept() (n int) {
	u.unkept.Range(func(any, any) bool { n++; return true })
	return n
}
