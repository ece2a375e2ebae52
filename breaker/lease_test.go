package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// paced asks for a safe call that its client is still sending.
func paced(t *testing.T, b *breaker.Breaker) *breaker.Permit {
	t.Helper()
	p, err := b.Acquire(breaker.Op{Safe: true, ClientPaced: true})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "probe", p.Probe(), true)
	return &p
}

// freed says that a lease has run out without a word on the upstream.
func freed(t *testing.T, b *breaker.Breaker) {
	t.Helper()
	want(t, b, breaker.HalfOpen)
	equal(t, "probing", b.Status().Probing, false)
	equal(t, "failed probes", b.Status().FailedProbes, 0)
}

// A call that its client sends slowly is no better a probe than one that changes
// something, and says nothing of the upstream while it is sent.
func TestClientPacedProbe(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		op := breaker.Op{Safe: true, ClientPaced: true}
		equal(t, "advice", refused(t, b, op).RetryAfter(), 5*time.Second)
		if b.RefusalOf(op) == nil {
			t.Error("its refusal is not foreseen")
		}
		pass(5 * time.Second)
		slow := paced(t, b)
		pass(29 * time.Second)
		equal(t, "probing", b.Status().Probing, true)
		pass(time.Second)
		freed(t, b)
		next := acquire(t, b)
		slow.Done(failed) // too late: the lease is another's
		want(t, b, breaker.HalfOpen)
		next.Done(ok)
		want(t, b, breaker.Closed)
	})
}

// Once the call is sent, the upstream has all of the lease, and its silence fails it.
func TestClientHasSent(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{ProbeWait: -1}, nil, pass)
		p := paced(t, b)
		pass(29 * time.Second)
		p.Lease().Sent()
		pass(29 * time.Second)
		p.Lease().Sent() // nothing is gained by saying it twice
		want(t, b, breaker.HalfOpen)
		pass(time.Second)
		want(t, b, breaker.Open)
		equal(t, "failed probes", b.Status().FailedProbes, 1)
	})
}

// An upstream that has begun an answer lives, whatever its client does after that.
func TestProbeIsAlive(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{ProbeWait: -1}, nil, pass)
		silent := acquire(t, b)
		silent.Lease().Alive()
		pass(30 * time.Second)
		freed(t, b)

		both := paced(t, b)
		both.Lease().Alive()
		both.Lease().Sent()
		pass(30 * time.Second)
		freed(t, b)

		alive := acquire(t, b)
		alive.Lease().Alive()
		alive.Done(failed)
		want(t, b, breaker.Open)
	})
}

// A lease that is over changes nothing of the next one.
func TestLeaseThatIsOver(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{ProbeWait: -1}, nil, pass)
		first := paced(t, b)
		lease := first.Lease()
		first.Done(neutral)
		equal(t, "lease of a call that is none", first.Lease(), breaker.Lease{})
		acquire(t, b)
		lease.Alive()
		breaker.Lease{}.Alive()
		breaker.Lease{}.Sent()
		pass(30 * time.Second)
		want(t, b, breaker.Open)
	})
}
