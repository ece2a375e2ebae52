package body

import (
	"io"
	"os"
)

var (
	Known     = known
	Words     = words
	ErrClosed = errClosed
	ErrLimit  = errLimit
)

// SpillError is a failure of the temporary file.
type SpillError = spillError

// ReadFrom reads r to its end into the spool.
func (s *Spool) ReadFrom(r io.Reader) (int64, error) { return s.readFrom(r) }

// File is the temporary file as the spool sees it, for tests that let it fail.
type File = file

// WithFile makes the spool use create instead of a temporary file.
func (o SpoolOptions) WithFile(create func() (File, error)) SpoolOptions {
	o.create = func(string) (file, error) { return create() }
	return o
}

// WithNamedFiles makes the spool behave as where open files cannot be removed.
func (o SpoolOptions) WithNamedFiles() SpoolOptions {
	o.create = func(dir string) (file, error) {
		f, err := os.CreateTemp(dir, "named")
		return removeOnClose{f}, err
	}
	return o
}

// Sum is the fingerprint that Read computes.
func (c *Comparison) Sum(req Request) (Fingerprint, error) {
	sum, _, err := c.Read(req)
	return sum, err
}
