// Package checkpoint keeps what must be known to put a call's effect back: on disk
// before the call leaves (P2), sealed (P8), and for as long as its token promises
// (cascade 4.2).
//
// A checkpoint has up to four values. The Snapshot is recorded in the commit of the
// claim: how the call can be undone, and what stood there before. The Result is
// recorded in the commit of the outcome: what stood there afterwards, or what of the
// answer the undo needs. Credentials are a value of their own, so that they can go
// before the rest does. The Mark says how far the undo has come; it outlives the
// others, so that what was undone is not undone again.
//
// Snapshot and Result begin with 32 random bytes, and their hashes are the SHA-256 of
// their plain bytes: unchanged when they are sealed anew, and not to be guessed from
// what they say. Nothing is read back without its hash being compared.
package checkpoint
