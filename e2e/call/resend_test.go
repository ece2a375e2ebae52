package call

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: Caddy sends a POST again over fastcgi if it is told to, and no trace of the
// request can stop it. Such a configuration does not start.
func TestResendsThatNothingCanStopAreRefused(t *testing.T) {
	const retried = "lb_retries 2\nlb_retry_match method POST\n"
	for _, row := range []struct {
		name, site, refused string
	}{
		{"fastcgi", "agent_guard\nreverse_proxy localhost:1 {\n" + retried + "transport fastcgi\n}", "the transport fastcgi"},
		{"in a route of its own", "agent_guard\nhandle /x* {\nroute {\nreverse_proxy localhost:1 {\n" + retried + "transport fastcgi\n}\n}\n}", "the transport fastcgi"},
		{"invoked", "agent_guard\ninvoke far", "the transport fastcgi"},
		{"declared GET", "agent_guard {\nconsequential path /run\n}\nreverse_proxy localhost:1 {\nlb_retries 2\ntransport fastcgi\n}", "the transport fastcgi"},
		{"http", "agent_guard\nreverse_proxy localhost:1 {\n" + retried + "}", ""},
		{"ours", "agent_proxy localhost:1 {\n" + retried + "}", ""},
		{"dial errors only", "agent_guard\nreverse_proxy localhost:1 {\nlb_retries 2\ntransport fastcgi\n}", ""},
		{"not guarded", "reverse_proxy localhost:1 {\n" + retried + "transport fastcgi\n}", ""},
		{"before the guard", "route {\nreverse_proxy /static* localhost:1 {\n" + retried + "transport fastcgi\n}\nagent_guard\nrespond ok\n}", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := t.TempDir()
			config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(fmt.Appendf(nil, `{
	admin off
	persist_config off
	auto_https off
	storage file_system %q
	default_bind 127.0.0.1
	agent_guard {
		store badger %s
	}
}
&(far) {
	reverse_proxy localhost:1 {
		lb_retries 2
		lb_retry_match method POST
		transport fastcgi
	}
}
http://%s {
	%s
}
`, dir, filepath.Join(dir, "store"), harness.FreeAddress(t), row.site), nil)
			if err != nil {
				t.Fatal(err)
			}
			err = caddy.Load(config, true)
			t.Cleanup(func() {
				if err := caddy.Stop(); err != nil {
					t.Error(err)
				}
			})
			switch {
			case row.refused == "" && err != nil:
				t.Errorf("refused: %v", err)
			case row.refused != "" && (err == nil || !strings.Contains(err.Error(), row.refused) ||
				!strings.Contains(err.Error(), "lb_retry_match")):
				t.Errorf("error %v, want one about %s", err, row.refused)
			}
		})
	}
}
