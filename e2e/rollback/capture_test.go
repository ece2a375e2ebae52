package rollback

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-4.2.1-a to -h, C-4.2.2-c, -d: for each way to undo a call its checkpoint says
// truthfully before the call leaves whether it can be undone, and can be verified.
func TestCheckpointsOfEachWay(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	for _, name := range []string{"there", "gone", "refused"} {
		lab.Write("/docs/"+name, "old")
	}
	lab.On("PATCH /docs/refused", 1, harness.RestSays(http.StatusUnprocessableEntity, ""))
	lab.On("POST /charge", -1, harness.RestSays(http.StatusOK, `{"id":"ch_1"}`))
	lab.On("POST /charge/none", -1, harness.RestSays(http.StatusOK, `{}`))
	lab.On("POST /docs/post", 1, harness.RestSays(http.StatusCreated, ""))
	lab.On("POST /*", -1, harness.RestSays(http.StatusCreated, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + lab.Addr + ` {
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
		got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Method: c.method, Path: c.path, Body: c.body}))
		v := g.CheckpointOf(a, got)
		if v.Claims.Ext["cascade.reversible"] != c.reversible || v.Reversible != c.can || v.Way != c.way || v.Reason != c.reason ||
			v.Verification.Snapshot != "matches" || v.Execution.State != "completed" || v.Execution.Status != got.Status || v.Claims.Out == "" {
			t.Errorf("%s %s: %d %+v", c.method, c.path, got.Status, v)
		}
		gets := lab.All("GET "+c.path, "")
		if len(gets) != c.gets || c.gets > 0 && (gets[0].Header.Get("X-Look") != "yes" || gets[1].Header.Get("X-Look") != "yes" ||
			gets[0].Header.Get("Accept-Encoding") != "identity" || gets[0].Header.Get("Execution-Context") != "") {
			t.Errorf("%s %s: it was looked at with %v", c.method, c.path, gets)
		}
		if sent := lab.Last(c.path); strings.HasPrefix(c.path, "/charge") && strings.Contains(sent.Body, "amount") && sent.Header.Get("Accept-Encoding") != "identity" {
			t.Errorf("an answer that is needed is asked for with %v", sent.Header)
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
		get  func(*harness.RestCall)
	}{
		{"refused", harness.RestSays(http.StatusUnauthorized, "")},
		{"broken", harness.RestSays(http.StatusInternalServerError, "")},
		{"cut", harness.RestDrops},
		{"large", harness.RestSays(http.StatusOK, strings.Repeat("x", 1<<20+1))},
		{"partial", harness.RestSays(http.StatusPartialContent, "")},
	} {
		t.Run(c.name, func(t *testing.T) {
			lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
			for path, times := range map[string]int{"/docs/strict": 1, "/docs/lax": -1, "/docs/both": -1} {
				lab.Write(path, "old")
				lab.On("GET "+path, times, c.get)
			}
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + lab.Addr + ` {
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
			put := func(path string) harness.Reply {
				return g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Method: "PUT", Path: path, Id: path, Body: "new"}))
			}
			doc := put("/docs/strict").Retryable(t, 503, "snapshot-failed")
			if !*doc.SafeNewKey || doc.State != "" {
				t.Errorf("%+v", doc)
			}
			lab.Arrived("PUT /docs/strict", 0)
			if got := put("/docs/strict"); got.Status != 200 || got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("the id was not free: %d %s", got.Status, got.Body)
			}
			if v := g.CheckpointOf(a, put("/docs/lax")); v.Reversible || v.Way != "irreversible" || v.Reason != "no-image" || v.Claims.Ext["cascade.reversible"] != false {
				t.Errorf("%+v", v)
			}
			if v := g.CheckpointOf(a, put("/docs/both")); !v.Reversible || v.Way != "compensate" {
				t.Errorf("%+v", v)
			}
		})
	}
}

// A state after the call that contradicts its answer, or cannot be read, is not taken for
// what the call has left. The call is completed all the same, and its answer is whole.
func TestStateAfterTheCall(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	lab.Write("/docs/broken", "old")
	lab.On("GET /docs/lagging", -1, harness.RestSays(http.StatusNotFound, ""))
	lab.On("GET /docs/broken", 1, (*harness.RestCall).Usual)
	lab.On("GET /docs/broken", -1, harness.RestSays(http.StatusInternalServerError, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + lab.Addr + " {\n default_undo restore\n}"})
	for path, status := range map[string]int{"/docs/lagging": 201, "/docs/broken": 200} {
		got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Method: "PUT", Path: path, Body: "new"}))
		got.Want(t, status, "new", "executed")
		if v := g.CheckpointOf(a, got); v.Claims.Ext["cascade.reversible"] != true || v.Reversible || v.Reason != "no-image" {
			t.Errorf("%s: %+v", path, v)
		}
	}
}

// A call that was refused without being executed has nothing to undo; one in doubt keeps
// its checkpoint, without a result.
func TestCheckpointsOfWhatDidNotRun(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	u.On("/refused", harness.Status(429, ""))
	u.On("/lost", func(w http.ResponseWriter, in *harness.Arrival) {
		if in.Method != http.MethodGet {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, "old")
	})
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n default_undo restore\n}"})
	call := func(method, path string) harness.CheckpointView {
		return g.CheckpointOf(a, g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Method: method, Path: path})))
	}
	released := call("POST", "/refused")
	harness.Eventually(t, "the release", func() bool {
		released = harness.Document[harness.CheckpointView](t, g.Get(a, "checkpoints/"+released.JTI))
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
	u, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + u.Addr + " {\n checkpoint_ttl 2h\n}"})
	got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Path: "/x"}))
	id := got.Header.Get("Execution-Checkpoint")
	g.CheckpointOf(a, got)
	foreign, unknown := g.Get(b, "checkpoints/"+id+"?wait=0"), g.Get(b, "checkpoints/"+uuid.NewString()+"?wait=0")
	foreign.Terminal(t, 403, "not-in-workflow")
	if unknown.Status != foreign.Status || unknown.Body != foreign.Body {
		t.Errorf("%s and %s", foreign.Body, unknown.Body)
	}
	g.Get(nil, "checkpoints/"+id).Terminal(t, 401, "authentication-required")
	g.Store.Pass(2 * time.Hour) // C-4.2.2-d: after its ttl it is gone
	g.Get(a, "checkpoints/"+id+"?wait=0").Terminal(t, 410, "checkpoint-expired")
}

// C-6.3-e, A-checkpoint-flooding-a, -c: a workflow that makes too many checkpoints is
// refused; nothing is recorded or forwarded, and others do not notice.
func TestCheckpointQuotas(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	for name, c := range map[string]struct{ quota, detail string }{
		"count":  {"checkpoints workflow 3", "The workflow has 3 checkpoints standing, at most so many."},
		"rate":   {"checkpoint_rate 3", "The workflow makes more than 3 checkpoints in a minute."},
		"bytes":  {"checkpoint_bytes workflow 8KiB", "The workflow would have more than 8192 bytes of checkpoints."},
		"caller": {"checkpoints caller 3", "The caller has 3 checkpoints standing, at most so many."},
	} {
		t.Run(name, func(t *testing.T) {
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nquota {\n" + c.quota + "\n}", Site: "agent_proxy " + u.Addr, Badger: true})
			defer harness.Stop(t)
			path, wid := "/"+name, uuid.NewString()
			call := func(workflow, id string) harness.Reply {
				return g.Call(harness.With(a.Issue(ect.Claims{Workflow: workflow}), harness.Request{Path: path, Id: id}))
			}
			for i := range 3 {
				call(wid, fmt.Sprint(i)).Want(t, 201, fmt.Sprint("arrival ", i+1), "executed")
			}
			doc := call(wid, "more").Retryable(t, 429, "quota-exceeded")
			if doc.Detail != c.detail || !*doc.SafeNewKey || doc.State != "" {
				t.Errorf("%+v", doc)
			}
			u.Arrived(path, 3)
			call(wid, "1").Want(t, 201, "arrival 2", "replayed")
			if name != "caller" {
				call(uuid.NewString(), "other").Want(t, 201, "arrival 4", "executed")
			}
		})
	}
}

// The state is read with the configuration's
// credentials, or with the call's own; never with both, and never with those of a token.
func TestWithWhatTheStateIsRead(t *testing.T) {
	lab := harness.NewRestLab(t)
	t.Setenv("E2E_TOKEN", "of the gateway")
	lab.Write("/docs/config", "old")
	lab.Write("/docs/recorded", "old")
	g := harness.Launch(t, harness.Setup{App: "identity " + harness.GatewayIdentity, Badger: true, Site: "agent_proxy " + lab.Addr + ` {
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
		got := g.Call(harness.Request{Method: "PUT", Path: path, Body: "new", Header: harness.Headers{
			"Authorization": "Bearer of the caller", "Accept": "text/x", "X-Other": "x",
		}})
		if got.Status != 200 || got.Header.Get("Execution-Status") != "executed" {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		gets := lab.All("GET "+path, "")
		for _, got := range gets {
			if h := got.Header; h.Get("Authorization") != want || h.Get("Accept") != "text/x" || h.Get("X-Other") != "" || h.Get("Idempotency-Key") != "" {
				t.Errorf("%s was read with %v", path, h)
			}
		}
		if len(gets) != 2 {
			t.Errorf("%s was read %d times", path, len(gets))
		}
	}
}
