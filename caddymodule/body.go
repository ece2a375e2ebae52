package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// readBody reads the request's body whole, before anything is claimed.
func (x *exchange) readBody() error {
	limit := x.h.MaxBody
	tooLarge := func() error {
		return problem.New(problem.BodyTooLarge, fmt.Sprintf("This route takes bodies of at most %d bytes.", limit))
	}
	if x.r.ContentLength > limit {
		return tooLarge()
	}
	x.body = spool.New(spool.Options{Limit: limit})
	if x.r.Body == nil || x.r.Body == http.NoBody {
		x.read = true
		return nil
	}
	_, err := io.Copy(x.body, x.r.Body)
	var spill *spool.SpillError
	var max *http.MaxBytesError
	switch {
	case err == nil:
		x.read = true
		return nil
	case errors.Is(err, spool.ErrLimit), errors.As(err, &max):
		return tooLarge()
	case errors.As(err, &spill):
		p := problem.New(problem.StoreUnavailable, "The request's body could not be kept.")
		p.Cause = err
		return p
	}
	// The client broke off or sent a malformed body.
	return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("reading the request's body: %w", err))
}

// giveBack makes the body readable again for the site's error routes, which would else
// forward the call without it. It is freed with the request.
func (x *exchange) giveBack() {
	if !x.read || x.body.Size() == 0 {
		return
	}
	body := x.body.NewReader()
	x.r.Body = body
	context.AfterFunc(x.r.Context(), func() { _ = body.Close() })
}

// lookUpBody reads the id at p in a JSON body. A body that is no JSON has none.
func (x *exchange) lookUpBody(p fingerprint.Pointer) (string, error) {
	if !isJSON(x.r.Header.Get("Content-Type")) {
		return "", errNoID
	}
	id, found, err := fingerprint.Lookup(x.body, x.body.Size(), p)
	switch {
	case errors.Is(err, fingerprint.ErrNotJSON), err == nil && !found:
		return "", errNoID
	case errors.Is(err, fingerprint.ErrNotScalar), errors.Is(err, fingerprint.ErrAmbiguous),
		errors.Is(err, fingerprint.ErrValueTooLong):
		return "", invalidID(err)
	}
	return id, err
}

// isJSON reports a media type whose body is JSON.
func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return media == "application/json" || strings.HasSuffix(media, "+json")
}

func (x *exchange) fingerprintBody() (guard.Fingerprint, error) {
	sum, err := x.h.fingerprints.Sum(fingerprint.Request{
		Method:          x.r.Method,
		Host:            strings.ToLower(x.r.Host),
		Path:            x.r.URL.EscapedPath(),
		RawQuery:        x.r.URL.RawQuery,
		ContentType:     x.r.Header.Get("Content-Type"),
		ContentEncoding: x.r.Header.Get("Content-Encoding"),
		Body:            x.body,
		Size:            x.body.Size(),
	})
	return guard.Fingerprint(sum), err
}
