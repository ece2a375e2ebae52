// Package hitl keeps what needs a human in the loop: an Escalation is recorded durably
// before anybody says "escalated" (A-basic-rollback-g), and somebody is told of it.
//
// A Desk records, finds and lists escalations. Opening one can ride in the commit of the
// decision that causes it: see Desk.Prepare. A Courier takes those that nobody was told
// of to a Notifier, at least once each, also after a restart. Decisions are not made here.
//
// The package knows neither HTTP servers nor Caddy. It keeps everything in a store.Store,
// sealed (P8).
package hitl
