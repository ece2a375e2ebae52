package caddymodule

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Whatever stands in the block, the parser does not panic, every error has its line,
// and what it accepts is also accepted as JSON.
func FuzzCaddyfile(f *testing.F) {
	files, err := filepath.Glob("testdata/*/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		f.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for c := range strings.SplitSeq(string(text), "==========\n") {
			_, block, _ := strings.Cut(c, "agent_guard {\n")
			block, _, _ = strings.Cut(block, "\n\t}\n")
			f.Add(block)
		}
	}
	f.Fuzz(func(t *testing.T, block string) {
		tokens, err := caddyfile.Tokenize([]byte("agent_guard {\n"+block+"\n}\n"), "Fuzzed")
		if err != nil {
			return
		}
		var h, again Handler
		if err := h.Read(caddyfile.NewDispenser(tokens)); err != nil {
			if !strings.Contains(err.Error(), ", at Fuzzed:") {
				t.Errorf("no place in: %v", err)
			}
			return
		}
		text, err := json.Marshal(&h)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatalf("%s\n%v", text, err)
		}
		again.setDefaults()
		if err := again.provisionIDs(); err != nil {
			t.Errorf("%s\n%v", text, err)
		}
		for _, a := range append(again.Actions, &Action{Action: guard.Action{Name: defaultAction}}) {
			a.policy().inherit(again.policy())
			if err := a.policy().check(); err != nil {
				t.Errorf("%s\naction %s: %v", text, a.Name, err)
			}
			if a.Answers.Probe != nil {
				if err := a.Answers.Probe.provision(); err != nil {
					t.Errorf("%s\naction %s: %v", text, a.Name, err)
				}
			}
		}
		if err := again.Validate(); err != nil {
			t.Errorf("%s\n%v", text, err)
		}
	})
}
