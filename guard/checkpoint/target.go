package checkpoint

import (
	"context"
	"encoding/hex"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"
)

// TargetOf names what a request to an upstream changes, in one way for all spellings of
// its path that servers may take for the same. The query is no part of it.
func TargetOf(upstream, escaped string) string {
	plain, err := url.PathUnescape(escaped)
	if err != nil {
		plain = escaped
	}
	return upstream + " " + strings.ToLower(path.Clean("/"+plain))
}

// Target is what the call of a checkpoint has changed, by a name that calls share which
// must be undone one after the other, and when the checkpoint was made. It is as the store
// has it, and good for an order only. The errors are those of Before.
func (v *Vault) Target(ctx context.Context, id string) (name string, made time.Time, err error) {
	s, err := v.standing(ctx, id)
	if err != nil {
		return "", time.Time{}, err
	}
	if s.Way != Restore && s.Request.Method == http.MethodPost {
		// A POST makes something of its own, so that many at one place have nothing in common.
		return hex.EncodeToString(s.Execution[:]), s.Created, nil
	}
	return TargetOf(s.Upstream, s.Request.Path), s.Created, nil
}
