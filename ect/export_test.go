package ect

// What the tests look into.

var (
	ErrOtherWorkflow = errOtherWorkflow
	ParseRing        = parseRing
)

func (s *FileSource) Retired(kid string) []*Key { return s.replaced(kid) }

func (s *URLSource) Retired(kid string) []*Key { return s.replaced(kid) }
