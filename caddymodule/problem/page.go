package problem

import (
	"fmt"
	"html/template"
	"net/http"
	"strings"
	texttemplate "text/template"
)

// page is what the templates show of a kind.
type page struct {
	Kind
	Meaning, Caller, Operator string
	Retry                     bool
}

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
<p>{{if .Retry}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}}
{{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}</p>
<h2>What the operator can do</h2>
<p>{{.Operator}}</p>
</html>
`))

var textPage = texttemplate.Must(texttemplate.New("problem").Parse(`{{.Title}} ({{.Status}} {{.Slug}})

{{.Meaning}}

What the caller should do: {{.Caller}}
{{if .Retry}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}} {{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}

What the operator can do: {{.Operator}}
`))

// serveIndex lists the problems.
func serveIndex(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	for _, k := range Kinds() {
		_, _ = fmt.Fprintf(w, "%s%s\n\t%d %s\n", BasePath, k.Slug, k.Status, k.Title) // only the client's leaving can fail here
	}
}

// ServePage explains the kind with this slug to a person, as HTML where the client
// asks for it, else as plain text. An empty slug lists all kinds.
func ServePage(w http.ResponseWriter, r *http.Request, slug string) {
	if slug == "" {
		serveIndex(w)
		return
	}
	k, ok := Find(slug)
	if !ok {
		http.Error(w, "There is no problem of this name.", http.StatusNotFound)
		return
	}
	p := page{Kind: k, Meaning: k.meaning, Caller: k.caller, Operator: k.operator, Retry: k.retry}
	w.Header().Set("Vary", "Accept")
	if strings.Contains(r.Header.Get("Accept"), "text/html") {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = htmlPage.Execute(w, p) // only the client's leaving can fail here
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_ = textPage.Execute(w, p)
}
