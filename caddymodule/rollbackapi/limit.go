package rollbackapi

import (
	"sync"
	"time"
)

// maxBuckets bounds what a Limit remembers; each bucket takes about 150 bytes.
const maxBuckets = 100_000

// DefaultRate is how many new rollbacks an issuer, and a workflow, may ask for in a minute.
const DefaultRate = 60

// Limit bounds how often new rollbacks are asked for, per issuer and per workflow: a token
// bucket for each (C-6.1-d). The zero Limit is ready for use.
type Limit struct {
	mu      sync.Mutex
	buckets map[bucketOf]*bucket
	swept   time.Time
}

type bucketOf struct {
	workflow bool
	name     string
}

// bucket holds up to a minute's worth.
type bucket struct {
	left float64
	at   time.Time
}

// Issuer counts one new rollback that an issuer asks for. Where it may not, nothing is
// counted, and retry says when it may.
func (l *Limit) Issuer(now time.Time, perMinute int, issuer string) (retry time.Duration, ok bool) {
	return l.take(now, perMinute, bucketOf{false, issuer})
}

// Workflow counts one new rollback in a workflow, as Issuer does. It is to be asked only
// for who may roll back there: whoever knows the name of a workflow could else keep others
// from it.
func (l *Limit) Workflow(now time.Time, perMinute int, workflow string) (retry time.Duration, ok bool) {
	return l.take(now, perMinute, bucketOf{true, workflow})
}

func (l *Limit) take(now time.Time, perMinute int, name bucketOf) (retry time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buckets == nil {
		l.buckets = map[bucketOf]*bucket{}
	}
	b := l.buckets[name]
	if b == nil {
		if len(l.buckets) >= maxBuckets && !l.sweep(now, perMinute) {
			return time.Minute, false // forgetting one would let it begin anew
		}
		b = &bucket{float64(perMinute), now}
		l.buckets[name] = b
	}
	b.fill(now, perMinute)
	if b.left < 1 {
		missing := (1 - b.left) / float64(perMinute)
		return time.Duration(missing * float64(time.Minute)), false
	}
	b.left--
	return 0, true
}

func (b *bucket) fill(now time.Time, perMinute int) {
	if passed := now.Sub(b.at); passed > 0 { // a clock that was set back fills nothing
		b.left += passed.Minutes() * float64(perMinute)
	}
	b.left, b.at = min(b.left, float64(perMinute)), now
}

// sweep forgets full buckets, at most once a second: they are as ones that were never
// used. It reports whether there is room now.
func (l *Limit) sweep(now time.Time, perMinute int) bool {
	if now.Sub(l.swept).Abs() < time.Second {
		return false
	}
	l.swept = now
	for name, b := range l.buckets {
		if b.fill(now, perMinute); b.left >= float64(perMinute) {
			delete(l.buckets, name)
		}
	}
	return len(l.buckets) < maxBuckets
}
