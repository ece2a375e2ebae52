package checkpoint

const (
	OverBytes    = overBytes
	ReasonUnkept = reasonUnkept
)

var (
	ErrInvalid = errInvalid
	ErrTaken   = errTaken
)
