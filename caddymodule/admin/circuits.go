package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// CircuitMode is what POST circuits/mode takes.
type CircuitMode struct {
	// Upstream is the address of the upstream, as circuits shows it.
	Upstream string `json:"upstream"`
	// Class is read or write, where these have breakers of their own.
	Class string `json:"class,omitempty"`
	// Mode is auto, observe, forced_open or forced_closed.
	Mode *breaker.Mode `json:"mode"`
}

// maxCircuitMode is the most bytes of such a request.
const maxCircuitMode = 4 << 10

// read decodes strictly: a misspelled member must not set another breaker.
func (d *CircuitMode) read(from io.Reader) error {
	decoder := json.NewDecoder(io.LimitReader(from, maxCircuitMode))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(d)
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			err = nil
		} else {
			err = errors.New("something stands behind it")
		}
	}
	switch {
	case err != nil:
		return refuse(http.StatusBadRequest, `the request is no {"upstream": "host:port", "mode": "forced_open"}: %v`, err)
	case d.Upstream == "":
		return refuse(http.StatusBadRequest, "upstream: it is missing")
	case d.Mode == nil:
		return refuse(http.StatusBadRequest, "mode: it is missing; it is auto, observe, forced_open or forced_closed")
	}
	return nil
}

// circuits answers GET circuits.
func (a *API) circuits(_ *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	return circuits.Document{Circuits: st.Circuits()}, nil
}

// circuitMode answers POST circuits/mode, with the breakers as they are now.
func (a *API) circuitMode(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	var d CircuitMode
	if err := d.read(r.Body); err != nil {
		return nil, err
	}
	found, err := st.SetCircuitMode(r.Context(), breaker.Key{Upstream: d.Upstream, Class: d.Class}, *d.Mode)
	if err != nil {
		return nil, unavailable(err)
	}
	if !found {
		class := ""
		if d.Class != "" {
			class = fmt.Sprintf(" of the class %q", d.Class)
		}
		return nil, refuse(http.StatusNotFound,
			"the upstream %q has no circuit breaker%s: one begins with the first call; circuits lists them", d.Upstream, class)
	}
	return circuits.Document{Circuits: st.Circuits()}, nil
}
