package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

const shownWorkflow = `{"wid": "w", "status": "running", "stated_status": "partial", "roots": [], "leaves": [],
	"nodes": [{"jti": "t1", "exec_act": "evil\u001b[2J", "iss": "a", "state": "failed", "detail": "in_doubt", "time": "2026-11-26T05:00:00Z"}], "edges": []}`

const shownPlan = `{"wf_id": "trip", "version": "v1", "status": "running", "others": ["x"], "nodes": [
	{"id": "pay", "level": 1, "after": ["hold"], "state": "pending", "tasks": [], "holds": [{"node": "hold", "state": "running"}]},
	{"id": "hold", "level": 0, "after": [], "state": "running", "tasks": ["t1"], "holds": []}]}`

// A workflow is shown by its plan, or without one by its tokens; what strangers wrote moves no cursor.
func TestWorkflowIsShown(t *testing.T) {
	doc := new(evidence.Workflow)
	if err := json.Unmarshal([]byte(shownWorkflow), doc); err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 11, 26, 5, 1, 0, 0, time.UTC)
	text := describeWorkflow(doc, now)
	for _, want := range []string{"workflow  w", "status    running", "stated    partial", "t1", "failed, in doubt"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Errorf("%q", text)
	}
	if err := json.Unmarshal([]byte(strings.TrimSuffix(shownWorkflow, "}")+`, "plan": `+shownPlan+"}"), doc); err != nil {
		t.Fatal(err)
	}
	text = describeWorkflow(doc, now)
	for _, want := range []string{"plan      trip, version v1", "0      hold  running", "1      pay   pending  0      hold (running)", "1 no node of the plan: x"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	tree := workflowFlags{tree: true}
	if text := tree.describe(doc, now); !strings.Contains(text, "● hold  running") || !strings.Contains(text, "● pay  pending") {
		t.Errorf("%s", text)
	}
}

// --watch shows each change, goes on behind the last one when the stream ends, and ends with the plan.
func TestWorkflowIsWatched(t *testing.T) {
	lasts := make(chan string, 2)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(admin.Mark, "1")
		w.Header().Set("Content-Type", "text/event-stream")
		lasts <- r.Header.Get("Last-Event-ID") + " " + r.Header.Get("Accept")
		plan := func(status, state string) string {
			return strings.TrimSuffix(shownWorkflow, "}") + fmt.Sprintf(`, "plan": {"wf_id": "trip", "version": "v1", "status": %q, "others": [], "nodes": [{"id": "hold", "state": %q}]}}`, status, state)
		}
		one := func(text string) string { return strings.ReplaceAll(strings.ReplaceAll(text, "\n", ""), "\t", "") }
		if r.Header.Get("Last-Event-ID") == "" {
			_, _ = io.WriteString(w, ":\n\nevent: workflow\nid: 1\ndata: "+one(plan("running", "running"))+"\n\n")
			return
		}
		_, _ = io.WriteString(w, ": as it was\n\nevent: change\nid: 2\ndata: "+one(plan("success", "done"))+"\n\nevent: change\nid: 3\ndata: {}\n\n")
	}))
	defer server.Close()
	out, _, err := run(t, "workflows", "show", "w", "--watch", "--address", strings.TrimPrefix(server.URL, "http://"))
	if err != nil || !strings.Contains(out, "hold  running") || !strings.Contains(out, "hold  done") {
		t.Errorf("%v\n%s", err, out)
	}
	if first, second := <-lasts, <-lasts; first != " text/event-stream" || second != "1 text/event-stream" {
		t.Errorf("%q and %q", first, second)
	}
}
