package admin_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// Section "Admin API": breakers are shown, and their modes set.
func TestCircuits(t *testing.T) {
	r, o := newRig(t)
	var got circuits.Document
	if r.get("circuits", &got); got.Circuits != nil {
		t.Errorf("%+v", got)
	}
	o.circuits = []circuits.Circuit{{Upstream: "a:1", State: "closed", Mode: "auto"}, {Upstream: "b:1", Class: "write", State: "open", Mode: "auto"}}
	if r.get("circuits", &got); !slices.Equal(got.Circuits, o.circuits) {
		t.Errorf("%+v", got)
	}
	w, refused := r.ask("POST", "circuits/mode", `{"upstream": "b:1", "class": "write", "mode": "forced_open"}`)
	if refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &got) != nil || got.Circuits[1].Mode != "forced_open" || got.Circuits[0].Mode != "auto" {
		t.Errorf("%v %s", refused, w.Body)
	}
}

// Section "Admin API": what is not understood sets no mode.
func TestCircuitRefusals(t *testing.T) {
	r, o := newRig(t)
	o.circuits = []circuits.Circuit{{Upstream: "a:1", Mode: "auto"}}
	for body, want := range map[string]string{
		``:                                    "the request is no",
		`[]`:                                  "the request is no",
		`{"upstream": "a:1"}`:                 "mode: it is missing",
		`{"mode": "observe"}`:                 "upstream: it is missing",
		`{"upstream": "a:1", "mode": "open"}`: "the request is no",
		`{"upstream": "a:1", "mode": "observe", "clas": "write"}`: "the request is no",
		`{"upstream": "a:1", "mode": "observe"} {}`:               "something stands behind it",
	} {
		r.refuses("POST", "circuits/mode", body, http.StatusBadRequest, want)
	}
	r.refuses("POST", "circuits/mode", `{"upstream": "c:1", "mode": "observe"}`, http.StatusNotFound, `the upstream "c:1" has no circuit breaker: one`)
	r.refuses("POST", "circuits/mode", `{"upstream": "c:1", "class": "read", "mode": "observe"}`, http.StatusNotFound, `no circuit breaker of the class "read": one`)
	r.refuses("GET", "circuits?twice=1", "", http.StatusBadRequest, `"twice" is no parameter`)
	if o.circuits[0].Mode != "auto" {
		t.Errorf("%+v", o.circuits)
	}
	o.unkept = errors.New("the disk is full")
	r.refuses("POST", "circuits/mode", `{"upstream": "a:1", "mode": "observe"}`, http.StatusServiceUnavailable, "the disk is full")
}
