package admin

import (
	"net/http"
	"time"
)

// KeyStatus is what operators see of the key ring. There is never a key in it.
type KeyStatus struct {
	// Source is "file", or "value" where the configuration gives the key.
	Source string `json:"source"`
	// File is the key file's path.
	File string `json:"file,omitempty"`
	// Keys are the sealing keys, the newest last.
	Keys []Key `json:"keys"`
	// Resealing is the last pass of sealing anew since the store was opened.
	Resealing *Resealing `json:"resealing,omitempty"`
}

// Key is one sealing key.
type Key struct {
	// ID is its number.
	ID uint32 `json:"id"`
	// Created is when it was made.
	Created time.Time `json:"created,omitzero"`
	// Newest says that what is sealed now is sealed with it.
	Newest bool `json:"newest"`
	// InUse says that something may stand under it: the ring must keep it.
	InUse bool `json:"in_use"`
	// Until is when the last of that expires, where that is known.
	Until time.Time `json:"until,omitzero"`
}

// Resealing tells how far a pass has come.
type Resealing struct {
	// Key is the sealing key to which values are moved.
	Key uint32 `json:"key"`
	// Seen counts the values that were looked at.
	Seen int `json:"seen"`
	// Resealed counts those that were sealed anew.
	Resealed int `json:"resealed"`
	// Damaged counts those that do not open.
	Damaged int `json:"damaged"`
	// Left is what stands under older keys, as far as was looked.
	Left []KeyLeft `json:"left"`
	// Started is when it began.
	Started time.Time `json:"started"`
	// Finished is when it was done; left out while it runs, and where it failed.
	Finished time.Time `json:"finished,omitzero"`
	// Done says that everything was looked at.
	Done bool `json:"done"`
	// Error is why it stopped; it will be tried again.
	Error string `json:"error,omitempty"`
}

// KeyLeft is what stands under an older key.
type KeyLeft struct {
	// ID is the key's number.
	ID uint32 `json:"id"`
	// Records are those that could not be moved.
	Records int `json:"records"`
	// Results are parts of answers, which expire.
	Results int `json:"results"`
	// Until is when the last of it expires; left out where some of it does not.
	Until time.Time `json:"until,omitzero"`
}

// keys answers GET keys.
func (a *API) keys(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	return st.Keys(r.Context())
}

// rotate answers POST keys/rotate, with the keys that there are now.
func (a *API) rotate(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	if err := st.RotateKeys(r.Context()); err != nil {
		return nil, err
	}
	return st.Keys(r.Context())
}
