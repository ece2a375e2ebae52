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

func (s *RuleSet) Rules() []rule { return s.rules }

func (r *rule) Matches(members map[string]string) bool { return r.matches(members) }

func (r *rule) Opening() Opening { return r.opening() }
