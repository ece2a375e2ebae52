package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// checkpointView is what a checkpoint's page tells.
type checkpointView struct {
	JTI    string `json:"jti"`
	Token  string
	Claims struct {
		Act string `json:"exec_act"`
		Out string `json:"out_hash"`
		Ext map[string]any
	}
	Verification struct {
		Signature, Snapshot string
		Out                 string `json:"out_hash"`
		Expired             bool
	}
	Reversible  bool
	Way, Reason string
	Undo        struct{ State string }
	Execution   struct {
		State  string
		Status int
	}
}

// checkpointOf reads the checkpoint of an answer once its call is settled.
func (g *gateway) checkpointOf(a *agent, r reply) (v checkpointView) {
	g.t.Helper()
	eventually(g.t, "the checkpoint of a settled call", func() bool {
		v = document[checkpointView](g.t, g.get(a, "checkpoints/"+r.header.Get("Execution-Checkpoint")))
		return v.Execution.State != "sending"
	})
	if v.Verification.Signature != "valid" || v.Verification.Out != v.Claims.Out || v.Claims.Act != "checkpoint" || v.Verification.Expired ||
		v.JTI != r.header.Get("Execution-Checkpoint") || v.Undo.State != "standing" {
		g.t.Errorf("%+v", v)
	}
	return v
}

// shelf is a resource of a REST upstream at one path.
type shelf struct {
	mu    sync.Mutex
	state *string
	gets  []http.Header
	get   func(w http.ResponseWriter) bool // answers a GET in place of the shelf
}

func (s *shelf) serve(w http.ResponseWriter, a *arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch a.Method {
	case http.MethodGet:
		s.gets = append(s.gets, a.Header.Clone())
		if s.get != nil && s.get(w) {
			return
		}
		if s.state == nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("ETag", fmt.Sprintf("%q", *s.state))
		_, _ = io.WriteString(w, *s.state)
	case http.MethodDelete:
		s.state = nil
		w.WriteHeader(http.StatusNoContent)
	default:
		if a.body == "refuse" {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		}
		created := s.state == nil
		s.state = &a.body
		if created {
			w.WriteHeader(http.StatusCreated)
			return
		}
		w.WriteHeader(http.StatusOK)
	}
}

// C-4.2.1-a to -h, C-4.2.2-c, -d: for each way to undo a call its checkpoint says
// truthfully before the call leaves whether it can be undone, and can be verified.
func TestCheckpointsOfEachWay(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	there := "old"
	shelves := map[string]*shelf{"/r/there": {state: &there}, "/r/new": {}, "/r/gone": {state: &there}, "/r/refused": {state: &there}, "/r/post": {}}
	for path, s := range shelves {
		u.on(path, s.serve)
	}
	u.on("/charge", func(w http.ResponseWriter, in *arrival) {
		if got := in.Header.Get("Accept-Encoding"); strings.Contains(in.body, "amount") && got != "identity" {
			t.Errorf("an answer that is needed is asked for with %q", got)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"ch_1"}`)
	})
	u.on("/charge/none", func(w http.ResponseWriter, _ *arrival) { _, _ = io.WriteString(w, `{}`) })
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + ` {
		action rest {
			match path /r/*
			restore {
				header X-Look yes
			}
			description "Changes a shelf"
			checkpoint_ttl 2h
		}
		action charge {
			match path /charge*
			compensate POST /refunds {
				json charge {response.json./id}
				json amount {request.json./amount}
			}
		}
		action ask {
			match path /ask
			delegate https://agent.example.com/rollback
		}
		action mail {
			match path /mail
			irreversible
		}
	}`})
	for _, c := range []struct {
		method, path, body string
		gets               int
		reversible, can    bool
		way, reason        string
	}{
		{"PUT", "/r/there", "new", 2, true, true, "restore", ""},
		{"PUT", "/r/new", "new", 2, true, true, "restore", ""},
		{"DELETE", "/r/gone", "", 2, true, true, "restore", ""},
		{"PATCH", "/r/refused", "refuse", 2, true, true, "restore", ""},
		{"POST", "/r/post", "new", 0, false, false, "irreversible", "method"},
		{"POST", "/charge", `{"amount":1}`, 0, true, true, "compensate", ""},
		{"POST", "/charge/none", `{"amount":1}`, 0, true, false, "compensate", "absent-value"},
		{"POST", "/charge", `{"sum":1}`, 0, false, false, "irreversible", "absent-value"},
		{"POST", "/ask", "x", 0, true, true, "delegate", ""},
		{"POST", "/mail", "x", 0, false, false, "irreversible", "declared"},
		{"POST", "/other", "x", 0, false, false, "irreversible", "no-action"},
	} {
		got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: c.method, path: c.path, body: c.body}))
		v := g.checkpointOf(a, got)
		if v.Claims.Ext["cascade.reversible"] != c.reversible || v.Reversible != c.can || v.Way != c.way || v.Reason != c.reason ||
			v.Verification.Snapshot != "matches" || v.Execution.State != "completed" || v.Execution.Status != got.status || v.Claims.Out == "" {
			t.Errorf("%s %s: %d %+v", c.method, c.path, got.status, v)
		}
		s := shelves[c.path]
		if s == nil {
			continue
		}
		if len(s.gets) != c.gets || c.gets > 0 && (s.gets[0].Get("X-Look") != "yes" || s.gets[1].Get("X-Look") != "yes" ||
			s.gets[0].Get("Accept-Encoding") != "identity" || s.gets[0].Get("Execution-Context") != "") {
			t.Errorf("%s %s: it was looked at with %v", c.method, c.path, s.gets)
		}
		if c.gets > 0 {
			ext, _ := json.Marshal(v.Claims.Ext)
			if v.Claims.Ext["cascade.description"] != "Changes a shelf" || v.Claims.Ext["cascade.ttl"] != 7200.0 ||
				v.Claims.Ext["cascade.target"] != "default" || !strings.HasSuffix(fmt.Sprint(v.Claims.Ext["cascade.rollback_uri"]), "/.well-known/cascade/rollback") ||
				strings.Contains(string(ext), "old") { // C-6.3-c
				t.Errorf("%s", ext)
			}
		}
	}
}

// Issue "Checkpoints": where the state before a call cannot be read nothing is forwarded
// and the id stays free; or, where that is configured, the call runs and is irreversible.
func TestSnapshotThatFails(t *testing.T) {
	for _, c := range []struct {
		name string
		get  func(w http.ResponseWriter) bool
	}{
		{"refused", func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusUnauthorized); return true }},
		{"broken", func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusInternalServerError); return true }},
		{"cut", func(http.ResponseWriter) bool { panic(http.ErrAbortHandler) }},
		{"large", func(w http.ResponseWriter) bool { _, _ = io.WriteString(w, strings.Repeat("x", 2000)); return true }},
		{"partial", func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusPartialContent); return true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			u, a := newUpstream(t), newAgent(t, "a")
			there := "old"
			strict, lax, both := &shelf{state: &there, get: c.get}, &shelf{state: &there, get: c.get}, &shelf{state: &there, get: c.get}
			u.on("/strict", strict.serve)
			u.on("/lax", lax.serve)
			u.on("/both", both.serve)
			g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + ` {
				max_image 1KiB
				action strict {
					match path /strict
					restore
				}
				action lax {
					match path /lax
					restore
					on_snapshot_error irreversible
				}
				action both {
					match path /both
					restore
					compensate POST /undo
				}
			}`})
			put := func(path string) reply {
				return g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: path, id: "k", body: "new"}))
			}
			doc := put("/strict").retryable(t, 503, "snapshot-failed")
			if !*doc.SafeNewKey || doc.State != "" {
				t.Errorf("%+v", doc)
			}
			if last := u.last("/strict"); last.Method != http.MethodGet {
				t.Errorf("%s was forwarded", last.Method)
			}
			strict.mu.Lock()
			strict.get = nil
			strict.mu.Unlock()
			if got := put("/strict"); got.status != 200 || got.header.Get("Execution-Status") != "executed" {
				t.Errorf("the id was not free: %d %s", got.status, got.body)
			}
			if v := g.checkpointOf(a, put("/lax")); v.Reversible || v.Way != "irreversible" || v.Reason != "no-image" || v.Claims.Ext["cascade.reversible"] != false {
				t.Errorf("%+v", v)
			}
			if v := g.checkpointOf(a, put("/both")); !v.Reversible || v.Way != "compensate" {
				t.Errorf("%+v", v)
			}
		})
	}
}

// A state after the call that contradicts its answer, or cannot be read, is not taken for
// what the call has left. The call is completed all the same, and its answer is whole.
func TestStateAfterTheCall(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	there := "old"
	lagging, broken := &shelf{}, &shelf{state: &there}
	looks := 0
	lagging.get = func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusNotFound); return true }
	broken.get = func(w http.ResponseWriter) bool {
		if looks++; looks == 1 {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	}
	u.on("/lagging", lagging.serve)
	u.on("/broken", broken.serve)
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n default_undo restore\n}"})
	for path, status := range map[string]int{"/lagging": 201, "/broken": 200} {
		got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: path, body: "new"}))
		got.want(t, status, "", "executed")
		if v := g.checkpointOf(a, got); v.Claims.Ext["cascade.reversible"] != true || v.Reversible || v.Reason != "no-image" {
			t.Errorf("%s: %+v", path, v)
		}
	}
}

// A call that was refused without being executed has nothing to undo; one in doubt keeps
// its checkpoint, without a result.
func TestCheckpointsOfWhatDidNotRun(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/refused", status(429, ""))
	u.on("/lost", func(w http.ResponseWriter, in *arrival) {
		if in.Method != http.MethodGet {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, "old")
	})
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n default_undo restore\n settle async\n}"})
	call := func(method, path string) checkpointView {
		return g.checkpointOf(a, g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: method, path: path})))
	}
	released := call("POST", "/refused")
	eventually(t, "the release", func() bool {
		released = document[checkpointView](t, g.get(a, "checkpoints/"+released.JTI))
		return released.Verification.Snapshot == "released"
	})
	if released.Reversible || released.Reason != "released" {
		t.Errorf("%+v", released)
	}
	if v := call("PUT", "/lost"); !v.Reversible || v.Verification.Snapshot != "matches" || v.Execution.State != "in_doubt" {
		t.Errorf("%+v", v)
	}
}

// P3, C-4.2.2-c: a checkpoint is shown to who took part; for everybody else it is the
// same as none. Nothing is kept of callers' credentials where that is not configured.
func TestP3Checkpoints(t *testing.T) {
	u, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + u.addr + " {\n checkpoint_ttl 2h\n}"})
	got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: "/x"}))
	id := got.header.Get("Execution-Checkpoint")
	g.checkpointOf(a, got)
	foreign, unknown := g.get(b, "checkpoints/"+id+"?wait=0"), g.get(b, "checkpoints/"+uuid.NewString()+"?wait=0")
	foreign.terminal(t, 403, "not-in-workflow")
	if unknown.status != foreign.status || unknown.body != foreign.body {
		t.Errorf("%s and %s", foreign.body, unknown.body)
	}
	g.get(nil, "checkpoints/"+id).terminal(t, 401, "authentication-required")
	g.store.pass(2 * time.Hour) // C-4.2.2-d: after its ttl it is gone
	g.get(a, "checkpoints/"+id+"?wait=0").terminal(t, 410, "checkpoint-expired")
}

// C-6.3-e, A-checkpoint-flooding-a, -c: a workflow that makes too many checkpoints is
// refused; nothing is recorded or forwarded, and others do not notice.
func TestCheckpointQuotas(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	for name, c := range map[string]struct{ quota, detail string }{
		"count":  {"checkpoints workflow 3", "The workflow has 3 checkpoints standing, at most so many."},
		"rate":   {"checkpoint_rate 3", "The workflow makes more than 3 checkpoints in a minute."},
		"bytes":  {"checkpoint_bytes workflow 8KiB", "The workflow would have more than 8192 bytes of checkpoints."},
		"caller": {"checkpoints caller 3", "The caller has 3 checkpoints standing, at most so many."},
	} {
		t.Run(name, func(t *testing.T) {
			g := launch(t, setup{app: trusting(t, a) + "\nquota {\n" + c.quota + "\n}", site: "agent_proxy " + u.addr, badger: true})
			defer stop(t)
			path, wid := "/"+name, uuid.NewString()
			call := func(workflow, id string) reply {
				return g.call(with(a.issue(ect.Claims{Workflow: workflow}), request{path: path, id: id}))
			}
			for i := range 3 {
				call(wid, fmt.Sprint(i)).want(t, 201, fmt.Sprint("arrival ", i+1), "executed")
			}
			doc := call(wid, "more").retryable(t, 429, "quota-exceeded")
			if doc.Detail != c.detail || !*doc.SafeNewKey || doc.State != "" {
				t.Errorf("%+v", doc)
			}
			u.arrived(path, 3)
			call(wid, "1").want(t, 201, "arrival 2", "replayed")
			if name != "caller" {
				call(uuid.NewString(), "other").want(t, 201, "arrival 4", "executed")
			}
		})
	}
}

// The state is read with the configuration's
// credentials, or with the call's own; never with both, and never with those of a token.
func TestWithWhatTheStateIsRead(t *testing.T) {
	u := newUpstream(t)
	t.Setenv("E2E_TOKEN", "of the gateway")
	there := "old"
	config, recorded := &shelf{state: &there}, &shelf{state: &there}
	u.on("/config", config.serve)
	u.on("/recorded", recorded.serve)
	g := launch(t, setup{app: "identity " + gatewayIdentity, badger: true, site: "agent_proxy " + u.addr + ` {
		action config {
			match path /config
			restore {
				header Authorization "Bearer {env.E2E_TOKEN}"
			}
		}
		action recorded {
			match path /recorded
			restore
			undo_auth recorded
		}
	}`})
	for path, want := range map[string]string{"/config": "Bearer of the gateway", "/recorded": "Bearer of the caller"} {
		got := g.call(request{method: "PUT", path: path, body: "new", header: headers{
			"Authorization": "Bearer of the caller", "Accept": "text/x", "X-Other": "x",
		}})
		if got.status != 200 || got.header.Get("Execution-Status") != "executed" {
			t.Fatalf("%d %s", got.status, got.body)
		}
		s := map[string]*shelf{"/config": config, "/recorded": recorded}[path]
		for _, h := range s.gets {
			if h.Get("Authorization") != want || h.Get("Accept") != "text/x" || h.Get("X-Other") != "" || h.Get("Idempotency-Key") != "" {
				t.Errorf("%s was read with %v", path, h)
			}
		}
		if len(s.gets) != 2 {
			t.Errorf("%s was read %d times", path, len(s.gets))
		}
	}
}
