package caddymodule

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// nodesEvery is how often a gateway looks at the others that share its store. What it says of itself is
// read by them within as long.
const nodesEvery = 5 * time.Second

// nodes is what an engine knows of the gateways that share its store (ADR 0135).
type nodes struct {
	engine *engine
	shared *fleet.Fleet // nil where one gateway has the store
	last   atomic.Pointer[nodeReport]
}

// nodeReport is the state of a fleet at one moment.
type nodeReport struct {
	// Name is this gateway's.
	Name string
	// Members is the number of gateways, with this one, and Differing that of others with another configuration.
	Members, Differing int
	// SeenAge is how long ago the one was heard of that has been silent the longest, by the store's clock.
	SeenAge time.Duration
}

// start begins to describe this gateway to the others, and to look at them, until the engine is closed.
func (n *nodes) start() {
	if n.shared = fleet.Of(n.engine.calls.Store); n.shared == nil {
		return
	}
	n.describe()
	var seen differing
	n.engine.watch.ends = append(n.engine.watch.ends, fleet.Every(nodesEvery, func(context.Context) {
		n.describe()
		seen = n.compare(seen)
	}).Start())
}

// describe sets what the other gateways read of this one: soon where its configuration or its keys have changed, and
// the rest with its next heartbeat.
func (n *nodes) describe() {
	if n.shared != nil {
		n.shared.Describe(n.about())
	}
}

func (n *nodes) about() store.About {
	e := n.engine
	about := store.About{Version: version(), SealingKeys: e.keys.Ring.KeyIDs(), Open: e.calls.Executions.Running()}
	if ev := e.ledger.open.Load(); ev != nil {
		about.LogSize = ev.Log().Head().Size
	}
	if a := e.activeConfigs.latest(); a != nil {
		about.Configuration = a.agreement(e.keys.Ring)
	}
	return about
}

// differing are the options in which others differ, by node, and those of which the log has a line.
type differing struct{ found, logged map[string]string }

// compare looks at the other gateways, and logs differences that are there at two looks: while one configuration
// after the other is loaded, they are no fault.
func (n *nodes) compare(before differing) differing {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	list, err := n.list(ctx)
	if err != nil {
		n.last.Store(nil)
		return before
	}
	logger := n.engine.logger
	now := differing{map[string]string{}, map[string]string{}}
	report := nodeReport{Members: len(list)}
	for i := range list {
		one := &list[i]
		report.SeenAge = max(report.SeenAge, time.Duration(one.SeenAge*float64(time.Second)))
		if one.This {
			report.Name = one.Node
		}
		if len(one.Differs) > 0 {
			report.Differing++
			now.found[one.Node] = strings.Join(one.Differs, ", ")
		}
	}
	n.last.Store(&report)
	for node, options := range now.found {
		logged := before.logged[node]
		if logged != options && before.found[node] == options {
			logger.Warn("another gateway over the store has another configuration: the same call may be judged differently there",
				zap.String("node", node), zap.String("options", options))
			logged = options
		}
		now.logged[node] = logged
	}
	for node, logged := range before.logged {
		if now.found[node] == "" && logged != "" {
			logger.Info("the other gateway over the store has the same configuration again, or is gone", zap.String("node", node))
		}
	}
	return now
}

// list returns the gateways that have the store open, by name. A store that is not shared has this one.
func (n *nodes) list(ctx context.Context) ([]admin.Node, error) {
	e := n.engine
	now, err := e.calls.Store.Now(ctx)
	if err != nil {
		return nil, err
	}
	mine := n.about()
	if n.shared == nil {
		self := store.Member{Node: e.calls.Executions.Node(), Boot: e.calls.Executions.Boot(), Joined: e.watch.opened, Seen: now, About: mine}
		return []admin.Node{n.show(&self, &mine, now)}, nil
	}
	members, err := n.shared.Members(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]admin.Node, len(members))
	for i := range members {
		list[i] = n.show(&members[i], &mine, now)
	}
	return list, nil
}

func (n *nodes) show(m *store.Member, mine *store.About, now time.Time) admin.Node {
	this := m.Boot == n.engine.calls.Executions.Boot()
	if this {
		m.About = *mine // newer than what is stored
	}
	return admin.Node{
		Node: m.Node, Boot: m.Boot, This: this, Version: m.Version, Joined: m.Joined.UTC(), Seen: m.Seen.UTC(),
		SeenAge: max(0, now.Sub(m.Seen)).Seconds(), Open: m.Open, LogSize: m.LogSize,
		SealingKeys: append([]uint32{}, m.SealingKeys...), Differs: differences(mine.Configuration, m.Configuration),
	}
}

// Nodes implements admin.Store.
func (b storeView) Nodes(ctx context.Context) ([]admin.Node, error) { return b.e.nodes.list(ctx) }

// ownOptions are the options that each gateway may have its own way: they say where its files, its store and its
// upstreams are, and how much it does at a time. All others have to be the same at all gateways over a store.
var ownOptions = map[string][]string{
	"app":      {"store", "key", "key_file", "drain", "body_memory", placeMember},
	"identity": {"key_file"},
	"guard":    {"name", "upstream", "fallback", "bulkhead", "idle_timeout", placeMember},
}

const (
	// guardOption begins the name of the hash of a guard, and optionOf stands between it and the name of an option.
	guardOption, optionOf = "guard ", ": "
	// mostDetailed is the number of guards up to which each of their options has a hash of its own.
	mostDetailed = 32
)

// agreement has a hash of each option that has to be the same at all gateways over a store, as it is written, by its
// name. Who does not have the store's key ring learns nothing from it.
func (a *App) agreement(sealer store.Sealer) map[string]string {
	a.agreedOnce.Do(func() {
		a.agreed = map[string]string{}
		hash := func(name string, written any) {
			text, _ := json.Marshal(written) // of what JSON was read into
			sum := store.Index(sealer, "configuration", name, string(text))
			a.agreed[name] = hex.EncodeToString(sum[:6])
		}
		for name, option := range shared(written(a), ownOptions["app"]) {
			members, block := option.(map[string]any)
			if !block {
				hash(name, option)
			}
			for member, value := range shared(members, ownOptions[name]) {
				hash(name+"."+member, value)
			}
		}
		delete(a.agreed, "plans") // the names of the files
		for name, plan := range a.plans {
			hash("plan "+name, plan.Version())
		}
		guards := map[string][]map[string]any{}
		for _, h := range a.guards.list() {
			guards[h.Name] = append(guards[h.Name], shared(written(json.RawMessage(h.written)), ownOptions["guard"]))
		}
		for name, all := range guards {
			options := map[string][]string{} // of all guards of the name, in any order
			for _, members := range all {
				for member, value := range members {
					text, _ := json.Marshal(value)
					options[member] = append(options[member], string(text))
				}
			}
			for member, values := range options {
				slices.Sort(values)
				if len(guards) <= mostDetailed {
					hash(guardOption+name+optionOf+member, values)
				}
			}
			hash(guardOption+name, options)
		}
	})
	return a.agreed
}

// written is a configuration as JSON has it; nil if it is none.
func written(configuration any) (members map[string]any) {
	text, err := json.Marshal(configuration)
	if err == nil {
		err = json.Unmarshal(text, &members)
	}
	if err != nil {
		return nil
	}
	return members
}

// shared are the members without those that a gateway may have its own way.
func shared(members map[string]any, own []string) map[string]any {
	maps.DeleteFunc(members, func(name string, _ any) bool { return slices.Contains(own, name) })
	return members
}

// differences are the names of the options in which two configurations differ, sorted; none if one of them is not
// known. A guard that both have is named by its options.
func differences(mine, theirs map[string]string) []string {
	differ := []string{}
	if mine == nil || theirs == nil {
		return differ
	}
	detailed := func(all map[string]string) bool {
		for name := range all {
			if strings.HasPrefix(name, guardOption) && strings.Contains(name, optionOf) {
				return true
			}
		}
		return false
	}
	details := detailed(mine) && detailed(theirs)
	all := maps.Clone(mine)
	maps.Copy(all, theirs)
	for name := range all {
		if mine[name] == theirs[name] {
			continue
		}
		whole, _, option := strings.Cut(name, optionOf)
		both := strings.HasPrefix(name, guardOption) && mine[whole] != "" && theirs[whole] != ""
		if option == (both && details) || !strings.HasPrefix(name, guardOption) {
			differ = append(differ, name)
		}
	}
	slices.Sort(differ)
	return differ
}
