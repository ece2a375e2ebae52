package admin_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// transcript has each answer as it goes over the wire. What differs between two runs is
// replaced by a word.
type transcript struct {
	r    *rig
	text strings.Builder
}

var (
	hexDigits  = regexp.MustCompile(`\b[0-9a-f]{16,64}\b`)
	openedID   = regexp.MustCompile(`("id":"|urn:uuid:)[0-9a-f-]{36}`)
	keptBytes  = regexp.MustCompile(`"size":[1-9]\d+`)
	headMember = regexp.MustCompile(`"(root|key|note)":"[^"]*[+/=][^"]*"`)
)

// ask makes a request, as Caddy's admin endpoint does with an admin.api module.
func (g *transcript) ask(method, target, body string) {
	w := httptest.NewRecorder()
	if err := g.r.api.ServeHTTP(w, httptest.NewRequest(method, "/agent_guard/"+target, strings.NewReader(body))); err != nil {
		// This is handleError of Caddy's admin endpoint.
		refused, ok := err.(caddy.APIError)
		if !ok {
			refused = caddy.APIError{HTTPStatus: http.StatusInternalServerError, Err: err}
		}
		if refused.Message == "" && refused.Err != nil {
			refused.Message = refused.Err.Error()
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(refused.HTTPStatus)
		_ = json.NewEncoder(w).Encode(refused)
	}
	answer := w.Result()
	var header strings.Builder
	_ = answer.Header.Write(&header) // sorted by name
	text := w.Body.String()
	if strings.HasPrefix(answer.Header.Get("Content-Type"), "text/plain") {
		text = text[:strings.IndexByte(text, '\n')+1] + "...\n" // signatures and sealed tokens follow
	}
	if !strings.Contains(text, rollbackID) {
		text = openedID.ReplaceAllString(text, "${1}UUID")
	}
	text = hexDigits.ReplaceAllString(text, "HEX")
	text = headMember.ReplaceAllString(keptBytes.ReplaceAllString(text, `"size":N`), `"$1":"BASE64"`)
	if len(body) > 200 {
		body = body[:20] + "..."
	}
	target = hexDigits.ReplaceAllString(target, "HEX")
	fmt.Fprintf(&g.text, "> %s %s %s\n%d\n%s%s\n", method, target, body, answer.StatusCode, strings.ReplaceAll(header.String(), "\r\n", "\n"), text)
}

// Section "Admin API": every path, what is wrong with a request for it, and every error
// that may come from below, to the letter: status, header, members and words are an API.
func TestGoldenAnswers(t *testing.T) {
	r, o := newRig(t)
	g := &transcript{r: r}

	// What is wrong with any request.
	for _, target := range []string{"", "nothing", "executions/", "executions//resolve", "store/x", "rollback/a/b"} {
		g.ask("GET", target, "")
	}
	for _, c := range [][2]string{
		{"POST", "executions"}, {"PUT", "executions/a%2Fb"}, {"GET", "executions/abcd/resolve"}, {"DELETE", "store"}, {"POST", "nodes"}, {"POST", "keys"}, {"GET", "keys/rotate"},
		{"PATCH", "identity"}, {"HEAD", "identity/rotate"}, {"POST", "circuits"}, {"GET", "circuits/mode"}, {"GET", "rollback"}, {"POST", "rollback/" + rollbackID},
		{"POST", "rollbacks"}, {"POST", "escalations"}, {"POST", "ledger/head"}, {"POST", "ledger/export"}, {"POST", "ledger/verify"},
	} {
		g.ask(c[0], c[1], "")
	}
	for _, target := range []string{
		"executions", "executions/abcd", "store", "nodes", "keys", "identity", "circuits", "rollbacks", "escalations", "ledger/head", "ledger/export", "ledger/verify",
	} {
		g.ask("GET", target+"?colour=red", "")
		g.ask("GET", target+"?store=%zz", "")
		g.ask("GET", target+"?store=/data/three", "")
	}
	g.ask("GET", "store?store=/data/one&store=/data/two", "")

	// Nothing is configured.
	for _, target := range []string{"executions", "keys", "identity", "circuits", "rollbacks", "rollback/" + rollbackID, "escalations", "ledger/head", "ledger/export", "ledger/verify"} {
		g.ask("GET", target, "")
	}
	g.ask("POST", "identity/rotate", "")
	g.ask("POST", "rollback", `{}`)
	o.ledger = new(admin.Ledger)
	g.ask("GET", "ledger/head", "")

	// Executions.
	one := call{id: "order/7", workflow: "trip-7", checkpoint: checkpointID}
	key := o.doubt(one)
	o.keep(key, one)
	r.now = r.now.Add(time.Second) // listings are in the order of time
	o.doubt(call{id: "twice"})
	r.now = r.now.Add(time.Second)
	o.doubt(call{id: "twice", caller: "user:bob"})
	r.now = r.now.Add(time.Minute)
	_, running := o.claim(call{id: "runs", path: "/v1/<&>"})
	for _, target := range []string{
		"executions?action=charge&limit=1000", "executions?id=order/7", "executions?workflow=" + evidence.WorkflowID("trip-7"), "executions?state=completed",
		"executions/order%2F7", "executions/" + checkpointID, "executions/twice", "executions/nobody", "executions/" + strings.Repeat("0", 64), "store",
		"executions?state=x", "executions?caller=x", "executions?checkpoint=x", "executions?undos=x", "executions?limit=0", "executions?from=x",
		"executions?min_age=x", "executions?max_age=-1s", "executions?after=x", "executions?action=a&action=b",
	} {
		g.ask("GET", target, "")
	}
	g.ask("HEAD", "store", "")
	for _, body := range []string{
		``, `{"forced": true}`, `{} {}`, `{"decision": "maybe"}`, "\xff", `"` + strings.Repeat("x", 2<<20) + `"`,
		`{"decision": "applied"}`, `{"decision": "applied", "operator": "ann"}`,
		`{"decision": "applied", "operator": "` + strings.Repeat("a", 257) + `", "reason": "seen"}`,
		`{"decision": "not_applied", "operator": "ann", "reason": "seen", "result": {"status": 200}}`,
		`{"decision": "applied", "operator": "ann", "reason": "seen", "result": {"status": 100}}`,
		`{"decision": "applied", "operator": "ann", "reason": "seen", "result": {"status": 200, "body_base64": "%"}}`,
		`{"decision": "applied", "operator": "ann", "reason": "seen", "result": {"status": 200, "header": {"Connection": ["close"]}}}`,
		`{"decision": "applied", "operator": "ann", "reason": "seen", "result": {"status": 200, "body": "` + strings.Repeat("x", 256<<10+1) + `"}}`,
		`{"decision": "applied", "operator": "ann", "reason": "<seen>", "result": {"status": 201, "body": "ok"}}`,
		`{"decision": "applied", "operator": "ann", "reason": "seen again"}`,
	} {
		g.ask("POST", "executions/order%2F7/resolve", body)
	}
	g.ask("POST", "executions/nobody/resolve", `{"decision": "not_applied", "operator": "ann", "reason": "seen"}`)
	g.ask("POST", "executions/runs/resolve", `{"decision": "not_applied", "operator": "ann", "reason": "seen"}`)
	o.settle(running, execution.Outcome{Verdict: execution.Released})

	// The nodes, the keys, the identity, the breakers, the ledger.
	o.nodes = []admin.Node{
		{Node: "a", Boot: "one", This: true, Version: "v1", Joined: r.now, Seen: r.now, Open: 2, LogSize: 7, SealingKeys: []uint32{1, 2}, Differs: []string{}},
		{Node: "b", Boot: "two", Version: "v2", Joined: r.now, Seen: r.now, SeenAge: 1.5, SealingKeys: []uint32{1}, Differs: []string{"guard pay: retain_key", "quota"}},
	}
	g.ask("GET", "nodes", "")
	g.ask("POST", "keys/rotate", "")
	o.identity = &admin.Identity{
		Name: "spiffe://example.com/gateway", File: "/data/one.identity", Algorithm: "ES256",
		Keys: []admin.IdentityKey{{ID: "first", Algorithm: "ES256", Created: r.now, Until: r.now.Add(time.Hour)}},
	}
	g.ask("GET", "identity", "")
	for _, body := range []string{"", `{"stolen": true}`, `{"stollen": true}`, `{} {}`} {
		g.ask("POST", "identity/rotate", body)
	}
	o.circuits = []proxy.Circuit{{Upstream: "a:1"}, {Upstream: "b:1", Class: "write", Status: breaker.Status{State: breaker.Open}}}
	g.ask("GET", "circuits", "")
	g.ask("GET", "circuits?scope=fleet", "")
	g.ask("GET", "circuits?scope=all", "")
	g.ask("GET", "cascades", "")
	o.cascades = []api.Cascade{{ID: "0123", State: "open", Pattern: "depth_first", Class: "agent", Failed: 3, Affected: 4, Workflows: []api.CascadePart{}}}
	g.ask("GET", "cascades", "")
	g.ask("GET", "cascades/0123", "")
	g.ask("GET", "cascades/4567", "")
	for _, body := range []string{
		``, `{"mode": "observe"}`, `{"upstream": "a:1"}`, `{"upstream": "a:1", "mode": "observe", "clas": "write"}`, `{"upstream": "a:1", "mode": "observe"} {}`,
		`{"upstream": "c:1", "mode": "observe"}`, `{"upstream": "c:1", "class": "read", "mode": "observe"}`, `{"upstream": "b:1", "class": "write", "mode": "forced_open"}`,
	} {
		g.ask("POST", "circuits/mode", body)
	}
	o.unkept = errors.New("the disk is full")
	g.ask("POST", "circuits/mode", `{"upstream": "a:1", "mode": "observe"}`)
	log := &cutting{Store: memory.New(memory.Options{}), after: 1000}
	o.ledgerOver(log, 3)
	for _, after := range []int{1000, 1} {
		log.after = after
		for _, target := range []string{"ledger/head", "ledger/export", "ledger/verify"} {
			g.ask("GET", target, "")
		}
	}

	// Escalations.
	if _, err := o.escalations.Open(ctx, hitl.Opening{
		Key: "1", Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "No way back.", Workflow: evidence.WorkflowID("trip-7"), Caller: "ada",
		Links: hitl.Links{Checkpoint: checkpointID, Rollback: "r", Error: "e", Execution: "x", Upstream: "u:1"},
	}); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{"", "?workflow=trip-7&level=2&state=open", "?level=4", "?state=closed", "?after=x", "?limit=1001"} {
		g.ask("GET", "escalations"+query, "")
	}

	// Plans.
	for _, body := range []string{
		``, `{}`, `{"operator": "ann", "plan": 7, "more": 1}`, `{"operator": "ann", "plan": {"wf_id": "trip", "nodes": []}}`,
		`{"operator": "ann", "plan": {"wf_id": "trip", "nodes": [{"id": "a"}]}}`, `{"operator": "ann", "plan": {"wf_id": "trip", "nodes": [{"id": "b"}]}}`,
		`{"operator": "bob", "replaces": "*", "plan": {"wf_id": "trip", "nodes": [{"id": "b", "label": "x"}, {"id": "c", "label": "x"}]}}`,
	} {
		g.ask("POST", "plans/trip-7", body)
	}
	g.ask("GET", "plans", "")
	g.ask("GET", "plans?x=y", "")

	// Rollbacks.
	d := &coordinator{}
	o.rollback = d
	const whole = `{"checkpoint_id": "c", "operator": "ann", "reason": "r"}`
	for _, body := range []string{
		``, `{}`, `{"checkpoint_id": "c"}`, `{"checkpoint_id": "c", "operator": "ann"}`, `{"checkpoint_id": "c", "operator": "ann", "reason": "r", "scop": "x"}`,
		`{"checkpoint_id": "c", "operator": "ann", "reason": "r", "scope": "x"}`, `{"checkpoint_id": "c", "operator": "ann", "reason": "r", "scope": "single", "cascade": true}`,
		`{"checkpoint_id": "c", "operator": "ann", "reason": "r", "rollback_id": "x"}`, whole + "x",
		`{"checkpoint_id": "c", "operator": "ann", "cascade": true, "dry_run": true}`,
		`{"rollback_id": "urn:uuid:` + rollbackID + `", "checkpoint_id": "` + checkpointID + `", "operator": "ann", "reason": "r"}`,
	} {
		g.ask("POST", "rollback", body)
	}
	for _, target := range []string{"rollback/" + rollbackID, "rollback/" + checkpointID, "rollback/x", "rollback/" + rollbackID + "?wait=x", "rollbacks?limit=7&after=x", "rollbacks?after=bad", "rollbacks?limit=x"} {
		g.ask("GET", target, "")
	}

	// Every error from below, where it can come from.
	wrapped := func(err error) error { return fmt.Errorf("%w: more", err) }
	anywhere := []error{
		wrapped(hitl.ErrStore), store.ErrClosed, wrapped(store.ErrUnhealthy), store.ErrFull, store.ErrUnknown, store.ErrNotFound, seal.ErrBusy,
		ledger.ErrTampered, ledger.ErrNotFound, ledger.ErrClosed, ect.ErrUnavailable,
		caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New("it is a value")}, wrapped(caddy.APIError{HTTPStatus: http.StatusServiceUnavailable, Err: errors.New("later")}),
		errors.New("read-only file system"),
	}
	for _, err := range append([]error{
		execution.ErrUnknown, execution.ErrAmbiguous, execution.ErrKeyForm, execution.ErrCursor, execution.ErrResolution, execution.ErrAnswerTooLarge, execution.ErrNotInDoubt,
		execution.ErrTaken, execution.ErrDraining, execution.ErrUnreadable, execution.ErrResultUnavailable, wrapped(execution.ErrStore), hitl.ErrCursor, hitl.ErrNotFound,
	}, anywhere...) {
		fmt.Fprintf(&g.text, "# %v\n", err)
		o.rotation = err
		g.ask("POST", "keys/rotate", "")
	}
	for _, err := range append([]error{
		&ect.Error{Code: ect.CodeReplayed}, wrapped(&ect.Error{Code: ect.CodeParents}), problem.New(evidence.WorkflowUnknown, "Nothing of it is known."),
		rollback.ErrUnknown, rollback.ErrCursor, rollback.ErrInvalid, rollback.ErrMismatch, rollback.ErrStopping, rollback.ErrStore, rollback.ErrNotInWorkflow,
		rollback.ErrUnnamed, rollback.ErrCheckpointUnknown, &rollback.ConflictError{Winner: "w"}, &rollback.DependedOnError{Dependants: []string{"d"}},
		&rollback.ScopeError{Scope: rollback.FullWorkflow}, &rollback.TooManyError{What: "nodes", Count: 2, Limit: 1}, &rollback.CycleError{Nodes: []string{"n"}},
		checkpoint.ErrUnknown, wrapped(checkpoint.ErrExpired), wrapped(checkpoint.ErrTampered), checkpoint.ErrStore,
	}, anywhere...) {
		fmt.Fprintf(&g.text, "# %v\n", err)
		d.fail = err
		g.ask("POST", "rollback", whole)
	}

	// The store is closed, then there are several, then none.
	if err := o.store.Close(); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"executions", "executions/abcd", "executions/order%2F7", "store", "nodes", "escalations", "escalations?workflow=trip-7"} {
		g.ask("GET", target, "")
	}
	r.open("/data/two")
	g.ask("GET", "store", "")
	g.ask("GET", "store?store=/data/three", "")
	clear(r.stores)
	g.ask("GET", "store", "")
	g.ask("GET", "store?store=/data/one", "")

	golden(t, "testdata/answers.golden", g.text.String())
}
