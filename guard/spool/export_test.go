package spool

import "os"

// File is the temporary file as the spool sees it, for tests that let it fail.
type File = file

// WithFile makes the spool use create instead of a temporary file.
func (o Options) WithFile(create func() (File, error)) Options {
	o.create = func(string) (file, error) { return create() }
	return o
}

// WithNamedFiles makes the spool behave as where open files cannot be removed.
func (o Options) WithNamedFiles() Options {
	o.create = func(dir string) (file, error) {
		f, err := os.CreateTemp(dir, "named")
		return removeOnClose{f}, err
	}
	return o
}

var ErrClosed = errClosed
