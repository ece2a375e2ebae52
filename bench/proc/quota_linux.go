package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Quota is processor time that several processes have together and no more of: a control group of the kernel, of
// version 1 or 2.
type Quota struct {
	dir string
}

// quotaPrefix begins the names of all groups. Behind it comes the id of the process that has made one, so that
// another run can remove what one that was killed has left.
const quotaPrefix = "agent-guard-bench-"

// NewQuota makes a group without processes. A share of 0.5 is half the time of one processor, 2 all of two. The
// error is ErrNoQuota where the system or the user's rights do not allow it.
func NewQuota(name string, share float64) (*Quota, error) {
	if err := CheckShare(share); err != nil {
		return nil, err
	}
	h, err := controllers("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	h.sweep()
	q, err := h.group(fmt.Sprintf("%s%d-%s", quotaPrefix, os.Getpid(), name), share)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoQuota, err)
	}
	return q, nil
}

// hierarchy is where the kernel keeps groups for processor time.
type hierarchy struct {
	root    string
	unified bool // version 2
}

// controllers finds the hierarchy among the mounts. Where version 1 has the processors, version 2 has not.
func controllers(mounts string) (hierarchy, error) {
	text, err := os.ReadFile(mounts)
	if err != nil {
		return hierarchy{}, fmt.Errorf("%w: %w", ErrNoQuota, err)
	}
	var unified string
	for line := range strings.Lines(string(text)) {
		// 36 25 0:31 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 {
			continue
		}
		switch {
		case right[0] == "cgroup" && slices.Contains(strings.Split(right[2], ","), "cpu"):
			return hierarchy{root: left[4]}, nil
		case right[0] == "cgroup2" && unified == "":
			unified = left[4]
		}
	}
	if unified == "" {
		return hierarchy{}, fmt.Errorf("%w: no control groups are mounted", ErrNoQuota)
	}
	return hierarchy{root: unified, unified: true}, nil
}

// Quotas are the directories of the groups that this process has made and not removed.
func Quotas() []string {
	h, err := controllers("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	mine, _ := filepath.Glob(filepath.Join(h.root, fmt.Sprintf("%s%d-*", quotaPrefix, os.Getpid())))
	return mine
}

// sweep removes groups of runs that ended without doing so. What it cannot remove harms nobody.
func (h hierarchy) sweep() {
	left, _ := filepath.Glob(filepath.Join(h.root, quotaPrefix+"*"))
	for _, dir := range left {
		maker, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), quotaPrefix), "-")
		if pid, err := strconv.Atoi(maker); err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			_ = syscall.Rmdir(dir)
		}
	}
}

func (h hierarchy) group(name string, share float64) (_ *Quota, err error) {
	if h.unified {
		if err := h.pass(); err != nil {
			return nil, err
		}
	}
	q := &Quota{dir: filepath.Join(h.root, name)}
	if err := os.Mkdir(q.dir, 0o755); err != nil {
		return nil, err
	}
	for _, s := range h.settings(share) {
		if err := q.write(s[0], s[1]); err != nil {
			return nil, errors.Join(err, syscall.Rmdir(q.dir))
		}
	}
	if _, err := q.Throttling(); err != nil {
		return nil, errors.Join(err, syscall.Rmdir(q.dir))
	}
	return q, nil
}

// pass has version 2 hand the processors on to groups below its root.
func (h hierarchy) pass() error {
	const file = "cgroup.subtree_control"
	text, err := os.ReadFile(filepath.Join(h.root, file))
	if err != nil || slices.Contains(strings.Fields(string(text)), "cpu") {
		return err
	}
	return (&Quota{dir: h.root}).write(file, "+cpu")
}

// settings are the files of a group, and what they say. A quota comes behind its period, since the kernel compares them.
func (h hierarchy) settings(share float64) [][2]string {
	period := strconv.FormatInt(quotaPeriod.Microseconds(), 10)
	quota := strconv.FormatInt(int64(share*float64(quotaPeriod.Microseconds())), 10)
	if h.unified {
		return [][2]string{{"cpu.max", quota + " " + period}}
	}
	return [][2]string{{"cpu.cfs_period_us", period}, {"cpu.cfs_quota_us", quota}}
}

// write writes to a file of the kernel, which must be there.
func (q *Quota) write(file, text string) error {
	f, err := os.OpenFile(filepath.Join(q.dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// Add has a process and its children share the quota; children that they start later do by themselves.
func (q *Quota) Add(pid int) error {
	if err := q.add(pid); err != nil { // first, so that whom it starts meanwhile is either found or born there
		return err
	}
	children, err := childrenOf(pid)
	if err != nil {
		return err
	}
	for _, child := range children {
		if err := q.add(child); err != nil && !errors.Is(err, syscall.ESRCH) { // it has ended
			return err
		}
	}
	return nil
}

func (q *Quota) add(pid int) error { return q.write("cgroup.procs", strconv.Itoa(pid)) }

// Pin has a process and its children run on one processor. The kernel gives each processor a slice of a quota, which
// lies idle when the next process to run is on another one: several processes that take turns then get a good deal
// less than their share. For processes of one thread.
func (q *Quota) Pin(pid int) error {
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(pid, &may); err != nil {
		return err
	}
	for n := 0; one.Count() == 0 && n < len(may)*64; n++ {
		if may.IsSet(n) {
			one.Set(n)
		}
	}
	if err := unix.SchedSetaffinity(pid, &one); err != nil {
		return err
	}
	children, err := childrenOf(pid)
	if err != nil {
		return err
	}
	for _, child := range children {
		if err := unix.SchedSetaffinity(child, &one); err != nil && !errors.Is(err, syscall.ESRCH) { // it has ended
			return err
		}
	}
	return nil
}

// Throttling is what the kernel has counted so far.
func (q *Quota) Throttling() (t Throttling, err error) {
	file, counted := filepath.Join(q.dir, "cpu.stat"), false
	text, err := os.ReadFile(file)
	if err != nil {
		return t, err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, _ := strconv.ParseInt(value, 10, 64)
		switch name {
		case "nr_periods":
			t.Periods = n
		case "nr_throttled":
			t.Throttled, counted = n, true
		}
	}
	if !counted { // as by what only looks like such a kernel
		return t, fmt.Errorf("%s does not count what is throttled", file)
	}
	return t, nil
}

// Remove removes the group, whose processes must have ended, or be about to.
func (q *Quota) Remove() error {
	const every = 10 * time.Millisecond
	for late := time.Now().Add(patience / 6); ; {
		err := syscall.Rmdir(q.dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(late) {
			return fmt.Errorf("group %s: %w", q.dir, err)
		}
		<-time.After(every)
	}
}
