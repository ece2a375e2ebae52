package caddymodule

import (
	"context"
	"net/http"
)

// ownRequest is the context key of requests that the gateway makes by itself.
type ownRequest struct{}

// asOwn marks a request as the gateway's own: guards and endpoints on its way hand it on
// as if they were not there. It is nobody's call, and needs no key, token or record.
func asOwn(ctx context.Context) context.Context { return context.WithValue(ctx, ownRequest{}, true) }

func isOwn(r *http.Request) bool { return r.Context().Value(ownRequest{}) != nil }
