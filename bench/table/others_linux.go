package table

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the unit of /proc/stat on every system that Go runs on.
const tick = 10 * time.Millisecond

// soFar reads the work up to now; zero where it cannot be read.
func soFar() work {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return work{}
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal ...
	if len(fields) < 9 {
		return work{}
	}
	w := work{at: time.Now()}
	for i, field := range fields[1:9] {
		if i == 3 || i == 4 { // idle, and idle while a disk works
			continue
		}
		n, _ := strconv.ParseInt(field, 10, 64)
		w.machine += time.Duration(n) * tick
	}
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err != nil {
			return work{}
		}
		w.ours += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return w
}
