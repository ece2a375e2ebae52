package caddymodule

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App is what all guards of one configuration share: the store that records executions, and the
// keys that encrypt it.
//
// An `agent_guard` handler works without any configuration of the app: it then uses a Badger store
// in Caddy's data directory, with a new key file beside it.
type App struct {
	// The store that records executions. It is opened when the server starts, not when a
	// configuration is validated, and survives reloads. Default: `badger`, in the directory
	// `agent_guard` below Caddy's data directory.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=agent_guard.stores inline_key=module"`

	// The file with the store's keys. It is created with a new store, mode 0600, and never for a
	// store that already holds something: without its key no execution can be found. Keep a copy of
	// it apart from the store. It is read again with every configuration, so sealing keys that were
	// added are used without a restart. Placeholders are replaced once, at load; one without a
	// value is an error. Default: the store's path with `.key` appended.
	KeyFile string `json:"key_file,omitempty"`

	// The key itself instead of a file, usually a placeholder like `{env.AGENT_GUARD_KEY}` or
	// `{file./run/secrets/key}`: the content of a key file, or 32 random bytes in base64 (`openssl
	// rand -base64 32`). A later configuration may add sealing keys, or take the keys from another
	// place; the index key must stay that of the store.
	Key string `json:"key,omitempty"`

	// How long the process waits for running executions when it exits; new guarded calls get 503
	// during this time. Calls that still run afterwards are cut off and in doubt. Default: 30s.
	Drain caddy.Duration `json:"drain,omitempty"`

	// Memory for the bodies of all running requests and responses of this process together, in bytes:
	// of several gateways on a database each has its own. Each body keeps its first 4 KiB in memory, and
	// up to 1 MiB while there is room; the rest goes to an unlinked temporary file, encrypted with a key
	// that exists only in memory. So clients that stop in the middle of an upload occupy disk, not memory.
	// Default: 128 MiB.
	BodyMemory int64 `json:"body_memory,omitempty"`

	// What one caller may hold in the store at a time. Default: see its members.
	Quota Quota `json:"quota,omitzero"`

	// The gateway's identity in the tokens that it issues. With it, every decision about a guarded
	// call is recorded in the ledger of the store. Default: no identity and no ledger.
	Identity *Identity `json:"identity,omitempty"`

	// The issuers whose tokens are accepted. It needs `identity`. Default: callers' tokens are
	// passed on to the upstream and ignored.
	Trust *Trust `json:"trust,omitempty"`

	// Who may ask for rollbacks, and how often.
	Rollback *Rollback `json:"rollback,omitempty"`

	// Where escalations are sent, the cases that only a person can decide. Default: to the log.
	HITL *HITL `json:"hitl,omitempty"`

	// Files with plans of workflows (`application/atd-workflow+json`). A workflow follows one if its
	// first call has a token `workflow_start` that names the plan's `wf_id`, or follows from one, and
	// stays with the plan as it is then. The files are read at load. Needs an `identity`. Default: none.
	PlanFiles []string `json:"plans,omitempty"`
	// What happens to calls that their workflow's plan does not provide for: `enforced` refuses them,
	// `observed` records them. It also counts for plans that were put for a workflow. Default: `enforced`.
	PlanMode string `json:"plan_mode,omitempty"`

	// After how long without a call or another record a workflow without a plan, or with one that is only
	// observed, has ended, from 1s to 720h;
	// its end is recorded as `workflow_complete`. One in which a call runs, is in doubt or is being undone
	// goes on. Needs an `identity`. Default: such a workflow ends only where somebody says so.
	WorkflowIdle caddy.Duration `json:"workflow_idle,omitempty"`

	// When a failure that spreads from one agent to others is a cascade, and what happens then.
	// Default: see its members.
	OnCascade *OnCascade `json:"on_cascade,omitempty"`

	// The places in the Caddyfile of options that are checked only at load, so that errors can name
	// them: values like `Caddyfile:12`, for the members `store`, `keys`, `identity.key_file`,
	// `trust.N` (the Nth source of keys, if it is a file), `hitl.rules`, `hitl.webhook`,
	// `hitl.webhook.secret.N`, `plans.N`, `plan_mode`, `workflow_idle` and `on_cascade`. Default: errors name no
	// place.
	WrittenAt map[string]string `json:"written_at,omitempty"`

	ctx    caddy.Context
	logger *zap.Logger
	spec   engineSpec

	plans     map[string]*plan.Descriptor
	guards    guards
	events    *caddyevents.App
	pending   pendingEvents
	counts    *storeCounts // shared by all configurations with the same store
	counting  bool         // counts are held, until Cleanup
	collector *collector

	mu       sync.Mutex
	held     *engine     // the configuration's own reference
	accepted atomic.Bool // the engine has adopted the configuration's keys
	opened   atomic.Bool // held is or was set
	ended    bool        // Cleanup was called

	agreedOnce    sync.Once
	agreed        map[string]string // see agreement; nil before
	passagesOnce  sync.Once
	knownPassages []passage // of the configuration to upstreams

	openingMu sync.Mutex
	opening   *opening              // the running attempt to open the store; nil without one
	unreached atomic.Pointer[error] // why the store is not open; reachStore tries again
	started   bool                  // Start was called; guarded by mu
	followed  *engine               // with which useOpened did what follows the start; guarded by mu
	policy    atomic.Pointer[tokenPolicy]
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard", New: func() caddy.Module { return new(App) }}
}

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (a *App) UnmarshalJSON(text []byte) error {
	type plain App
	return option.DecodeJSON(text, (*plain)(a))
}

// Provision checks the options. It opens nothing: `caddy validate` works beside a
// running server.
func (a *App) Provision(ctx caddy.Context) error {
	return a.place(a.provision(ctx))
}

// place adds the place of err's option in the Caddyfile: that of the innermost one that is known.
func (a *App) place(err error) error {
	bad, place := (*invalid)(nil), ""
	for inner := err; errors.As(inner, &bad); inner = bad.err {
		place = cmp.Or(a.WrittenAt[bad.options[0]], place)
	}
	switch {
	case bad != nil:
		return withPlace(err, place)
	case errors.Is(err, errKeys), errors.Is(err, execution.ErrWrongKey), errors.Is(err, execution.ErrMissingKey):
		return withPlace(err, a.WrittenAt["keys"])
	}
	return err
}

func (a *App) provision(ctx caddy.Context) error {
	a.ctx, a.logger = ctx, ctx.Logger()
	for _, part := range []struct {
		name      string // of its errors, and of its place in the Caddyfile; empty where the errors name it themselves
		provision func() error
	}{
		{"", a.provisionStore},
		{"keys", a.provisionKeys},
		{"", a.provisionOptions},
		{"quota", a.Quota.validate},
		{"", a.provisionTokens},
		{"", a.readPlans},
		{"rollback", a.provisionRollback},
		{"hitl", a.provisionHITL},
		{"on_cascade", a.provisionCascades},
	} {
		err := part.provision()
		if err != nil && part.name != "" {
			err = invalidOption(part.name, "%w", err)
		}
		if err != nil {
			return fmt.Errorf("agent_guard: %w", err)
		}
	}
	events, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("agent_guard: %w", err)
	}
	a.events, a.pending = events.(*caddyevents.App), make(pendingEvents, maxEvents)
	go a.pending.serve(ctx, a.deliver)
	a.provisionMetrics()
	return a.events.On(exitEvent, exitWatch{})
}

func (a *App) provisionStore() error {
	if a.StoreRaw == nil {
		a.StoreRaw = caddyconfig.JSONModuleObject(new(BadgerStore), "module", "badger", nil)
	}
	mod, err := a.ctx.LoadModule(a, "StoreRaw")
	if err != nil {
		return &invalid{[]string{"store"}, fmt.Errorf("loading the store: %w", err)}
	}
	opener, ok := mod.(StoreOpener)
	if !ok {
		return &invalid{[]string{"store"}, fmt.Errorf("%T is no store: it does not implement StoreOpener", mod)}
	}
	path, err := opener.StorePath()
	if err != nil {
		return invalidOption("store", "%w", err)
	}
	a.spec = engineSpec{opener: opener, path: path, pooled: path, logger: a.logger, ledger: a.Identity != nil}
	return nil
}

// provisionOptions checks the options that are one value, and completes them.
func (a *App) provisionOptions() error {
	if err := checkOptions(appOptions(), a); err != nil {
		return err
	}
	inherit(&a.BodyMemory, execution.DefaultBodyMemory)
	inherit(&a.Drain, caddy.Duration(30*time.Second))
	a.spec.drain = time.Duration(a.Drain)
	if a.WorkflowIdle != 0 && a.Identity == nil {
		return invalidOption("workflow_idle", "it needs an identity; without one nothing of workflows is recorded")
	}
	return nil
}

func (a *App) provisionRollback() error {
	if a.Rollback == nil {
		return nil
	}
	return cmp.Or(a.Rollback.provision(), a.checkParticipants())
}

func (a *App) provisionCascades() error {
	if a.OnCascade == nil {
		a.OnCascade = new(OnCascade)
	}
	checked, err := a.OnCascade.Check()
	a.OnCascade.Settings = checked
	return err
}

func (a *App) provisionHITL() error {
	if a.HITL == nil {
		return nil
	}
	gateway := ""
	if a.Identity != nil {
		gateway = a.Identity.Name
	}
	return a.HITL.provision(gateway)
}

// provisionKeys finds the store's keys, and checks them if they exist already.
func (a *App) provisionKeys() (err error) {
	repl := caddy.NewReplacer()
	if a.Key == "" && a.KeyFile == "" {
		defer func() {
			if err != nil {
				err = &invalid{[]string{"store"}, err} // it follows from that
			}
		}()
	}
	switch {
	case a.Key != "" && a.KeyFile != "":
		return errors.New("give either a file or a value, not both")
	case a.Key != "":
		if strings.Contains(a.Key, `"`) { // the replacer's error would contain the key (P8)
			return errors.New("value: a key ring's JSON cannot stand in the configuration; " +
				"give a placeholder that has it as its value, like {env.AGENT_GUARD_KEY}")
		}
		if a.spec.keys.Value, err = repl.ReplaceOrErr(a.Key, true, true); err != nil {
			return fmt.Errorf("value: %w", err)
		}
		if _, err := seal.Parse([]byte(a.spec.keys.Value)); err != nil {
			return fmt.Errorf("value: %w", err)
		}
		return nil
	case a.KeyFile != "":
		// An unset variable must not lead to a different file.
		if a.spec.keys.File, err = repl.ReplaceOrErr(a.KeyFile, true, true); err == nil {
			a.spec.keys.File, err = filepath.Abs(a.spec.keys.File)
		}
		if err != nil {
			return fmt.Errorf("file %q: %w", a.KeyFile, err)
		}
	case !filepath.IsAbs(a.spec.path):
		return errors.New("a store that is no directory has no place for a key file beside it; name one with `keys file <path>`, or give the ring with `keys value <placeholder>`")
	default:
		a.spec.keys.File = a.spec.path + ".key"
	}
	if err := checkKeyFile(a.spec.keys.File); err != nil {
		return err
	}
	if _, err := seal.Load(a.spec.keys.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// The values of plan_mode.
const (
	planEnforced = "enforced"
	planObserved = "observed"
)

// readPlans reads the plans of workflows.
func (a *App) readPlans() error {
	if len(a.PlanFiles) > 0 && a.Identity == nil {
		return &invalid{[]string{"plans.1"}, errors.New("plan: it needs an identity; without one nothing of workflows is recorded")}
	}
	switch a.PlanMode {
	case "":
		a.PlanMode = planEnforced
	case planEnforced, planObserved:
	default:
		return invalidOption("plan_mode", "%q is no mode; write enforced or observed", a.PlanMode)
	}
	a.plans = make(map[string]*plan.Descriptor, len(a.PlanFiles))
	for i, name := range a.PlanFiles {
		d, err := readPlan(name)
		if err == nil && a.plans[d.WorkflowID] != nil {
			err = fmt.Errorf("wf_id: %q is the name of an earlier plan; give each its own", d.WorkflowID)
		}
		if err != nil {
			return &invalid{[]string{fmt.Sprintf("plans.%d", i+1)}, fmt.Errorf("plan: %s: %w", name, err)}
		}
		a.plans[d.WorkflowID] = d
		for _, w := range d.Warnings {
			a.logger.Warn("plan of a workflow", zap.String("file", name), zap.Stringer("warning", w))
		}
	}
	return nil
}

// canUndo reports whether a way to undo an action is configured, and whether there is such an action. Of
// several with one name all have to have one.
func (a *App) canUndo(action string) (reversible, known bool) {
	for _, h := range a.guards.list() {
		for i := range h.actions {
			if a := h.actions[i]; a.Name == action {
				reversible, known = (reversible || !known) && a.Undo != nil, true
			}
		}
	}
	return reversible, known
}

func readPlan(name string) (*plan.Descriptor, error) {
	file, err := caddy.NewReplacer().ReplaceOrErr(name, true, true)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, plan.MaxSize+1)) // Parse refuses one that is longer
	if err != nil {
		return nil, err
	}
	return plan.Parse(text)
}

func (a *App) provisionTokens() error {
	if a.Identity == nil {
		if a.Trust != nil {
			return fmt.Errorf("trust: %w", a.Trust.lacksIdentity())
		}
		return nil
	}
	if err := a.Identity.provision(a.spec.path); err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	if a.Trust == nil {
		return nil
	}
	if err := a.Trust.provision(a.logger); err != nil {
		return fmt.Errorf("trust: %w", err)
	}
	return nil
}

// Start opens the store, if no configuration before this one has it open. A database that cannot be
// reached fails no start: guarded calls get 503 until it can.
func (a *App) Start() error {
	if app, err := a.ctx.AppIfConfigured("http"); err == nil {
		visits, passages := visitsOf(app.(*caddyhttp.App))
		if err := cmp.Or(checkResends(passages), checkVisits(visits, true)); err != nil {
			return fmt.Errorf("agent_guard: %w", err)
		}
		noteBehind(visits, passages)
		noteChanges(visits)
		warnBare(a.logger, passages)
		warnErrorRoutes(a.logger, visits, passages)
		a.warnRoles()
	}
	for _, h := range a.guards.list() {
		if h.pool != nil { // earlier configurations use it as well
			settings, _ := h.Bulkhead.Check() // checked
			h.pool.Configure(settings)
		}
	}
	for _, d := range a.plans {
		for _, w := range d.CheckUndo(a.canUndo) {
			a.logger.Warn("plan of a workflow", zap.String("wf_id", d.WorkflowID), zap.Stringer("warning", w))
		}
	}
	a.mu.Lock()
	a.started = true
	a.mu.Unlock()
	e, err := a.engine()
	switch {
	case err == nil:
		a.useOpened(e)
	case errors.Is(err, store.ErrUnavailable):
		a.logger.Error("the store cannot be opened yet; guarded calls get 503 until it can", zap.Error(err))
		return nil
	}
	return a.place(err)
}

// useOpened does what follows the start with an open store, once for each.
func (a *App) useOpened(e *engine) {
	a.mu.Lock()
	before := a.followed
	a.followed = e
	a.mu.Unlock()
	if before == e {
		return
	}
	e.startRollbacks(context.Background())
	if app, err := a.ctx.AppIfConfigured("http"); err == nil {
		visits, _ := visitsOf(app.(*caddyhttp.App))
		warnAnonymous(visits, &e.warned)
	}
	a.watchPlaces(e)
}

// Stop does nothing. On a reload running executions go on, each with its reference to the
// engine; at an exit, exitWatch has waited for them.
func (a *App) Stop() error { return nil }

// Cleanup releases the configuration's reference, if Provision or Start took one.
func (a *App) Cleanup() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counting { // executions that outlive the configuration are still counted
		releaseCounts(a.spec.path)
		a.counting = false
	}
	a.HITL.close()
	a.ended = true
	return a.releaseHeld()
}

// releaseHeld releases the configuration's reference, if there is one. mu is held.
func (a *App) releaseHeld() error {
	held := a.held
	if held == nil {
		return nil
	}
	a.held = nil
	if a.Identity != nil {
		held.ledger.leave(a.Identity)
	}
	held.activeConfigs.leave(a)
	held.nodes.describe()
	return held.release()
}

// openAnew releases an engine that has lost its store, and opens another one as soon as it can.
func (a *App) openAnew(e *engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held != e {
		return // it has ended
	}
	why := errLost
	a.unreached.Store(&why)
	_ = a.releaseHeld() // closing the store logs its own errors
	go a.reachStore()
}

// engine returns the open engine, opening it on first use: Caddy starts apps in no
// particular order, so a request may come before Start. It does not wait for a store that could not
// be reached: reachStore tries again.
func (a *App) engine() (*engine, error) {
	if why := a.unreached.Load(); why != nil {
		return nil, *why
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if why := a.unreached.Load(); why != nil {
		return nil, *why
	}
	e, err := a.openEngine()
	return e, a.noted(err)
}

// noted returns err. If the store cannot be reached, it is tried again in the background from here
// on. mu is held.
func (a *App) noted(err error) error {
	if errors.Is(err, store.ErrUnavailable) && !a.ended {
		a.unreached.Store(&err)
		go a.reachStore()
	}
	return err
}

// reachEvery is how often a store is tried that could not be reached.
const reachEvery = time.Second

// reachStore opens a store that could not be reached. It ends when the store is open, when it is
// refused for another reason, which only another configuration can help, or with the configuration.
func (a *App) reachStore() {
	ctx, over := context.WithCancel(a.ctx)
	defer over()
	fleet.Every(reachEvery, func(context.Context) {
		if !errors.Is(a.tryStore(), store.ErrUnavailable) {
			over()
		}
	}).Run(ctx)
}

// tryStore tries once to open the store.
func (a *App) tryStore() error {
	a.mu.Lock()
	e, err := a.openEngine()
	started := a.started
	if err == nil {
		a.unreached.Store(nil)
	} else {
		a.unreached.Store(&err)
	}
	a.mu.Unlock()
	switch {
	case err == nil:
		a.logger.Info("the store is open; guarded calls are taken")
		if started { // else Start does it
			a.useOpened(e)
		}
	case !errors.Is(err, errEnded) && !errors.Is(err, store.ErrUnavailable):
		a.logger.Error("the store is reached, and refused; guarded calls get 503 until another configuration is loaded", zap.Error(a.place(err)))
	}
	return err
}

// openEngine opens the engine, unless it is open. mu is held.
func (a *App) openEngine() (*engine, error) {
	if a.held != nil {
		return a.held, nil
	}
	if a.ended {
		return nil, errEnded // nothing would release it
	}
	e, err := a.acquireOpen()
	if err != nil {
		return nil, err
	}
	if err := a.checkNaming(e); err != nil {
		_ = e.release() // closing the store logs its own errors
		return nil, err
	}
	if a.Identity != nil {
		policy, err := openTokenPolicy(context.Background(), e, a.Identity, a.Trust, a.ctx.Slogger())
		if err != nil {
			_ = e.release() // closing the store logs its own errors
			return nil, err
		}
		policy.Plans = guard.Plans{Files: a.plans, Observed: a.PlanMode == planObserved}
		e.calls.Plans.Configure(time.Duration(a.Identity.Retain))
		policy.AwaitEnds = a.WorkflowIdle > 0
		a.policy.Store(policy)
		if err := e.openRollbacks(a.rollbackRetain()); err != nil {
			e.ledger.leave(a.Identity)
			_ = e.release() // closing the store logs its own errors
			return nil, err
		}
	}
	if a.Identity == nil {
		if begun, err := evidence.Exists(context.Background(), e.calls.Store); err == nil && begun {
			a.logger.Warn("the store holds a ledger, and no `identity` is configured: nothing more is recorded in it, and tokens mean nothing",
				zap.String("store", a.spec.path))
		}
	}
	e.drain.Store(int64(a.Drain))
	e.calls.Executions.BodyMemory().SetLimit(a.BodyMemory)
	e.calls.Executions.LimitWorkflows(a.Quota.WorkflowStoredBytes)
	if adjuster, ok := a.spec.opener.(StoreAdjuster); ok {
		adjuster.AdjustStore(e.calls.Store)
	}
	a.held = e
	e.activeConfigs.join(a)
	if e.ledger.unsealed.Swap(false) {
		e.keys.Reseal()
	}
	e.nodes.describe()
	e.recorder.begin()
	e.cascades.Start()
	e.boundaries.begin()
	e.adoptHITL(a.HITL)
	e.reportRecovered()
	e.settleFenced()
	a.opened.Store(true)
	if e.lost.Load() { // before it was joined
		go a.openAnew(e)
	}
	return e, nil
}

// checkNaming refuses a configuration that changes how callers or tenants are named while the store holds keys of
// theirs (P1).
func (a *App) checkNaming(e *engine) error {
	for _, h := range a.guards.list() {
		if h.FreeKeys {
			a.logger.Warn("`free_keys` lets a change of what names callers or tenants free the keys of a guard; remove it after the load", zap.String("guard", h.Name))
			continue
		}
		_, _, err := e.calls.Executions.CheckNaming(context.Background(), h.Name, &h.naming, false)
		if errors.Is(err, execution.ErrStore) { // checked again before the first claim; a reload must not need the store
			a.logger.Warn("what names the callers of a guard cannot be compared with its keys in the store yet",
				zap.String("guard", h.Name), zap.Error(err))
			continue
		}
		if err != nil {
			return withPlace(fmt.Errorf("agent_guard: %w", err), h.WrittenAt)
		}
	}
	return nil
}

var errEnded = errors.New("agent_guard: the configuration has ended")

// acquire returns the engine with a reference of its own for one guarded request,
// which may outlive its configuration.
func (a *App) acquire() (*engine, error) {
	if why := a.unreached.Load(); why != nil {
		return nil, *why
	}
	if a.opened.Load() {
		return a.acquireOpen()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if why := a.unreached.Load(); why != nil { // the call before this one has waited for it
		return nil, *why
	}
	e, err := a.acquireOpen()
	return e, a.noted(err)
}

func (a *App) acquireOpen() (*engine, error) {
	e, err := engines.acquire(a.spec, a.accepted.Load())
	if err == nil {
		a.accepted.Store(true)
	}
	return e, err
}

// openCalls is acquire in the form that package guard needs.
func (a *App) openCalls() (*guard.Engine, func(), error) {
	e, err := a.acquire()
	if err != nil {
		return nil, nil, err
	}
	return e.calls, e.giveBack, nil
}

var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)

// guards are the handlers of one configuration. The gateway's own requests reach the
// upstream of a call through them. Handlers are provisioned in any order, also while
// rollbacks are running.
type guards struct {
	mu      sync.Mutex
	all     []*Handler
	checked []*caddyhttp.Server // by checkReached
	sites   []*Roles            // of guards and of agent_guard_endpoints: who has which role there
}

func (g *guards) list() []*Handler {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.all)
}

var (
	errNoGuard    = errors.New("nothing in the configuration leads to the call's upstream any more")
	errManyGuards = errors.New("several guards have the name of the call's, and nothing tells which of them leads to its upstream")
	errOtherWay   = errors.New("the guard leads to another upstream than the one that the recorded credentials are for")
)

// The events that the app emits (docs/observability.md). Their data are guards, actions, states,
// hashes and upstreams, never callers, their ids, or paths (P8).
const (
	eventInDoubt        = guard.EventInDoubt
	eventResolved       = guard.EventResolved
	eventRecovered      = "agent_guard.executions_recovered"
	eventMismatch       = guard.EventMismatch
	eventFailOpen       = guard.EventFailOpen
	eventStoreUnhealthy = "agent_guard.store_unhealthy"
	eventDiskLow        = "agent_guard.disk_low"
	eventDiskRecovered  = "agent_guard.disk_recovered"
	eventKeysRotated    = "agent_guard.keys_rotated"

	eventIdentityRotated = "agent_guard.identity_rotated"
	eventCircuit         = "agent_guard.circuit_changed"
	eventCircuitGivesUp  = "agent_guard.circuit_permanently_open"
	eventCascade         = "agent_guard.cascade_detected"
	eventWorkflowStarted = guard.EventWorkflowStarted
	eventWorkflowEnded   = "agent_guard.workflow_ended"

	eventRollbackStarted  = "agent_guard.rollback_started"
	eventRollbackFinished = "agent_guard.rollback_finished"
	eventEscalated        = "agent_guard.escalation_opened"
	eventUndeliverable    = "agent_guard.escalation_undeliverable"
	eventDecided          = "agent_guard.escalation_decided"
)

// maxEvents is the largest number of events that wait for handlers.
const maxEvents = 256

// flushTime is how long an exit waits for the handlers of events.
const flushTime = 5 * time.Second

// emit calls the handlers of an event, and writes it to the debug log. It never waits: handlers are
// called in the background, one event after the other. If they are too slow, events are dropped
// and counted.
func (a *App) emit(name string, data map[string]any) {
	if !a.events.ShouldEmit(name) {
		return
	}
	select {
	case a.pending <- pendingEvent{name: name, data: data}:
	default:
		a.counts.add(eventsDropped, "", 1)
	}
}

// deliver calls the handlers. A panic of theirs is logged.
func (a *App) deliver(e pendingEvent) {
	defer func() {
		if p := recover(); p != nil {
			a.logger.Error("a handler of an event panicked", zap.String("event", e.name), zap.String("panic", fmt.Sprint(p)))
		}
	}()
	if a.ctx.Err() == nil { // afterwards the configuration's handlers no longer exist
		a.events.Emit(a.ctx, e.name, e.data)
	}
}

type pendingEvent struct {
	name    string
	data    map[string]any
	flushed chan struct{} // closed when all before it are delivered; nil for an event
}

// pendingEvents is the queue of events for handlers.
type pendingEvents chan pendingEvent

// serve delivers the queued events, one after the other, until ctx ends.
func (p pendingEvents) serve(ctx context.Context, deliver func(pendingEvent)) {
	for {
		select {
		case e := <-p:
			if e.flushed != nil {
				close(e.flushed)
			} else {
				deliver(e)
			}
		case <-ctx.Done():
			return
		}
	}
}

// flush waits until what is queued is delivered, for at most flushTime.
func (p pendingEvents) flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, flushTime)
	defer cancel()
	flushed := make(chan struct{})
	select {
	case p <- pendingEvent{flushed: flushed}:
	case <-ctx.Done():
		return
	}
	select {
	case <-flushed:
	case <-ctx.Done():
	}
}

// activeConfigs are the configurations that use an engine. The latest one gets all its events,
// also those of an execution that has outlived its configuration.
type activeConfigs struct {
	mu   sync.Mutex
	apps []*App
}

func (u *activeConfigs) join(a *App) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.apps = append(u.apps, a)
}

func (u *activeConfigs) leave(a *App) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.apps = slices.DeleteFunc(slices.Clone(u.apps), func(other *App) bool { return other == a })
}

// latest is the configuration that was loaded last, or nil.
func (u *activeConfigs) latest() *App {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.apps) == 0 {
		return nil
	}
	return u.apps[len(u.apps)-1]
}

func (u *activeConfigs) all() []*App {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.apps)
}

// lives reports whether any configuration is active. During a reload the new one is.
func (u *activeConfigs) lives() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(u.apps, func(a *App) bool { return a.ctx.Err() == nil })
}

// AwaitCircuits returns when the breakers have the state that the last process left. Caddy starts
// its apps in no particular order, so that requests may come before the store is open. The transport
// calls it. On an error nothing may be sent.
func (a *App) AwaitCircuits(ctx context.Context) error {
	if a.opened.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, circuitStart)
	defer cancel()
	o := a.open()
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return fmt.Errorf("agent_guard: the states of the circuit breakers are not read yet: %w", ctx.Err())
	}
}

// open starts opening the store, unless an attempt is running.
func (a *App) open() *opening {
	a.openingMu.Lock()
	defer a.openingMu.Unlock()
	if a.opening != nil {
		return a.opening
	}
	o := &opening{done: make(chan struct{})}
	a.opening = o
	go func() {
		_, o.err = a.engine()
		a.openingMu.Lock()
		a.opening = nil
		a.openingMu.Unlock()
		close(o.done)
	}()
	return o
}

// checkTrust checks `trust` against the identity, and its lines against each other.
func (a *App) checkTrust() error {
	if a.Identity == nil {
		return a.Trust.lacksIdentity()
	}
	if len(a.Trust.Keys) == 0 {
		return errNoTrust
	}
	return a.Trust.checkLevel()
}

// checkParticipants checks `participants` against `trust`.
func (a *App) checkParticipants() error {
	if a.Rollback == nil || len(a.Rollback.Participants) == 0 || a.Trust != nil {
		return nil
	}
	return invalidOption("participants", "what an agent answers counts only if it verifies; add `trust` with the keys of the agents, or leave them out")
}

// provisionMetrics registers the counts of the app's store with the registry of its configuration.
// A failure is logged only.
func (a *App) provisionMetrics() {
	a.counts, a.counting = acquireCounts(a.spec.path), true
	kind := "unknown"
	if mod, ok := a.spec.opener.(caddy.Module); ok {
		kind = mod.CaddyModule().ID.Name()
	}
	a.collector = newCollector(a.counts, version(), kind, a.snapshot)
	registry := a.ctx.GetMetricsRegistry()
	if registry == nil {
		return
	}
	if err := registry.Register(a.collector); err != nil && !errors.As(err, new(prometheus.AlreadyRegisteredError)) {
		a.logger.Warn("the metrics of agent_guard cannot be shown", zap.Error(err))
	}
}

// snapshot is the state of the store, or nil if it is not open. Any configuration may have opened it:
// after a reload that fails late, Caddy's admin endpoint shows the registry of the failed one.
func (a *App) snapshot() *storeSnapshot {
	e := engines.peek(a.spec.path)
	if e == nil {
		return nil
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	return e.snapshot()
}

// AnswerVerifier verifies for the transport who has answered a probe; nil without trust.
func (a *App) AnswerVerifier() proxy.AnswerVerifier {
	if a.Trust == nil {
		return nil
	}
	return a.verifyAnswer
}

// verifyAnswer is a proxy.AnswerVerifier: one valid token in the answer is enough.
func (a *App) verifyAnswer(ctx context.Context, header http.Header, issuer string, since time.Time) error {
	policy, err := a.tokenPolicy()
	if err != nil {
		return err
	}
	raws, err := ect.ParseFields(header[ect.FieldName])
	if err != nil {
		return err
	}
	earliest := since.Truncate(time.Second).Add(-ect.Skew) // tokens have whole seconds
	var refused error = &ect.Error{Code: ect.CodeMissing}
	for _, raw := range raws[:min(len(raws), guard.MaxTokens)] {
		if refused = policy.proves(ctx, raw, issuer, earliest); refused == nil {
			break
		}
	}
	return refused
}

// tokenPolicy returns the configuration's token policy; nil without an identity.
func (a *App) tokenPolicy() (*tokenPolicy, error) {
	if a.Identity == nil {
		return nil, nil
	}
	if policy := a.policy.Load(); policy != nil {
		return policy, nil
	}
	if _, err := a.engine(); err != nil {
		return nil, err
	}
	return a.policy.Load(), nil
}

// rollbackRetain is how long finished rollbacks are kept: at least as long as the keys of their
// calls, or a late duplicate could run again (P1).
func (a *App) rollbackRetain() time.Duration {
	keep := time.Duration(a.rollbackOptions().Retain)
	a.guards.mu.Lock()
	defer a.guards.mu.Unlock()
	for _, h := range a.guards.all {
		for _, action := range h.actions {
			keep = max(keep, time.Duration(action.RetainKey))
		}
	}
	return keep
}

// rollbackPolicy is nil without trust: then only operators may ask for rollbacks.
func (a *App) rollbackPolicy(mount string) *policyRollback {
	if a.Trust == nil {
		return nil
	}
	o := a.rollbackOptions()
	return &policyRollback{
		Request: mount + rollback.Path, Prepare: mount + rollback.PreparePath, Status: mount + rollback.Path + "/{rollback_id}{?checkpoint_id,wait}",
		ATD: mount + rollback.ATDPath, AERR: mount + rollback.AERRPath,
		Lineage: o.Lineage, Rate: o.Rate, Wait: time.Duration(o.Wait).Seconds(), MaxWait: rollback.LongestWait.Seconds(),
		Reservation: time.Duration(o.Reservation).Seconds(),
	}
}

// rollbackOptions are those of the configuration, or the defaults.
func (a *App) rollbackOptions() Rollback {
	if a.Rollback != nil {
		return *a.Rollback
	}
	var o Rollback
	_ = o.provision() // nothing is wrong with the defaults
	return o
}
