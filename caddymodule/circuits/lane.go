package circuits

import "context"

type undoKey struct{}

// Undo marks a request as one that undoes something. It has a lane of its own past the
// breakers (ADR 0033): none refuses it, none makes it the probe, and none learns from what
// comes of it. Constraints of workflows do not hold for it either.
func Undo(ctx context.Context) context.Context { return context.WithValue(ctx, undoKey{}, true) }

// IsUndo reports what Undo has said.
func IsUndo(ctx context.Context) bool { return ctx.Value(undoKey{}) != nil }
