package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

var ctx = context.Background()

// rig is an API over stores that a test fills.
type rig struct {
	unopened error // why the store of the configuration is not open
	t        *testing.T
	api      caddy.AdminHandler
	stores   map[string]*opened
	now      time.Time
}

// opened is a store as the API views it.
type opened struct {
	rig         *rig
	path        string
	guard       *execution.Guard
	store       store.Store
	ledger      *admin.Ledger
	rotated     int
	newRing     string
	rotation    error
	identity    *admin.Identity
	stolen      []bool // of each rotation of the identity
	circuits    []proxy.Circuit
	cascades    []api.Cascade
	escalations *hitl.Store
	unkept      error // with which a mode is not recorded
	rollback    admin.Rollbacks
	checkpoints *checkpoint.Store
	plans       *plan.Store
	trials      map[string]admin.Trial
	nodes       []admin.Node

	mu       sync.Mutex
	held     int
	resolved []execution.Resolution
}

func (o *opened) Path() string                               { return o.path }
func (o *opened) Executions() *execution.Guard               { return o.guard }
func (o *opened) Now(ctx context.Context) (time.Time, error) { return o.store.Now(ctx) }
func (o *opened) Quota() *admin.Quota                        { return &admin.Quota{OpenExecutions: 9} }
func (o *opened) Report() *admin.Report                      { return &admin.Report{Commits: 7} }
func (o *opened) Keys(context.Context) (*gateway.KeyStatus, error) {
	return &gateway.KeyStatus{Source: "file", Keys: make([]gateway.Key, o.rotated+1)}, nil
}

func (o *opened) Nodes(ctx context.Context) ([]admin.Node, error) {
	_, err := o.store.Now(ctx)
	return o.nodes, err
}

func (o *opened) Escalations() *hitl.Store { return o.escalations }

func (o *opened) Plans() *plan.Store { return o.plans }

func (o *opened) PutPlan(ctx context.Context, text []byte, p plan.Putting) (doc evidence.PlanDocument, err error) {
	if p.Plan, err = plan.Parse(text); err != nil {
		return doc, err
	}
	a, _, err := o.plans.Put(ctx, p)
	if err != nil {
		return doc, err
	}
	return evidence.DescribePlan(a), nil
}

func (o *opened) Ledger() *admin.Ledger { return o.ledger }

func (o *opened) RotateKeys(context.Context) (uint32, string, error) {
	o.rotated++
	return uint32(o.rotated), o.newRing, o.rotation
}

func (o *opened) Identity() *admin.Identity { return o.identity }

func (o *opened) Checkpoints() *checkpoint.Store { return o.checkpoints }

func (o *opened) Trial(checkpoint string) (admin.Trial, bool) {
	t, ok := o.trials[checkpoint]
	return t, ok
}

func (o *opened) Rollbacks() admin.Rollbacks { return o.rollback }

func (o *opened) Circuits(_ context.Context, fleet bool) ([]proxy.Circuit, error) {
	if fleet {
		return append(slices.Clone(o.circuits), proxy.Circuit{Upstream: "a:1", Status: breaker.Status{State: breaker.Open}, Node: "other", Age: 7}), nil
	}
	return o.circuits, nil
}

func (o *opened) Cascades() []api.Cascade { return o.cascades }

func (o *opened) Workflows() *evidence.Ledger { return nil }

func (o *opened) Cascade(id string) *api.Cascade {
	for i := range o.cascades {
		if o.cascades[i].ID == id {
			return &o.cascades[i]
		}
	}
	return nil
}

func (o *opened) SetCircuitMode(_ context.Context, key breaker.Key, mode breaker.Mode) (bool, error) {
	for i := range o.circuits {
		if c := &o.circuits[i]; c.Upstream == key.Upstream && c.Class == key.Class {
			c.Mode = mode
			return true, o.unkept
		}
	}
	return false, nil
}

func (o *opened) RotateIdentity(stolen bool) error {
	o.stolen = append(o.stolen, stolen)
	if o.rotation == nil {
		o.identity.Keys = append(o.identity.Keys, admin.IdentityKey{ID: "next", Signs: true})
	}
	return o.rotation
}

func (o *opened) Release() { o.hold(-1) }

func (o *opened) hold(n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.held += n
}

func (o *opened) Evidence(context.Context, execution.Key, *execution.Record, execution.Resolution) *store.Batch {
	return nil
}

func (o *opened) Resolved(_ execution.Key, _ *execution.Record, decision execution.Resolution) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resolved = append(o.resolved, decision)
}

func (r *rig) Paths() []string { return slices.Collect(maps.Keys(r.stores)) }

func (r *rig) Unopened() (string, error) { return "/data/away", r.unopened }

func (r *rig) View(path string) (admin.Store, bool) {
	st, ok := r.stores[path]
	if ok {
		st.hold(1)
	}
	return st, ok
}

// newRig is an API over one store, at a moment that stands still until the test moves
// it.
func newRig(t *testing.T) (*rig, *opened) {
	r := &rig{t: t, stores: map[string]*opened{}, now: time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)}
	r.api = admin.New(r)
	return r, r.open("/data/one")
}

func (r *rig) open(path string) *opened {
	r.t.Helper()
	st := memory.New(memory.Options{Now: func() time.Time { return r.now }})
	ring := seal.Generate()
	g, _, err := execution.Open(ctx, st, ring)
	if err != nil {
		r.t.Fatal(err)
	}
	o := &opened{rig: r, path: path, guard: g, store: st, escalations: hitl.NewStore(st, ring), checkpoints: checkpoint.New(st, ring), plans: plan.NewStore(st, ring)}
	r.stores[path] = o
	r.t.Cleanup(func() {
		if o.held != 0 {
			r.t.Errorf("%s is still held %d times", path, o.held)
		}
	})
	return o
}

// call is one to record; what a test does not set is filled in.
type call struct {
	id, caller, guard, method, path, action, workflow, checkpoint string
}

// claim begins an execution.
func (o *opened) claim(c call) (execution.Key, *execution.Execution) {
	o.rig.t.Helper()
	fill := func(s *string, value string) {
		if *s == "" {
			*s = value
		}
	}
	fill(&c.caller, "user:ada")
	fill(&c.guard, "default")
	fill(&c.method, "POST")
	fill(&c.path, "/v1/charges")
	fill(&c.action, "charge")
	scope := execution.Scope{Caller: c.caller, Guard: c.guard, Method: c.method, Path: c.path, ID: c.id}
	key := o.guard.Key(scope)
	e, err := o.guard.Claim(ctx, &execution.Call{
		Key: key, Scope: scope, Origin: execution.OriginGiven, Host: "api.example", Action: c.action, Workflow: c.workflow, Checkpoint: c.checkpoint,
		Deadline: time.Minute, KeepResult: time.Hour, KeepKey: 48 * time.Hour, ResultCap: 1 << 20,
	}, execution.Finding{})
	if err != nil {
		o.rig.t.Fatal(err)
	}
	return key, e
}

func (o *opened) settle(e *execution.Execution, outcome execution.Outcome) {
	o.rig.t.Helper()
	if outcome.Verdict == execution.Completed {
		e.Recording().Start(201, map[string][]string{"X-Secret": {"of the answer"}})
		e.Write([]byte(`{"secret":"of the answer"}`), false)
		outcome.Status, outcome.Whole = 201, true
	}
	if err := e.Settle(ctx, outcome); err != nil {
		o.rig.t.Fatal(err)
	}
}

// doubt records an execution that is in doubt.
func (o *opened) doubt(c call) execution.Key {
	o.rig.t.Helper()
	key, e := o.claim(c)
	o.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost, Status: 502})
	return key
}

// ask makes a request as Caddy hands it over, and returns the answer or the error.
func (r *rig) ask(method, target, body string) (*httptest.ResponseRecorder, caddy.APIError) {
	r.t.Helper()
	w := httptest.NewRecorder()
	err := r.api.ServeHTTP(w, httptest.NewRequest(method, "/agent_guard/"+target, strings.NewReader(body)))
	if w.Code >= 400 && err == nil { // written as Caddy does, and not logged as an error of the server
		var said struct{ Error string }
		if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || said.Error == "" || w.Code >= 500 {
			r.t.Errorf("%s %s: %d %s", method, target, w.Code, w.Body)
		}
		return w, caddy.APIError{HTTPStatus: w.Code, Err: errors.New(said.Error)}
	}
	if err == nil {
		if w.Code != http.StatusOK || w.Header().Get("Content-Type") == "" || w.Header().Get(admin.Mark) == "" || w.Header().Get("Cache-Control") != "no-store" {
			r.t.Errorf("%s %s: %d, %v", method, target, w.Code, w.Header())
		}
		return w, caddy.APIError{}
	}
	refused, ok := err.(caddy.APIError)
	if !ok {
		r.t.Fatalf("%s %s: %T %v is not an error of the API", method, target, err, err)
	}
	if w.Body.Len() > 0 {
		r.t.Errorf("%s %s: an error after %q", method, target, w.Body)
	}
	return w, refused
}

// get reads what is answered into v.
func (r *rig) get(target string, v any) {
	r.t.Helper()
	w, refused := r.ask(http.MethodGet, target, "")
	if refused.HTTPStatus != 0 || w.Header().Get("Content-Type") != "application/json" {
		r.t.Fatalf("%s: %d %v %v", target, refused.HTTPStatus, refused, w.Header())
	}
	decoder := json.NewDecoder(w.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(v); err != nil {
		r.t.Fatalf("%s: %v", target, err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		r.t.Errorf("%s: more than one document", target)
	}
}

// refuses fails unless the request is refused with the status and the words.
func (r *rig) refuses(method, target, body string, status int, words string) {
	r.t.Helper()
	_, refused := r.ask(method, target, body)
	if refused.HTTPStatus != status || !strings.Contains(refused.Error(), words) {
		r.t.Errorf("%s %s %s: %d %v, want %d ...%s", method, target, body, refused.HTTPStatus, refused, status, words)
	}
}

// Section "Admin API": what is not there, and what a route is not for.
func TestRoutes(t *testing.T) {
	r, o := newRig(t)
	key := o.doubt(call{id: "a"}).Hex()
	for target, allow := range map[string]string{
		"executions": "GET", "executions/" + key: "GET", "executions/" + key + "/resolve": "POST", "store": "GET",
		"keys": "GET", "keys/rotate": "POST", "identity": "GET", "identity/rotate": "POST", "ledger/head": "GET", "ledger/export": "GET", "ledger/verify": "GET",
	} {
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			if method == allow {
				continue
			}
			w, refused := r.ask(method, target, "")
			if refused.HTTPStatus != http.StatusMethodNotAllowed || w.Header().Get("Allow") != allow {
				t.Errorf("%s %s: %d, Allow %q", method, target, refused.HTTPStatus, w.Header().Get("Allow"))
			}
		}
	}
	if w, refused := r.ask("HEAD", "store", ""); refused.HTTPStatus != 0 {
		t.Errorf("HEAD: %d %v", refused.HTTPStatus, w)
	}
	for _, target := range []string{
		"", "nothing", "executions/", "executions/" + key + "/", "executions/" + key + "/delete", "executions//resolve", "store/", "store/x", "keys/", "keys/rotate/x", "identity/", "identity/rotate/x", "ledger", "ledger/", "ledger/head/x",
	} {
		r.refuses("GET", target, "", http.StatusNotFound, "there are executions")
	}
}

// Section "Admin API": with several stores, one is named; nothing is opened by asking.
func TestStoresByName(t *testing.T) {
	r, _ := newRig(t)
	two := r.open("/data/two")
	two.doubt(call{id: "a"})
	for _, target := range []string{"executions", "store", "executions/abcd"} {
		r.refuses("GET", target, "", http.StatusBadRequest, "name one with store: /data/one, /data/two")
		r.refuses("GET", target+"?store=/data/three", "", http.StatusNotFound, "the store /data/three is not open; open: /data/one, /data/two")
	}
	var page admin.Page
	r.get("executions?store=/data/two", &page)
	if len(page.Executions) != 1 {
		t.Errorf("%+v", page)
	}
	var st admin.StoreStatus
	if r.get("store?store=/data/one", &st); st.Path != "/data/one" || st.Executions["in_doubt"].N != 0 {
		t.Errorf("%+v", st)
	}
	clear(r.stores)
	r.refuses("GET", "store", "", http.StatusNotFound, "no store is open")
	r.refuses("GET", "store?store=/data/one", "", http.StatusNotFound, "open: none")
	r.unopened = errors.New("no answer in time")
	for _, target := range []string{"nodes", "store?store=/data/away"} { // a database that is away is no missing configuration
		r.refuses("GET", target, "", http.StatusServiceUnavailable, "the store /data/away is not open, and is tried again: no answer in time")
	}
	r.refuses("GET", "store?store=/data/one", "", http.StatusNotFound, "open: none")
}

// Section "Admin API": what is said of a store, and that one which is not well says so.
func TestStoreStatus(t *testing.T) {
	r, o := newRig(t)
	for i := range 3 {
		o.doubt(call{id: fmt.Sprint(i)})
		r.now = r.now.Add(time.Minute)
	}
	_, running := o.claim(call{id: "runs"})
	var st admin.StoreStatus
	r.get("store", &st)
	doubts := st.Executions["in_doubt"]
	if st.Health != "ok" || st.Problem != "" || st.Node != o.guard.Node() || st.Boot != o.guard.Boot() || st.Node == "" ||
		doubts.N != 3 || doubts.More || doubts.OldestAge != 180 || !doubts.Oldest.Equal(r.now.Add(-3*time.Minute)) ||
		st.Executions["running"].N != 1 || len(st.Executions) != 4 || st.Store == nil || st.Store.Commits != 7 || st.Quota.OpenExecutions != 9 {
		t.Errorf("%+v", st)
	}
	o.settle(running, execution.Outcome{Verdict: execution.Released})
	if err := o.store.Close(); err != nil {
		t.Fatal(err)
	}
	st = admin.StoreStatus{}
	r.get("store", &st)
	if st.Health != "unknown" || st.Problem == "" || st.Executions != nil || st.Store == nil {
		t.Errorf("closed: %+v", st)
	}
	for _, target := range []string{"executions", "executions/abcd"} {
		r.refuses("GET", target, "", http.StatusServiceUnavailable, "store")
	}
}

// Section "Admin API": a store that closed itself after a failed sync says that only a
// restart helps.
func TestStoreStatusAfterAFailedSync(t *testing.T) {
	r, o := newRig(t)
	o.store = unhealthy{o.store}
	var st admin.StoreStatus
	r.get("store", &st)
	if st.Health != "closed" || !strings.Contains(st.Problem, "restart") {
		t.Errorf("%+v", st)
	}
}

type unhealthy struct{ store.Store }

func (unhealthy) Now(context.Context) (time.Time, error) { return time.Time{}, store.ErrUnhealthy }

// Section "Admin API": keys are listed and rotated; a ring that is a value is printed.
func TestKeys(t *testing.T) {
	r, o := newRig(t)
	var status gateway.KeyStatus
	if r.get("keys", &status); len(status.Keys) != 1 {
		t.Errorf("%+v", status)
	}
	w, refused := r.ask("POST", "keys/rotate", "")
	if refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &status) != nil || len(status.Keys) != 2 || status.Made != 1 || status.Ring != "" {
		t.Errorf("%v %s", refused, w.Body)
	}
	o.newRing = "a ring"
	if w, refused := r.ask("POST", "keys/rotate", ""); refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &status) != nil || status.Ring != "a ring" {
		t.Errorf("%v %s", refused, w.Body)
	}
	o.rotation = caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New("another gateway has made a key")}
	r.refuses("POST", "keys/rotate", "", http.StatusConflict, "another gateway has made a key")
	o.rotation = errors.New("read-only file system")
	r.refuses("POST", "keys/rotate", "", http.StatusInternalServerError, "read-only file system")
	r.refuses("POST", "keys/rotate?twice=1", "", http.StatusBadRequest, `"twice" is no parameter`)
	if o.rotated != 4 {
		t.Errorf("rotated %d times", o.rotated)
	}
}
