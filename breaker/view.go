package breaker

import (
	"fmt"
	"math"
	"time"
)

// View is what one of many callers asks of a breaker beyond its settings: to be refused
// while more than a share of the calls of a recent stretch have failed, though the
// breaker is closed for others. It never lets a call through that the breaker refuses,
// changes no state and has none: it compares with what the breaker has counted. A View
// does not change, so that many calls can share it.
type View struct {
	threshold         uint64        // in millionths; a million where none was asked for
	shortest, longest time.Duration // of the windows that were asked for
}

// NewView returns a view with a threshold, over 0 and under 1, and a window, 1 s or more.
// For either, 0 is the breaker's own. It fails on other values and names them.
func NewView(threshold float64, window time.Duration) (*View, error) {
	v := &View{threshold: million, shortest: math.MaxInt64, longest: math.MaxInt64}
	if threshold != 0 {
		if !share(threshold) {
			return nil, fmt.Errorf("breaker: Threshold is %v; it has to be above 0 and below 1", threshold)
		}
		v.threshold = uint64(math.Round(threshold * million))
	}
	if window != 0 {
		if window < time.Second {
			return nil, fmt.Errorf("breaker: Window is %v; it has to be 1s or more", window)
		}
		v.shortest, v.longest = window, window
	}
	return v, nil
}

// And returns a view that refuses whatever v or other does: with the lower threshold,
// over every stretch from the shortest to the longest window of the two. Either may be
// nil, which refuses nothing.
func (v *View) And(other *View) *View {
	switch {
	case other == nil, v != nil && *v == *other:
		return v
	case v == nil:
		return other
	}
	both := View{min(v.threshold, other.threshold), min(v.shortest, other.shortest), max(v.longest, other.longest)}
	if both == *v {
		return v
	}
	return &both
}

// Threshold is the share of failures, over 0 and up to 1, above which calls are refused.
// It is 1 where none was asked for.
func (v *View) Threshold() float64 { return float64(v.threshold) / million }

// Window is the longest stretch that is looked at.
func (v *View) Window() time.Duration { return v.longest }

// lens is a view within the bounds of a breaker's rules.
type lens struct {
	threshold uint64
	from, to  int // steps: each stretch of so many, with the present one, is looked at
}

// lens fails where the view asks for nothing that the rules do not hold by themselves,
// or where they heed none.
func (r *Rules) lens(v *View) (l lens, ok bool) {
	l = lens{min(max(v.threshold, r.floor), r.threshold), r.stepsBack(v.shortest), r.stepsBack(v.longest)}
	return l, r.set.ViewFloor > 0 && (l.threshold < r.threshold || l.from < buckets)
}

// stepsBack is how many steps hold a window. The present step has partly passed, so that
// one more is looked at: no less than the window is.
func (r *Rules) stepsBack(window time.Duration) int {
	if window >= r.set.Window {
		return buckets
	}
	return min(int((window+r.beat-1)/r.beat)+1, buckets)
}

// excesses has a bit for each stretch, of l.from to l.to steps, in which more than the
// threshold has failed. It takes no lock.
func (p *period) excesses(rules *Rules, l lens) uint64 {
	c := p.counts(p.window.Load())
	if c.failures+c.overdue == 0 {
		return 0
	}
	c.calls, c.failures = 0, 0
	var found uint64
	at := int(p.at.Load())
	for n := 0; ; n++ {
		if n >= l.from && rules.fails(c, l.threshold) {
			found |= 1 << n
		}
		if n == l.to {
			return found
		}
		calls, failures := halves(p.ring[at].calls.Load())
		c.calls += calls
		c.failures += failures
		if at--; at < 0 {
			at = buckets - 1
		}
	}
}

// refused is with what a call with this view is refused, or would be if the breaker did
// not only observe; nil if it is let through.
func (p *period) refused(v *View) *OpenError {
	b := p.owner
	rules := b.rules.Load()
	l, ok := rules.lens(v)
	if !ok || p.excesses(rules, l) == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.unlock()
	if b.period != p || b.mode == ForcedClosed {
		return nil
	}
	return &OpenError{
		Key: b.key, State: b.state, Mode: b.inForce(), Generation: b.generation,
		Until: p.begun.Add(time.Duration(p.wait(rules, l)) * rules.beat), Reason: StricterView,
		Cause: p.last.cause, Evidence: p.last.evidence,
		View: &View{l.threshold, min(v.shortest, rules.set.Window), min(v.longest, rules.set.Window)},
	}
}

// admitIn is admit for a call that may have a view.
func (p *period) admitIn(op Op) (Permit, error) {
	if op.View != nil {
		if refusal := p.refused(op.View); refusal != nil {
			p.owner.rejected.Add(1)
			if refusal.Mode != Observe {
				return Permit{}, refusal
			}
		}
	}
	return p.admit(op), nil
}

// wait is after how many steps, if nothing else is counted until then, no stretch that is
// looked at exceeds the threshold. Calls that hang may go on to: they are waited for no
// longer than the window.
func (p *period) wait(rules *Rules, l lens) int {
	found := p.excesses(rules, lens{l.threshold, 0, l.to})
	for n := 1; n < l.to; n++ {
		// What is l.to steps back then is n fewer steps back now.
		looked := uint64(1)<<(l.to-n+1) - uint64(1)<<max(l.from-n, 0)
		if found&looked == 0 {
			return n
		}
	}
	return l.to
}
