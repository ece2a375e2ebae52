package protocol

// What tests compare with.
const ProblemCode = problemCode

// Errors of a key.
var (
	ErrKeyType  = errKeyType
	ErrKeyTwice = errKeyTwice
)
