package table

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// syncData makes the bytes of f durable.
func syncData(f *os.File) error { return syscall.Fdatasync(int(f.Fd())) }

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}

// fileSystem is the type of the file system that holds dir: the one of the longest
// mount point above it.
func fileSystem(dir string) string {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "unknown"
	}
	text, _ := os.ReadFile("/proc/self/mounts")
	name, length := "unknown", 0
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		at := fields[1]
		if (at == "/" || dir == at || strings.HasPrefix(dir, at+"/")) && len(at) >= length {
			name, length = fields[2], len(at)
		}
	}
	return name
}
