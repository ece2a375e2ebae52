package proc_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// What a file has grown by reaches the device, where there is one, before its counter is
// read. A file system without a device has no counter.
func TestDeviceCountsWhatIsWritten(t *testing.T) {
	dir := t.TempDir()
	d, known := proc.DeviceOf(dir)
	if !known {
		t.Logf("%s has no device of its own", dir)
		return
	}
	before, err := d.Written()
	if err != nil {
		t.Fatal(err)
	}
	const size = 1 << 20
	bytes := make([]byte, size)
	for i := range bytes {
		bytes[i] = byte(i * 7)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	after, err := d.Written()
	if err != nil {
		t.Fatal(err)
	}
	if after-before < size {
		t.Errorf("%d bytes were written to the device, %d to the file", after-before, size)
	}
}

// Nowhere is no device.
func TestNoDevice(t *testing.T) {
	if d, known := proc.DeviceOf(filepath.Join(t.TempDir(), "none")); known {
		t.Errorf("%+v is the device of nothing", d)
	}
}

// A process knows itself, where the system tells anything.
func TestUsage(t *testing.T) {
	u, err := proc.UsageOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if proc.Measures && (u.RssAnon <= 0 || u.RSS < u.RssAnon || u.Files <= 0) {
		t.Errorf("%+v", u)
	}
	if !proc.Measures && u.Written != -1 {
		t.Errorf("%d bytes written, where nothing is known", u.Written)
	}
}
