package caddymodule

import (
	"context"
	"crypto/sha256"
	"net/http"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// safeUse is what the tokens of a request that is not guarded are used for.
type safeUse struct {
	evidence.Use
	// once: a retry is not told from another request.
	once bool
}

func safeUseOf(r *http.Request) safeUse {
	request := r.Method + "\x00" + r.Host + "\x00" + r.URL.RequestURI()
	once := r.ContentLength != 0
	if once {
		request += "\x00" + uuid.NewString() // another body would be another request
	}
	return safeUse{sha256.Sum256([]byte(request)), once}
}

// spend uses the tokens up for a request that is not guarded. Without a body the same
// bytes may come with the same request again, and with no other; with one, never. Where
// it fails nothing is used up.
func (t *testimony) spend(p *presented, r *http.Request) error {
	if err := p.inTime(); err != nil {
		return err
	}
	if len(p.all) == 0 {
		return nil
	}
	use := safeUseOf(r)
	taken, err := t.take(r.Context(), p.own, use.Use)
	if err == nil && t.ledgerFirst {
		if err = t.enter(r, p, use); err == nil {
			taken = p.own // the store knows
		}
	}
	if err != nil || t.ledgerFirst {
		for _, token := range taken {
			t.evidence.Forget(token, use.Use)
		}
	}
	return err
}

// take remembers in memory what tokens are used for, and returns those of which nothing
// was known, also with an error.
func (t *testimony) take(ctx context.Context, own []*ect.Token, use evidence.Use) (taken []*ect.Token, err error) {
	for _, token := range own {
		standing, err := t.evidence.Take(token, use, time.Now())
		if err != nil && !t.ledgerFirst { // else the store remembers
			return taken, refusedToken(err)
		}
		if standing == evidence.Unused {
			taken = append(taken, token)
			// It may have claimed a key.
			if standing, err = t.evidence.Recorded(ctx, token, use); err != nil {
				return taken, refusedToken(err)
			}
		}
		if standing == evidence.Other {
			return taken, replayedToken()
		}
	}
	return taken, nil
}
