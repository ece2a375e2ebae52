package rollback

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Issue 15, "To look at": a rollback with each agent's status and times, as JSON, as Graphviz and
// as SVG, to the same readers.
func TestRollbackAsAPicture(t *testing.T) {
	lab, a, b, m := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "m")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, m) + harness.UndoesParts, Site: lab.Site(), Badger: true})
	f := g.Workflow()
	root, first := f.Does(a, "PUT", "/docs/a", "1")
	charged, charge := f.Does(b, "POST", "/charges", "{}", root.ID())
	_, mail := f.Does(b, "POST", "/mail", "hello", charged.ID())
	id := uuid.NewString()
	doc := f.Asks(a, id, first, `, "scope": "sub_dag"`).Undone(t, rollback.Partial)
	steps := make(map[string]rollback.Step)
	for _, step := range doc.Steps {
		steps[step.Checkpoint] = step
	}
	if got := [3]string{earlier(steps[first]), earlier(steps[charge]), earlier(steps[mail])}; got != [3]string{charge, mail, ""} {
		t.Errorf("%v, of %s, %s and %s", got, first, charge, mail)
	}
	for _, id := range []string{first, charge} {
		if s := steps[id]; s.Begun.IsZero() || s.Begun.Before(doc.Asked) || s.Ended.Before(s.Begun) {
			t.Errorf("%+v of a rollback asked for at %s", s, doc.Asked)
		}
	}
	if s := steps[mail]; !s.Begun.IsZero() || s.Ended.IsZero() {
		t.Errorf("nothing was tried, and %+v", s)
	}

	look := func(who *harness.Agent, accept string) harness.Reply {
		return f.Call(harness.With(who.Issue(ect.Claims{Workflow: f.Wid}), harness.Request{Method: "GET", Path: rollback.URL(id), Header: harness.Headers{"Accept": accept}}))
	}
	refused := look(m, "")
	refused.Is(t, 403, "not-in-workflow")
	for accept, media := range map[string]string{
		"": "application/json", "*/*": "application/json", "application/json": "application/json", "text/html, application/xhtml+xml, */*;q=0.8": "application/json",
		"text/csv": "application/json", "*/*, image/svg+xml": "image/svg+xml", "image/svg+xml, application/json": "application/json", "image/svg+xml;q=0": "application/json", "image/svg+xml;q=0.5, application/json": "application/json",
		"image/svg+xml": "image/svg+xml", "image/avif,image/webp,image/*,*/*;q=0.8": "image/svg+xml", "application/json;q=0.2, image/svg+xml;q=0.3": "image/svg+xml",
		"text/vnd.graphviz": "text/vnd.graphviz; charset=utf-8", "text/*": "text/vnd.graphviz; charset=utf-8",
	} {
		got := look(b, accept)
		if got.Status != 200 || got.Header.Get("Content-Type") != media || got.Header.Get("Vary") != "Accept" || got.Header.Get("Cache-Control") != "no-store" {
			t.Fatalf("Accept: %s gets %d %v", accept, got.Status, got.Header)
		}
		switch {
		case media == "application/json":
			got.Undone(t, rollback.Partial)
			continue
		case media == "image/svg+xml":
			if err := xml.Unmarshal([]byte(got.Body), new(struct{})); err != nil || got.Header.Get("Content-Security-Policy") != "default-src 'none'; sandbox" {
				t.Errorf("%v %v", err, got.Header)
			}
		case !strings.HasPrefix(got.Body, "digraph"):
			t.Errorf("%s", got.Body)
		}
		for _, text := range []string{
			"finished, partial", "undo: completed", "escalate: escalated", "reason irreversible", a.Issuer.Identity(), b.Issuer.Identity(),
			first, charge, mail, "begun " + steps[charge].Begun.Format("2006-01-02T15:04:05"),
		} {
			if !strings.Contains(got.Body, text) {
				t.Errorf("%s has no %q:\n%s", media, text, got.Body)
			}
		}
		// P3: who may not read the document sees no picture either.
		if other := look(m, accept); other.Status != refused.Status || other.Body != refused.Body || other.Header.Get("Content-Type") != refused.Header.Get("Content-Type") {
			t.Errorf("Accept: %s shows a stranger %d %s", accept, other.Status, other.Body)
		}
	}
}

func earlier(s rollback.Step) string { return strings.Join(s.Earlier, " ") }
