package spool

// File is the temporary file as the spool sees it, for tests that let it fail.
type File = file

// WithFile makes the spool use create instead of a temporary file.
func (o Options) WithFile(create func() (File, error)) Options {
	o.create = func(string) (file, error) { return create() }
	return o
}
