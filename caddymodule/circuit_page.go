package caddymodule

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// circuitsPath shows the breakers, and aerrCircuitsPath does so under AERR's name.
const (
	circuitsPath     = wellKnown + "circuits"
	aerrCircuitsPath = "/.well-known/aerr/circuits"
	aerrBarePath     = "/aerr/circuits"
)

// circuitsDocument is Figure 3 of the cascade draft, with more members. They are an API.
type circuitsDocument struct {
	Circuits []circuitDocument `json:"circuits"`
}

type circuitDocument struct {
	// Downstream is the identity of the upstream where one is configured, else its address.
	Downstream        string  `json:"downstream_agent"`
	State             string  `json:"state"`
	ErrorRate         float64 `json:"error_rate"`
	Window            float64 `json:"window_s"`
	LastFailure       string  `json:"last_failure_ect,omitempty"`
	CooldownRemaining float64 `json:"cooldown_remaining_s"`

	Upstream     string     `json:"upstream"`
	Class        string     `json:"class,omitempty"` // read or write, where they are apart
	Mode         string     `json:"mode"`
	Generation   uint64     `json:"generation"`
	Since        *time.Time `json:"since,omitempty"`
	MinVolume    int        `json:"min_volume"`
	Threshold    float64    `json:"threshold"`
	Calls        int        `json:"calls"`
	Failures     int        `json:"failures"`
	Slow         int        `json:"slow"`
	RateLimited  int        `json:"rate_limited"`
	Overdue      int        `json:"overdue"`
	Cooldown     float64    `json:"cooldown_s"`
	NextProbe    *time.Time `json:"next_probe,omitempty"`
	Probing      bool       `json:"probing"`
	FailedProbes int        `json:"failed_probes"`
	Reason       string     `json:"reason,omitempty"`
	LastCause    string     `json:"last_cause,omitempty"`
	Opened       string     `json:"open_ect,omitempty"`
	Rejected     uint64     `json:"rejected"`
}

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
	only := r.URL.Query().Get("state")
	doc := circuitsDocument{Circuits: []circuitDocument{}}
	for _, s := range e.circuits.Status() {
		if c := e.describeCircuit(way, &s); may(&c) && (only == "" || strings.EqualFold(only, c.State)) {
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

func (e *engine) describeCircuit(way *testimony, s *breaker.Status) circuitDocument {
	doc := circuitDocument{
		Downstream: e.circuits.Downstream(s.Key.Upstream), State: s.State.String(), ErrorRate: s.ErrorRate, Window: s.Window.Seconds(),
		CooldownRemaining: s.CooldownRemaining.Seconds(), Upstream: s.Key.Upstream, Class: s.Key.Class, Mode: s.Mode.String(),
		Generation: s.Generation, MinVolume: s.MinVolume, Threshold: s.Threshold, Calls: s.Calls, Failures: s.Failures, Slow: s.Slow,
		RateLimited: s.RateLimited, Overdue: s.Overdue, Cooldown: s.Cooldown.Seconds(), Probing: s.Probing, FailedProbes: s.FailedProbes,
		Reason: string(s.Reason), LastCause: s.Cause, Opened: s.Reference, Rejected: s.Rejected,
	}
	if way != nil && s.Evidence != "" {
		doc.LastFailure = way.evidence.ErrorID(s.Evidence)
	}
	if !s.Since.IsZero() {
		at := s.Since.UTC()
		doc.Since = &at
	}
	if !s.NextProbe.IsZero() {
		at := s.NextProbe.UTC()
		doc.NextProbe = &at
	}
	return doc
}
