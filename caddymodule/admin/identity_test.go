package admin_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// Section "Admin API": the identity is shown with its keys, and rotated.
func TestIdentity(t *testing.T) {
	r, o := newRig(t)
	first := admin.IdentityKey{ID: "first", Algorithm: "ES256", Created: r.now, Until: r.now.Add(time.Hour)}
	o.identity = &admin.Identity{
		Name: "spiffe://example.com/gateway", File: "/data/one.identity", Algorithm: "ES256", Keys: []admin.IdentityKey{first},
	}
	var got admin.Identity
	if r.get("identity", &got); got.Name != o.identity.Name || got.File != o.identity.File || !slices.Equal(got.Keys, o.identity.Keys) {
		t.Errorf("%+v", got)
	}
	for body, stolen := range map[string]bool{"": false, "{}": false, `{"stolen": false}`: false, `{"stolen": true}`: true} {
		w, refused := r.ask("POST", "identity/rotate", body)
		if refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &got) != nil || !slices.Equal(got.Keys, o.identity.Keys) {
			t.Errorf("%s: %v %s", body, refused, w.Body)
		}
		if o.stolen[len(o.stolen)-1] != stolen {
			t.Errorf("%s: stolen: %v", body, o.stolen)
		}
	}
}

// Section "Admin API": a rotation that is not understood, or cannot be, changes nothing
// and says why.
func TestIdentityRefusals(t *testing.T) {
	r, o := newRig(t)
	for method, target := range map[string]string{"GET": "identity", "POST": "identity/rotate"} {
		r.refuses(method, target, "", http.StatusNotFound, "the gateway over the store /data/one has no identity, and signs nothing: configure `identity`")
		r.refuses(method, target+"?twice=1", "", http.StatusBadRequest, `"twice" is no parameter`)
	}
	o.identity = new(admin.Identity)
	for _, body := range []string{`{"stollen": true}`, `{"stolen": "yes"}`, `{"stolen": true} {}`, "stolen", "[]", `{"stolen": `, `"`} {
		r.refuses("POST", "identity/rotate", body, http.StatusBadRequest, `the request is no {"stolen": true} or {}`)
	}
	if len(o.stolen) != 0 {
		t.Errorf("rotated %d times", len(o.stolen))
	}
	o.rotation = caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New("the file is missing")}
	r.refuses("POST", "identity/rotate", "", http.StatusConflict, "the file is missing")
	o.rotation = errors.New("read-only file system")
	r.refuses("POST", "identity/rotate", "", http.StatusInternalServerError, "read-only file system")
}
