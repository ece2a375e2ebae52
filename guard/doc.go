// Package guard executes a side effect at most once under retries (P1).
//
// A Call names one intended effect by its Key. Find says what is recorded of it:
// nothing, a running execution to follow, a result to replay, or a reason to
// refuse. Claim makes one caller the owner, durably, before anything is sent (P2);
// its Execution is settled with what came of it: completed, released or in doubt
// (P6). What nobody can tell is in doubt and stays so until there is evidence;
// elapsed time is never evidence.
//
// The package knows neither HTTP servers nor Caddy. It keeps everything in a
// store.Store, sealed (P8). docs/state_machine.md draws the states.
package guard
