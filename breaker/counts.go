package breaker

// counts is what a window holds.
type counts struct {
	calls, failures uint64 // ended; failures are among the calls
	slow, limited   uint64 // slow ones are among the calls, rate-limited ones are not
	overdue         uint64 // still hanging
}

// rate is the error rate, with calls that hang as failures; 0 of nothing.
func (c counts) rate() float64 {
	if c.calls+c.overdue == 0 {
		return 0
	}
	return float64(c.failures+c.overdue) / float64(c.calls+c.overdue)
}

// Two counts share a word, the first in the upper half, so that both change in one
// atomic operation and each outcome is judged by exact numbers.
const (
	oneCall    = 1 << 32
	oneFailure = 1
	oneSlow    = 1 << 32
	oneLimited = 1
)

func halves(word uint64) (upper, lower uint64) { return word >> 32, word & (1<<32 - 1) }
