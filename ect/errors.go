package ect

import (
	"errors"
	"fmt"
	"net/http"
)

// Code says why a token was refused. Codes are stable, and go to callers.
type Code string

// The reasons to refuse a token; [Error.Detail] has the sentence of each. A code that is
// named like a claim or a header parameter says that it is missing, malformed or wrong.
const (
	CodeMissing    Code = "missing"
	CodeMalformed  Code = "malformed"
	CodeTooLarge   Code = "too-large"
	CodeLevel      Code = "level"
	CodeType       Code = "typ"
	CodeAlgorithm  Code = "alg"
	CodeCritical   Code = "crit"
	CodeKeyID      Code = "kid"
	CodeSignature  Code = "signature"
	CodeKeyRevoked Code = "key-revoked"
	CodeIssuer     Code = "iss"
	CodeAudience   Code = "aud"
	CodeExpires    Code = "exp"
	CodeExpired    Code = "expired"
	CodeIssuedAt   Code = "iat"
	CodeTooOld     Code = "too-old"
	CodeNotYet     Code = "not-yet"
	CodeID         Code = "jti"
	CodeWorkflow   Code = "wid"
	CodeAction     Code = "exec_act"
	CodeParents    Code = "par"
	CodeInputHash  Code = "inp_hash"
	CodeOutputHash Code = "out_hash"
	CodeExt        Code = "ext"
	CodeReplayed   Code = "replayed"
	// CodeParentUnknown covers unrecorded parents and those of other workflows: the answer
	// must not reveal which (P3).
	CodeParentUnknown    Code = "parent-unknown"
	CodeParentLater      Code = "parent-later"
	CodeTooManyParents   Code = "too-many-parents"
	CodeDuplicateParent  Code = "duplicate-parent"
	CodeCycle            Code = "cycle"
	CodeTooManyAncestors Code = "too-many-ancestors"
)

// details are what callers read. None repeats anything of the token.
var details = map[Code]string{
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
	CodeReplayed:         "the token, or its id, was used for something else before",
	CodeParentUnknown:    "a parent is not known in this workflow",
	CodeParentLater:      "a parent was made after the token",
	CodeTooManyParents:   "too many parents",
	CodeDuplicateParent:  "a parent is named twice",
	CodeCycle:            "the token is its own ancestor",
	CodeTooManyAncestors: "too many ancestors",
}

// Error is the refusal of a token. Its text holds nothing of the token, the keys or the ledger.
type Error struct {
	// Code is the reason.
	Code Code
	// Lacks is the name of a required extension member that is missing or has another
	// type, where that is the reason.
	Lacks string
	err   error
}

func (e *Error) Error() string { return "ect: " + string(e.Code) + ": " + details[e.Code] }

// Unwrap returns a cause for the operator's log only, or nil.
func (e *Error) Unwrap() error { return e.err }

// Detail is the sentence for the caller.
func (e *Error) Detail() string {
	if e.Lacks != "" {
		return details[e.Code] + "; " + e.Lacks + " is missing, or has another type"
	}
	return details[e.Code]
}

// Status is 400 for what cannot be parsed, else 403; never 401, since a token is evidence
// and no credential.
func (e *Error) Status() int {
	if e.Code == CodeMalformed || e.Code == CodeTooLarge {
		return http.StatusBadRequest
	}
	return http.StatusForbidden
}

func refuse(code Code) error { return &Error{Code: code} }

// ErrUnavailable says nothing about the token: keys or graph cannot be read at the moment.
// It is never an *Error. Fail closed with 503 (P4).
var ErrUnavailable = errors.New("ect: keys or graph cannot be read at the moment")

// errOtherWorkflow is wrapped by the refusal of a parent that is recorded in another
// workflow. It is not revealed to callers (P3).
var errOtherWorkflow = errors.New("ect: a parent belongs to another workflow")

// unavailable marks an error as one that says nothing about the token.
func unavailable(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}
