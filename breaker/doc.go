// Package breaker cuts a failing upstream off and lets it back by one probe.
//
// A Breaker is CLOSED, OPEN or HALF_OPEN (cascade 3.2.1). A call asks it with Acquire
// and tells it what came of the call with Permit.Done, on every exit path:
//
//	permit, err := b.Acquire(breaker.Op{Safe: true})
//	if err != nil {
//		return err // *OpenError: nothing was sent
//	}
//	defer permit.Done(breaker.Outcome{}) // a panic or Goexit is neutral and frees the probe
//	... send; when the header of a good answer arrives:
//	permit.Answered(time.Since(start))
//	... when the body has ended:
//	permit.Done(breaker.Outcome{Class: breaker.Success})
//
// What counts, and when:
//
//   - A call is in the error rate when it ends, however long it took, and is judged
//     with every outcome. A call that has no answer after its patience counts as a
//     failure while it hangs. A call that was answered, a long stream say, counts for
//     nothing until its body ends.
//   - A permit belongs to the generation in which it was given. Results of an older
//     generation change nothing.
//   - A View is how one of many callers is stricter than the breaker: it is refused while
//     more than its own share of the calls fail, and nobody else is.
//   - In HALF_OPEN one call holds the probe, under a lease. Its answer closes the
//     breaker; a failure, or the end of the lease, opens it for twice as long.
//
// A closed breaker admits and counts with a few atomic operations and reads no clock:
// a timer, which runs only while there is something to count, moves the window on.
// All times are monotonic, so that a step of the wall clock changes nothing.
//
// A Registry holds a breaker for each upstream. The package knows neither HTTP nor
// Caddy; what an outcome is, is for the caller to say.
package breaker
