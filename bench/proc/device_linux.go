package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DeviceOf is the device of dir's file system; false where that has none of its own, as
// a tmpfs or an overlay.
func DeviceOf(dir string) (*Device, bool) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return nil, false
	}
	d := &Device{dir: dir, stat: fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(s.Dev), unix.Minor(s.Dev))}
	_, err := d.sectors()
	return d, err == nil
}

// Written is how many bytes were written to the device so far. What the file system
// still held in memory is written first.
func (d *Device) Written() (int64, error) {
	if err := d.sync(); err != nil {
		return 0, err
	}
	n, err := d.sectors()
	return n * sector, err
}

func (d *Device) sync() error {
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}

func (d *Device) sectors() (int64, error) {
	const written = 6 // after the reads, merged reads, sectors read, their time, writes, merged writes
	text, err := os.ReadFile(d.stat)
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	if len(fields) <= written {
		return 0, fmt.Errorf("%s has %d fields", d.stat, len(fields))
	}
	return strconv.ParseInt(fields[written], 10, 64)
}
