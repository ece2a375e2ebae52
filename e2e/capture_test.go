package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
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

// C-4.2.1-a to -h, C-4.2.2-c, -d: for each way to undo a call its checkpoint says
// truthfully before the call leaves whether it can be undone, and can be verified.
func TestCheckpointsOfEachWay(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	for _, name := range []string{"there", "gone", "refused"} {
		lab.write("/docs/"+name, "old")
	}
	lab.on("PATCH /docs/refused", 1, restSays(http.StatusUnprocessableEntity, ""))
	lab.on("POST /charge", -1, restSays(http.StatusOK, `{"id":"ch_1"}`))
	lab.on("POST /charge/none", -1, restSays(http.StatusOK, `{}`))
	lab.on("POST /docs/post", 1, restSays(http.StatusCreated, ""))
	lab.on("POST /*", -1, restSays(http.StatusCreated, ""))
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + lab.addr + ` {
		action rest {
			match path /docs/*
			restore {
				header X-Look yes
			}
			description "Changes a document"
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
			delegate https://agent.example.com/rollback unsigned
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
		{"PUT", "/docs/there", "new", 2, true, true, "restore", ""},
		{"PUT", "/docs/new", "new", 2, true, true, "restore", ""},
		{"DELETE", "/docs/gone", "", 2, true, true, "restore", ""},
		{"PATCH", "/docs/refused", "refuse", 2, true, true, "restore", ""},
		{"POST", "/docs/post", "new", 0, false, false, "irreversible", "method"},
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
		gets := lab.all("GET "+c.path, "")
		if len(gets) != c.gets || c.gets > 0 && (gets[0].header.Get("X-Look") != "yes" || gets[1].header.Get("X-Look") != "yes" ||
			gets[0].header.Get("Accept-Encoding") != "identity" || gets[0].header.Get("Execution-Context") != "") {
			t.Errorf("%s %s: it was looked at with %v", c.method, c.path, gets)
		}
		if sent := lab.last(c.path); strings.HasPrefix(c.path, "/charge") && strings.Contains(sent.body, "amount") && sent.header.Get("Accept-Encoding") != "identity" {
			t.Errorf("an answer that is needed is asked for with %v", sent.header)
		}
		if c.gets > 0 {
			ext, _ := json.Marshal(v.Claims.Ext)
			if v.Claims.Ext["cascade.description"] != "Changes a document" || v.Claims.Ext["cascade.ttl"] != 7200.0 ||
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
		get  func(*restCall)
	}{
		{"refused", restSays(http.StatusUnauthorized, "")},
		{"broken", restSays(http.StatusInternalServerError, "")},
		{"cut", restDrops},
		{"large", restSays(http.StatusOK, strings.Repeat("x", 1<<20+1))},
		{"partial", restSays(http.StatusPartialContent, "")},
	} {
		t.Run(c.name, func(t *testing.T) {
			lab, a := newRestLab(t), newAgent(t, "a")
			for path, times := range map[string]int{"/docs/strict": 1, "/docs/lax": -1, "/docs/both": -1} {
				lab.write(path, "old")
				lab.on("GET "+path, times, c.get)
			}
			g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + lab.addr + ` {
				action strict {
					match path /docs/strict
					restore
				}
				action lax {
					match path /docs/lax
					restore
					on_snapshot_error irreversible
				}
				action both {
					match path /docs/both
					restore
					compensate POST /undo
				}
			}`})
			put := func(path string) reply {
				return g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: path, id: path, body: "new"}))
			}
			doc := put("/docs/strict").retryable(t, 503, "snapshot-failed")
			if !*doc.SafeNewKey || doc.State != "" {
				t.Errorf("%+v", doc)
			}
			lab.arrived("PUT /docs/strict", 0)
			if got := put("/docs/strict"); got.status != 200 || got.header.Get("Execution-Status") != "executed" {
				t.Errorf("the id was not free: %d %s", got.status, got.body)
			}
			if v := g.checkpointOf(a, put("/docs/lax")); v.Reversible || v.Way != "irreversible" || v.Reason != "no-image" || v.Claims.Ext["cascade.reversible"] != false {
				t.Errorf("%+v", v)
			}
			if v := g.checkpointOf(a, put("/docs/both")); !v.Reversible || v.Way != "compensate" {
				t.Errorf("%+v", v)
			}
		})
	}
}

// A state after the call that contradicts its answer, or cannot be read, is not taken for
// what the call has left. The call is completed all the same, and its answer is whole.
func TestStateAfterTheCall(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	lab.write("/docs/broken", "old")
	lab.on("GET /docs/lagging", -1, restSays(http.StatusNotFound, ""))
	lab.on("GET /docs/broken", 1, (*restCall).usual)
	lab.on("GET /docs/broken", -1, restSays(http.StatusInternalServerError, ""))
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + lab.addr + " {\n default_undo restore\n}"})
	for path, status := range map[string]int{"/docs/lagging": 201, "/docs/broken": 200} {
		got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: path, body: "new"}))
		got.want(t, status, "new", "executed")
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
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n default_undo restore\n}"})
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
	lab := newRestLab(t)
	t.Setenv("E2E_TOKEN", "of the gateway")
	lab.write("/docs/config", "old")
	lab.write("/docs/recorded", "old")
	g := launch(t, setup{app: "identity " + gatewayIdentity, badger: true, site: "agent_proxy " + lab.addr + ` {
		action config {
			match path /docs/config
			restore {
				header Authorization "Bearer {env.E2E_TOKEN}"
			}
		}
		action recorded {
			match path /docs/recorded
			restore
			undo_auth recorded
		}
	}`})
	for path, want := range map[string]string{"/docs/config": "Bearer of the gateway", "/docs/recorded": "Bearer of the caller"} {
		got := g.call(request{method: "PUT", path: path, body: "new", header: headers{
			"Authorization": "Bearer of the caller", "Accept": "text/x", "X-Other": "x",
		}})
		if got.status != 200 || got.header.Get("Execution-Status") != "executed" {
			t.Fatalf("%d %s", got.status, got.body)
		}
		gets := lab.all("GET "+path, "")
		for _, got := range gets {
			if h := got.header; h.Get("Authorization") != want || h.Get("Accept") != "text/x" || h.Get("X-Other") != "" || h.Get("Idempotency-Key") != "" {
				t.Errorf("%s was read with %v", path, h)
			}
		}
		if len(gets) != 2 {
			t.Errorf("%s was read %d times", path, len(gets))
		}
	}
}
