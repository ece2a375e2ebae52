package undoing

import (
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Terms are how checkpoints of calls are made and kept, whatever way there is to undo
// them.
type Terms struct {
	// Where the credentials of an undo come from: `config` (only what the configuration
	// writes) or `recorded` (those that the call came with, sealed with its checkpoint,
	// used towards the same upstream only, and gone with the checkpoint). Default:
	// `config`.
	UndoAuth string `json:"undo_auth,omitempty"`

	// What becomes of a call whose state before cannot be read: `refuse` (503
	// `snapshot-failed`, nothing is forwarded, its id stays free) or `irreversible` (it
	// runs, and its checkpoint says that it cannot be undone). Default: `refuse`.
	OnSnapshotError string `json:"on_snapshot_error,omitempty"`

	// How long the state before the call is waited for, and the state after it.
	// Default: 10s.
	SnapshotTimeout caddy.Duration `json:"snapshot_timeout,omitempty"`

	// What becomes of an undo whose answer is lost, where no `status` can be asked:
	// `resend` (it is sent again under the same Idempotency-Key) or `escalate` (a person
	// looks). Default: `resend`.
	OnLost string `json:"on_lost,omitempty"`

	// What becomes of an undo where something else stands there than the call has left:
	// `escalate` (a person looks) or `overwrite`. Default: `escalate`.
	OnChanged string `json:"on_changed,omitempty"`

	// How long a call can be undone. Default: 24h.
	CheckpointTTL caddy.Duration `json:"checkpoint_ttl,omitempty"`

	// The largest body, in bytes, that is kept for an undo: of the state before and
	// after, of the request, and of the answer. Default: 1 MiB.
	MaxImage int64 `json:"max_image,omitempty"`
}

// The words of Terms.OnSnapshotError, besides that of checkpoint.Irreversible.
const refuse = "refuse"

// Defaults are the terms where nothing is said.
var Defaults = Terms{
	UndoAuth: undo.AuthConfig, OnSnapshotError: refuse, SnapshotTimeout: caddy.Duration(10 * time.Second),
	OnLost: undo.Resend, OnChanged: undo.Escalate,
	CheckpointTTL: caddy.Duration(24 * time.Hour), MaxImage: checkpoint.DefaultMaxImage,
}

// Choices are the options of Terms that are one of some words.
func Choices() map[string][]string {
	return map[string][]string{
		"undo_auth":         {undo.AuthConfig, undo.AuthRecorded},
		"on_snapshot_error": {refuse, checkpoint.Irreversible.String()},
		"on_lost":           {undo.Resend, undo.Escalate},
		"on_changed":        {undo.Escalate, undo.Overwrite},
	}
}

// TTL is how long checkpoints stand.
func (t *Terms) TTL() time.Duration { return time.Duration(t.CheckpointTTL) }

// Refuses says that a call whose state before cannot be read is not forwarded.
func (t *Terms) Refuses() bool { return t.OnSnapshotError == refuse }

// Recorded says that the call's own credentials are kept for its undo.
func (t *Terms) Recorded() bool { return t.UndoAuth == undo.AuthRecorded }

// longestSnapshot is more than a caller waits for.
const longestSnapshot = 10 * time.Minute

// CheckTerms checks terms that are complete. The error is an *Error.
func (t *Terms) CheckTerms() error {
	choices := Choices()
	for option, word := range map[string]string{
		"undo_auth": t.UndoAuth, "on_snapshot_error": t.OnSnapshotError, "on_lost": t.OnLost, "on_changed": t.OnChanged,
	} {
		if err := oneOf(word, choices[option]); err != nil {
			return &Error{option, err}
		}
	}
	switch ttl, timeout := t.TTL(), time.Duration(t.SnapshotTimeout); {
	case ttl < checkpoint.MinTTL || ttl > checkpoint.MaxTTL:
		return wrong("checkpoint_ttl", "%v; it must be from %v to %dd", ttl, checkpoint.MinTTL, checkpoint.MaxTTL/(24*time.Hour))
	case ttl%time.Second != 0: // tokens tell it in whole seconds
		return wrong("checkpoint_ttl", "%v; it must be whole seconds", ttl)
	case timeout <= 0 || timeout > longestSnapshot:
		return wrong("snapshot_timeout", "%v; it must be positive, and at most %v", timeout, longestSnapshot)
	case t.MaxImage < 1 || t.MaxImage > checkpoint.MaxImage:
		return wrong("max_image", "%d bytes; it must be from 1 byte to %d MiB", t.MaxImage, checkpoint.MaxImage>>20)
	}
	return nil
}

// Error is an error in an option.
type Error struct {
	// Option is its name.
	Option string
	// Err says what is wrong, and what would be right.
	Err error
}

func (e *Error) Error() string { return e.Option + ": " + e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

func wrong(option, format string, args ...any) error {
	return &Error{option, fmt.Errorf(format, args...)}
}

func oneOf(word string, known []string) error {
	for _, k := range known {
		if word == k {
			return nil
		}
	}
	return fmt.Errorf("%q is unknown; use %s or %s", word, known[0], known[1])
}
