package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

func someCircuits() *circuits.Document {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return &circuits.Document{Circuits: []circuits.Circuit{
		{Upstream: "10.0.0.7:9001", State: "open", Mode: "auto", ErrorRate: 0.75, Calls: 12, NextProbe: at.Add(30 * time.Second), LastCause: "status 503"},
		{Upstream: "10.0.0.8:9001", Class: "write", State: "closed", Mode: "observe", Calls: 3},
		{Upstream: "evil\x1b[2J:1", State: "half_open", Mode: "auto", LastCause: "\x1b[2J"},
	}}
}

// Section "CLI": how breakers are shown.
func TestGoldenCircuits(t *testing.T) {
	var out strings.Builder
	now := time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC)
	if err := printCircuits(&out, someCircuits(), now); err != nil {
		t.Fatal(err)
	}
	golden(t, "circuits_list", out.String())
	out.Reset()
	if err := printCircuits(&out, &circuits.Document{}, now); err != nil || out.String() != "No upstream has been called yet.\n" {
		t.Errorf("%v %q", err, out.String())
	}
}

// Section "CLI": what is asked of the server.
func TestCircuitsAsk(t *testing.T) {
	text, err := json.Marshal(someCircuits())
	if err != nil {
		t.Fatal(err)
	}
	asked := ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = r.Method + " " + r.URL.String() + " " + string(body)
		w.Header().Set(admin.Mark, "1")
		_, _ = w.Write(text)
	}))
	defer server.Close()
	for args, want := range map[string]string{
		"circuits list":                            "GET /agent_guard/circuits ",
		"circuits set a:1 forced_open":             `POST /agent_guard/circuits/mode {"upstream":"a:1","mode":"forced_open"}`,
		"circuits set a:1 auto --class read":       `POST /agent_guard/circuits/mode {"upstream":"a:1","class":"read","mode":"auto"}`,
		"circuits set a:1 observe --store /data/1": `POST /agent_guard/circuits/mode?store=%2Fdata%2F1 {"upstream":"a:1","mode":"observe"}`,
	} {
		command := append(strings.Fields(args), "--address", server.Listener.Addr().String())
		out, _, err := run(t, command...)
		if err != nil || asked != want || !strings.HasPrefix(out, "UPSTREAM ") {
			t.Errorf("%s asks %s: %v\n%s", args, asked, err, out)
		}
		if got := document[circuits.Document](t, command...); len(got.Circuits) != 3 || got.Circuits[0].ErrorRate != 0.75 {
			t.Errorf("%s: %+v", args, got)
		}
	}
	asked = ""
	refuses(t, `"open" is no mode; it is one of auto, observe, forced_open, forced_closed`, "circuits", "set", "a:1", "open", "--address", server.Listener.Addr().String())
	refuses(t, "give UPSTREAM and MODE", "circuits", "set", "a:1")
	if asked != "" {
		t.Errorf("asked %s", asked)
	}
}
