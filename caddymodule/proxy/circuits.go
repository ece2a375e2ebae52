package proxy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Circuits are the breakers of one transport's upstreams.
type Circuits struct {
	pool      *pool
	set       Settings
	checked   *checkedSettings
	upstreams []string // their addresses
	open      bool     // there are unknown upstreams too
}

// Open acquires the process's breakers for a transport with these settings, until Close.
// upstreams are its known upstreams, as Caddy dials them; more says that there may be
// others. The error names the option that is wrong.
func Open(s Settings, upstreams []string, more bool) (*Circuits, error) {
	checked, err := s.checkAll()
	if err != nil {
		return nil, err
	}
	c := &Circuits{set: s, checked: checked, open: more}
	for _, dial := range upstreams {
		address, err := Address(dial)
		if err != nil || strings.Contains(dial, "{") {
			c.open = true
			continue
		}
		if s.VerifyProbe && checked.downstream[address] == "" {
			return nil, fmt.Errorf("verify_probe: %s has no identity to hold answers to; name it with downstream", address)
		}
		c.upstreams = append(c.upstreams, address)
	}
	c.pool = holdPool()
	c.pool.join(c)
	return c, nil
}

// Close releases the breakers. Running calls may still report their outcomes.
func (c *Circuits) Close() error {
	c.pool.leave(c)
	return releasePool()
}

// Address returns the address of an upstream's breaker for a dial address.
func Address(dial string) (string, error) {
	addr, err := caddy.ParseNetworkAddress(dial)
	if err != nil {
		return "", err
	}
	return addressOf(addr.Network, addr.JoinHostPort(0)), nil
}

// addressOf returns the address of an upstream's breaker for a network and an address in
// it.
func addressOf(network, address string) string {
	if network == "" || network == "tcp" {
		return address
	}
	return network + "/" + address
}

// Breaker returns the breaker of the upstream at address. Look it up for each call.
func (c *Circuits) Breaker(upstream string) *breaker.Breaker {
	return c.pool.registry.Get(breaker.Key{Upstream: upstream}, c.checked.rules)
}

// Refusal returns the refusal of the upstream that recovers first, if all upstreams are
// known and currently refuse a call of this method and view; otherwise nil.
func (c *Circuits) Refusal(method string, view *breaker.View) *breaker.OpenError {
	if c.open {
		return nil
	}
	var first *breaker.OpenError
	for _, upstream := range c.upstreams {
		refusal := c.Breaker(upstream).RefusalOf(breaker.Op{Safe: guard.SafeMethod(method), View: view})
		if refusal == nil {
			return nil
		}
		// A refusal without an end comes last, since its end is unknown.
		if first == nil || !refusal.Until.IsZero() && (first.Until.IsZero() || refusal.Until.Before(first.Until)) {
			first = refusal
		}
	}
	return first
}

// leadsTo reports whether calls of this transport may go to the upstream.
func (c *Circuits) leadsTo(upstream string) bool {
	return c.open || c.known(upstream)
}

// known reports whether an upstream is one of those that are known from the configuration.
func (c *Circuits) known(upstream string) bool { return slices.Contains(c.upstreams, upstream) }

// pool has the process's breakers, as long as a transport or member uses them.
type pool struct {
	registry  *breaker.Registry
	latencies latencies

	// mu is never held during calls of a breaker or the registry: they call the hook or
	// leadsTo, which lock mu.
	mu        sync.Mutex
	users     []*Circuits          // never changed, only replaced
	listeners []*Member            // the latest last
	shared    map[string]bool      // downstreams whose breakers probe as one because of a cascade
	undoUsed  map[string]time.Time // addresses of undoClass with their last use
}

// pools has one entry: a caddy.UsagePool counts the users over reloads.
var pools = caddy.NewUsagePool()

const poolKey = "agent_guard.circuits"

func holdPool() *pool {
	value, _, err := pools.LoadOrNew(poolKey, func() (caddy.Destructor, error) {
		p := &pool{shared: map[string]bool{}, undoUsed: map[string]time.Time{}}
		p.registry = breaker.NewRegistry(0, p)
		return p, nil
	})
	if err != nil {
		panic(err) // the constructor has none
	}
	return value.(*pool)
}

func releasePool() error {
	_, err := pools.Delete(poolKey)
	return err
}

// Destruct stops the breakers' timers.
func (p *pool) Destruct() error {
	p.registry.Drop(func(breaker.Key) bool { return true })
	return nil
}

// join adds a user. Equal settings share their rules; otherwise a breaker that several
// transports use would change its rules with every call.
func (p *pool) join(c *Circuits) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, other := range p.users {
		if other.checked.rules.Settings() == c.checked.rules.Settings() {
			c.checked.rules = other.checked.rules
			break
		}
	}
	p.users = append(slices.Clip(p.users), c)
}

// leave removes a user, and forgets the upstreams that no other user has.
func (p *pool) leave(c *Circuits) {
	p.mu.Lock()
	p.users = slices.DeleteFunc(slices.Clone(p.users), func(u *Circuits) bool { return u == c })
	p.mu.Unlock()
	p.forget()
}

// forget forgets the breakers of upstreams that no transport has.
func (p *pool) forget() {
	stood := p.registry.Status()
	var gone []breaker.Key
	p.registry.Drop(func(key breaker.Key) bool {
		if p.leadsTo(key) {
			return false
		}
		gone = append(gone, key)
		return true
	})
	p.latencies.mu.Lock()
	watched := p.latencies.all()
	maps.DeleteFunc(watched, func(upstream string, _ *answers) bool { return !p.leadsTo(breaker.Key{Upstream: upstream}) })
	p.latencies.of.Store(&watched)
	p.latencies.mu.Unlock()
	stood = slices.DeleteFunc(stood, func(s breaker.Status) bool { return !slices.Contains(gone, s.Key) })
	if m := p.listener(); m != nil && len(stood) > 0 {
		m.hook.Dropped(stood)
	}
}

// leadsTo reports whether any user, even a new one, has the upstream of a breaker.
func (p *pool) leadsTo(key breaker.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if key.Class == undoClass {
		_, used := p.undoUsed[key.Upstream]
		return used
	}
	return slices.ContainsFunc(p.users, func(u *Circuits) bool { return u.leadsTo(key.Upstream) })
}

// identity returns the identity of an upstream according to the latest user that configures
// one.
func (p *pool) identity(upstream string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, user := range slices.Backward(p.users) {
		if identity := user.checked.downstream[upstream]; identity != "" {
			return identity
		}
	}
	return ""
}

// sharesProbes reports whether the breakers of all processes before an upstream send one probe: as the
// latest transport says that knows the upstream, or because of a cascade.
func (p *pool) sharesProbes(key breaker.Key) bool {
	if key.Class == undoClass {
		return false
	}
	downstream := cmp.Or(p.identity(key.Upstream), key.Upstream)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shared[downstream] {
		return true
	}
	for _, user := range slices.Backward(p.users) {
		if user.known(key.Upstream) {
			return user.set.ProbeScope == ScopeFleet
		}
	}
	return slices.ContainsFunc(p.users, func(u *Circuits) bool { return u.open && u.set.ProbeScope == ScopeFleet })
}

func (p *pool) Transition(e breaker.Event) {
	if m := p.listener(); m != nil {
		m.hook.Transition(e)
	}
}

func (p *pool) PermanentlyOpen(e breaker.Event) {
	if m := p.listener(); m != nil {
		m.hook.PermanentlyOpen(e)
	}
}

// listener returns the latest member with a hook; nil without one.
func (p *pool) listener() *Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.listeners) == 0 {
		return nil
	}
	return p.listeners[len(p.listeners)-1]
}

var (
	_ breaker.Hook     = (*pool)(nil)
	_ caddy.Destructor = (*pool)(nil)
)

// Member stores and restores the state of the process's breakers, and delivers their
// events. If several members have a hook, only the latest delivers, so that each transition
// is reported once.
type Member struct {
	pool *pool
	hook Hook
}

// Hook receives the events of the process's breakers.
type Hook interface {
	breaker.Hook
	// Probe asks whether a breaker that shares its probes with other processes may send one, for
	// as long as lasts. release is to be called when its call has ended. If it is false, until is
	// when to ask again; zero if that is unknown.
	Probe(ctx context.Context, key breaker.Key, lasts time.Duration) (release func(), until time.Time, ok bool)
	// Slow says that the latency of an upstream has risen far above what is usual, or is back. It must
	// not wait.
	Slow(upstream string, is bool)
	// Dropped receives the last states of the breakers that are forgotten because no
	// transport has their upstreams any more. A new transport may bring one back at any
	// moment: look up the breakers that exist.
	Dropped([]breaker.Status)
}

// Join makes a member until Leave.
func Join() *Member { return &Member{pool: holdPool()} }

// Listen calls the hook for every transition from now on. The hook may call the member.
func (m *Member) Listen(hook Hook) {
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	m.hook = hook
	m.pool.listeners = append(m.pool.listeners, m)
}

// Leave ends the membership. A running call of the hook may continue.
func (m *Member) Leave() {
	m.pool.mu.Lock()
	m.pool.listeners = slices.DeleteFunc(m.pool.listeners, func(other *Member) bool { return other == m })
	m.pool.mu.Unlock()
	_ = releasePool() // the pool's end reports no errors
}

// Status returns the status of every breaker, sorted by key.
func (m *Member) Status() []breaker.Status {
	m.pool.forgetUnused()
	return m.pool.registry.Status()
}

// Downstream returns the configured identity of an upstream, or its address.
func (m *Member) Downstream(upstream string) string {
	return cmp.Or(m.pool.identity(upstream), upstream)
}

// Keep stores a reference to the opening of an event, such as the id of its token
// (breaker.Breaker.Keep).
func (m *Member) Keep(e breaker.Event, reference string) {
	if b := m.pool.registry.Find(e.Key); b != nil {
		b.Keep(e.Generation, reference)
	}
}

// Follow does what the probe of another process says (breaker.Breaker.Follow), if the breaker shares its probes.
func (m *Member) Follow(key breaker.Key, p breaker.PeerProbe) bool {
	b := m.pool.registry.Find(key)
	return b != nil && m.pool.sharesProbes(key) && b.Follow(p)
}

// SetMode sets the mode that an operator chose for a breaker. It returns false if there is
// no such breaker.
func (m *Member) SetMode(key breaker.Key, mode breaker.Mode) bool {
	b := m.pool.registry.Find(key)
	if b != nil {
		b.SetMode(mode)
	}
	return b != nil
}

// Snapshot returns the state of a breaker that must survive the process. keep is false if a
// new breaker would be in the same state; there is false if it is forgotten, which at the end of a
// process all are.
func (m *Member) Snapshot(key breaker.Key) (s breaker.Snapshot, keep, there bool) {
	b := m.pool.registry.Find(key)
	if b == nil {
		return s, false, false
	}
	s = b.Snapshot()
	return s, !s.Blank(), true
}

// Restore continues a breaker in the state of an earlier process. It returns false if no
// transport has the upstream. A state of this process takes precedence.
func (m *Member) Restore(s breaker.Snapshot) (bool, error) {
	p := m.pool
	if s.Class == undoClass {
		p.noteUndo(s.Upstream)
		if err := p.registry.Restore(s, undoRules); err != nil {
			return false, fmt.Errorf("circuits: %w", err)
		}
		return true, nil
	}
	p.mu.Lock()
	users := p.users
	p.mu.Unlock()
	i := slices.IndexFunc(users, func(u *Circuits) bool { return u.leadsTo(s.Upstream) })
	if i < 0 {
		return false, nil
	}
	if err := p.registry.Restore(s, users[i].checked.rules); err != nil {
		return false, fmt.Errorf("circuits: %w", err)
	}
	return true, nil
}

// undoClass is the class of breakers for servers that the gateway itself calls (ADR 0053).
// They are separate from those of upstreams at the same addresses.
const undoClass = "undo"

// undoRules are the rules of undoClass. Undos are few and are retried at growing intervals,
// so that a rate over a minute would hardly ever open a breaker. Their time is limited, so
// that the longest cooldown is short.
var undoRules = func() *breaker.Rules {
	r, err := breaker.NewRules(breaker.Settings{
		Consecutive: 5, Cooldown: jsontime.Duration(5 * time.Second), MaxCooldown: jsontime.Duration(30 * time.Second),
	})
	if err != nil {
		panic(err) // all values are in their ranges
	}
	return r
}()

const (
	// undoMemory is how long an unused breaker of undoClass is kept.
	undoMemory = time.Hour
	// maxUndoBreakers bounds their number. A removed address that is still in use gets a
	// new, closed breaker.
	maxUndoBreakers = 128
)

// UndoBreaker returns the breaker of a server that the gateway itself calls, by address. It
// is forgotten an hour after its last use, unless an operator has set its mode. Look it up
// for each call.
func (m *Member) UndoBreaker(address string) *breaker.Breaker {
	m.pool.noteUndo(address)
	m.pool.forgetUnused()
	return m.pool.registry.Get(breaker.Key{Upstream: address, Class: undoClass}, undoRules)
}

// noteUndo notes a use of the breaker of address.
func (p *pool) noteUndo(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.undoUsed[address] = time.Now()
}

// forgetUnused forgets the breakers of undoClass that were not used for undoMemory, and the
// least recently used one if there are too many. Those with a mode set by an operator stay.
func (p *pool) forgetUnused() {
	p.mu.Lock()
	busy := len(p.undoUsed) <= maxUndoBreakers
	for _, used := range p.undoUsed {
		busy = busy && time.Since(used) <= undoMemory
	}
	p.mu.Unlock()
	if busy {
		return
	}
	set := map[string]bool{}
	for _, s := range p.registry.Status() {
		set[s.Key.Upstream] = set[s.Key.Upstream] || s.Key.Class == undoClass && s.Mode != breaker.Auto
	}
	oldest := ""
	p.mu.Lock()
	for address, used := range p.undoUsed {
		switch {
		case set[address]:
		case time.Since(used) > undoMemory:
			delete(p.undoUsed, address)
		case oldest == "" || used.Before(p.undoUsed[oldest]):
			oldest = address
		}
	}
	if len(p.undoUsed) > maxUndoBreakers {
		delete(p.undoUsed, oldest)
	}
	p.mu.Unlock()
	p.forget()
}

// RetryAfter parses Retry-After (RFC 9110, section 10.2.3) in either form; 0 without one.
func RetryAfter(header http.Header) time.Duration {
	value := header.Get("Retry-After")
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(time.Until(at), 0)
}

// Document describes breakers: Figure 3 of the cascade draft, with further members. Its
// members are an API.
type Document struct {
	// Circuits are sorted by upstream and class.
	Circuits []Circuit `json:"circuits"`
}

// Circuit describes one breaker to callers and operators.
type Circuit struct {
	// Downstream is the configured identity of the upstream, or its address.
	Downstream string `json:"downstream_agent"`
	// Upstream is the upstream's address.
	Upstream string `json:"upstream"`
	// Class is undo for servers that the gateway itself calls (undoClass).
	Class string `json:"class,omitempty"`
	breaker.Status
	// Window is the length of the window, in seconds.
	Window float64 `json:"window_s"`
	// LastFailure is the id of the error token of the last failure, if there is one.
	LastFailure string `json:"last_failure_ect,omitempty"`
	// CooldownRemaining is the time in seconds until a probe may be let through, rounded up
	// so that it never reaches 0 too early.
	CooldownRemaining int64 `json:"cooldown_remaining_s"`
	// Cooldown is the current cooldown, in seconds.
	Cooldown float64 `json:"cooldown_s"`

	// Node is whose breaker it is, if those of all nodes are asked for (`scope=fleet`). Of other
	// nodes the counts are those of the opening, and the settings are not known.
	Node string `json:"node,omitempty"`
	// Age is how many seconds ago another node has stored this state, which it does with each
	// change; 0 if it was closed all the time.
	Age int64 `json:"age_s,omitempty"`

	// WorkflowThreshold is the stricter threshold of the requested workflow, if it has
	// asked for one within the settings' bounds.
	WorkflowThreshold float64 `json:"workflow_threshold,omitempty"`
	// WorkflowWindow is the window of the requested workflow in seconds, if it has asked
	// for one.
	WorkflowWindow float64 `json:"workflow_window_s,omitempty"`
}

// SetView adds what a workflow asks of the breaker; nil is nothing.
func (c *Circuit) SetView(v *breaker.View) {
	if v == nil {
		return
	}
	if v.Threshold() < 1 {
		c.WorkflowThreshold = v.Threshold()
	}
	if v.Window() <= time.Hour {
		c.WorkflowWindow = v.Window().Seconds()
	}
}

// Describe describes a breaker.
func (m *Member) Describe(s *breaker.Status) Circuit {
	c := Circuit{
		Downstream: m.Downstream(s.Key.Upstream), Upstream: s.Key.Upstream, Class: s.Key.Class, Status: *s,
		Window: s.Window.Seconds(), Cooldown: s.Cooldown.Seconds(),
		CooldownRemaining: int64((s.CooldownRemaining + time.Second - 1) / time.Second),
	}
	c.Since, c.NextProbe = s.Since.UTC(), s.NextProbe.UTC()
	return c
}
