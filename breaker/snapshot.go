package breaker

import (
	"encoding/json"
	"fmt"
	"time"
)

// Snapshot is what of a breaker outlives its process: the state, the end of the
// cooldown, and what the next transition needs. The window of a closed breaker is not
// in it. Its JSON is stable; durations are in nanoseconds, times are wall time.
type Snapshot struct {
	Version    int    `json:"v"` // 1
	Upstream   string `json:"upstream"`
	Class      string `json:"class,omitempty"`
	State      State  `json:"state"`
	Mode       Mode   `json:"mode"`
	Generation uint64 `json:"generation"`
	// Outage is the generation in which the breaker left CLOSED; 0 in CLOSED.
	Outage uint64 `json:"outage,omitempty"`

	At    time.Time `json:"at"`    // when this was taken
	Since time.Time `json:"since"` // of State
	// Until is the end of the cooldown; zero outside of OPEN, and if forced open.
	Until time.Time `json:"until,omitzero"`

	Cooldown      time.Duration `json:"cooldown_ns"` // the newest, before jitter
	TotalCooldown time.Duration `json:"total_cooldown_ns"`
	FailedProbes  int           `json:"failed_probes"`
	Calls         int           `json:"calls"`    // of the window that opened it
	Failures      int           `json:"failures"` // among the calls

	Reason    Reason `json:"reason,omitempty"`
	Cause     string `json:"cause,omitempty"`
	Evidence  string `json:"evidence,omitempty"`
	Reference string `json:"reference,omitempty"`
}

const snapshotVersion = 1

// Encode returns the snapshot's JSON. It fails on a State or Mode that does not exist,
// and on a time outside of the years 0 to 9999.
func (s Snapshot) Encode() ([]byte, error) {
	data, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("breaker: snapshot of %q: %w", s.Upstream, err)
	}
	return data, nil
}

// DecodeSnapshot reads what Encode wrote. Members that it does not know are ignored; a
// value that no breaker can have is an error that names it.
func DecodeSnapshot(data []byte) (Snapshot, error) {
	var s Snapshot
	if err := json.Unmarshal(data, &s); err != nil {
		return Snapshot{}, fmt.Errorf("breaker: snapshot of %q: %w", s.Upstream, err)
	}
	if err := s.check(); err != nil {
		return Snapshot{}, err
	}
	return s, nil
}

func (s Snapshot) check() error {
	for _, c := range []struct {
		ok    bool
		name  string
		value any
		right string
	}{
		{s.Version == snapshotVersion, "v", s.Version, "1"},
		{int(s.State) < len(stateNames), "state", s.State, "a state"},
		{int(s.Mode) < len(modeNames), "mode", s.Mode, "a mode"},
		{s.Generation > 0, "generation", s.Generation, "positive"},
		{s.Outage <= s.Generation, "outage", s.Outage, "no later than the generation"},
		{s.Mode != ForcedOpen || s.State == Open, "state", s.State, "open in mode forced_open"},
		{s.Mode != ForcedClosed || s.State == Closed, "state", s.State, "closed in mode forced_closed"},
		{s.Cooldown >= 0, "cooldown_ns", s.Cooldown, "0 or more"},
		{s.TotalCooldown >= 0, "total_cooldown_ns", s.TotalCooldown, "0 or more"},
		{s.FailedProbes >= 0, "failed_probes", s.FailedProbes, "0 or more"},
		{s.Failures >= 0 && s.Failures <= s.Calls, "failures", s.Failures, "from 0 to calls"},
	} {
		if !c.ok {
			return fmt.Errorf("breaker: snapshot of %q: %s is %v; it has to be %s", s.Upstream, c.name, c.value, c.right)
		}
	}
	return nil
}

// Snapshot returns what Restore needs.
func (b *Breaker) Snapshot() Snapshot {
	b.mu.Lock()
	defer b.unlock()
	o := &b.outage
	return Snapshot{
		Version: snapshotVersion, Upstream: b.key.Upstream, Class: b.key.Class,
		State: b.state, Mode: b.mode, Generation: b.generation, Outage: o.began,
		At: time.Now().Round(0), Since: b.since.Round(0), Until: o.until.Round(0),
		Cooldown: o.cooldown, TotalCooldown: o.total, FailedProbes: o.failedProbes,
		Calls: int(o.counts.calls + o.counts.overdue), Failures: int(o.counts.failures + o.counts.overdue),
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
	}
}

// Blank reports whether a new breaker would do as well.
func (s Snapshot) Blank() bool { return s.State == Closed && s.Mode == Auto && s.Cooldown == 0 }

// Restore returns a breaker that goes on where the snapshot was taken. OPEN ends when
// it would have ended, judged by the wall clock, but never later than if no time had
// passed since: a clock that was set back lengthens nothing. A probe that was under
// way is lost, and the next suitable call is one. It fails on a snapshot that no
// breaker can have made.
func Restore(s Snapshot, rules *Rules, hook Hook) (*Breaker, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	now := time.Now()
	b := New(Key{s.Upstream, s.Class}, rules, hook)
	b.mu.Lock()
	defer b.unlock()
	b.state, b.mode, b.generation = s.State, s.Mode, s.Generation
	b.outage = outage{
		began: s.Outage, cooldown: s.Cooldown, total: s.TotalCooldown, failedProbes: s.FailedProbes,
		counts: counts{calls: uint64(s.Calls), failures: uint64(s.Failures)},
		reason: s.Reason, last: failureRecord{s.Cause, s.Evidence}, reference: s.Reference,
	}
	passed := now.Round(0).Sub(s.Since)
	b.since = now.Add(-min(max(passed, 0), max(rules.set.Healthy, rules.set.ProbeWait)))
	switch {
	case s.State == Closed:
		b.period.generation = s.Generation
	case s.State == Open && s.Mode != ForcedOpen:
		b.period = nil
		left := min(s.Until.Sub(now.Round(0)), s.Until.Sub(s.At), max(rules.set.MaxCooldown, rules.set.MaxRetryAfter))
		left = max(left, 0)
		b.outage.until, b.outage.lasts = now.Add(left), max(s.Until.Sub(s.Since), left)
		b.arm(left)
	default:
		b.period = nil
	}
	b.publish()
	return b, nil
}
