package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

func someEscalations() []admin.Escalation {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return []admin.Escalation{
		{
			ID: "01234567-89ab-8def-8123-456789abcdef", Level: 3, LevelName: "stop", State: "undeliverable", Cause: "rollback_failed",
			Summary: "The refund of checkpoint-7 was refused.", Workflow: "w", Opened: at, Changed: at, Attempts: 7, LastError: "410",
		},
		{
			ID: "11234567-89ab-8def-8123-456789abcdef", Level: 2, LevelName: "approval", State: "notified", Cause: "breaker_permanently_open",
			Summary: "evil\x1b[2J " + strings.Repeat("long ", 40), Opened: at.Add(5 * time.Second), Changed: at, Attempts: 1,
		},
	}
}

// Section "CLI": how escalations are shown.
func TestGoldenEscalations(t *testing.T) {
	var page []json.RawMessage
	for _, e := range someEscalations() {
		text, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		page = append(page, text)
	}
	var out strings.Builder
	rows := escalationRows{now: time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC), table: table{out: &out}}
	if err := rows.print(page); err != nil {
		t.Fatal(err)
	}
	golden(t, "escalations_list", out.String())
}

// Section "CLI": what is asked of the server, and that pages are followed.
func TestEscalationsAsk(t *testing.T) {
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.Path+" "+r.URL.Query().Encode())
		w.Header().Set(admin.Mark, "1")
		page := admin.Escalations{Escalations: someEscalations()[:1], Next: "more", Unreadable: 1}
		if r.URL.Query().Get("after") == "more" {
			page = admin.Escalations{Escalations: someEscalations()[1:]}
		}
		_ = json.NewEncoder(w).Encode(page)
	}))
	defer server.Close()
	list := func(args string) (string, string) {
		t.Helper()
		asked = nil
		out, diagnostics, err := run(t, append(strings.Fields("escalations list "+args), "--address", server.Listener.Addr().String())...)
		if err != nil {
			t.Fatal(err)
		}
		return out, diagnostics
	}
	for args, want := range map[string]string{
		"--limit 1": "limit=1",
		"--limit 1 --state open --level stop --workflow w --after x": "after=x&level=stop&limit=1&state=open&workflow=w",
	} {
		out, diagnostics := list(args)
		if len(asked) != 1 || asked[0] != "GET /agent_guard/escalations "+want || !strings.HasPrefix(out, "OPENED ") ||
			!strings.Contains(diagnostics, "--after more goes on") || !strings.Contains(diagnostics, "1 escalations are recorded and cannot be read.") {
			t.Errorf("%s asks %q:\n%s%s", args, asked, out, diagnostics)
		}
	}
	if out, _ := list("--all"); len(asked) != 2 || strings.Count(out, "-89ab-8def-8123-") != 2 {
		t.Errorf("%q\n%s", asked, out)
	}
	all := document[admin.Escalations](t, "escalations", "list", "--all", "--address", server.Listener.Addr().String())
	if len(all.Escalations) != 2 || all.Escalations[0] != someEscalations()[0] {
		t.Errorf("%+v", all)
	}
	refuses(t, "use pause, approval or stop", "escalations", "list", "--level", "4")
	refuses(t, "--limit must be at least 1", "escalations", "list", "--limit", "0")
}
