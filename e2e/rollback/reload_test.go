package rollback

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// reloads is a gateway whose guarded sites a test changes. Rollbacks are asked for at a
// site that stays.
type reloads struct {
	*harness.Flow
	t                *testing.T
	log, store, dir  string
	app              string
	asking, shifting string // the ports of the site that stays, and of the one that does not
}

func newReloads(t *testing.T, a *harness.Agent, sites string) *reloads {
	t.Helper()
	dir := t.TempDir()
	r := &reloads{t: t, dir: dir, log: filepath.Join(dir, "log"), app: harness.Trusting(t, a)}
	st := harness.NewTestStore(filepath.Join(dir, "store"))
	t.Cleanup(st.Forget)
	r.store = st.Path
	_, r.asking, _ = strings.Cut(harness.FreeAddress(t), ":")
	_, r.shifting, _ = strings.Cut(harness.FreeAddress(t), ":")
	r.load(sites)
	g := &harness.Gateway{T: t, Scheme: "http", Addr: "127.0.0.1:" + r.shifting, Store: st}
	g.Client = g.NewClient(nil)
	r.Flow = g.Workflow()
	return r
}

// load is a reload with these sites.
func (r *reloads) load(sites string) {
	r.t.Helper()
	harness.Load(r.t, fmt.Sprintf(`{
	admin off
	persist_config off
	auto_https off
	storage file_system %q
	default_bind 127.0.0.1
	grace_period 10s
	log {
		output file %s
		format json
	}
	agent_guard {
		store e2e %s
		%s
	}
}
http://:%s {
	agent_guard_endpoints
}
%s
`, r.dir, r.log, r.store, r.app, r.asking, strings.ReplaceAll(sites, "PORT", r.shifting)))
}

// rolledBack asks for a rollback of a checkpoint at the site that stays.
func (r *reloads) rolledBack(a *harness.Agent, checkpoint string) harness.Reply {
	r.t.Helper()
	there := *r.Gateway
	there.Addr, there.Reloads = "127.0.0.1:"+r.asking, true
	token := a.Issue(r.Request(checkpoint, ""))
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "phase": "execute"}`, uuid.NewString(), checkpoint)
	return there.Call(harness.With(token, harness.Request{Path: rollback.Path, Body: body}))
}

func (r *reloads) logged() string {
	r.t.Helper()
	text, err := os.ReadFile(r.log)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}

const reloadActions = `
	action thing {
		match path /docs/*
		restore
	}
	action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
			header Authorization "Bearer {env.E2E_RELOAD_TOKEN}"
		}
	}`

// Undo is decided before the call leaves. What a checkpoint needs is
// in it: a reload that leaves its upstream reachable takes nothing of it away, whatever it
// does to guards, actions, breakers and sites.
func TestCheckpointsSurviveReloads(t *testing.T) {
	t.Setenv("E2E_RELOAD_TOKEN", "of-the-gateway")
	const before = "http://:PORT {\n agent_proxy UP {\n" + reloadActions + "\n}\n}"
	for name, after := range map[string]string{
		"the same":                   before,
		"actions removed":            "http://:PORT {\n agent_proxy UP\n}",
		"actions renamed":            strings.NewReplacer("action thing", "action document", "action charge", "action pay").Replace(before),
		"guard named":                strings.Replace(before, "agent_proxy UP {", "agent_proxy UP {\n name payments", 1),
		"breaker changed":            strings.Replace(before, "agent_proxy UP {", "agent_proxy UP {\n breaker {\n consecutive 7\n}", 1),
		"breaker off":                strings.Replace(before, "agent_proxy UP {", "agent_proxy UP {\n breaker off", 1),
		"transport changed":          strings.Replace(before, "agent_proxy UP {", "agent_proxy UP {\n lb_retries 2\n transport agent_guard {\n dial_timeout 7s\n}", 1),
		"upstream added":             strings.Replace(before, "agent_proxy UP {", "agent_proxy UP 127.0.0.1:9 {\n lb_policy first", 1),
		"site renamed":               strings.Replace(before, "http://:PORT", "http://elsewhere.example:PORT", 1),
		"under a path":               "http://:PORT {\n handle_path /v1/* {\n agent_proxy UP {\n" + reloadActions + "\n}\n}\n}",
		"handlers of its own":        "http://:PORT {\n agent_guard {\n upstream {\n reverse_proxy UP {\n transport agent_guard\n}\n}\n" + reloadActions + "\n}\n reverse_proxy UP {\n transport agent_guard\n}\n}",
		"no guard any more":          "http://:PORT {\n reverse_proxy UP\n}",
		"site gone, another has it":  "http://other.example:PORT {\n handle /x/* {\n agent_proxy UP {\n name other\n}\n}\n}",
		"another upstream beside it": before + "\nhttp://other.example:PORT {\n agent_proxy 127.0.0.1:9 {\n name other\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
			lab.Write("/docs/a", "before")
			up := func(site string) string { return strings.ReplaceAll(site, "UP", lab.Addr) }
			r := newReloads(t, a, up(before))
			_, put := r.Does(a, "PUT", "/docs/a", "after")
			_, charged := r.Does(a, "POST", "/charges", "{}")

			r.load(up(after))
			r.rolledBack(a, put).Undone(t, rollback.Completed)
			r.rolledBack(a, charged).Undone(t, rollback.Completed)
			lab.WantDoc("/docs/a", "before")
			lab.WantEffects("changed /docs/a", "charged ch_1", "changed /docs/a", "refunded ch_1")
			if all := lab.All("POST /refunds", ""); len(all) != 1 || all[0].Header.Get("Authorization") != "Bearer of-the-gateway" {
				t.Errorf("the refund came with %v", all)
			}
			if strings.Contains(r.logged(), lostUpstream) {
				t.Error("the log says that an upstream is gone")
			}
		})
	}
}

// lostUpstream is in the line of the log that a load leaves nobody to undo checkpoints with.
const lostUpstream = "nothing in this configuration leads to the upstream of calls that can still be undone"

// Where the upstream of checkpoints is really gone, the load says so, with their number,
// and a rollback leaves them to a person and says why. Nothing goes to whatever has the
// guard's name by now (P6), and all is well once the upstream is back.
func TestCheckpointsOfAnUpstreamThatIsGone(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("%s %s came to another upstream", r.Method, r.URL)
	}))
	defer other.Close()
	site := "http://:PORT {\n agent_proxy %s {\n" + strings.Replace(reloadActions, "header Authorization \"Bearer {env.E2E_RELOAD_TOKEN}\"", "", 1) + "\n}\n}"
	before := fmt.Sprintf(site, lab.Addr)
	r := newReloads(t, a, before)
	_, put := r.Does(a, "PUT", "/docs/a", "after")
	_, undone := r.Does(a, "PUT", "/docs/b", "after")
	_, charged := r.Does(a, "POST", "/charges", "{}")
	r.rolledBack(a, undone).Undone(t, rollback.Completed)

	after := fmt.Sprintf(site, strings.TrimPrefix(other.URL, "http://"))
	r.load(after)
	harness.Eventually(t, "the log says that an upstream is gone", func() bool { return strings.Contains(r.logged(), lostUpstream) })
	for _, line := range strings.Split(r.logged(), "\n") {
		if strings.Contains(line, lostUpstream) && (!strings.Contains(line, `"checkpoints":2`) || !strings.Contains(line, lab.Addr) ||
			!strings.Contains(line, `"level":"warn"`) || !strings.Contains(line, `"guard":"default"`)) {
			t.Error(line)
		}
	}
	for _, checkpoint := range []string{put, charged} {
		doc := r.rolledBack(a, checkpoint).Undone(t, rollback.Escalated)
		if len(doc.Steps) != 1 || doc.Steps[0].Reason != string(rollback.ReasonNoUpstream) || len(doc.FollowUp) == 0 {
			t.Errorf("%+v", doc)
		}
	}
	r.load(after) // as it was: nothing new is lost
	r.load(before)
	r.rolledBack(a, put).Undone(t, rollback.Completed)
	r.rolledBack(a, charged).Undone(t, rollback.Completed)
	lab.WantDoc("/docs/a", "")
	if n := strings.Count(r.logged(), lostUpstream); n != 1 {
		t.Errorf("the log says %d times that an upstream is gone", n)
	}
}
