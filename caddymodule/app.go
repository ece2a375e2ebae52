package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App is what all guards of one configuration share: the store in which executions
// are recorded, and the keys that seal it.
//
// An `agent_guard` handler works without any configuration of the app: records then
// go to a Badger store in Caddy's data directory, and a key file is made beside it.
type App struct {
	// The store that keeps the executions. Default: `badger`, in the directory
	// `agent_guard` below Caddy's data directory. A store is opened when the
	// server starts, not when a configuration is validated, and is shared by
	// configuration reloads.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=agent_guard.stores inline_key=module"`

	// The file that holds the key ring. It is made, with mode 0600, together with
	// a new store; it is never made for a store that holds anything, because
	// without its key no execution can be found. Default: the store's path with
	// `.key` appended. Placeholders are replaced once, at load; one without a
	// value is an error. Keep a copy of it apart from the store's. It is read again
	// with every configuration: sealing keys that were added to it are used from
	// then on, without a restart.
	KeyFile string `json:"key_file,omitempty"`

	// The key itself instead of a file, usually a placeholder like
	// `{env.AGENT_GUARD_KEY}` or `{file./run/secrets/key}`: the content of a key
	// file, or 32 random bytes in base64 (`openssl rand -base64 32`). A later
	// configuration may bring the ring with more sealing keys, or from another
	// place; its index key stays that of the store.
	Key string `json:"key,omitempty"`

	// How long the process waits for running executions when it exits; new guarded
	// calls get 503 meanwhile. What is still running then is cut, and is in doubt.
	// Default: 30s.
	Drain caddy.Duration `json:"drain,omitempty"`

	// What one caller may hold in the store at a time. Default: no bounds.
	Quota Quota `json:"quota,omitzero"`

	// Who the gateway is in the tokens that it issues. With it, every decision about
	// a guarded call is told to the ledger of the store. Default: no identity and no
	// ledger.
	Identity *Identity `json:"identity,omitempty"`

	// Whose tokens are believed. It needs an identity. Default: tokens of callers are
	// passed through and mean nothing.
	Trust *Trust `json:"trust,omitempty"`

	// Who may ask for rollbacks, and how often.
	Rollback *Rollback `json:"rollback,omitempty"`

	// Who is told of what only people can decide. Default: the log.
	HITL *HITL `json:"hitl,omitempty"`

	ctx    caddy.Context
	logger *zap.Logger
	spec   engineSpec

	guards    guards
	events    *caddyevents.App
	pending   pendingEvents
	counts    *metrics.Set // of the store
	counting  bool         // counts are held, until Cleanup
	collector *metrics.Collector

	mu       sync.Mutex
	held     *engine     // the configuration's own reference
	accepted atomic.Bool // the engine has taken the configuration's keys over
	way      atomic.Pointer[testimony]
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard", New: func() caddy.Module { return new(App) }}
}

// Provision checks the options. It opens nothing: `caddy validate` works beside a
// running server.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx, a.logger = ctx, ctx.Logger()
	if a.StoreRaw == nil {
		a.StoreRaw = caddyconfig.JSONModuleObject(new(BadgerStore), "module", "badger", nil)
	}
	mod, err := ctx.LoadModule(a, "StoreRaw")
	if err != nil {
		return fmt.Errorf("agent_guard: loading the store: %w", err)
	}
	opener, ok := mod.(StoreOpener)
	if !ok {
		return fmt.Errorf("agent_guard: %T is no store: it does not implement StoreOpener", mod)
	}
	path, err := opener.StorePath()
	if err != nil {
		return fmt.Errorf("agent_guard: store: %w", err)
	}
	repl := caddy.NewReplacer()
	a.spec = engineSpec{opener: opener, path: path, logger: a.logger}
	switch {
	case a.Key != "" && a.KeyFile != "":
		return errors.New("agent_guard: keys: give either a file or a value, not both")
	case a.Key != "":
		if strings.Contains(a.Key, `"`) { // which an error of the replacer would show (P8)
			return errors.New("agent_guard: keys: value: a key ring's JSON cannot stand in the configuration; " +
				"give a placeholder that has it as its value, like {env.AGENT_GUARD_KEY}")
		}
		if a.spec.key, err = repl.ReplaceOrErr(a.Key, true, true); err != nil {
			return fmt.Errorf("agent_guard: keys: value: %w", err)
		}
		if _, err := seal.Parse([]byte(a.spec.key)); err != nil {
			return fmt.Errorf("agent_guard: keys: value: %w", err)
		}
	case a.KeyFile != "":
		// An unset variable must not lead to another file than was meant.
		if a.spec.keyFile, err = repl.ReplaceOrErr(a.KeyFile, true, true); err == nil {
			a.spec.keyFile, err = filepath.Abs(a.spec.keyFile)
		}
		if err != nil {
			return fmt.Errorf("agent_guard: keys: file %q: %w", a.KeyFile, err)
		}
	default:
		a.spec.keyFile = path + ".key"
	}
	if err := checkDuration(a.Drain); err != nil {
		return fmt.Errorf("agent_guard: drain: %w", err)
	}
	if a.Drain == 0 {
		a.Drain = caddy.Duration(30 * time.Second)
	}
	a.spec.drain = time.Duration(a.Drain)
	if err := a.Quota.validate(); err != nil {
		return fmt.Errorf("agent_guard: quota: %w", err)
	}
	if err := a.provisionTokens(); err != nil {
		return err
	}
	if a.Rollback != nil {
		if err := a.Rollback.provision(); err != nil {
			return fmt.Errorf("agent_guard: rollback: %w", err)
		}
	}
	if a.HITL != nil {
		gateway := ""
		if a.Identity != nil {
			gateway = a.Identity.Name
		}
		if err := a.HITL.provision(gateway); err != nil {
			return fmt.Errorf("agent_guard: hitl: %w", err)
		}
	}
	events, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("agent_guard: %w", err)
	}
	a.events = events.(*caddyevents.App)
	a.provisionMetrics()
	return a.events.On(exitEvent, exitWatch{})
}

// provisionTokens checks identity and trust.
func (a *App) provisionTokens() error {
	if a.Identity == nil {
		if a.Trust != nil {
			return a.Trust.lacksIdentity()
		}
		return nil
	}
	if err := a.Identity.provision(a.spec.path); err != nil {
		return fmt.Errorf("agent_guard: identity: %w", err)
	}
	if a.Trust == nil {
		return nil
	}
	if err := a.Trust.provision(a.Identity.Algorithm, a.logger); err != nil {
		return fmt.Errorf("agent_guard: trust: %w", err)
	}
	return nil
}

// Start opens the store, if no configuration before this one has it open.
func (a *App) Start() error {
	if app, err := a.ctx.AppIfConfigured("http"); err == nil {
		if err := checkResends(app.(*caddyhttp.App)); err != nil {
			return fmt.Errorf("agent_guard: %w", err)
		}
		joinProxies(app.(*caddyhttp.App))
		for _, server := range unguardedErrorRoutes(app.(*caddyhttp.App)) {
			a.logger.Warn("reverse_proxy in handle_errors is not guarded: a call that was released there runs again with each retry; "+
				"use agent_proxy in its place", zap.String("server", server))
		}
	}
	e, err := a.engine()
	if err == nil {
		e.startRollbacks(context.Background())
	}
	return err
}

// Stop does nothing: on a reload running executions go on, each holding the engine
// open by itself, and an exit has waited for them before it (exit.go).
func (a *App) Stop() error { return nil }

// Cleanup gives the configuration's reference back. It tolerates every half-built
// state: an App whose Provision failed never acquired one.
func (a *App) Cleanup() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counting { // what has outlived the configuration goes on to count
		releaseCounts(a.spec.path)
		a.counting = false
	}
	a.HITL.close()
	if a.held == nil {
		return nil
	}
	held := a.held
	a.held = nil
	held.leave(&a.spec)
	if a.Identity != nil {
		held.leaveArchive(a.Identity)
	}
	held.audience.leave(a)
	return held.release()
}

// engine returns the open engine, opening it on first use: Caddy starts apps in no
// particular order, so a request may come before Start.
func (a *App) engine() (*engine, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held != nil {
		return a.held, nil
	}
	e, err := a.acquire()
	if err != nil {
		return nil, err
	}
	if a.Identity != nil {
		way, err := e.testify(context.Background(), a.Identity, a.Trust, a.ctx.Slogger())
		if err != nil {
			_ = e.release() // closing the store logs its own errors
			return nil, err
		}
		a.way.Store(way)
		if err := e.openRollbacks(a.rollbackRetain()); err != nil {
			e.leaveArchive(a.Identity)
			_ = e.release() // closing the store logs its own errors
			return nil, err
		}
	}
	if a.Identity == nil {
		if begun, err := evidence.Begun(context.Background(), e.store); err == nil && begun {
			a.logger.Warn("the store holds a ledger, and no `identity` is configured: nothing more is told to it, and tokens mean nothing",
				zap.String("store", a.spec.path))
		}
	}
	e.drain.Store(int64(a.Drain))
	if adjuster, ok := a.spec.opener.(StoreAdjuster); ok {
		adjuster.AdjustStore(e.store)
	}
	e.join(&a.spec)
	a.held = e
	e.audience.join(a)
	e.teller.begin()
	e.escalations.adopt(a.HITL)
	e.tellRecovered()
	return e, nil
}

// acquire returns the engine with a reference of its own for one guarded request,
// which may outlive its configuration.
func (a *App) acquire() (*engine, error) {
	e, err := engines.acquire(a.spec, a.accepted.Load())
	if err == nil {
		a.accepted.Store(true)
	}
	return e, err
}

var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
