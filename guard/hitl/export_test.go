package hitl

import "context"

type LaterError = laterError

const (
	Holding             = holding
	Keep                = keep
	Lifted              = lifted
	UnreachableAbort    = unreachableAbort
	UnreachableDeny     = unreachableDeny
	UnreachableEscalate = unreachableEscalate
	UnreachablePause    = unreachablePause
)

var (
	Causes     = causes
	ErrFinal   = errFinal
	ErrNotHeld = errNotHeld
	ErrOpening = errOpening
	ErrReason  = errReason
	ErrRefused = errRefused
	ErrRole    = errRole
)

func (s *RuleSet) Rules() []rule { return s.rules }

func (r *rule) Matches(members map[string]string) bool { return r.matches(members) }

func (r *rule) Opening() Opening { return r.opening() }

func (s *Store) Lift(ctx context.Context, o Opening) (Escalation, error) { return s.lift(ctx, o) }
