package caddymodule

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// configured is an app with these members and guards, as they are after loading.
func configured(t *testing.T, members string, guards ...string) *App {
	t.Helper()
	a := new(App)
	if err := json.Unmarshal([]byte(members), a); err != nil {
		t.Fatal(err)
	}
	for _, text := range guards {
		h := &Handler{written: text}
		if err := json.Unmarshal([]byte(text), h); err != nil {
			t.Fatal(err)
		}
		a.guards.all = append(a.guards.all, h)
	}
	return a
}

// ADR 0135: options that change what a call means are compared, each under its name; where files, stores and upstreams
// are, and how much is done at a time, is each gateway's own.
func TestConfigurationsThatDiffer(t *testing.T) {
	const pay = `{"name": "pay", "max_body": 1024, "retain_key": 60, "upstream": [{"handler": "a"}], "bulkhead": {"total": 5}}`
	ring := seal.Generate()
	base := configured(t, `{"quota": {"open_executions": 5}, "drain": 7}`, pay).agreement(ring)
	for name, c := range map[string]struct {
		members string
		guards  []string
		want    []string
	}{
		"nothing":                   {`{"quota": {"open_executions": 5}, "drain": 7}`, []string{pay}, nil},
		"what is each one's own":    {`{"quota": {"open_executions": 5}, "drain": 8, "key": "k", "body_memory": 1, "store": {"module": "x"}}`, []string{`{"name": "pay", "max_body": 1024, "retain_key": 60, "upstream": [{"handler": "b"}], "written_at": "Caddyfile:7"}`}, nil},
		"an option":                 {`{"quota": {"open_executions": 6}}`, []string{pay}, []string{"quota.open_executions"}},
		"one that the other lacks":  {`{}`, []string{pay}, []string{"quota.open_executions"}},
		"a block":                   {`{"quota": {"open_executions": 5}, "identity": {"name": "spiffe://a/b", "key_file": "x"}}`, []string{pay}, []string{"identity.name"}},
		"an option of a guard":      {`{"quota": {"open_executions": 5}}`, []string{`{"name": "pay", "max_body": 1024, "retain_key": 61}`}, []string{"guard pay: retain_key"}},
		"a guard more, of the name": {`{"quota": {"open_executions": 5}}`, []string{pay, `{"name": "pay", "max_body": 1024}`}, []string{"guard pay: max_body"}},
		"another guard":             {`{"quota": {"open_executions": 5}}`, []string{pay, `{"name": "mail", "max_body": 1}`}, []string{"guard mail"}},
		"no guard":                  {`{"quota": {"open_executions": 5}}`, nil, []string{"guard pay"}},
	} {
		other := configured(t, c.members, c.guards...).agreement(ring)
		for _, got := range [][]string{differences(base, other), differences(other, base)} {
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: %q, want %q", name, got, c.want)
			}
		}
	}
	if got := differences(base, nil); len(got) != 0 {
		t.Errorf("from what is not known: %q", got)
	}
	// P8: who reads the database cannot try values.
	if other := configured(t, `{"quota": {"open_executions": 5}}`).agreement(seal.Generate()); other["quota.open_executions"] == base["quota.open_executions"] {
		t.Error("the hash does not depend on the key")
	}
}

// With many guards each has one hash, and a difference is named by the guard.
func TestConfigurationsOfManyGuards(t *testing.T) {
	var guards []string
	for i := range mostDetailed {
		guards = append(guards, fmt.Sprintf(`{"name": "g%02d", "max_body": 1}`, i))
	}
	ring := seal.Generate()
	few := configured(t, `{}`, guards...).agreement(ring)
	many := configured(t, `{}`, append(guards, `{"name": "more", "max_body": 1}`)...).agreement(ring)
	if got := differences(few, many); !slices.Equal(got, []string{"guard more"}) {
		t.Errorf("%q", got)
	}
	guards[0] = `{"name": "g00", "max_body": 2}`
	if got := differences(configured(t, `{}`, guards...).agreement(ring), few); !slices.Equal(got, []string{"guard g00: max_body"}) {
		t.Errorf("%q", got)
	}
	other := configured(t, `{}`, append(guards, `{"name": "more", "max_body": 1}`)...).agreement(ring)
	if got := differences(other, many); !slices.Equal(got, []string{"guard g00"}) || len(many) != mostDetailed+1 {
		t.Errorf("%q of %d", got, len(many))
	}
}

// ADR 0135: a gateway describes itself to the others, sees them, and says once in its log, when it has seen it twice,
// in which options another one differs.
func TestNodesSeeEachOther(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	a, b := st.Join("a"), st.Join("b")
	g, _, err := execution.Open(t.Context(), a, ring)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = g.Close(context.Background()) }()
	core, log := observer.New(zapcore.InfoLevel)
	app := configured(t, `{"quota": {"open_executions": 5}, "workflow_idle": 7}`)
	app.ctx, _ = caddy.NewContext(caddy.Context{Context: t.Context()})
	e := &engine{calls: &guard.Engine{Store: a, Executions: g}, keys: &gateway.Keys{Ring: ring}, logger: zap.New(core)}
	e.nodes.engine, e.nodes.shared = e, fleet.Of(a)
	e.activeConfigs.join(app)
	e.nodes.describe()
	other := configured(t, `{"quota": {"open_executions": 6}}`).agreement(ring)
	b.Describe(store.About{Version: "v2", Open: 3, LogSize: 9, SealingKeys: []uint32{1}, Configuration: other})

	all, err := e.nodes.list(t.Context())
	if err != nil || len(all) != 2 || !all[0].This || all[1].This || all[0].Node != "a" || all[1].Node != "b" || all[1].Boot != b.Self().Boot ||
		all[1].Version != "v2" || all[1].Open != 3 || all[1].LogSize != 9 || !slices.Equal(all[0].SealingKeys, ring.KeyIDs()) ||
		len(all[0].Differs) != 0 || !slices.Equal(all[1].Differs, []string{"quota.open_executions", "workflow_idle"}) {
		t.Fatalf("%+v, %v", all, err)
	}
	if self := a.Self(); self.Configuration["quota.open_executions"] == "" || self.Version == "" {
		t.Errorf("it says %+v of itself", self)
	}
	looks := func(n int) []observer.LoggedEntry {
		var seen differing
		for range n {
			seen = e.nodes.compare(seen)
		}
		return log.TakeAll()
	}
	if said := looks(1); len(said) != 0 {
		t.Errorf("at the first look: %+v", said)
	}
	said := looks(4)
	if len(said) != 1 || said[0].ContextMap()["node"] != "b" || said[0].ContextMap()["options"] != "quota.open_executions, workflow_idle" {
		t.Errorf("%+v", said)
	}
	if r := e.nodes.last.Load(); r == nil || r.Name != "a" || r.Members != 2 || r.Differing != 1 {
		t.Errorf("%+v", r)
	}
	var seen differing
	for range 2 {
		seen = e.nodes.compare(seen)
	}
	b.Describe(store.About{Configuration: app.agreement(ring)})
	seen = e.nodes.compare(seen)
	if said := log.TakeAll(); len(said) != 2 || said[1].Level != zapcore.InfoLevel || e.nodes.last.Load().Differing != 0 {
		t.Errorf("once they are the same: %+v", said)
	}
	b.Remove()
	e.nodes.compare(seen)
	if r := e.nodes.last.Load(); r.Members != 1 || len(log.TakeAll()) != 0 {
		t.Errorf("once the other is gone: %+v", r)
	}
}
