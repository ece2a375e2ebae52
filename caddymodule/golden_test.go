package caddymodule_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard"

	_ "github.com/agent-guard/caddy-agent-guard/caddymodule"
)

var update = flag.Bool("update", false, "write the expected parts of the golden files anew")

// The separators of golden files, which have the form of Caddy's own adapt tests. A
// file of errors holds several cases.
const (
	expectMark = "----------\n"
	caseMark   = "==========\n"
)

// adapt gives the indented JSON of a Caddyfile, or the error.
func adapt(t *testing.T, input string) (string, error) {
	t.Helper()
	// The default of a {$VARIABLE} is tested, too: this one is set.
	t.Setenv("AGENT_GUARD_TEST_DEADLINE", "45s")
	t.Setenv("AGENT_GUARD_TEST_KEY", base64.StdEncoding.EncodeToString(make([]byte, 32)))
	t.Setenv("AGENT_GUARD_TEST_SECRET", "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	t.Setenv("AGENT_GUARD_TEST_HOOK", "http://hooks.example.com/in")
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(input), nil)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, out, "", "\t"); err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	return b.String(), nil
}

// golden runs check on every case of the files, which returns what the case gives.
func golden(t *testing.T, pattern string, result func(t *testing.T, input string) string) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			cases := strings.Split(string(text), caseMark)
			for i, c := range cases {
				input, want, _ := strings.Cut(c, expectMark)
				got := result(t, input)
				if !*update && got != want {
					t.Errorf("case %d:\n%s\ngot:\n%s\nwant:\n%s", i+1, input, got, want)
				}
				cases[i] = input + expectMark + got
			}
			if !*update {
				return
			}
			if err := os.WriteFile(file, []byte(strings.Join(cases, caseMark)), 0o644); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// What a Caddyfile means, as JSON. Every adapted configuration also provisions.
func TestGoldenAdapt(t *testing.T) {
	golden(t, "testdata/adapt/*.caddyfiletest", func(t *testing.T, input string) string {
		out, err := adapt(t, input)
		if err != nil {
			t.Fatal(err)
		}
		validate(t, strings.ReplaceAll(out, "/var/lib", t.TempDir())) // in which not everybody may write
		return out
	})
}

// Every error names the option, what is wrong with the value, what would be right,
// and the line.
func TestGoldenErrors(t *testing.T) {
	golden(t, "testdata/errors/*.caddyfiletest", func(t *testing.T, input string) string {
		out, err := adapt(t, input)
		if err == nil {
			t.Fatalf("%s\nis accepted:\n%s", input, out)
		}
		return err.Error() + "\n"
	})
}

// What depends on files and variables of the machine is found when the configuration loads,
// and `caddy validate` loads it as far as this. The error names the place in the Caddyfile.
func TestGoldenLoadErrors(t *testing.T) {
	golden(t, "testdata/load/*.caddyfiletest", func(t *testing.T, input string) string {
		out, err := adapt(t, input)
		if err != nil {
			t.Fatal(err)
		}
		agents, err := os.ReadFile("testdata/agents.jwks")
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		t.Run("load", func(t *testing.T) {
			t.Chdir(dir)
			t.Setenv("XDG_DATA_HOME", filepath.Join(dir, "data"))
			for name, text := range map[string]string{
				"file": "", "agents.jwks": string(agents), "no.jwks": "keys", "empty.jwks": `{"keys": []}`, "no.key": "nothing of a key",
			} {
				if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err = provision(t, out)
		})
		if err == nil {
			t.Fatalf("%s\nis accepted", input)
		}
		// What stands before tells by which of the apps the module was loaded, of which Caddy
		// takes any one first.
		text := strings.ReplaceAll(err.Error(), dir, "DIR")
		if i := strings.LastIndex(text, "provision "); i > 0 {
			text = text[i:]
		}
		return text + "\n"
	})
}

// validate provisions a configuration as `caddy validate` does.
func validate(t *testing.T, config string) {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	if err := provision(t, config); err != nil {
		t.Error(err)
	}
}

func provision(t *testing.T, config string) error {
	t.Helper()
	var cfg caddy.Config
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		t.Fatal(err)
	}
	cfg.Admin = &caddy.AdminConfig{Disabled: true}
	return caddy.Validate(&cfg)
}
