package ect

import (
	"errors"
	"net/http"
)

// Code says in one word why a token was refused. Codes are stable, and go to callers.
type Code string

// Why a token is refused. Those that are named like a claim or a header parameter mean
// that it is missing, has the wrong type or form, or does not fit.
const (
	// CodeMissing: a token is required and there is none.
	CodeMissing Code = "missing"
	// CodeMalformed: neither a compact JWS nor, at level L1, JSON in base64url; or
	// JSON that is ambiguous.
	CodeMalformed Code = "malformed"
	// CodeTooLarge: over the size of a field, of all fields, or of a token.
	CodeTooLarge Code = "too-large"
	// CodeLevel: the token, or one of its parents, is below the minimum level.
	CodeLevel Code = "level"
	// CodeType: typ is not that of an execution context token.
	CodeType Code = "typ"
	// CodeAlgorithm: alg is not allowed, or not the key's.
	CodeAlgorithm Code = "alg"
	// CodeCritical: a critical header parameter that we do not know.
	CodeCritical Code = "crit"
	// CodeKeyID: kid is missing, or names no key that is trusted.
	CodeKeyID Code = "kid"
	// CodeSignature: the signature does not hold.
	CodeSignature Code = "signature"
	// CodeKeyRevoked: the key was revoked, or is not valid at this time.
	CodeKeyRevoked Code = "key-revoked"
	// CodeIssuer: iss is missing, or not whom the key belongs to.
	CodeIssuer Code = "iss"
	// CodeAudience: aud is missing, or does not name the verifier.
	CodeAudience Code = "aud"
	// CodeExpires: exp is missing or wrong, or before iat.
	CodeExpires Code = "exp"
	// CodeExpired: the token has expired.
	CodeExpired Code = "expired"
	// CodeIssuedAt: iat is missing or wrong.
	CodeIssuedAt Code = "iat"
	// CodeTooOld: iat lies too far back.
	CodeTooOld Code = "too-old"
	// CodeNotYet: iat lies in the future.
	CodeNotYet Code = "not-yet"
	// CodeID: jti.
	CodeID Code = "jti"
	// CodeWorkflow: wid.
	CodeWorkflow Code = "wid"
	// CodeAction: exec_act.
	CodeAction Code = "exec_act"
	// CodeParents: par or pred is missing or wrong, or the two differ.
	CodeParents Code = "par"
	// CodeInputHash: inp_hash is wrong, or not that of the request's body.
	CodeInputHash Code = "inp_hash"
	// CodeOutputHash: out_hash.
	CodeOutputHash Code = "out_hash"
	// CodeExt: ext or ect_ext is wrong, too large or too deep, or the two differ.
	CodeExt Code = "ext"
	// CodePolicy: a pol member of the extensions is wrong, or what the parent's
	// decision does not allow.
	CodePolicy Code = "pol"
	// CodeReplayed: the id was used before.
	CodeReplayed Code = "replayed"
	// CodeParentUnknown: a parent is not recorded, or not in this workflow. That it is
	// one and not the other must not be learned from the answer.
	CodeParentUnknown Code = "parent-unknown"
	// CodeParentLater: a parent was made after the token.
	CodeParentLater Code = "parent-later"
	// CodeTooManyParents: more parents than allowed.
	CodeTooManyParents Code = "too-many-parents"
	// CodeDuplicateParent: a parent is named twice.
	CodeDuplicateParent Code = "duplicate-parent"
	// CodeCycle: the token is its own ancestor.
	CodeCycle Code = "cycle"
	// CodeTooManyAncestors: the walk over the ancestors reached its limit.
	CodeTooManyAncestors Code = "too-many-ancestors"
)

// texts says the codes in a sentence. None repeats anything of the token.
var texts = map[Code]string{
	CodeMissing:          "an execution context token is required",
	CodeMalformed:        "the token cannot be parsed",
	CodeTooLarge:         "the token, or all of them together, are too large",
	CodeLevel:            "the assurance level is below what is required",
	CodeType:             "the header parameter typ is not that of an execution context token",
	CodeAlgorithm:        "the signature algorithm is not allowed, or not that of the key",
	CodeCritical:         "a critical header parameter is not understood",
	CodeKeyID:            "the header parameter kid names no trusted key",
	CodeSignature:        "the signature does not hold",
	CodeKeyRevoked:       "the key was revoked or is not valid at this time",
	CodeIssuer:           "the claim iss is missing, or not whom the key belongs to",
	CodeAudience:         "the claim aud does not name this verifier",
	CodeExpires:          "the claim exp is missing or wrong",
	CodeExpired:          "the token has expired",
	CodeIssuedAt:         "the claim iat is missing or wrong",
	CodeTooOld:           "the token was made too long ago",
	CodeNotYet:           "the token was made in the future",
	CodeID:               "the claim jti is missing or wrong",
	CodeWorkflow:         "the claim wid is wrong, or the tokens are of several workflows",
	CodeAction:           "the claim exec_act is missing or wrong",
	CodeParents:          "the claim par or pred is missing or wrong",
	CodeInputHash:        "the claim inp_hash is wrong, or the body is another one",
	CodeOutputHash:       "the claim out_hash is wrong",
	CodeExt:              "the claim ext or ect_ext is wrong, too large, or lacks what a token of this event must say",
	CodePolicy:           "the policy decision is wrong, or does not allow this",
	CodeReplayed:         "the token, or its id, was used for something else before",
	CodeParentUnknown:    "a parent is not known in this workflow",
	CodeParentLater:      "a parent was made after the token",
	CodeTooManyParents:   "too many parents",
	CodeDuplicateParent:  "a parent is named twice",
	CodeCycle:            "the token is its own ancestor",
	CodeTooManyAncestors: "too many ancestors",
}

// Error is the refusal of a token. Its text holds nothing of the token, of the keys or
// of the ledger.
type Error struct {
	// Code is the reason.
	Code Code
	// Lacks is the name of the member that every token of its event has and this one has
	// not, where that is why; it is a word of the drafts.
	Lacks string
	err   error
}

func (e *Error) Error() string { return "ect: " + string(e.Code) + ": " + texts[e.Code] }

// Unwrap gives what only the operator may see: ErrOtherWorkflow, or nothing.
func (e *Error) Unwrap() error { return e.err }

// Detail is the sentence for the caller.
func (e *Error) Detail() string {
	if e.Lacks != "" {
		return texts[e.Code] + "; " + e.Lacks + " is missing, or has another type"
	}
	return texts[e.Code]
}

// Status is the HTTP status of the refusal: 400 for what cannot be parsed, else 403,
// and never 401, since a token is evidence and no credential.
func (e *Error) Status() int {
	if e.Code == CodeMalformed || e.Code == CodeTooLarge {
		return http.StatusBadRequest
	}
	return http.StatusForbidden
}

func refuse(code Code) error { return &Error{Code: code} }

func isCode(err error, code Code) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Code == code
}

// What is no fault of the token. These are never an *Error.
var (
	// ErrUnavailable: keys, ledger or memory for replays cannot be had at the moment,
	// so that nothing is known of the token. Fail closed with 503 (P4).
	ErrUnavailable = errors.New("ect: what is needed to verify the token cannot be had at the moment")
	// ErrOtherWorkflow is wrapped by the refusal of a parent that is recorded in
	// another workflow, for those who must escalate that. The caller is not told.
	ErrOtherWorkflow = errors.New("ect: a parent belongs to another workflow")
)
