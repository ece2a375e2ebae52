package hitl

type LaterError = laterError

const (
	Keep                = keep
	UnreachableAbort    = unreachableAbort
	UnreachableDeny     = unreachableDeny
	UnreachableEscalate = unreachableEscalate
	UnreachablePause    = unreachablePause
)

var (
	ErrOpening = errOpening
	ErrRefused = errRefused
)
