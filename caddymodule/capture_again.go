package caddymodule

import (
	"bytes"
	"context"
	"io"
	"mime"
	"net/http"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// imageBeforeAll is what stood at the target before a call that may have been executed
// already: what was read before its earlier attempt, as what stands there now may be its
// own work (P6). Where it is neither that nor what the attempt would have left, or somebody
// wrote there during that one, nobody knows whose it is: the window is disturbed.
func (x *exchange) imageBeforeAll(ctx context.Context, earlier string, now *checkpoint.Image) (*checkpoint.Image, error) {
	before, err := x.engine.vault.Before(ctx, earlier)
	if err != nil {
		return nil, err
	}
	others, err := x.engine.vault.Disturbed(ctx, earlier)
	if err != nil {
		return nil, err
	}
	if !others && !undo.Same(before, now) {
		own, err := x.leaves(now)
		if err != nil {
			return nil, err
		}
		others = !own
	}
	if others {
		x.window.disturb()
	}
	return before, nil
}

// leaves reports that an image is what the call itself would leave.
func (x *exchange) leaves(image *checkpoint.Image) (bool, error) {
	switch {
	case x.r.Method == http.MethodDelete:
		return !image.Exists, nil
	case x.r.Method != http.MethodPut, !image.Exists, encoded(x.r.Header), int64(len(image.Body)) != x.body.Size():
		return false, nil
	}
	if sent := x.r.Header.Get("Content-Type"); sent != "" && mediaType(sent) != mediaType(image.ContentType) {
		return false, nil
	}
	reader := x.body.NewReader()
	defer reader.Close()
	body, err := io.ReadAll(reader)
	return bytes.Equal(body, image.Body), err
}

// mediaType is one without its parameters, of which servers add some.
func mediaType(field string) string {
	if plain, _, err := mime.ParseMediaType(field); err == nil {
		return plain
	}
	return field
}

// othersBeside is what is recorded of a call in doubt: nothing, but that somebody else has
// written where it may have, for its rollback and its further attempts.
func (x *exchange) othersBeside(ctx context.Context) *checkpoint.Pending {
	c := &x.capture
	if c.decision.Way != checkpoint.Restore || !x.window.close() {
		return nil
	}
	p, err := x.engine.vault.Record(ctx, c.handle, checkpoint.Result{Reason: checkpoint.ReasonChanged}, int(x.action.MaxImage))
	if err != nil {
		x.h.logger.Error("what is needed to undo a call cannot be recorded", zap.Stringer("key", x.call.Key), zap.Error(err))
		return nil
	}
	return p
}
