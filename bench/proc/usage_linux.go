package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Measures says whether UsageOf works on this system.
const Measures = true

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
	if u.Work, err = work(pid); err != nil {
		return u, err
	}
	u.Written = written(pid)
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	u.Files = len(files)
	return u, err
}

// Fields of /proc/PID/stat, behind the name.
const (
	statParent = 1
	statUser   = 11
	statSystem = 12
	// Of children that have ended.
	statChildrenUser   = 13
	statChildrenSystem = 14
)

// stat reads numbers of /proc/PID/stat.
func stat(pid int, wanted ...int) ([]int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // the name may have spaces
	numbers := make([]int64, len(wanted))
	for i, at := range wanted {
		if at >= len(fields) {
			return nil, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
		}
		if numbers[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return nil, err
		}
	}
	return numbers, nil
}

const tick = 10 * time.Millisecond // on every system that Go runs on

// work is the processor time of all threads, the system's part included.
func work(pid int) (time.Duration, error) {
	n, err := stat(pid, statUser, statSystem)
	if err != nil {
		return 0, err
	}
	return time.Duration(n[0]+n[1]) * tick, nil
}

// FamilyWork is the processor time of a process and of its children, also of those that have ended.
func FamilyWork(pid int) (time.Duration, error) {
	own, err := stat(pid, statUser, statSystem, statChildrenUser, statChildrenSystem)
	if err != nil {
		return 0, err
	}
	sum := own[0] + own[1] + own[2] + own[3]
	children, err := childrenOf(pid)
	if err != nil {
		return 0, err
	}
	for _, child := range children {
		if n, err := stat(child, statUser, statSystem); err == nil { // else it has ended
			sum += n[0] + n[1]
		}
	}
	return time.Duration(sum) * tick, nil
}

// MachineWork is the processor time that everybody has used since the machine was started.
func MachineWork() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal ...
	if len(fields) < 9 {
		return 0, fmt.Errorf("/proc/stat has %d fields", len(fields))
	}
	var sum time.Duration
	for i, field := range fields[1:9] {
		if i == 3 || i == 4 { // idle, and idle while a disk works
			continue
		}
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

// childrenOf are the processes whose parent this one is, at this moment.
func childrenOf(pid int) (children []int, err error) {
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, entry := range all {
		child, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if n, err := stat(child, statParent); err == nil && n[0] == int64(pid) { // else it has ended
			children = append(children, child)
		}
	}
	return children, nil
}

// written is what the process had written to disks, -1 where the system keeps that to
// itself.
func written(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); name == "write_bytes" {
			if n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// allocated is what a file occupies on disk: Badger's are larger than they are full.
func allocated(info os.FileInfo) int64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Blocks * 512
	}
	return info.Size()
}
