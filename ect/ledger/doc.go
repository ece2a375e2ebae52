// Package ledger is an append-only log of what was decided: a Merkle tree (RFC 6962)
// over a store.Store, whose heads are signed notes.
//
// An event is recorded in two steps. Record makes writes that ride in the commit of
// the state change which the event tells of, so that either both are there or
// neither. A sequencer moves recorded events into the tree, in order, and signs what
// nobody waited for on the way. Each move is one commit that is conditional on the
// head: a crash leaves the tree before it or after it, and of two processes on one
// log one loses and goes on from what the other wrote.
//
// What stands in the tree is proved by receipts (an index, an inclusion proof, a
// signed head) and by consistency proofs between two heads, which anybody can check
// with the public keys alone. Verify reads everything and names what was changed;
// Export and VerifyExport do the same for those who have no store. Of what was pruned
// the hashes stay, and notes signed as the heads are say which entries that were.
//
// The payload of an event is opaque here. What a caller gave is sealed in the store
// (P8); hashes, counts and heads are plain.
package ledger
