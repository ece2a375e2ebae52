package table

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

// scene is the processes that are measured: every place has one of its own, so that
// nobody's heap is another's, and they are started when they are first needed.
type scene struct {
	dir      string
	env      []string
	upstream *proc.Proc
	gateways map[place]*gateway.Gateway
	caller   *caller
}

func newScene(o Options) (*scene, error) {
	dir, err := os.MkdirTemp(o.Dir, "agb")
	if err != nil {
		return nil, err
	}
	s := &scene{dir: dir, env: o.env(), gateways: map[place]*gateway.Gateway{}}
	if s.caller, err = newCaller(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if s.upstream, err = proc.Start(proc.Spec{Role: upstream.Role, Env: s.env}); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *scene) close() error {
	var all []error
	for _, g := range s.gateways {
		all = append(all, g.Proc().Stop())
	}
	if s.upstream != nil {
		s.upstream.Kill()
	}
	return errors.Join(append(all, os.RemoveAll(s.dir))...)
}

// site is what a gateway serves.
type site struct {
	// text are its directives: of the address of the upstream and what that answers.
	text string
	// guarded says that it has the guard and its store; ledger and trust are what
	// the guard is configured with.
	guarded, ledger, trust bool
}

var sites = map[place]site{
	bare:     {text: "reverse_proxy %[1]s"},
	static:   {text: "header Content-Type application/json\n\trespond `%[2]s`"},
	guarded:  {text: "agent_proxy %[1]s", guarded: true},
	async:    {text: "agent_proxy %[1]s {\n\t\tsettle async\n\t}", guarded: true},
	ledgered: {text: "agent_proxy %[1]s", guarded: true, ledger: true},
	trusting: {text: "agent_proxy %[1]s {\n\t\trequire_ect\n\t}", guarded: true, ledger: true, trust: true},
	sending: {
		text:    "agent_proxy %[1]s {\n\t\trequire_ect\n\t\tidentity spiffe://example.com/upstream\n\t}",
		guarded: true, ledger: true, trust: true,
	},
	noop:  {text: "route {\n\t\tbench_noop\n\t\treverse_proxy %[1]s\n\t}"},
	naive: {text: "route {\n\t\tbench_naive\n\t\treverse_proxy %[1]s\n\t}"},
}

// addr is where the place is served.
func (s *scene) addr(p place) (string, error) {
	g, err := s.gateway(p)
	if err != nil {
		return "", err
	}
	return g.Addr, nil
}

func (s *scene) gateway(p place) (*gateway.Gateway, error) {
	if g := s.gateways[p]; g != nil {
		return g, nil
	}
	site := sites[p]
	text := fmt.Sprintf(site.text+"%.0[1]s%.0[2]s", s.upstream.Word, upstream.Body)
	g, err := gateway.New(filepath.Join(s.dir, fmt.Sprint(len(s.gateways))), text, site.guarded)
	if err != nil {
		return nil, err
	}
	g.Env = s.env
	if g.Options, err = s.options(site); err != nil {
		return nil, err
	}
	if err := g.Start(); err != nil {
		return nil, err
	}
	s.gateways[p] = g
	return g, nil
}

// options are the options of the guard's app.
func (s *scene) options(of site) (string, error) {
	text := ""
	if of.ledger {
		text += "\t\tidentity " + gatewayIdentity + "\n"
	}
	if of.trust {
		path := filepath.Join(s.dir, "callers.jwks")
		if err := s.caller.publish(path); err != nil {
			return "", err
		}
		text += "\t\ttrust jwks_file " + path + "\n"
	}
	return text, nil
}
