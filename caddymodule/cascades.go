package caddymodule

import (
	"context"
	"math"
	"net/http"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/cascades"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// OnCascade says when a failure that spreads from one agent to others is a cascade (at least three must have failed),
// and what happens then.
// A cascade is always recorded, in the ledger of each of its workflows as `cascade_detected`, logged,
// emitted as an event, and counted; people are asked where it affects many agents or several workflows, or
// where several breakers open on one downstream.
type OnCascade struct{ cascades.Settings }

// parseOnCascade reads
//
//	on_cascade alert | pause | open {
//		escalate <number>
//		window   <duration>
//	}
func parseOnCascade(d *caddyfile.Dispenser, a *App) error {
	at := originOf(d)
	a.OnCascade = new(OnCascade)
	if err := parseChoice(d, &a.OnCascade.Do, cascades.Alert, cascades.Pause, cascades.TripRoot); err != nil {
		return err
	}
	return cascadeOptions().Read(d, "on_cascade", a.OnCascade, at)
}

func cascadeOptions() option.Set[*OnCascade] {
	all := option.Set[*OnCascade]{
		"escalate": count(func(o *OnCascade) *int { return &o.Escalate }),
		"window":   duration(func(o *OnCascade) *jsontime.Duration { return &o.Window }),
	}
	for name, opt := range all { // each is checked at its own line
		opt.Check = func(o *OnCascade) error {
			_, err := o.Check()
			return err
		}
		all[name] = opt
	}
	return all
}

// startCascades makes the watch for failures that spread. It begins with the first configuration.
func (e *engine) startCascades(ctx context.Context) error {
	settings, err := cascades.Settings{}.Check()
	if err != nil {
		return err
	}
	e.cascades, err = cascades.Open(ctx, cascades.Options{
		Store: e.calls.Store, Sealer: e.keys.Ring, Escalations: e.calls.Escalations, Settings: settings, KeepTokens: guard.KeepCircuitTokens,
		Log: slogOf(e.logger), Emit: func(data map[string]any) { e.emit(eventCascade, data) },
		Recorder: e.evidenceRecorder,
		Circuits: cascades.Circuits{
			Downstream: e.circuits.Downstream, Status: e.circuits.Status, Trip: e.circuits.Trip, ShareProbes: e.circuits.ShareProbes,
		},
		Look: func() (cascades.Look, bool) {
			a := e.activeConfigs.latest()
			if a == nil {
				return cascades.Look{}, false
			}
			if a.OnCascade != nil { // else it has not been provisioned
				settings = a.OnCascade.Settings
			}
			return cascades.Look{Settings: settings, Topology: topologyOf(a), Answered: e.circuits.Answered(), Readings: e.readings(a)}, true
		},
	})
	return err
}

// placed takes an event of the ledger, of this or another gateway, and does not wait.
func (e *engine) placed(log string, ev *ledger.Event, recorded time.Time) {
	e.cascades.Placed(log, ev, recorded)
	e.boundaries.placed(ev)
	e.followers.Changed(ev.Workflow)
}

// topologyOf is what the guards of a configuration lead to.
func topologyOf(a *App) cascades.Topology {
	at := cascades.Topology{Pools: map[string][]string{}, Guards: map[string][]string{}, Targets: map[string]string{}, Changed: map[string][]string{}}
	for _, h := range a.guards.list() {
		for i, action := range h.actions {
			fixed := action.Target != "" && !strings.Contains(action.Target, "{")
			if fixed {
				at.Targets[action.Target] = h.Name
			}
			switch {
			case !fixed || action.Target == h.Name:
				delete(at.Changed, h.Name)
			case i == 0:
				at.Changed[h.Name] = []string{action.Target}
			default:
				at.Changed[h.Name] = slices.DeleteFunc(at.Changed[h.Name], func(name string) bool { return name != action.Target })
			}
		}
		p := h.proxy.Load()
		if p == nil {
			continue
		}
		upstreams, _, _ := p.Upstreams()
		for _, upstream := range upstreams {
			if !slices.Contains(at.Pools[h.Name], upstream) {
				at.Pools[h.Name] = append(at.Pools[h.Name], upstream)
				at.Guards[upstream] = append(at.Guards[upstream], h.Name)
			}
		}
	}
	return at
}

// readings are how much of each resource is used now (cascade 3.4.1).
func (e *engine) readings(a *App) (all []cascade.Reading) {
	for _, h := range a.guards.list() {
		if h.pool != nil {
			s := h.pool.Status()
			all = append(all,
				cascade.Reading{Pool: h.Name, Resource: "permits", Used: float64(s.InUse), Limit: float64(s.Settings.Total)},
				cascade.Reading{Pool: h.Name, Resource: "queue", Refused: s.Counts.Refused[bulkhead.QueueFull]})
		}
		if p := h.proxy.Load(); p != nil {
			_, open, limit := p.Upstreams()
			all = append(all, cascade.Reading{Pool: h.Name, Resource: "connections", Used: float64(open), Limit: float64(limit)})
		}
	}
	if limit := debug.SetMemoryLimit(-1); limit > 0 && limit != math.MaxInt64 { // GOMEMLIMIT
		used := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		metrics.Read(used)
		all = append(all, cascade.Reading{Resource: "memory", Used: float64(used[0].Value.Uint64() - used[1].Value.Uint64()), Limit: float64(limit)})
	}
	if r := e.report(); r != nil {
		all = append(all, cascade.Reading{Resource: "disk", Full: r.Disk != nil && r.Disk.Takes != admin.TakesEverything})
	}
	counts := e.counts
	return append(all, cascade.Reading{Resource: "store", Ops: counts.commits.Load(), Took: time.Duration(counts.commitTime.Load())})
}

// resources are the names of what belongs to no guard.
var resources = []string{"memory", "disk", "store"}

// cascadeReport is what is counted of cascades, for metrics.
func (e *engine) cascadeReport() *cascadeReport {
	seen := e.cascades.Report()
	r := &cascadeReport{
		Open: seen.Open, Found: seen.Found, Dropped: seen.Dropped, Exhausted: map[[2]string]float64{}, Latencies: e.circuits.LatencyReports(),
	}
	for _, name := range resources {
		r.Exhausted[[2]string{"", name}] = 0
	}
	for _, guard := range seen.Guards {
		for _, name := range []string{"permits", "queue", "connections"} {
			r.Exhausted[[2]string{guard, name}] = 0
		}
	}
	for _, s := range seen.Exhausted {
		r.Exhausted[[2]string{s.Pool, s.Name}] = 1
	}
	return r
}

// cascadesFor answers the requests of one guard's site.
func cascadesFor(h *Handler, e *engine, policy *tokenPolicy) *api.Cascades {
	return &api.Cascades{
		List: func(context.Context) ([]api.Cascade, error) { return e.cascades.List(), nil },
		Get:  func(_ context.Context, id string) (*api.Cascade, error) { return e.cascades.Get(id), nil },
		Reader: func(r *http.Request) (router.Reader, bool, func(string) bool, error) {
			who, name, err := h.asker(e, policy, r)
			if err != nil {
				return who, false, nil, err
			}
			if !caller.Verified(name) {
				return who, false, nil, problem.New(router.Unauthenticated,
					"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
			}
			p := h.proxy.Load()
			leads := func(upstream string) bool {
				return p != nil && p.LeadsTo(upstream[strings.LastIndex(upstream, " ")+1:])
			}
			return who, slices.Contains(h.Operators, h.handler.Callers.Operator(r, name)), leads, nil
		},
	}
}
