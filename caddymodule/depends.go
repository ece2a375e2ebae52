package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Dependency is what calls need behind their upstream, and the gateway before it. While a breaker there
// is open, the calls are refused here.
type Dependency struct {
	// Where the breakers of the other gateway are shown: https, or http on the same machine.
	URI string `json:"uri,omitempty"`

	// The identity of the other gateway, which the question is for.
	Identity string `json:"identity,omitempty"`

	// The identities of the agents that the calls need, as the `downstream` of the other gateway's
	// breakers names them.
	Downstreams []string `json:"downstreams,omitempty"`

	watch *dependencyWatch // since it is provisioned
}

// dependencyWatch knows the breakers of the other gateway.
type dependencyWatch struct {
	*Dependency
	read   func(ctx context.Context) ([]proxy.Circuit, error)
	logger *slog.Logger
	asking atomic.Bool
	last   atomic.Pointer[dependencyAnswer]
}

// dependencyAnswer is what was known when the other gateway was asked last.
type dependencyAnswer struct {
	asked  time.Time
	failed bool               // nothing was answered
	at     time.Time          // of the last answer; zero without one
	open   *breaker.OpenError // nil if all works
	went   atomic.Bool        // one call has gone on since, as the probe
}

const (
	// dependencyEvery is how often a gateway is asked at most, and only while there are calls.
	dependencyEvery = time.Second
	// dependencyTime bounds one question.
	dependencyTime = 2 * time.Second
	// dependencyLife is how long an answer counts. Who knows nothing lets calls pass: the other gateway
	// still refuses them.
	dependencyLife = 5 * time.Second
	// longestRefusal bounds the Retry-After that another gateway's breaker causes.
	longestRefusal = time.Hour
)

func (d *Dependency) check() error {
	if err := checkDelegate(d.URI); err != nil {
		return err
	}
	for _, name := range append([]string{d.Identity}, d.Downstreams...) {
		if err := checkIdentity(name); err != nil {
			return err
		}
	}
	if len(d.Downstreams) == 0 {
		return errors.New("it names no downstream; name the agents that the calls need")
	}
	return nil
}

func parseDependency(d *caddyfile.Dispenser, p *Policy) error {
	uri, identity, err := parsePair(d)
	if err != nil {
		return err
	}
	p.DependsOn = &Dependency{URI: uri, Identity: identity, Downstreams: d.RemainingArgs()}
	if len(p.DependsOn.Downstreams) == 0 {
		return errSyntax
	}
	return p.DependsOn.check()
}

// provision prepares the question. Actions that inherit it share its answers.
func (d *Dependency) provision(h *Handler) error {
	if d == nil || d.watch != nil {
		return nil
	}
	if err := d.check(); err != nil {
		return &invalid{[]string{"depends_on"}, err}
	}
	if h.app.Identity == nil {
		return &invalid{[]string{"depends_on"}, errors.New("it needs an `identity` in the global options, to which the other gateway shows its breakers")}
	}
	sender := undoSender{direct: newDirect()} // only for whole URLs
	d.watch = &dependencyWatch{Dependency: d, logger: h.logger, read: func(ctx context.Context) ([]proxy.Circuit, error) {
		return d.circuits(ctx, h.app, &sender)
	}}
	return nil
}

// forCalls returns the question of calls; nil without a dependency.
func (d *Dependency) forCalls() func() (*breaker.OpenError, string) {
	if d == nil {
		return nil
	}
	return func() (*breaker.OpenError, string) {
		open := d.watch.refusal()
		if open == nil {
			return nil, ""
		}
		return open, open.Key.Upstream
	}
}

// refusal is the refusal of the breaker that recovers last of those that the calls need, as far as is
// known (cascade 3.3.2). It never waits. When the cooldown there is over, one call for each answer goes
// on, so that the other gateway has its probe.
func (w *dependencyWatch) refusal() *breaker.OpenError {
	a := w.last.Load()
	if (a == nil || time.Since(a.asked) > dependencyEvery) && w.asking.CompareAndSwap(false, true) {
		go w.ask()
	}
	switch {
	case a == nil, a.open == nil, time.Since(a.at) > dependencyLife:
		return nil
	case a.open.Mode == breaker.ForcedOpen, time.Now().Before(a.open.Until):
		return a.open
	case a.went.CompareAndSwap(false, true):
		return nil
	}
	waits := *a.open
	waits.State, waits.Until = breaker.HalfOpen, time.Time{}
	return &waits
}

// ask asks the other gateway, and keeps its answer. Without one the last is kept, as old as it is.
func (w *dependencyWatch) ask() {
	defer w.asking.Store(false)
	ctx, cancel := context.WithTimeout(context.Background(), dependencyTime)
	defer cancel()
	before := w.last.Load()
	if before == nil {
		before = new(dependencyAnswer)
	} else if time.Since(before.asked) <= dependencyEvery {
		return // it was asked while this call looked
	}
	circuits, err := w.read(ctx)
	a := &dependencyAnswer{asked: time.Now(), failed: err != nil, at: before.at, open: before.open}
	if err == nil {
		a.at, a.open = a.asked, w.refusedBy(circuits)
	} else if !before.failed {
		w.logger.Warn("another gateway does not show its breakers; calls that depend on them pass as if they were closed",
			slog.String("uri", w.URI), slog.Any("error", err))
	}
	w.last.Store(a)
}

// circuits reads the breakers of the other gateway.
func (d *Dependency) circuits(ctx context.Context, app *App, sender *undoSender) ([]proxy.Circuit, error) {
	e, err := app.acquire()
	if err != nil {
		return nil, err
	}
	defer e.giveBack()
	policy, err := app.tokenPolicy()
	if err != nil {
		return nil, err
	}
	raw, err := policy.Events.ReadRequest(ctx, "", d.Identity)
	if err != nil {
		return nil, err
	}
	answer, err := sender.send(ctx, &rollback.Outgoing{Method: http.MethodGet, URL: d.URI}, http.Header{ect.FieldName: {raw}})
	if err != nil {
		return nil, err
	}
	var doc proxy.Document
	if answer.Status != http.StatusOK || answer.Cut || json.Unmarshal(answer.Body, &doc) != nil {
		return nil, fmt.Errorf("it answers %d, and no list of breakers", answer.Status)
	}
	return doc.Circuits, nil
}

// refusedBy is the refusal of that breaker of a dependency that recovers last.
func (w *dependencyWatch) refusedBy(circuits []proxy.Circuit) (last *breaker.OpenError) {
	for _, c := range circuits {
		refuses := c.State != breaker.Closed.String() && c.Mode != breaker.Observe.String() && c.Mode != breaker.ForcedClosed.String()
		if !refuses || c.Class == proxy.UndoClass || !slices.Contains(w.Downstreams, c.Downstream) {
			continue
		}
		open := &breaker.OpenError{Key: breaker.Key{Upstream: c.Downstream, Class: c.Class}, State: breaker.Open, Generation: c.Generation}
		left := time.Duration(min(c.CooldownRemaining, int64(longestRefusal/time.Second))) * time.Second
		switch {
		case c.Mode == breaker.ForcedOpen.String():
			open.Mode = breaker.ForcedOpen
		case left > 0:
			open.Until = time.Now().Add(left)
		}
		if last == nil || open.Mode == breaker.ForcedOpen || last.Mode != breaker.ForcedOpen && open.Until.After(last.Until) {
			last = open
		}
	}
	return last
}
