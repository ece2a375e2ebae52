//go:build !linux

package badger

// reserve is left to the free space that Options.MinFree asks for.
func (s *Store) reserve() {}
