package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// The compose file of docs/fleet.md is read, not run: its gateways have names of their own and the rest in common,
// the files that it mounts are there, and what these take from the environment is set.
func TestFleetCompose(t *testing.T) {
	dir := filepath.Join("..", "..", "examples", "fleet")
	text, err := os.ReadFile(filepath.Join(dir, "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Build       struct{ Context, Dockerfile string }
			Command     []string
			Environment map[string]string
			Volumes     []string
		}
		Volumes map[string]any
	}
	if err := yaml.Unmarshal(text, &compose); err != nil {
		t.Fatal(err)
	}
	fromEnvironment := regexp.MustCompile(`\{\$([A-Z_]+)\}|\{env\.([A-Z_]+)\}`)
	names, common := map[string]bool{}, ""
	for name, s := range compose.Services {
		for _, volume := range s.Volumes {
			source, _, _ := strings.Cut(volume, ":")
			if path, is := strings.CutPrefix(source, "./"); !is {
				if _, there := compose.Volumes[source]; !there {
					t.Errorf("%s: no volume %s", name, source)
				}
			} else if _, err := os.Stat(filepath.Join(dir, path)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if len(s.Command) == 0 {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, s.Build.Context, s.Build.Dockerfile)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		at := slices.Index(s.Command, "--config")
		file, err := os.ReadFile(filepath.Join(dir, filepath.Base(s.Command[at+1])))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range fromEnvironment.FindAllStringSubmatch(string(file), -1) {
			if variable := m[1] + m[2]; s.Environment[variable] == "" {
				t.Errorf("%s: %s is not set", name, variable)
			}
		}
		if node := s.Environment["NODE"]; node != "" {
			if names[node] {
				t.Errorf("two gateways have the name %s", node)
			}
			names[node] = true
			if shared := s.Environment["AGENT_GUARD_DSN"] + s.Environment["AGENT_GUARD_KEYS"] + s.Environment["UPSTREAM"]; common == "" {
				common = shared
			} else if shared != common {
				t.Errorf("%s differs from the others", node)
			}
		}
	}
	for _, address := range strings.Fields(compose.Services["front"].Environment["NODES"]) {
		name, _, _ := strings.Cut(address, ":")
		if !names[name] {
			t.Errorf("the load balancer leads to %s, which is no gateway", address)
		}
		delete(names, name)
	}
	if len(names) > 0 || common == "" {
		t.Errorf("gateways without calls: %v", names)
	}
}
