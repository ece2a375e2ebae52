package operate

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

var readmeBlock = regexp.MustCompile("(?s)<!-- caddyfile: (\\w+) -->\n```\n(.*?)```")

// What the README and the manual show of the Caddyfile can be used as it stands.
func TestReadmeExamplesLoad(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	var readme []byte
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		readme = append(readme, text...)
	}
	t.Setenv("OPS_SECRET", "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	around := map[string]string{
		"whole":  "%",
		"site":   "http://localhost:8080 {\n%\n}",
		"policy": "http://localhost:8080 {\nagent_proxy localhost:9001 {\n%\n}\n}",
	}
	seen := map[string]int{}
	for _, block := range readmeBlock.FindAllStringSubmatch(string(readme), -1) {
		kind, text := block[1], block[2]
		seen[kind]++
		whole := strings.Replace(around[kind], "%", text, 1)
		adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(whole), map[string]any{"filename": "README.md"})
		if err != nil {
			t.Errorf("%v in\n%s", err, text)
			continue
		}
		if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
			t.Errorf("formatted, it is\n%s, and not\n%s", formatted, text)
		}
		for _, w := range warnings {
			if !strings.Contains(w.Message, "not formatted") { // of the lines around it
				t.Errorf("%s in\n%s", w, text)
			}
		}
		var config caddy.Config
		if err := json.Unmarshal(adapted, &config); err != nil {
			t.Fatal(err)
		}
		config.Admin = &caddy.AdminConfig{Disabled: true}
		if err := caddy.Validate(&config); err != nil {
			t.Errorf("%v in\n%s", err, text)
		}
	}
	for kind := range around {
		if seen[kind] == 0 {
			t.Errorf("the README has no block of the kind %s", kind)
		}
	}
}
