package caddymodule_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

// withHandlers is a configuration whose one route has these handlers.
func withHandlers(handlers string) string {
	return fmt.Sprintf(`{"apps": {"http": {"servers": {"s": {"listen": ["127.0.0.1:0"], "routes": [{"handle": [%s]}]}}}}}`, handlers)
}

// withHandler is a configuration whose one route begins with this agent_guard.
func withHandler(members string) string {
	if members != "" {
		members = ", " + members
	}
	return withHandlers(fmt.Sprintf(`{"handler": "agent_guard"%s}, {"handler": "static_response"}`, members))
}

func withEndpoints(members string) string {
	return withHandlers(`{"handler": "agent_guard_endpoints", ` + members + `}`)
}

func withTransport(members string) string {
	return withHandlers(`{"handler": "reverse_proxy", "transport": {"protocol": "agent_guard", ` + members + `}}`)
}

func withApp(members string) string { return fmt.Sprintf(`{"apps": {"agent_guard": {%s}}}`, members) }

// Errors of JSON name the option, what is wrong, and what would be right.
func TestBadJSONIsRefused(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	upstream := `"upstream": [{"handler": "static_response"}]`
	probe := func(members string) string {
		return upstream + `, "on_unknown": "probe", "probe": {` + members + `}`
	}
	action := func(members string) string { return `"actions": [{"name": "pay", ` + members + `}]` }
	for name, c := range map[string]struct{ config, want string }{
		"unknown option":            {withHandler(`"frobnicate": 1`), `json: unknown field "frobnicate"`},
		"unknown option of action":  {withHandler(action(`"frobnicate": 1`)), `json: unknown field "frobnicate"`},
		"deadline":                  {withHandler(`"deadline": -1000000000`), `deadline: -1s is negative; it must be positive`},
		"deadline as text":          {withHandler(`"deadline": "soon"`), `agent_guard: deadline: time: invalid duration "soon"`},
		"deadline of no type":       {withHandler(`"deadline": true`), `agent_guard: deadline: it must be a duration like "30s", not bool`},
		"deadline of action":        {withHandler(`"actions": [{"name": "pay"}, {"name": "send", "deadline": []}]`), `agent_guard: actions/1/deadline: it must be a duration like "30s", not array`},
		"max_body as text":          {withHandler(`"name": "a", "max_body": "1MiB"`), `agent_guard: max_body: it must be a whole number, not string`},
		"endpoints' role":           {withEndpoints(`"roles": {"payer": "alice"}`), `agent_guard_endpoints: roles/payer: it must be an array, not string`},
		"breaker's window":          {withTransport(`"breaker": {"threshold": 0.5, "window": true}`), `transport.agent_guard: breaker/window: it must be a duration like "30s", not bool`},
		"breaker's in_band":         {withTransport(`"breaker": {"in_band": [{"sse_error": 1}]}`), `transport.agent_guard: breaker/in_band/0/sse_error: it must be true or false, not number`},
		"number of app":             {withApp(`"quota": {"open_executions": 1.5}`), `agent_guard: quota/open_executions: it must be a whole number, not number 1.5`},
		"store's path":              {withApp(`"store": {"module": "badger", "path": {}}`), `agent_guard.stores.badger: path: it must be a string, not object`},
		"store's lease":             {withApp(`"store": {"module": "postgres", "lease": {}}`), `agent_guard.stores.postgres: lease: it must be a duration like "30s", not object`},
		"retain_result":             {withHandler(`"retain_result": -1`), `retain_result: -1ns is negative; it must be positive`},
		"retain_key":                {withHandler(`"retain_key": "50000d"`), `retain_key: 1200000h0m0s is too long; it must be at most 36500d`},
		"retain_key of action":      {withHandler(action(`"retain_key": "1h"`)), `action pay: retain_key: 1h0m0s is shorter than retain_result, which is 24h0m0s; a result cannot outlive its key`},
		"max_result":                {withHandler(`"max_result": -1`), `max_result: -1 bytes is negative; it must be positive`},
		"preset":                    {withHandler(`"preset": "paypal"`), `preset: "paypal" is unknown; use default, stripe, acp or strict`},
		"grpc":                      {withHandler(`"grpc": "stream"`), `grpc: "stream" is unknown; use unary`},
		"on_unknown":                {withHandler(`"on_unknown": "ask"`), `on_unknown: "ask" is unknown; use block, probe, resend or retry`},
		"outcome":                   {withHandler(`"outcomes": [{"outcome": "maybe", "match": {"status_code": [404]}}]`), `outcomes: rule 1: "maybe" is no outcome; use completed, released or in_doubt`},
		"outcome of everything":     {withHandler(`"outcomes": [{"outcome": "completed", "match": {"status_code": [404]}}, {"outcome": "released"}]`), `outcomes: rule 2: it would match every answer; name a status or a header`},
		"outcome's status":          {withHandler(`"outcomes": [{"outcome": "completed", "match": {"status_code": [600]}}]`), `outcomes: rule 1: 600 is no final status; use 200 to 599, or a class from 2 to 5`},
		"outcome's class":           {withHandler(`"outcomes": [{"outcome": "completed", "match": {"status_code": [1]}}]`), `outcomes: rule 1: 1 is no final status; use 200 to 599, or a class from 2 to 5`},
		"outcome's header":          {withHandler(`"outcomes": [{"outcome": "completed", "match": {"headers": {"X Y": ["z"]}}}]`), `outcomes: rule 1: "X Y" is no name of a header field`},
		"missing_id":                {withHandler(`"missing_id": "invent"`), `missing_id: "invent" is unknown; use require, mint, derive or recognize`},
		"exempt_tools":              {withHandler(`"protocol": "mcp", "exempt_tools": ["get", "get"]`), `exempt_tools: the tool "get" is empty or named twice; name each tool once`},
		"consequential_tools":       {withHandler(`"protocol": "mcp", "consequential_tools": [""]`), `consequential_tools: the tool "" is empty or named twice; name each tool once`},
		"derive_window":             {withHandler(`"missing_id": "derive", "derive_window": -1`), `derive_window: -1ns is negative; it must be positive`},
		"attach_wait":               {withHandler(`"attach_wait": -1`), `attach_wait: -1ns is negative; it must be positive`},
		"max_body":                  {withHandler(`"max_body": -1`), `max_body: -1 bytes is negative; it must be positive`},
		"endpoints":                 {withHandler(`"endpoints": "on"`), `endpoints: "on" is unknown; use off`},
		"caller":                    {withHandler(`"caller": "everybody"`), `caller: "everybody" has no placeholder and is the same for every request; write one like {http.auth.user.id}`},
		"credentials":               {withHandler(`"credentials": ["X Y"]`), `credentials: "X Y" is no name of a header field`},
		"execution_id of nothing":   {withHandler(`"execution_id": [{"header": "A"}, {}]`), `execution_id: source 2: it names 0 places; it needs exactly one of header, placeholder and json`},
		"execution_id of two":       {withHandler(`"execution_id": [{"header": "A", "json": "/id"}]`), `execution_id: source 1: it names 2 places; it needs exactly one of header, placeholder and json`},
		"execution_id's pointer":    {withHandler(`"execution_id": [{"json": "id"}]`), `execution_id: source 1: JSON pointer "id" must be empty or begin with '/'`},
		"execution_id's constant":   {withHandler(`"execution_id": [{"placeholder": "id"}]`), `execution_id: source 1: "id" has no placeholder and is the same for every request`},
		"fingerprint_exclude":       {withHandler(`"fingerprint_exclude": ["time"]`), `fingerprint_exclude: JSON pointer "time" must be empty or begin with '/'`},
		"fingerprint_exclude of it": {withHandler(`"fingerprint_exclude": [""]`), `fingerprint_exclude: an empty JSON pointer is the whole body; name a member of it`},
		"compare of the caller":     {withHandler(`"compare": ["x-api-key"]`), `compare: X-Api-Key names the caller, and a caller's calls are compared with his own only; leave it out`},
		"compare and ignore":        {withHandler(`"compare": ["X-A"], "ignore": ["x-a"]`), `ignore: X-A stands both in ` + "`compare` and in `ignore`" + `; leave it out of one of them`},
		"exempt of everything":      {withHandler(`"exempt": [{"path": ["/a"]}, {}]`), `exempt: matcher set 2 is empty and would match every call; name a matcher, or leave the set out`},
		"unknown matcher":           {withHandler(`"consequential": [{"nosuch": {}}]`), `unknown module: http.matchers.nosuch`},
		"match of nothing":          {withHandler(action(`"match": [{}]`)), `action pay: match: matcher set 1 is empty and would match every call; name a matcher, or leave the set out`},
		"bad matcher":               {withHandler(action(`"match": [{"path_regexp": {"pattern": "["}}]`)), `action pay: match: `},
		"action without name":       {withHandler(`"actions": [{}]`), `actions: action 1: an action has no name; give it one`},
		"action called default":     {withHandler(`"actions": [{"name": "default"}]`), `actions: action 1: "default" is the name of what no action matches; choose another`},
		"actions of one name":       {withHandler(`"actions": [{"name": "a", "tools": ["a"]}, {"name": "b", "tools": ["b"]}, {"name": "a"}]`), `actions: action 3: two actions are called "a"; give each a name of its own`},
		"no action":                 {withHandler(`"actions": [null]`), `actions: action 1 is null; leave it out`},
		"unknown upstream":          {withHandler(`"upstream": [{"handler": "nosuch"}]`), `upstream: `},
		"probe of a task":           {withHandler(`"protocol": "jsonrpc", ` + probe(`"task": true`)), "on_unknown: tasks are of MCP and A2A, and `probe task` needs `protocol mcp`, `a2a` or `auto`"},
		"probe of task and URI":     {withHandler(`"protocol": "mcp", ` + probe(`"task": true, "uri": "/a"`)), "probe: a task is asked for with tasks/get"},
		"probe without upstream":    {withHandler(`"on_unknown": "probe", "probe": {"uri": "/a", "applied": {"status_code": [200]}}`), "on_unknown: probe needs an `upstream`"},
		"on_unknown without probe":  {withHandler(`"on_unknown": "probe", ` + upstream), "on_unknown: probe needs a `probe` with the status URL to ask"},
		"probe without on_unknown":  {withHandler(action(`"probe": {"uri": "/a"}`)), `action pay: probe: it is never asked, as on_unknown is block; set on_unknown to probe`},
		"probe's URI":               {withHandler(probe(`"uri": "http://elsewhere/", "applied": {"status_code": [200]}`)), `probe: URI "http://elsewhere/" must begin with a slash`},
		"probe's method":            {withHandler(probe(`"method": "get", "uri": "/a", "applied": {"status_code": [200]}`)), `probe: "get" is no method; write one in capital letters, like GET`},
		"probe's header":            {withHandler(probe(`"header": {"X Y": "z"}, "uri": "/a", "applied": {"status_code": [200]}`)), `probe: header: "X Y" is no name of a header field`},
		"probe's timeout":           {withHandler(probe(`"timeout": -1, "uri": "/a", "applied": {"status_code": [200]}`)), `probe: timeout: -1ns is negative; it must be positive`},
		"probe without evidence":    {withHandler(probe(`"uri": "/a"`)), `probe: neither applied nor not_applied is set`},
		"evidence of everything":    {withHandler(probe(`"uri": "/a", "applied": {}`)), `probe: applied: it names no status, header or json, and would match every answer`},
		"evidence's status":         {withHandler(probe(`"uri": "/a", "not_applied": {"status_code": [0]}`)), `probe: not_applied: 0 is no final status`},
		"evidence's pointer":        {withHandler(probe(`"uri": "/a", "applied": {"json": {"state": "done"}}`)), `probe: applied: json "state": JSON pointer "state" must be empty or begin with '/'`},
		"unknown option of the app": {withApp(`"frobnicate": 1`), `json: unknown field "frobnicate"`},
		"unknown store":             {withApp(`"store": {"module": "nosuch"}`), `agent_guard: loading the store: `},
		"no store":                  {withApp(`"store": {}`), `agent_guard: loading the store: `},
		"unknown option of store":   {withApp(`"store": {"module": "badger", "compact": true}`), `json: unknown field "compact"`},
		"store in an unset place":   {withApp(`"store": {"module": "badger", "path": "{env.AGENT_GUARD_TEST_UNSET}/store"}`), `badger: path "{env.AGENT_GUARD_TEST_UNSET}/store": evaluated placeholder {env.AGENT_GUARD_TEST_UNSET} is empty`},
		"two keys":                  {withApp(`"key": "a", "key_file": "b"`), `agent_guard: keys: give either a file or a value, not both`},
		"an unset key":              {withApp(`"key": "{env.AGENT_GUARD_TEST_UNSET}"`), `agent_guard: keys: value: evaluated placeholder {env.AGENT_GUARD_TEST_UNSET} is empty`},
		"an unknown key":            {withApp(`"key": "{nosuch.placeholder}"`), `agent_guard: keys: value: unrecognized placeholder {nosuch.placeholder}`},
		"a key that is none":        {withApp(`"key": "short"`), `agent_guard: keys: value: seal: the key is neither`},
		"a key file nowhere":        {withApp(`"key_file": "{env.AGENT_GUARD_TEST_UNSET}/key"`), `agent_guard: keys: file "{env.AGENT_GUARD_TEST_UNSET}/key": evaluated placeholder {env.AGENT_GUARD_TEST_UNSET} is empty`},
		"drain":                     {withApp(`"drain": -1`), `agent_guard: drain: -1ns is negative; it must be positive`},
		"quota's number":            {withApp(`"quota": {"open_executions": -1}`), `agent_guard: quota: open_executions: -1 is negative; it must be positive`},
		"quota's size":              {withApp(`"quota": {"stored_bytes": -1}`), `agent_guard: quota: stored_bytes: -1 bytes is negative; it must be positive`},
	} {
		t.Run(name, func(t *testing.T) {
			err := provision(t, c.config)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got  %v\nwant ...%s", err, c.want)
			}
		})
	}
}

// P4's other side: `caddy validate` works beside a running
// server, so that loading a configuration opens and makes nothing. A handler works
// without any configuration of the app.
func TestProvisionOpensNothing(t *testing.T) {
	home := t.TempDir()
	t.Setenv("XDG_DATA_HOME", home)
	for name, config := range map[string]string{
		"no app": withHandler(""),
		"an app": withApp(""),
		"a store of its own": fmt.Sprintf(`{"apps": {"agent_guard": {"store": {"module": "badger", "path": %q}, "key_file": %q}}}`,
			filepath.Join(home, "store"), filepath.Join(home, "key")),
		"an error after the app": withHandler(`"preset": "never"`),
	} {
		t.Run(name, func(t *testing.T) {
			if err := provision(t, config); (err != nil) != strings.Contains(name, "error") {
				t.Fatal(err)
			}
			err := filepath.WalkDir(home, func(path string, entry fs.DirEntry, err error) error {
				if err == nil && path != home {
					t.Errorf("%s was made", path)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// An empty list in JSON is a default, not "no credential field at all" (P3).
func TestDefaults(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	for name, raw := range map[string]string{
		"nothing said": `{}`,
		"empty lists":  `{"credentials": [], "execution_id": [], "outcomes": [], "actions": [], "exempt": [], "consequential": []}`,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}})
			if err != nil {
				t.Fatal(err)
			}
			mod, err := ctx.LoadModuleByID("http.handlers.agent_guard", json.RawMessage(raw))
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.Marshal(mod)
			if err != nil {
				t.Fatal(err)
			}
			want := `{"name":"default","missing_id":"recognize",` +
				`"derive_window":60000000000,"recognize_window":600000000000,"error_window":60000000000,"protocol":"auto","max_body":33554432,"attach_wait":30000000000,"idle_timeout":600000000000,` +
				`"unguarded_streams":"pass","deadline":300000000000,"retain_result":86400000000000,"retain_key":2592000000000000,"max_result":8388608,"preset":"default",` +
				`"resend_for":82800000000000,"keys":"trusted",` +
				`"undo_auth":"config","on_snapshot_error":"refuse","on_lost":"resend","on_changed":"escalate",` +
				`"checkpoint_ttl":86400000000000}`
			if string(got) != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

// The manual names every option that the Caddyfile has.
func TestManualListsEveryOption(t *testing.T) {
	var manual []byte
	for _, page := range []string{"../docs/caddyfile.md", "../docs/rollback.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		manual = append(manual, text...)
	}
	for block, names := range caddymodule.OptionNames() {
		if len(names) == 0 {
			t.Errorf("%s has no options", block)
		}
		for _, name := range names {
			if !strings.Contains(string(manual), "`"+name+"`") {
				t.Errorf("the manual does not name the option `%s` of %s", name, block)
			}
		}
	}
}

// The comments that explain the syntax have a line for every option.
func TestSyntaxCommentsListEveryOption(t *testing.T) {
	var comments strings.Builder
	for _, file := range []string{"caddyfile.go", "caddyfile_guard.go", "store.go", "postgres.go", "trust.go", "policy.go", "rollback.go", "hitl.go", "identity.go", "cascades.go"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if syntax, ok := strings.CutPrefix(line, "//\t"); ok {
				comments.WriteString(strings.TrimSpace(syntax) + " \n")
			}
		}
	}
	for block, names := range caddymodule.OptionNames() {
		for _, name := range names {
			if !strings.Contains(comments.String(), "\n"+name+" ") {
				t.Errorf("no line for the option %s of %s", name, block)
			}
		}
	}
}
