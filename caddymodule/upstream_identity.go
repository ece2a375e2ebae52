package caddymodule

import (
	"cmp"
	"context"
	"crypto/rand"
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// AnswerVerifier is how the transport verifies who has answered a probe; nil without
// trust.
func (a *App) AnswerVerifier() transport.AnswerVerifier {
	if a.Trust == nil {
		return nil
	}
	return a.verifyAnswer
}

// verifyAnswer is a transport.AnswerVerifier: of the tokens of an answer one has to do.
func (a *App) verifyAnswer(ctx context.Context, header http.Header, issuer string, since time.Time) error {
	way, err := a.testimony()
	if err != nil {
		return err
	}
	raws, err := ect.ParseFields(header[ect.FieldName])
	if err != nil {
		return err
	}
	skew := cmp.Or(time.Duration(a.Trust.Skew), ect.Skew)
	earliest := since.Truncate(time.Second).Add(-skew) // tokens tell the time in whole seconds
	var refused error = &ect.Error{Code: ect.CodeMissing}
	for _, raw := range raws[:min(len(raws), maxPresented)] {
		if refused = way.proves(ctx, raw, issuer, earliest); refused == nil {
			break
		}
	}
	return refused
}

// proves verifies that a token proves that issuer has answered, and uses it up.
func (t *testimony) proves(ctx context.Context, raw, issuer string, earliest time.Time) error {
	now := time.Now()
	// Its parents are not looked up: who has answered is asked, not what it did.
	token, err := t.verifier.Verify(ctx, raw, ect.Presentation{Now: now})
	switch {
	case err != nil:
		return err
	case token.Level() < ect.L2: // whatever `min_level` is: nothing else speaks for it here
		return &ect.Error{Code: ect.CodeLevel}
	case token.Issuer() != issuer:
		return &ect.Error{Code: ect.CodeIssuer}
	case token.IssuedAt().Before(earliest):
		return &ect.Error{Code: ect.CodeTooOld}
	}
	// The use has a name that no other has. So a token that came before is refused, with a
	// probe (which is in memory) or with a call (which is there, or in the store), and so is
	// this one if it comes with a new call later. The memory is bounded, outlives reloads,
	// and where it is full nothing more is verified; over a restart, the earliest time
	// stands in for it.
	var use evidence.Use
	_, _ = rand.Read(use[:]) // which never fails
	standing, err := t.evidence.Take(token, use, now)
	if err == nil && standing == evidence.Unused {
		standing, err = t.evidence.Recorded(ctx, token, use)
	}
	if err == nil && standing != evidence.Unused {
		err = &ect.Error{Code: ect.CodeReplayed}
	}
	return err
}
