package table

import (
	"syscall"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// soFar reads the work up to now; zero where it cannot be read.
func soFar() work {
	machine, err := proc.MachineWork()
	if err != nil {
		return work{}
	}
	w := work{at: time.Now(), machine: machine}
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err != nil {
			return work{}
		}
		w.ours += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return w
}
