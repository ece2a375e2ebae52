package admin

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"
)

// Identity is who the gateway is in its tokens, and what it signs them with. There is
// never a private key in it.
type Identity struct {
	// Name is the `iss` of the gateway's tokens.
	Name string `json:"name"`
	// File is the key file's path.
	File string `json:"file"`
	// Algorithm is that of the next key.
	Algorithm string `json:"algorithm"`
	// Keys are those of the file, the one that signs last.
	Keys []IdentityKey `json:"keys"`
}

// IdentityKey is one key of the gateway's.
type IdentityKey struct {
	// ID is its name, the `kid` of its tokens.
	ID string `json:"id"`
	// Algorithm is what it signs with.
	Algorithm string `json:"alg"`
	// Created is when it was made; left out where that is not known.
	Created time.Time `json:"created,omitzero"`
	// Until is when it leaves the published set, or has left it; left out for the one
	// that signs.
	Until time.Time `json:"until,omitzero"`
	// Signs marks the one in use.
	Signs bool `json:"signs"`
	// Revoked says that nothing that it has signed is believed any more, not even
	// records.
	Revoked bool `json:"revoked,omitempty"`
}

// IdentityRotation is what POST identity/rotate takes. An empty body is one without
// members.
type IdentityRotation struct {
	// Stolen says that an older key is in wrong hands: none of them is published any
	// more.
	Stolen bool `json:"stolen,omitempty"`
}

// maxRotation is the most bytes of such a request.
const maxRotation = 1 << 10

// read decodes strictly: a misspelled member must not leave a stolen key in use.
func (d *IdentityRotation) read(from io.Reader) error {
	decoder := json.NewDecoder(io.LimitReader(from, maxRotation))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(d)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.New("something stands behind it")
	}
	return refuse(http.StatusBadRequest, `the request is no {"stolen": true} or {}: %v`, err)
}

// identityOf is the identity in the store's latest configuration.
func identityOf(st Store) (*Identity, error) {
	if i := st.Identity(); i != nil {
		return i, nil
	}
	return nil, refuse(http.StatusNotFound,
		"the gateway over the store %s has no identity, and signs nothing: configure `identity`, in whose name it signs what it decides", st.Path())
}

// identity answers GET identity.
func (a *API) identity(_ *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	return identityOf(st)
}

// rotateIdentity answers POST identity/rotate, with the keys that there are now.
func (a *API) rotateIdentity(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	var d IdentityRotation
	if err := d.read(r.Body); err != nil {
		return nil, err
	}
	if _, err := identityOf(st); err != nil {
		return nil, err
	}
	if err := st.RotateIdentity(d.Stolen); err != nil {
		return nil, err
	}
	return identityOf(st)
}
