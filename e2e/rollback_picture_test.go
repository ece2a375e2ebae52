package e2e

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Issue 15, "To look at": a rollback with each agent's status and times, as JSON, as Graphviz and
// as SVG, to the same readers.
func TestRollbackAsAPicture(t *testing.T) {
	lab, a, b, m := newRestLab(t), newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "m")
	g := launch(t, setup{app: trusting(t, a, b, m) + undoesParts, site: lab.site(), badger: true})
	f := g.workflow()
	root, first := f.does(a, "PUT", "/docs/a", "1")
	charged, charge := f.does(b, "POST", "/charges", "{}", root.ID())
	_, mail := f.does(b, "POST", "/mail", "hello", charged.ID())
	id := uuid.NewString()
	doc := f.asks(a, id, first, `, "scope": "sub_dag"`).undone(t, rollback.Partial)
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

	look := func(who *agent, accept string) reply {
		return f.call(with(who.issue(ect.Claims{Workflow: f.wid}), request{method: "GET", path: api.RollbackURL(id), header: headers{"Accept": accept}}))
	}
	refused := look(m, "")
	refused.is(t, 403, "not-in-workflow")
	for accept, media := range map[string]string{
		"": "application/json", "*/*": "application/json", "application/json": "application/json", "text/html, application/xhtml+xml, */*;q=0.8": "application/json",
		"text/csv": "application/json", "*/*, image/svg+xml": "image/svg+xml", "image/svg+xml, application/json": "application/json", "image/svg+xml;q=0": "application/json", "image/svg+xml;q=0.5, application/json": "application/json",
		"image/svg+xml": "image/svg+xml", "image/avif,image/webp,image/*,*/*;q=0.8": "image/svg+xml", "application/json;q=0.2, image/svg+xml;q=0.3": "image/svg+xml",
		"text/vnd.graphviz": "text/vnd.graphviz; charset=utf-8", "text/*": "text/vnd.graphviz; charset=utf-8",
	} {
		got := look(b, accept)
		if got.status != 200 || got.header.Get("Content-Type") != media || got.header.Get("Vary") != "Accept" || got.header.Get("Cache-Control") != "no-store" {
			t.Fatalf("Accept: %s gets %d %v", accept, got.status, got.header)
		}
		switch {
		case media == "application/json":
			got.undone(t, rollback.Partial)
			continue
		case media == "image/svg+xml":
			if err := xml.Unmarshal([]byte(got.body), new(struct{})); err != nil || got.header.Get("Content-Security-Policy") != "default-src 'none'; sandbox" {
				t.Errorf("%v %v", err, got.header)
			}
		case !strings.HasPrefix(got.body, "digraph"):
			t.Errorf("%s", got.body)
		}
		for _, text := range []string{
			"finished, partial", "undo: completed", "escalate: escalated", "reason irreversible", a.issuer.Identity(), b.issuer.Identity(),
			first, charge, mail, "begun " + steps[charge].Begun.Format("2006-01-02T15:04:05"),
		} {
			if !strings.Contains(got.body, text) {
				t.Errorf("%s has no %q:\n%s", media, text, got.body)
			}
		}
		// P3: who may not read the document sees no picture either.
		if other := look(m, accept); other.status != refused.status || other.body != refused.body || other.header.Get("Content-Type") != refused.header.Get("Content-Type") {
			t.Errorf("Accept: %s shows a stranger %d %s", accept, other.status, other.body)
		}
	}
}

func earlier(s rollback.Step) string { return strings.Join(s.Earlier, " ") }
