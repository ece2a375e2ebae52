package proc

// Device is the block device that holds a directory. It counts what everybody writes to
// it, not one process alone.
type Device struct {
	dir  string
	stat string // the file with its counters
}

// sector is the unit in which block devices count, whatever theirs is.
const sector = 512
