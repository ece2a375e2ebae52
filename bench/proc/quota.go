package proc

import (
	"errors"
	"fmt"
	"time"
)

// ErrNoQuota: this system has no quotas of processor time, or this user may not set them.
var ErrNoQuota = errors.New("no quota of processor time can be set")

// A quota is given anew in each period: one that has used it up waits for the next. The shorter the period, the
// shorter are these waits; the kernel takes nothing below a millisecond for either.
const (
	quotaPeriod = 10 * time.Millisecond
	// LeastShare is the smallest share of a processor.
	LeastShare = 0.1
)

// MostShare is the largest share: as many whole processors.
const MostShare = 1024

// CheckShare refuses what the kernel would not take.
func CheckShare(share float64) error {
	if !(share >= LeastShare && share <= MostShare) { // what is no number is neither
		return fmt.Errorf("a share of %v processors; from %v to %d", share, LeastShare, MostShare)
	}
	return nil
}

// Throttling says how often the processes of a quota had to wait for the next period.
type Throttling struct {
	// Periods are those in which one of them ran, and Throttled those in which the quota was used up.
	Periods, Throttled int64
}
