package table

import (
	"os"
	"runtime"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// Machine is what the numbers depend on.
type Machine struct {
	OS         string `json:"os"`
	Arch       string `json:"arch"`
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`
	FileSystem string `json:"file_system"`
	// Device says that the file system's block device is known, so that the bytes that
	// reach it are.
	Device bool `json:"device"`
	// Others is the part of the processors that others used during the run, from 0
	// to 1; -1 where the system does not tell.
	Others float64 `json:"others"`
	// Sync is the median of an append and its sync in a file whose bytes are there
	// already, as in a store's log; Growing that in a file that grows, for which the
	// file system's own journal has to be written too.
	Sync    time.Duration `json:"sync"`
	Growing time.Duration `json:"growing"`
}

// Look finds out about the machine and the file system of dir.
func Look(dir string) (Machine, error) {
	m := Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(),
		CPU: processor(), FileSystem: fileSystem(dir), Others: -1,
	}
	var err error
	if m.Sync, err = syncTime(dir, syncSamples*syncAppend); err != nil {
		return m, err
	}
	m.Growing, err = syncTime(dir, 0)
	return m, err
}

const (
	syncSamples = 200
	syncAppend  = 256
)

// syncTime is the median time of an append of 256 bytes and its fdatasync, in a file
// that begins with so many written zeros.
func syncTime(dir string, written int) (time.Duration, error) {
	f, err := os.CreateTemp(dir, "agent-guard-bench-sync")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(make([]byte, written)); err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	record := make([]byte, syncAppend)
	var took []time.Duration
	for i := range syncSamples {
		begin := time.Now()
		if _, err := f.WriteAt(record, int64(i*syncAppend)); err != nil {
			return 0, err
		}
		if err := syncData(f); err != nil {
			return 0, err
		}
		took = append(took, time.Since(begin))
	}
	return stat.Percentile(took, 50), nil
}
