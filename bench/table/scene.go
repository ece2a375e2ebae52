package table

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/peer"
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
	others   map[place]*proc.Proc
}

func newScene(o Options) (*scene, error) {
	dir, err := os.MkdirTemp(o.Dir, "agb")
	if err != nil {
		return nil, err
	}
	s := &scene{dir: dir, env: o.env(), gateways: map[place]*gateway.Gateway{}, others: map[place]*proc.Proc{}}
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
	for _, p := range s.others {
		p.Kill() // it has nothing to lose
	}
	if s.upstream != nil {
		s.upstream.Kill()
	}
	return errors.Join(append(all, os.RemoveAll(s.dir))...)
}

// sites are the gateways' sites. %[1]s is the upstream's address.
var sites = map[place]string{
	bare:    "reverse_proxy %[1]s",
	static:  "header Content-Type application/json\n\trespond `%[2]s`",
	guarded: "agent_proxy %[1]s",
	async:   "agent_proxy %[1]s {\n\t\tsettle async\n\t}",
	noop:    "route {\n\t\tbench_noop\n\t\treverse_proxy %[1]s\n\t}",
	naive:   "route {\n\t\tbench_naive\n\t\treverse_proxy %[1]s\n\t}",
}

// addr is where the place is served.
func (s *scene) addr(p place) (string, error) {
	if _, ok := sites[p]; ok {
		g, err := s.gateway(p)
		if err != nil {
			return "", err
		}
		return g.Addr, nil
	}
	if other := s.others[p]; other != nil {
		return other.Word, nil
	}
	args := []string{"-upstream", s.upstream.Word}
	if p == fiberIdempotent {
		args = append(args, "-idempotent")
	}
	other, err := proc.Start(proc.Spec{Role: peer.Role, Args: args, Env: s.env})
	if err != nil {
		return "", err
	}
	s.others[p] = other
	return other.Word, nil
}

func (s *scene) gateway(p place) (*gateway.Gateway, error) {
	if g := s.gateways[p]; g != nil {
		return g, nil
	}
	site := fmt.Sprintf(sites[p]+"%.0[1]s%.0[2]s", s.upstream.Word, upstream.Body)
	g, err := gateway.New(filepath.Join(s.dir, fmt.Sprint(len(s.gateways))), site, p == guarded || p == async)
	if err != nil {
		return nil, err
	}
	g.Env = s.env
	if err := g.Start(); err != nil {
		return nil, err
	}
	s.gateways[p] = g
	return g, nil
}
