package guard

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// UnguardedReason says why a request is not guarded.
type UnguardedReason uint8

// Why a request is not guarded: its method changes nothing, the configuration says so, it
// leaves HTTP, or it is a gRPC call and its action is not unary.
const (
	ReasonSafe UnguardedReason = iota
	ReasonExempt
	ReasonUpgrade
	ReasonGRPC
	unguardedReasons
)

var reasonNames = [unguardedReasons]string{"safe", "exempt", "upgrade", "grpc"}

func (r UnguardedReason) String() string { return reasonNames[r] }

// ProbeResult is what a probe of a call in doubt has found out.
type ProbeResult uint8

// What a probe has found out: the call was executed, it was not, or the answer says neither.
const (
	ProbeApplied ProbeResult = iota
	ProbeNotApplied
	ProbeUnknown
	probeResults
)

var probeResultNames = [probeResults]string{"applied", "not_applied", "unknown"}

func (r ProbeResult) String() string { return probeResultNames[r] }

var verdicts = [...]execution.Verdict{execution.Completed, execution.Released, execution.InDoubt}

// ActionCounts counts the outcomes of one action's calls. Counting is one atomic addition.
type ActionCounts struct {
	guard, name string

	running  atomic.Int64
	executed [len(verdicts)]atomic.Uint64
	replays  atomic.Uint64
	attaches atomic.Uint64
	failOpen atomic.Uint64
	probes   [probeResults]atomic.Uint64
	retries  [len(execution.EvidenceKinds)]atomic.Uint64 // that were recognised
	cancels  [2]atomic.Uint64                            // that were kept back, and passed on
	kinds    []problem.Kind                              // of problems that are counted
	problems []atomic.Uint64                             // by kind
}

// Begun counts an execution that has begun. Settled must follow.
func (a *ActionCounts) Begun() { a.running.Add(1) }

// Settled counts the end of an execution by its recorded verdict.
func (a *ActionCounts) Settled(v execution.Verdict) {
	a.running.Add(-1)
	for i := range verdicts {
		if verdicts[i] == v {
			a.executed[i].Add(1)
		}
	}
}

// Replayed counts a call that was answered with a recorded result.
func (a *ActionCounts) Replayed() { a.replays.Add(1) }

// Attached counts a call that was answered by an execution that was running.
func (a *ActionCounts) Attached() { a.attaches.Add(1) }

// Recognized counts a call that was recognised as a retry by evidence.
func (a *ActionCounts) Recognized(e execution.Evidence) {
	a.retries[slices.Index(execution.EvidenceKinds[:], e)].Add(1)
}

// Cancelled counts a notifications/cancelled for a running call.
func (a *ActionCounts) Cancelled(passedOn bool) {
	i := 0
	if passedOn {
		i = 1
	}
	a.cancels[i].Add(1)
}

// FailedOpen counts a call that was forwarded unguarded for want of a store (P4).
func (a *ActionCounts) FailedOpen() { a.failOpen.Add(1) }

// Probed counts a status probe.
func (a *ActionCounts) Probed(r ProbeResult) { a.probes[r].Add(1) }

// Refused counts a request that was answered with the problem of this slug.
func (a *ActionCounts) Refused(slug string) {
	for i := range a.kinds {
		if a.kinds[i].Slug == slug {
			a.problems[i].Add(1)
			return
		}
	}
}

// ActionReport holds the counts of one action since its first configuration.
type ActionReport struct {
	Guard, Action string
	// Running is the number of executions that run now.
	Running int64
	// Executions are those that ended, by recorded verdict.
	Executions map[execution.Verdict]uint64
	// Replays and Attaches are calls that were answered from a record, and by a running
	// execution; FailOpen those that were forwarded without a store (P4).
	Replays, Attaches, FailOpen uint64
	// Recognized are retries that were recognised by evidence, by what it was.
	Recognized map[execution.Evidence]uint64
	// CancelsKept and CancelsPassed are cancellations that the upstream was not told of, and that
	// it was.
	CancelsKept, CancelsPassed uint64
	// Probes are counted by result, Problems by slug.
	Probes   map[ProbeResult]uint64
	Problems map[string]uint64
}

// Report returns the counts.
func (a *ActionCounts) Report() ActionReport {
	r := ActionReport{
		Guard: a.guard, Action: a.name, Running: a.running.Load(), Executions: map[execution.Verdict]uint64{},
		Replays: a.replays.Load(), Attaches: a.attaches.Load(), FailOpen: a.failOpen.Load(),
		Probes: map[ProbeResult]uint64{}, Problems: map[string]uint64{}, Recognized: map[execution.Evidence]uint64{},
		CancelsKept: a.cancels[0].Load(), CancelsPassed: a.cancels[1].Load(),
	}
	for i, e := range execution.EvidenceKinds {
		r.Recognized[e] = a.retries[i].Load()
	}
	for i, v := range verdicts {
		r.Executions[v] = a.executed[i].Load()
	}
	for i := range a.probes {
		r.Probes[ProbeResult(i)] = a.probes[i].Load()
	}
	for i := range a.kinds {
		r.Problems[a.kinds[i].Slug] = a.problems[i].Load()
	}
	return r
}

// Upper bounds of the buckets of times.
var (
	callBounds  = [...]float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300} // seconds
	addedBounds = [...]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5}   // seconds
)

// countedStatuses are what became of a call, as its time is counted.
var countedStatuses = [...]string{"executed", "replayed", "attached", StatusRefused, statusInDoubt}

// times counts durations in buckets. Counting is two atomic additions.
type times struct {
	sum     atomic.Int64 // nanoseconds
	buckets [len(callBounds) + 1]atomic.Uint64
}

func (t *times) took(d time.Duration, bounds []float64) {
	i := 0
	for seconds := d.Seconds(); i < len(bounds) && seconds > bounds[i]; i++ {
	}
	t.buckets[i].Add(1)
	t.sum.Add(int64(d))
}

// TimesReport is a histogram of times.
type TimesReport struct {
	// Count is the number of times, and Sum all of them together, in seconds.
	Count uint64
	Sum   float64
	// Buckets has the number of times up to each bound, in seconds.
	Buckets map[float64]uint64
}

func (t *times) report(bounds []float64) TimesReport {
	r := TimesReport{Sum: time.Duration(t.sum.Load()).Seconds(), Buckets: make(map[float64]uint64, len(bounds))}
	for i, bound := range bounds {
		r.Count += t.buckets[i].Load()
		r.Buckets[bound] = r.Count
	}
	r.Count += t.buckets[len(bounds)].Load()
	return r
}

// Counts counts the requests of all guards of one name over one store.
type Counts struct {
	name      string
	kinds     []problem.Kind              // of problems that are counted
	calls     [len(countedStatuses)]times // of guarded calls, by what became of them
	added     times                       // by the guard, to each call that was executed
	unguarded [unguardedReasons]atomic.Uint64
	tokens    sync.Map // what came of verifying -> *atomic.Uint64

	mu      sync.Mutex
	actions []*ActionCounts
}

// NewCounts returns counts for the guards of a name, and of problems of these kinds.
func NewCounts(name string, kinds []problem.Kind) *Counts { return &Counts{name: name, kinds: kinds} }

// Unguarded counts a request that is not guarded.
func (c *Counts) Unguarded(r UnguardedReason) { c.unguarded[r].Add(1) }

// VerifiesTokens makes the count of verified tokens appear before there are any.
func (c *Counts) VerifiesTokens() { c.tokens.LoadOrStore("verified", new(atomic.Uint64)) }

// Token counts the verification of a request's tokens. result is verified, late, unavailable, or
// the code of the refusal; empty is not counted.
func (c *Counts) Token(result string) {
	if result == "" {
		return
	}
	n, ok := c.tokens.Load(result)
	if !ok {
		n, _ = c.tokens.LoadOrStore(result, new(atomic.Uint64))
	}
	n.(*atomic.Uint64).Add(1)
}

// Action returns the counts of the action of this name.
func (c *Counts) Action(name string) *ActionCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.IndexFunc(c.actions, func(a *ActionCounts) bool { return a.name == name }); i >= 0 {
		return c.actions[i]
	}
	a := &ActionCounts{guard: c.name, name: name, kinds: c.kinds, problems: make([]atomic.Uint64, len(c.kinds))}
	c.actions = append(c.actions, a)
	return a
}

// Times returns the times of guarded calls by their status, of those that there were, and those that the guard has added.
func (c *Counts) Times() (calls map[string]TimesReport, added TimesReport) {
	calls = map[string]TimesReport{}
	for i, status := range countedStatuses {
		if r := c.calls[i].report(callBounds[:]); r.Count > 0 || i == 0 {
			calls[status] = r
		}
	}
	return calls, c.added.report(addedBounds[:])
}

// Report returns the unguarded requests by reason and the verifications of tokens by result.
func (c *Counts) Report() (name string, unguarded map[UnguardedReason]uint64, tokens map[string]uint64) {
	unguarded, tokens = map[UnguardedReason]uint64{}, map[string]uint64{}
	for r := range c.unguarded {
		unguarded[UnguardedReason(r)] = c.unguarded[r].Load()
	}
	c.tokens.Range(func(result, n any) bool {
		tokens[result.(string)] = n.(*atomic.Uint64).Load()
		return true
	})
	return c.name, unguarded, tokens
}

// CountRefusal counts a problem's slug for a request that has no action, at the action that
// matches everything.
func (h *Handler) CountRefusal(slug string) { h.Actions[len(h.Actions)-1].Counts.Refused(slug) }

// CountTokens counts a verification of tokens.
func (h *Handler) CountTokens(p *Tokens, err error) { h.Counts.Token(tokenResult(p, err)) }

func (x *Call) note(status, slug string) {
	x.noted.status = status
	if slug != "" {
		x.noted.problem = slug
	}
}

// Event is an event of a call. It is a value, so that one that nobody subscribes to costs next to
// nothing.
type Event struct {
	Name string
	call *Request
	more map[string]any
}

// Data returns what subscribers get, by the names in docs/observability.md. It is called during the
// call's Emit.
func (e Event) Data() map[string]any {
	q := e.call
	data := map[string]any{"guard": q.h.Name, "action": q.action.Name}
	if q.hasID() {
		data["key"], data["caller"] = q.call.Key.String(), q.executions.Keyed(q.call.Scope.Caller)
	}
	if e.Name == eventRecognized { // not given, as most calls need no map
		data["evidence"] = string(q.call.Attempt.Evidence)
	}
	maps.Copy(data, e.more)
	return data
}

func (q *Request) emit(name string, more map[string]any) {
	e := Event{Name: name, call: q, more: more}
	if q.engine == nil || q.engine.Emit == nil || !q.engine.Emit(e) {
		q.h.Host.Emit(e)
	}
}

// String keeps everything else about the call out of logs (P8).
func (q *Request) String() string { return q.call.Key.String() }

// Value returns a variable of the call for logs and matchers, by its name in
// docs/observability.md, such as `status`. Unknown or inapplicable values are empty. It reports
// false for other names.
func (x *Call) Value(name string) (any, bool) {
	switch name {
	case "execution_id":
		return x.call.Scope.ID, true
	case "key":
		if !x.hasID() {
			return "", true
		}
		return x.call.Key.String(), true
	case "guard":
		return x.h.Name, true
	case "action":
		return x.action.Name, true
	case "caller":
		if !x.hasID() {
			return "", true
		}
		return x.executions.Keyed(x.call.Scope.Caller), true
	case "workflow":
		return x.call.Workflow, true
	case "issuer":
		return x.tokens.Issuer(), true
	case "checkpoint":
		return x.noted.checkpoint, true
	case "status":
		return x.noted.status, true
	case "outcome":
		if x.noted.outcome == 0 {
			return "", true
		}
		return x.noted.outcome.String(), true
	case "cause":
		return string(x.noted.cause), true
	case "problem":
		return x.noted.problem, true
	case "recognized":
		if x.call.Attempt == nil {
			return "", true
		}
		return string(x.call.Attempt.Evidence), true
	case "age":
		if x.noted.created.IsZero() {
			return "", true
		}
		return strconv.FormatInt(int64(max(0, time.Since(x.noted.created)).Seconds()), 10), true
	}
	return nil, false
}

// Over reports that the guard is done with the call.
func (x *Call) Over() bool { return x.noted.over }

func (q *Request) hasID() bool { return q.call.Scope.ID != "" }
