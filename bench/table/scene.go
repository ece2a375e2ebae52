package table

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/peer"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// scene is the processes that are measured: every place has one of its own, so that
// nobody's heap is another's, and they are started when they are first needed.
type scene struct {
	dir      string
	env      []string
	upstream *proc.Proc
	servers  map[spot]*server
	made     int // servers so far, whose directories have these numbers
	callers  map[ect.Algorithm]*caller
	device   *proc.Device // nil where it is not known
	keys     int          // of the recorded calls
}

// spot is a place, served by a program.
type spot struct {
	place   place
	program program
}

// program is one of those that are compared; the zero value is this one, alone.
type program struct {
	name   string
	binary string // empty is this one
}

// server is what serves a spot.
type server struct {
	addr string
	proc *proc.Proc
	// gateway is nil for a peer.
	gateway *gateway.Gateway
	// filled says that it has the recorded calls.
	filled bool
}

func newScene(o Options) (*scene, error) {
	dir, err := os.MkdirTemp(o.Dir, "agb")
	if err != nil {
		return nil, err
	}
	s := &scene{dir: dir, env: o.env(), keys: o.Keys, servers: map[spot]*server{}, callers: map[ect.Algorithm]*caller{}}
	if device, known := proc.DeviceOf(dir); known {
		s.device = device
	}
	for _, alg := range []ect.Algorithm{ect.ES256, ect.EdDSA} {
		if s.callers[alg], err = newCaller(alg); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	if s.upstream, err = proc.Start(proc.Spec{Role: upstream.Role, Env: s.env}); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *scene) close() error {
	var all []error
	for _, one := range s.servers {
		all = append(all, one.stop())
	}
	if s.upstream != nil {
		s.upstream.Kill()
	}
	return errors.Join(append(all, os.RemoveAll(s.dir))...)
}

func (s *server) stop() error {
	if s.gateway == nil {
		s.proc.Kill()
		return nil
	}
	return s.proc.Stop()
}

// site is what a server serves.
type site struct {
	// text are a gateway's directives: of the address of the upstream and what that
	// answers. Without any it is a peer.
	text string
	// guarded says that it has the guard and its store; ledger and trust are what
	// the guard is configured with, and the algorithm of all tokens.
	guarded, ledger, trust bool
	algorithm              ect.Algorithm
	// idempotent is for a peer with its middleware.
	idempotent bool
}

var sites = map[place]site{
	bare:     {text: "reverse_proxy %[1]s"},
	static:   {text: "header Content-Type application/json\n\trespond `%[2]s`"},
	guarded:  {text: "agent_proxy %[1]s", guarded: true},
	lenient:  {text: "agent_proxy %[1]s {\n\t\tbreaker off\n\t}", guarded: true},
	unshared: {text: "agent_proxy %[1]s {\n\t\tbulkhead off\n\t}", guarded: true},
	speaking: {text: "agent_proxy %[1]s {\n\t\tprotocol mcp\n\t}", guarded: true},
	ledgered: {text: "agent_proxy %[1]s", guarded: true, ledger: true, algorithm: ect.ES256},
	trusting: {text: "agent_proxy %[1]s {\n\t\trequire_ect\n\t}", guarded: true, ledger: true, trust: true, algorithm: ect.ES256},
	trustEd:  {text: "agent_proxy %[1]s {\n\t\trequire_ect\n\t}", guarded: true, ledger: true, trust: true, algorithm: ect.EdDSA},
	sending: {
		text:    "agent_proxy %[1]s {\n\t\trequire_ect\n\t\tidentity spiffe://example.com/upstream\n\t}",
		guarded: true, ledger: true, trust: true, algorithm: ect.ES256,
	},
	noop:     {text: "route {\n\t\tbench_noop\n\t\treverse_proxy %[1]s\n\t}"},
	naive:    {text: "route {\n\t\tbench_naive\n\t\treverse_proxy %[1]s\n\t}"},
	peerBare: {},
	peerIdem: {idempotent: true},
}

// serve returns what serves the spot, which it starts where it has to.
func (s *scene) serve(at spot) (*server, error) {
	if one := s.servers[at]; one != nil {
		return one, nil
	}
	made, err := s.start(at)
	if err == nil {
		s.servers[at] = made
	}
	return made, err
}

// fresh serves the spot by a new process with an empty store.
func (s *scene) fresh(at spot) (*server, error) {
	if one := s.servers[at]; one != nil {
		delete(s.servers, at)
		if err := one.stop(); err != nil {
			return nil, err
		}
	}
	return s.serve(at)
}

func (s *scene) start(at spot) (*server, error) {
	site := sites[at.place]
	if site.text == "" {
		args := []string{"-upstream", s.upstream.Word, fmt.Sprintf("-idempotent=%t", site.idempotent)}
		p, err := proc.Start(proc.Spec{Role: peer.Role, Env: s.env, Args: args})
		if err != nil {
			return nil, err
		}
		return &server{addr: p.Word, proc: p}, nil
	}
	text := fmt.Sprintf(site.text+"%.0[1]s%.0[2]s", s.upstream.Word, upstream.Body)
	g, err := gateway.New(filepath.Join(s.dir, fmt.Sprint(s.made)), text, site.guarded)
	if err != nil {
		return nil, err
	}
	g.Env, g.Binary = s.env, at.program.binary
	if g.Options, err = s.options(site); err != nil {
		return nil, err
	}
	s.made++
	if err := g.Start(); err != nil {
		return nil, err
	}
	return &server{addr: g.Addr, proc: g.Proc(), gateway: g}, nil
}

// options are the options of the guard's app.
func (s *scene) options(of site) (string, error) {
	text := ""
	if of.ledger {
		// A key of its own for each gateway: the head of its ledger is kept beside it.
		key := filepath.Join(s.dir, fmt.Sprintf("identity-%d", s.made))
		if _, err := ect.CreateRing(key, of.algorithm); err != nil {
			return "", err
		}
		text += fmt.Sprintf("\t\tidentity %s {\n\t\t\tkey_file %s\n\t\t}\n", gatewayIdentity, key)
	}
	if of.trust {
		path := filepath.Join(s.dir, fmt.Sprintf("callers-%s.jwks", of.algorithm))
		if err := s.callers[of.algorithm].publish(path); err != nil {
			return "", err
		}
		text += fmt.Sprintf("\t\ttrust {\n\t\t\tjwks_file %s\n\t\t}\n", path)
	}
	return text, nil
}

// recorded begins the ids of the calls that are recorded in order to be replayed.
const recorded = "5ec04ded-0000-4000-8000-"

// fillBound is how long recording them may take.
const fillBound = 10 * time.Minute

// fill makes the calls that are to be replayed, once per server.
func (s *scene) fill(ctx context.Context, one *server) error {
	if one.filled {
		return nil
	}
	request := load.Payment(requestSize)
	request.Keys = load.Each(recorded, s.keys)
	// A little more than once around: some numbers are taken to see how long keys are.
	const conns = 64
	_, err := load.Run(ctx, load.Job{Addr: one.addr, Request: request, Conns: conns, For: fillBound, Limit: s.keys + conns, Status: 200})
	one.filled = err == nil
	return err
}
