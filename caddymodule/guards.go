package caddymodule

import (
	"errors"
	"slices"
	"sync"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// guards are the handlers of one configuration, by which the gateway's own requests find
// the way that a call went. Handlers are provisioned in any order, and looked for as soon
// as a rollback goes on.
type guards struct {
	mu  sync.Mutex
	all []*Handler
}

func (g *guards) add(h *Handler) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = append(g.all, h)
}

// route is where a request of an undo goes.
type route struct {
	h      *Handler
	action *Action
}

// find returns the way that a call went: by the guard's and the action's names, which
// several routes may share, and by the upstream where that tells them apart. Where
// nothing does, nothing is guessed (P6).
func (g *guards) find(o *undo.Outgoing) (route, error) {
	g.mu.Lock()
	all := slices.Clone(g.all)
	g.mu.Unlock()
	var ways []route
	for _, h := range all {
		if h.Name != o.Guard {
			continue
		}
		for _, a := range h.actions {
			if a.Name == o.Action {
				ways = append(ways, route{h, a})
				break
			}
		}
	}
	if len(ways) == 0 {
		return route{}, errNoGuard
	}
	upstream := func(r route) bool { return r.h.upstream != nil }
	same := func(r route) bool { return upstream(r) && r.h.upstreamName() == o.Upstream }
	if i := slices.IndexFunc(ways, same); i >= 0 {
		return ways[i], nil
	}
	i := slices.IndexFunc(ways, upstream)
	if i < 0 {
		return ways[0], nil // it will do for a whole URL
	}
	for _, other := range ways {
		if upstream(other) && other.h.upstreamName() != ways[i].h.upstreamName() {
			return route{}, errManyGuards
		}
	}
	return ways[i], nil
}

var (
	errNoGuard    = errors.New("the configuration has no such guard and action any more")
	errManyGuards = errors.New("several guards of this name have the action, with other upstreams than the call's")
	errNoOwnWay   = errors.New("the guard has no `upstream` for requests of its own")
	errOtherWay   = errors.New("the guard leads to another upstream than the one that the recorded credentials are for")
	errNoServer   = errors.New("the configuration has no server")
)

// server is the one of the configuration's servers that a guard stands in: handlers on the
// way to the upstream read its settings, as if a request had come in there.
func (a *App) server(h *Handler) (*caddyhttp.Server, error) {
	loaded, err := a.ctx.AppIfConfigured("http")
	if err != nil {
		return nil, errNoServer
	}
	app := loaded.(*caddyhttp.App)
	var names []string
	for name := range app.Servers {
		names = append(names, name)
	}
	slices.Sort(names)
	var found *caddyhttp.Server
	for _, name := range names {
		server := app.Servers[name]
		if found == nil || guardIn(server.Routes, h) {
			found = server
		}
		if guardIn(server.Routes, h) {
			break
		}
	}
	if found == nil {
		return nil, errNoServer
	}
	return found, nil
}

// guardIn reports whether a guard is plain to see in routes.
func guardIn(routes caddyhttp.RouteList, guard *Handler) bool {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *Handler:
				if h == guard {
					return true
				}
			case *caddyhttp.Subroute:
				if guardIn(h.Routes, guard) {
					return true
				}
			}
		}
	}
	return false
}
