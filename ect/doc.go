// Package ect makes and verifies Execution Context Tokens: signed records of what an
// agent did, which name the records that they follow from and so form a graph.
//
// A [Verifier] takes a token through the checks of the drafts in their order and
// gives a [Token], which cannot be made in any other way than by verifying or by
// signing. [ParseInsecure] looks into a token without believing it. An [Issuer] signs
// with the keys of a [Ring], at once or, for tokens that nobody waits for, later.
// What is refused is an [*Error] with a short stable code and nothing else: an answer
// made of it tells no caller what the ledger holds (P3).
//
// Two spellings of the claims are read and written ([Spelling]), and three
// vocabularies for the names of actions and extension members ([Vocabulary]).
//
// Where a token's id must not be used twice, the caller records it, best in the same
// commit as what the token is used for: [Token.Workflow] and [Token.ID] are the key,
// [Token.Digest] tells a retry with the same bytes from another use. [Replays] is the
// same for those who record nothing.
package ect
