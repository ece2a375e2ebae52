package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// UsageOf reads what the process uses.
func UsageOf(pid int) (Usage, error) {
	var u Usage
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		kilobytes, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch name {
		case "VmRSS":
			u.RSS = kilobytes << 10
		case "RssAnon":
			u.RssAnon = kilobytes << 10
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	u.Files = len(files)
	return u, err
}

// allocated is what a file occupies on disk: Badger's are larger than they are full.
func allocated(info os.FileInfo) int64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Blocks * 512
	}
	return info.Size()
}
