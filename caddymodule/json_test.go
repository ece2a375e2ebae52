package caddymodule_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

const (
	jsonPage   = "../docs/json.md"
	modulePath = "github.com/agent-guard/caddy-agent-guard/"
)

// inCaddyfile says how the Caddyfile writes a member that is no option of the same name.
// The keys are TYPE.member.
var inCaddyfile = map[string]string{
	"App.store":                       "`store <name> ...`",
	"App.key_file":                    "`keys file <path>`",
	"App.key":                         "`keys value <placeholder>`",
	"App.plans":                       "`plan <file>`",
	"App.workflow_idle":               "`workflow_idle <duration>`",
	"Bulkhead.off":                    "`bulkhead off`",
	"Settings.total":                  "`bulkhead { total ... }`",
	"Settings.per_workflow":           "`bulkhead { per_workflow ... }`",
	"Settings.queue":                  "`bulkhead { queue ... }`",
	"Settings.wait":                   "`bulkhead { wait ... }`",
	"Settings.rate":                   "`bulkhead { rate ... }`",
	"Settings.retries":                "`bulkhead { retries ... }`",
	"Ways.delegate_to":                "`delegate <uri> <identity>`",
	"Ways.delegate_unsigned":          "`delegate <uri> unsigned`",
	"Participant.uri":                 "`participants <uri> <identity>`",
	"Participant.identity":            "`participants <uri> <identity>`",
	"App.written_at":                  "not written: set when the Caddyfile is read",
	"Handler.written_at":              "not written: set when the Caddyfile is read",
	"Settings.written_at":             "not written: set when the Caddyfile is read",
	"Handler.shared":                  "`name <name> shared`",
	"Settings.meta_keys":              "`execution_id meta <names...>`",
	"Settings.argument_keys":          "`execution_id argument <names...>`",
	"Settings.exempt_tools":           "`exempt tool <names...>`",
	"Settings.consequential_tools":    "`consequential tool <names...>`",
	"Settings.recognize_window":       "`missing_id recognize { window <duration> }`",
	"Settings.error_window":           "`missing_id recognize { error_window <duration> }`",
	"Probe.task":                      "`on_unknown probe task { ... }`",
	"Settings.caller_cookies":         "`caller cookie <names...>`",
	"Settings.derive_window":          "`missing_id derive <window>`",
	"Handler.actions":                 "`action <name> { ... }`",
	"Answers.outcomes":                "`outcome <outcome> ...`",
	"Answers.probe":                   "`on_unknown probe <method> <uri> { ... }`",
	"Roles.roles":                     "`role <role> <callers...>`",
	"Approve.role":                    "`approve <role>`",
	"Approve.quorum":                  "`approve { quorum <number> }`",
	"Approve.within":                  "`approve { within <duration> }`",
	"Approve.off":                     "`approve off`",
	"Policy.resend_for":               "`on_unknown resend <duration>`",
	"OutcomeRule.outcome":             "`outcome <outcome>`",
	"OutcomeRule.match":               "the rest of the line, or a block",
	"Action.tools":                    "`match tool <names...>`",
	"Action.arguments":                "`match argument <pointer> <value>`",
	"Action.name":                     "`action <name>`",
	"Identity.name":                   "`identity <name>`",
	"Settings.off":                    "`breaker off`",
	"Settings.slow_call":              "`slow <duration> ...`",
	"Settings.slow_threshold":         "`slow ... <percent>`",
	"Settings.max_cooldown":           "`cooldown ... <longest>`",
	"Settings.failure_status":         "`failure <status>...`",
	"Probe.method":                    "`on_unknown probe <method> ...`",
	"Probe.uri":                       "`on_unknown probe ... <uri>`",
	"Webhook.url":                     "`webhook <url>`",
	"Webhook.secrets":                 "`secret <placeholder>`",
	"UnreachableHuman.do":             "`unreachable_human <do>`",
	"UnreachableHuman.role":           "`unreachable_human escalate <role>`",
	"UnreachableHuman.within":         "`unreachable_human <do> { within <duration> }`",
	"OnCascade.do":                    "`on_cascade <do>`",
	"BadgerStore.path":                "`store badger <path>`",
	"Trust.keys":                      "`jwks_file`, `jwks_url`",
	"KeySource.file":                  "`jwks_file <file>`",
	"KeySource.url":                   "`jwks_url <url>`",
	"KeySource.owner":                 "`jwks_file ... <owner>`",
	"Request.method":                  "`<method>` of its line",
	"Request.url":                     "`<url>` of its line",
	"Compensation.content_type":       "`body <type> ...`",
	"IDSource.header":                 "`execution_id header <name>`",
	"IDSource.placeholder":            "`execution_id placeholder <placeholder>`",
	"IDSource.json":                   "`execution_id json <pointer>`",
	"InBand.json":                     "`in_band json <pointer> ...`",
	"InBand.header":                   "`in_band header <field> ...`",
	"InBand.value":                    "`in_band ... <value>`",
	"InBand.sse_error":                "`in_band sse_error`",
	"Quota.workflow_stored_bytes":     "`stored_bytes workflow <size>`",
	"Quota.workflow_checkpoints":      "`checkpoints workflow <number>`",
	"Quota.workflow_checkpoint_bytes": "`checkpoint_bytes workflow <size>`",
	"Quota.workflow_checkpoint_rate":  "`checkpoint_rate <number>`",
	"Quota.caller_checkpoints":        "`checkpoints caller <number>`",
	"Quota.caller_checkpoint_bytes":   "`checkpoint_bytes caller <size>`",
}

// TestGoldenJSON holds docs/json.md against the comments of the configuration's fields,
// which it is made of: `go test ./caddymodule -run Golden -update` writes it anew. A
// member that the Caddyfile writes in another way has to be in the table above.
func TestGoldenJSON(t *testing.T) {
	p := page{t: t, comments: map[string]map[string]string{}, options: map[string]bool{}, seen: map[reflect.Type]bool{}}
	for _, names := range caddymodule.OptionNames() {
		for _, name := range names {
			p.options[name] = true
		}
	}
	// The blocks of the transport and its breakers are read elsewhere.
	for _, name := range []string{
		"breaker", "keepalive_guarded", "window", "threshold", "min_volume", "consecutive", "cooldown", "probe_scope",
		"in_band", "downstream", "verify_probe",
	} {
		p.options[name] = true
	}
	p.text.WriteString(`# The JSON configuration

Caddy's own configuration is JSON; the Caddyfile is converted to it (` + "`caddy adapt`" + ` shows the result). This page has every member of the guard's modules. It is generated from the comments in the source. *In the Caddyfile* says how a member is written there; where the cell is empty, it is an option of the same name, described in [caddyfile.md](caddyfile.md).

Durations are strings such as ` + "`\"30s\"`" + ` or nanoseconds, sizes are bytes, and shares are numbers from 0 to 1. A member that is left out has its default.

`)
	for _, id := range []string{
		"agent_guard", "agent_guard.stores.badger", "agent_guard.stores.postgres", "http.handlers.agent_guard",
		"http.handlers.agent_guard_endpoints", "http.reverse_proxy.transport.agent_guard",
	} {
		info, err := caddy.GetModule(id)
		if err != nil {
			t.Fatal(err)
		}
		p.module(id, reflect.TypeOf(info.New()).Elem())
	}
	for len(p.queue) > 0 {
		next := p.queue[0]
		p.queue = p.queue[1:]
		fmt.Fprintf(&p.text, "## %s\n\n", next.Name())
		p.object(next)
	}
	got := strings.TrimRight(p.text.String(), "\n") + "\n"
	if *update {
		if err := os.WriteFile(jsonPage, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(jsonPage)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what the comments say; `go test ./caddymodule -run Golden -update` writes it anew", jsonPage)
	}
	for key := range maps.Keys(inCaddyfile) {
		if !p.used[key] {
			t.Errorf("inCaddyfile has %s, which is no member, or is an option of the same name", key)
		}
	}
}

// page is the document while it is written.
type page struct {
	t        *testing.T
	text     strings.Builder
	comments map[string]map[string]string // by directory, then by TYPE or TYPE.Field
	options  map[string]bool              // of the Caddyfile
	used     map[string]bool              // of inCaddyfile
	seen     map[reflect.Type]bool
	queue    []reflect.Type
}

func (p *page) module(id string, typ reflect.Type) {
	fmt.Fprintf(&p.text, "## Module `%s`\n\n", id)
	p.object(typ)
}

// object writes the comment of a type, and a row for each of its members.
func (p *page) object(typ reflect.Type) {
	p.seen[typ] = true
	fmt.Fprintf(&p.text, "%s\n\n", strings.TrimSpace(p.comment(typ, "")))
	rows := p.rows(typ)
	if len(rows) == 0 {
		p.text.WriteString("It has no members.\n\n")
		return
	}
	p.text.WriteString("| member | type | meaning | in the Caddyfile |\n|---|---|---|---|\n")
	for _, row := range rows {
		p.text.WriteString(row)
	}
	p.text.WriteString("\n")
}

func (p *page) rows(typ reflect.Type) (rows []string) {
	for field := range typ.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && name == "" && ours(field.Type):
			rows = append(rows, p.rows(deref(field.Type))...)
			continue
		case field.Anonymous && name == "":
			rows = append(rows, fmt.Sprintf("| | | All members of Caddy's `%s`. | |\n", field.Type))
			continue
		case !field.IsExported() || name == "-" || name == "":
			continue
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n",
			name, p.kind(field), cell(p.comment(typ, field.Name)), p.caddyfile(typ, name)))
	}
	return rows
}

// caddyfile says how the Caddyfile writes a member.
func (p *page) caddyfile(typ reflect.Type, member string) string {
	key := typ.Name() + "." + member
	if text, ok := inCaddyfile[key]; ok {
		if p.used == nil {
			p.used = map[string]bool{}
		}
		p.used[key] = true
		return text
	}
	if !p.options[member] {
		p.t.Errorf("the Caddyfile has no option %s, and inCaddyfile does not say how %s is written", member, key)
	}
	return ""
}

// kind is the type of a member, as JSON has it, with a link where it is an object of ours.
func (p *page) kind(field reflect.StructField) string {
	if strings.Contains(field.Tag.Get("caddy"), "namespace=http.matchers") {
		return "list of matcher sets"
	}
	if namespace, ok := strings.CutPrefix(field.Tag.Get("caddy"), "namespace="); ok {
		namespace, _, _ = strings.Cut(namespace, " ")
		if field.Type == reflect.TypeFor[json.RawMessage]() {
			return "module of `" + namespace + "`"
		}
		return "list of modules of `" + namespace + "`"
	}
	return p.typeName(field.Type)
}

func (p *page) typeName(typ reflect.Type) string {
	switch {
	case typ == reflect.TypeFor[caddy.Duration](), typ == reflect.TypeFor[jsontime.Duration]():
		return "duration"
	case typ.Kind() == reflect.Pointer:
		return p.typeName(typ.Elem())
	case typ.Kind() == reflect.Slice:
		return "list of " + p.typeName(typ.Elem())
	case typ.Kind() == reflect.Map:
		return "object of " + p.typeName(typ.Elem())
	case typ.Kind() == reflect.Struct && ours(typ):
		if !p.seen[typ] {
			p.seen[typ] = true
			p.queue = append(p.queue, typ)
		}
		return fmt.Sprintf("[%s](#%s)", typ.Name(), strings.ToLower(typ.Name()))
	case typ.Kind() == reflect.Struct:
		return "object, as Caddy's `" + typ.String() + "`"
	case typ.Kind() == reflect.Bool:
		return "true or false"
	case typ.Kind() == reflect.String, typ.Implements(reflect.TypeFor[interface{ MarshalText() ([]byte, error) }]()):
		return "string"
	default:
		return "number"
	}
}

func deref(typ reflect.Type) reflect.Type {
	if typ.Kind() == reflect.Pointer {
		return typ.Elem()
	}
	return typ
}

func ours(typ reflect.Type) bool { return strings.HasPrefix(deref(typ).PkgPath(), modulePath) }

// comment is what the source says of a type, or of one of its fields.
func (p *page) comment(typ reflect.Type, field string) string {
	dir := filepath.Join("..", strings.TrimPrefix(typ.PkgPath(), modulePath))
	if p.comments[dir] == nil {
		p.comments[dir] = p.read(dir)
	}
	key := typ.Name()
	if field != "" {
		key += "." + field
	}
	text := p.comments[dir][key]
	if text == "" {
		p.t.Errorf("%s: %s has no comment", dir, key)
	}
	return text
}

func (p *page) read(dir string) map[string]string {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		p.t.Fatal(err)
	}
	found := map[string]string{}
	for _, name := range slices.DeleteFunc(files, func(name string) bool { return strings.HasSuffix(name, "_test.go") }) {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, decl := range file.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range gen.Specs {
				typ, ok := spec.(*ast.TypeSpec)
				if !ok {
					continue
				}
				found[typ.Name.Name] = gen.Doc.Text() + typ.Doc.Text()
				object, ok := typ.Type.(*ast.StructType)
				if !ok {
					continue
				}
				for _, f := range object.Fields.List {
					for _, n := range f.Names {
						found[typ.Name.Name+"."+n.Name] = f.Doc.Text() + f.Comment.Text()
					}
				}
			}
		}
	}
	return found
}

// cell makes a comment fit into a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(text), " "), "|", `\|`)
}
