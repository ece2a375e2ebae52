package caddymodule

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

func document(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func byName() map[string]*Family {
	all := map[string]*Family{}
	for _, f := range Families() {
		all[f.Name] = f
	}
	return all
}

var labelWord = regexp.MustCompile("`([^`]+)`")

// Every metric has its row in the manual, with its type and labels, and every row its
// metric.
func TestFamiliesAreDocumented(t *testing.T) {
	undocumented := byName()
	for line := range strings.Lines(document(t, "observability.md")) {
		cells := strings.Split(line, " | ")
		name, ours := strings.CutPrefix(cells[0], "| `agent_guard_")
		if !ours {
			continue
		}
		name = "agent_guard_" + strings.TrimSuffix(name, "`")
		f := undocumented[name]
		if f == nil {
			t.Errorf("%s is documented, and is no metric or stands twice", name)
			continue
		}
		delete(undocumented, name)
		var labels []string
		for _, m := range labelWord.FindAllStringSubmatch(cells[2], -1) {
			labels = append(labels, m[1])
		}
		if cells[1] != f.Type || !slices.Equal(labels, f.Labels) {
			t.Errorf("%s is documented as %s %v, and is %s %v", name, cells[1], labels, f.Type, f.Labels)
		}
	}
	for name := range undocumented {
		t.Errorf("%s is not documented", name)
	}
}

// The parts of PromQL that the documents use.
var (
	quoted   = regexp.MustCompile(`"[^"]*"`)
	selector = regexp.MustCompile(`(agent_guard_[a-z_]+)(\{[^}]*\})?`)
	matcher  = regexp.MustCompile(`^([a-z_]+)(=~|!~|!=|=)"([^"]*)"$`)
	grouping = regexp.MustCompile(`\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)`)
	name     = regexp.MustCompile(`\$?[a-zA-Z_][a-zA-Z0-9_]*`)
)

// known are the words of PromQL that the documents use; another one is a typing error.
var known = []string{
	"sum", "max", "min", "max_over_time", "rate", "increase", "histogram_quantile", "time", "label_values",
	"by", "on", "group_left", "and", "unless", "or", "m", "h", "s",
}

// scrapeLabels are labels that Prometheus adds.
var scrapeLabels = []string{"instance", "job"}

// checkExpression holds an expression to the metrics, their labels and the values that
// these can have. It returns the names of the metrics.
func checkExpression(t *testing.T, where, expr string) (used []string) {
	t.Helper()
	all := byName()
	labels := slices.Clone(scrapeLabels)
	for _, m := range selector.FindAllStringSubmatch(expr, -1) {
		f, own := all[m[1]], []string(nil)
		if f == nil {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				base, ok := strings.CutSuffix(m[1], suffix)
				if ok && all[base] != nil && all[base].Type == "histogram" {
					f = all[base]
					own = []string{"le"}
				}
			}
		}
		if f == nil {
			t.Errorf("%s: %s is no metric", where, m[1])
			continue
		}
		used = append(used, f.Name)
		own = append(own, f.Labels...)
		labels = append(labels, own...)
		if f.Type == "counter" && !strings.Contains(expr, "rate("+m[0]) && !strings.Contains(expr, "increase("+m[0]) &&
			f.Name != "agent_guard_recovered_total" && !strings.Contains(expr, "label_values(") {
			t.Errorf("%s: the counter %s is used without a rate", where, m[1])
		}
		for part := range strings.SplitSeq(strings.Trim(m[2], "{}"), ",") {
			if part == "" {
				continue
			}
			pair := matcher.FindStringSubmatch(part)
			switch {
			case pair == nil:
				t.Errorf("%s: %s is no matcher", where, part)
			case !slices.Contains(own, pair[1]) && !slices.Contains(scrapeLabels, pair[1]):
				t.Errorf("%s: %s has no label %s", where, m[1], pair[1])
			case pair[2] == "=" && !possible(pair[1], pair[3]):
				t.Errorf("%s: %s is never %q", where, pair[1], pair[3])
			}
		}
	}
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(m[1], ",") {
			if label = strings.TrimSpace(label); label != "" && !slices.Contains(labels, label) {
				t.Errorf("%s: grouped by %s, which no metric of %q has", where, label, expr)
			}
		}
	}
	rest := quoted.ReplaceAllString(expr, `""`)
	if strings.Count(rest, "(") != strings.Count(rest, ")") || strings.Count(rest, "[") != strings.Count(rest, "]") {
		t.Errorf("%s: unbalanced: %s", where, expr)
	}
	for _, w := range name.FindAllString(selector.ReplaceAllString(rest, ""), -1) {
		if !slices.Contains(known, w) && !slices.Contains(labels, w) && w != "$__rate_interval" {
			t.Errorf("%s: %s is not known in %q", where, w, expr)
		}
	}
	if len(used) == 0 {
		t.Errorf("%s: %q is about no metric of ours", where, expr)
	}
	return used
}

// possible reports whether a label of ours can have this value.
func possible(label, value string) bool {
	switch label {
	case "problem":
		return slices.ContainsFunc(api.Kinds(), func(k problem.Kind) bool { return k.Slug == value })
	case "outcome":
		return slices.Contains([]string{"completed", "released", "in_doubt"}, value)
	case "result":
		return slices.Contains([]string{"applied", "not_applied", "unknown", "taken", "failed"}, value)
	case "reason":
		return slices.Contains([]string{"safe", "exempt", "upgrade", "grpc"}, value)
	}
	return true
}

var templated = regexp.MustCompile(`\{\{ *\$?([a-zA-Z.]+) *\}\}`)

// The dashboard can be imported, asks for metrics and labels that exist, through a data
// source that is chosen on it, and shows every metric.
func TestDashboard(t *testing.T) {
	type query struct {
		RefID        string
		Expr         string
		LegendFormat string
		Datasource   struct{ Type, UID string }
	}
	var dashboard struct {
		Title, UID    string
		SchemaVersion int
		Templating    struct {
			List []struct{ Name, Type, Definition string }
		}
		Panels []struct {
			ID          int
			Title, Type string
			GridPos     struct{ X, Y, W, H int }
			Datasource  struct{ Type, UID string }
			Targets     []query
		}
	}
	if err := json.Unmarshal([]byte(document(t, "grafana/agent-guard.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	if dashboard.Title == "" || dashboard.UID == "" || dashboard.SchemaVersion == 0 {
		t.Errorf("Grafana would not import it: %q %q %d", dashboard.Title, dashboard.UID, dashboard.SchemaVersion)
	}
	variables := map[string]string{}
	for _, v := range dashboard.Templating.List {
		variables[v.Name] = v.Type
		if v.Type == "query" {
			checkExpression(t, "variable "+v.Name, v.Definition)
		}
	}
	if variables["datasource"] != "datasource" {
		t.Error("there is no variable for the data source")
	}
	shown, ids := map[string]bool{}, map[int]bool{}
	for i, p := range dashboard.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.W == 0 || p.GridPos.H == 0 {
			t.Errorf("%s has no place: %+v", p.Title, p.GridPos)
		}
		for _, other := range dashboard.Panels[:i] {
			a, b := p.GridPos, other.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("%s lies over %s", p.Title, other.Title)
			}
		}
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s asks nothing", p.Title)
		}
		for _, q := range p.Targets {
			where := fmt.Sprintf("%s, query %s", p.Title, q.RefID)
			if p.Datasource.UID != "${datasource}" || q.Datasource.UID != "${datasource}" {
				t.Errorf("%s: another data source than the chosen one", where)
			}
			for _, variable := range regexp.MustCompile(`"\$([a-z]+)"`).FindAllStringSubmatch(q.Expr, -1) {
				if variables[variable[1]] == "" {
					t.Errorf("%s: there is no variable %s", where, variable[1])
				}
			}
			labels := slices.Clone(scrapeLabels)
			for _, used := range checkExpression(t, where, q.Expr) {
				shown[used] = true
				labels = append(labels, byName()[used].Labels...)
			}
			for _, m := range templated.FindAllStringSubmatch(q.LegendFormat, -1) {
				if !slices.Contains(labels, m[1]) {
					t.Errorf("%s: its legend names %s, which it does not have", where, m[1])
				}
			}
		}
	}
	for name := range byName() {
		if !shown[name] {
			t.Errorf("%s is on no panel", name)
		}
	}
}

// The alert rules are ones that Prometheus reads, about metrics and labels that exist.
func TestAlertRules(t *testing.T) {
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert       string
				Expr        string
				For         string            `yaml:",omitempty"`
				Labels      map[string]string `yaml:",omitempty"`
				Annotations map[string]string
			}
		}
	}
	decoder := yaml.NewDecoder(bytes.NewReader([]byte(document(t, "prometheus/agent-guard.rules.yml"))))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil {
		t.Fatal(err)
	}
	alerts := map[string]bool{}
	duration := regexp.MustCompile(`^[1-9][0-9]*[smhd]$`)
	for _, g := range file.Groups {
		if g.Name == "" || len(g.Rules) == 0 {
			t.Errorf("the group %q has %d rules", g.Name, len(g.Rules))
		}
		for _, r := range g.Rules {
			if alerts[r.Alert] || !regexp.MustCompile(`^AgentGuard[A-Za-z]+$`).MatchString(r.Alert) {
				t.Errorf("the name %q is taken or none", r.Alert)
			}
			alerts[r.Alert] = true
			if r.For != "" && !duration.MatchString(r.For) {
				t.Errorf("%s: for %q", r.Alert, r.For)
			}
			if r.Annotations["summary"] == "" || r.Annotations["description"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s says too little: %v %v", r.Alert, r.Labels, r.Annotations)
			}
			used := checkExpression(t, r.Alert, r.Expr)
			labels := slices.Clone(scrapeLabels)
			for _, metric := range used {
				labels = append(labels, byName()[metric].Labels...)
			}
			for _, text := range r.Annotations {
				for _, m := range templated.FindAllStringSubmatch(text, -1) {
					label, isLabel := strings.CutPrefix(m[1], "labels.")
					if m[1] != "value" && (!isLabel || !slices.Contains(labels, label)) {
						t.Errorf("%s: its text names %s, which it does not have", r.Alert, m[1])
					}
				}
			}
		}
	}
	for _, must := range []string{
		"AgentGuardInDoubt", "AgentGuardInDoubtForADay", "AgentGuardStoreUnhealthy", "AgentGuardDiskLow", "AgentGuardUnavailable",
		"AgentGuardFingerprintMismatches", "AgentGuardCommitsSlow", "AgentGuardFailOpen", "AgentGuardRollbackIncomplete", "AgentGuardRollbackHangs",
		"AgentGuardEscalationWaits",
	} {
		if !alerts[must] {
			t.Errorf("no alert is called %s", must)
		}
	}
}
