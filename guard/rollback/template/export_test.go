package template

// MaxRequest is the largest size of a request.
const MaxRequest = maxRequest

// FillError is the error of Fill.
type FillError = fillError

// Reasons why a template cannot be filled.
var (
	ErrAbsent    = errAbsent
	ErrEmpty     = errEmpty
	ErrNotScalar = errNotScalar
	ErrAmbiguous = errAmbiguous
	ErrNotJSON   = errNotJSON
	ErrMalformed = errMalformed
	ErrUnfit     = errUnfit
)

const MaxValue = maxValue
