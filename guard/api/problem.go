package api

import (
	"fmt"
	"html/template"
	"net/http"
	"slices"
	texttemplate "text/template"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

var htmlPage = template.Must(template.New("problem").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}}</title>
<style>body{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:3rem auto;padding:0 1rem}code{background:#8882;padding:.1em .3em}</style>
<p><code>{{.Status}} {{.Slug}}</code></p>
<h1>{{.Title}}</h1>
<p>{{.Meaning}}</p>
<h2>What the caller should do</h2>
<p>{{.Caller}}</p>
<p>{{if .RetryAfter}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}}
{{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}</p>
<h2>What the operator can do</h2>
<p>{{or .Operator "Nothing needs to be done."}}</p>
</html>
`))

var textPage = texttemplate.Must(texttemplate.New("problem").Parse(`{{.Title}} ({{.Status}} {{.Slug}})

{{.Meaning}}

What the caller should do: {{.Caller}}
{{if .RetryAfter}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}} {{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}

What the operator can do: {{or .Operator "Nothing needs to be done."}}
`))

// servePage answers with the page for people about the kind with this slug: as HTML if the
// client accepts it, else as plain text. An empty slug lists all kinds.
func servePage(w http.ResponseWriter, r *http.Request, slug string) {
	all := Kinds()
	if slug == "" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, k := range all {
			_, _ = fmt.Fprintf(w, "%s%s\n\t%d %s\n", problem.BasePath, k.Slug, k.Status, k.Title)
		}
		return
	}
	i := slices.IndexFunc(all, func(k problem.Kind) bool { return k.Slug == slug })
	if i < 0 {
		http.Error(w, "There is no problem of this name.", http.StatusNotFound)
		return
	}
	w.Header().Set("Vary", "Accept")
	if router.Preferred(r, "text/plain", "text/html") == "text/html" {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = htmlPage.Execute(w, all[i]) // only the client's leaving can fail here, as above and below
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_ = textPage.Execute(w, all[i])
}

// Kinds lists all kinds, in the order in which they are documented.
func Kinds() []problem.Kind {
	return slices.Concat([]problem.Kind{
		problem.ExecutionIDMissing, problem.ExecutionIDInvalid, problem.WorkflowIDInvalid, problem.NodeUnknown,
		problem.NodeAmbiguous,
	}, plan.Kinds, []problem.Kind{
		problem.BatchMixed, problem.CallerUnstable, problem.FingerprintMismatch, problem.InProgress, problem.InDoubt,
		problem.RolledBack, problem.ResultExpired, problem.ResultUnavailable, problem.QuotaExceeded, problem.BulkheadFull,
		problem.DependencyNotDone, problem.SnapshotFailed, problem.StoreUnavailable, problem.ShuttingDown,
		problem.UpstreamUnreachable, problem.CircuitOpen, problem.BodyTooLarge, problem.BodyTimeout, problem.StreamRefused,
		router.Unauthenticated, executionUnknown, problem.ECTInvalid, problem.ECTUnavailable,
	}, evidence.Kinds, []problem.Kind{router.ParameterInvalid}, hitl.Kinds, rollback.Kinds)
}

// The kinds of problems of the gateway's own paths.
var (
	executionUnknown = problem.Kind{
		Slug: "execution-unknown", Status: http.StatusNotFound,
		Title:    "No execution of this caller has this id",
		Meaning:  "At this route and host nothing is recorded under this id for the identity that asks. It was never called, was refused or released without being executed, its key is no longer kept, or it was called with another credential.",
		Caller:   "Ask with the credential and at the host that the call was made with. This is no proof that the call was never executed: a retry is safe under the same id and credential, for as long as keys are kept.",
		Operator: "A credential that was rotated is another caller; an identity from Caddy's authentication, or `caller`, stays the same.",
	}
)
