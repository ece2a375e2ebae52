package proc

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tryQuota makes a quota; nil where there are none, which the error must say.
func tryQuota(t *testing.T, share float64) *Quota {
	t.Helper()
	q, err := NewQuota(t.Name(), share)
	if errors.Is(err, ErrNoQuota) {
		t.Log(err)
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := q.Remove(); err != nil {
			t.Error(err)
		}
	})
	return q
}

// shell runs a script until the test ends.
func shell(t *testing.T, script string) int {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the group is removed
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// until waits for something that comes.
func until(t *testing.T, what string, there func() bool) {
	t.Helper()
	for late := time.Now().Add(time.Minute); !there(); <-time.After(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatal(what)
		}
	}
}

// A process and its children are in the group, whoever came first.
func TestQuotaHasChildren(t *testing.T) {
	q := tryQuota(t, 1)
	if q == nil {
		return
	}
	for range 10 {
		pid := shell(t, "sleep 100 & wait")
		if err := q.Add(pid); err != nil {
			t.Fatal(err)
		}
		var child int
		until(t, "the shell has no child", func() bool {
			all, err := childrenOf(pid)
			if err != nil {
				t.Fatal(err)
			}
			if len(all) > 0 {
				child = all[0]
			}
			return len(all) > 0
		})
		for _, one := range []int{pid, child} {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", one))
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(text), filepath.Base(q.dir)) {
				t.Errorf("process %d of the shell %d is in none but\n%s", one, pid, text)
			}
		}
	}
}

// Pinned processes have one processor, and so have their children.
func TestPin(t *testing.T) {
	pid := shell(t, "sleep 100 & wait")
	if err := new(Quota).Pin(pid); err != nil {
		t.Fatal(err)
	}
	var children []int
	until(t, "the shell has no child", func() (there bool) {
		var err error
		if children, err = childrenOf(pid); err != nil {
			t.Fatal(err)
		}
		return len(children) > 0
	})
	for _, one := range append(children, pid) {
		var may unix.CPUSet
		if err := unix.SchedGetaffinity(one, &may); err != nil || may.Count() != 1 {
			t.Errorf("process %d of the shell %d may use %d processors, %v", one, pid, may.Count(), err)
		}
	}
}

// A process that always works has to wait.
func TestQuotaThrottles(t *testing.T) {
	q := tryQuota(t, LeastShare)
	if q == nil {
		return
	}
	if err := q.Add(shell(t, "while :; do :; done")); err != nil {
		t.Fatal(err)
	}
	until(t, "it was never throttled", func() bool {
		n, err := q.Throttling()
		if err != nil {
			t.Fatal(err)
		}
		return n.Throttled > 0 && n.Periods >= n.Throttled
	})
}

func TestShares(t *testing.T) {
	for _, share := range []float64{LeastShare, 0.5, 1, 2.5, MostShare} {
		if err := CheckShare(share); err != nil {
			t.Error(err)
		}
	}
	for _, share := range []float64{0, 0.099, -1, MostShare + 1, math.NaN(), math.Inf(1)} {
		if err := CheckShare(share); err == nil {
			t.Errorf("a share of %v is none", share)
		}
		if _, err := NewQuota(t.Name(), share); err == nil || errors.Is(err, ErrNoQuota) {
			t.Errorf("a quota of %v: %v", share, err)
		}
	}
}

// Both versions of the kernel's groups are told the same.
func TestQuotaSettings(t *testing.T) {
	for _, c := range []struct {
		share float64
		one   string
		two   string
	}{
		{0.1, "1000", "1000 10000"},
		{0.75, "7500", "7500 10000"},
		{2, "20000", "20000 10000"},
	} {
		if got, want := (hierarchy{}).settings(c.share), [][2]string{{"cpu.cfs_period_us", "10000"}, {"cpu.cfs_quota_us", c.one}}; !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", c.share, got, want)
		}
		if got, want := (hierarchy{unified: true}).settings(c.share), [][2]string{{"cpu.max", c.two}}; !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", c.share, got, want)
		}
	}
}

// Version 1 has the processors where it is mounted with them, else version 2.
func TestControllers(t *testing.T) {
	const (
		tmpfs   = "24 20 0:21 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
		other   = "25 24 0:22 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
		cpu     = "26 24 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
		cpuset  = "27 24 0:24 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
		unified = "28 24 0:25 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
	)
	for _, c := range []struct {
		mounts string
		want   hierarchy
	}{
		{tmpfs + other + unified + cpuset + cpu, hierarchy{"/sys/fs/cgroup/cpu,cpuacct", false}},
		{tmpfs + other + cpuset + unified, hierarchy{"/sys/fs/cgroup/unified", true}},
		{tmpfs + other + cpuset, hierarchy{}},
		{"short\n", hierarchy{}},
	} {
		file := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(file, []byte(c.mounts), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := controllers(file)
		if got != c.want || errors.Is(err, ErrNoQuota) != (c.want == hierarchy{}) {
			t.Errorf("%+v, %v; want %+v", got, err, c.want)
		}
	}
	if _, err := controllers(filepath.Join(t.TempDir(), "none")); !errors.Is(err, ErrNoQuota) {
		t.Error(err)
	}
}

// Version 2 is asked to hand the processors on where it does not yet. What cannot be set leaves no group.
func TestUnified(t *testing.T) {
	root := t.TempDir()
	control := filepath.Join(root, "cgroup.subtree_control")
	for before, asked := range map[string]bool{"": true, "cpuset io": true, "cpuset cpu io": false} {
		if err := os.WriteFile(control, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := (hierarchy{root, true}).group("one", 1); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("there is no cpu.max: %v", err)
		}
		text, err := os.ReadFile(control)
		if err != nil || strings.HasPrefix(string(text), "+cpu") != asked {
			t.Errorf("%q became %q, %v", before, text, err)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "one")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// Groups of processes that are gone are removed, and no others.
func TestSweep(t *testing.T) {
	root := t.TempDir()
	const never = 1<<22 + 1 // above every process's id
	gone, mine, foreign := fmt.Sprint(quotaPrefix, never, "-a"), fmt.Sprint(quotaPrefix, os.Getpid(), "-b"), "other"
	for _, name := range []string{gone, mine, foreign} {
		if err := os.Mkdir(filepath.Join(root, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	hierarchy{root: root}.sweep()
	var left []string
	entries, err := os.ReadDir(root)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if want := []string{mine, foreign}; err != nil || !slices.Equal(left, want) {
		t.Errorf("%q, %v; want %q", left, err, want)
	}
}
