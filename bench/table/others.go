package table

import "time"

// work is the processor time that was used up to a moment: by the whole machine, and
// by this process and those of its children that have ended.
type work struct {
	at            time.Time
	machine, ours time.Duration
}

// others is the part of the machine's processors that others used between two
// moments, from 0 to 1; -1 where the system does not tell.
func others(before, after work, cores int) float64 {
	if before.machine == 0 {
		return -1
	}
	all := float64(after.at.Sub(before.at)) * float64(cores)
	used := float64(after.machine - before.machine - (after.ours - before.ours))
	return min(max(used/all, 0), 1)
}
