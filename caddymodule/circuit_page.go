package caddymodule

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// circuitsPath shows the breakers, and aerrCircuitsPath does so under AERR's name.
const (
	circuitsPath     = wellKnown + "circuits"
	aerrCircuitsPath = "/.well-known/aerr/circuits"
	aerrBarePath     = "/aerr/circuits"
)

// serveCircuits answers GET /.well-known/cascade/circuits (cascade 3.2.3).
func (h *Handler) serveCircuits(w http.ResponseWriter, r *http.Request) bool {
	if h.app == nil || r.URL.Path != circuitsPath && r.URL.Path != aerrCircuitsPath && r.URL.Path != aerrBarePath {
		return false
	}
	if allowRead(w, r) {
		h.answered(w, r, h.askCircuits(w, r))
	}
	return true
}

func (h *Handler) askCircuits(w http.ResponseWriter, r *http.Request) error {
	e, err := h.app.acquire()
	if err != nil {
		return err
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	way, err := h.app.testimony()
	if err != nil {
		return err
	}
	who, caller, err := h.asker(e, way, r)
	if err != nil {
		return err
	}
	may, err := h.circuitsFor(e, way, r, who, caller)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookPatience)
	defer cancel()
	only, view := r.URL.Query().Get("state"), way.asked(r.URL.Query().Get("wid"), who.Issuer)
	doc := circuits.Document{Circuits: []circuits.Circuit{}}
	for _, s := range e.circuits.Status() {
		if c := e.describeCircuit(ctx, way, &s); may(&c) && (only == "" || strings.EqualFold(only, c.State)) {
			c.SetView(view)
			doc.Circuits = append(doc.Circuits, c)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(doc) // only the client's leaving can fail here
	return nil
}

// describeCircuit describes a breaker, with the error that its last failure has in the
// ledger.
func (e *engine) describeCircuit(ctx context.Context, way *testimony, s *breaker.Status) circuits.Circuit {
	c := e.circuits.Describe(s)
	c.LastFailure = way.lastFailure(ctx, s)
	return c
}
