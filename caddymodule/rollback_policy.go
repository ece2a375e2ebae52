package caddymodule

import (
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
)

// policyRollback says where rollbacks are asked for, and by whom.
type policyRollback struct {
	Request string  `json:"request"`
	Status  string  `json:"status"` // a URI template (RFC 6570)
	ATD     string  `json:"atd"`
	AERR    string  `json:"aerr"`
	Lineage string  `json:"lineage"`
	Rate    int     `json:"rate_per_minute"`
	Wait    float64 `json:"wait_s"`
	MaxWait float64 `json:"max_wait_s"`
}

// rollbackPolicy is nil where nobody's tokens are believed, so that only operators ask.
func (a *App) rollbackPolicy() *policyRollback {
	if a.Trust == nil {
		return nil
	}
	o := a.rollbackOptions()
	return &policyRollback{
		Request: rollbackapi.Path, Status: rollbackapi.Path + "/{rollback_id}{?wait}",
		ATD: rollbackapi.ATDPath, AERR: rollbackapi.AERRPath,
		Lineage: o.Lineage, Rate: o.Rate, Wait: time.Duration(o.Wait).Seconds(), MaxWait: rollbackapi.LongestWait.Seconds(),
	}
}
