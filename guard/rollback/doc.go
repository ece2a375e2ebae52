// Package rollback undoes what calls have done: one checkpoint, what follows from it, or
// a whole workflow (cascade 4, P5).
//
// A Coordinator takes a Request, verifies the checkpoints that it reaches, and follows a
// plan (package plan), level by level. Each step is journaled before it is taken; after a
// crash the next life goes on where this one was, and no step runs twice. What came of it
// is told to the ledger, and what needs a person becomes an escalation.
//
// The package knows neither HTTP servers nor Caddy, nor tokens: it declares what it needs
// of them as the interfaces Ledger and Undoer.
package rollback
