package spool

import "sync"

const (
	// smallSize serves most request bodies without the weight of a whole block.
	smallSize = 4 << 10
	blockSize = 64 << 10
)

type (
	smallBlock [smallSize]byte
	block      [blockSize]byte
)

var (
	smallPool = sync.Pool{New: func() any { return new(smallBlock) }}
	blockPool = sync.Pool{New: func() any { return new(block) }}
)

// grow provides memory up to position end. A body that outgrows its small block
// moves to a whole one, so that up to 64 KiB lie in one piece; the small block
// stays until the release, because Bytes may have handed it out. The caller
// holds writing and mu.
func (s *Spool) grow(end int64) {
	if end <= 0 {
		return
	}
	if end <= smallSize && len(s.blocks) == 0 {
		if s.small == nil {
			s.small = smallPool.Get().(*smallBlock)
		}
		return
	}
	for int64(len(s.blocks))*blockSize < end {
		b := blockPool.Get().(*block)
		if len(s.blocks) == 0 && s.small != nil {
			copy(b[:], s.small[:])
		}
		s.blocks = append(s.blocks, b)
	}
}

// slot is the memory from pos to the end of its block. The caller holds mu, or is
// the writer between begin and end, and pos was provided by grow.
func (s *Spool) slot(pos int64) []byte {
	if len(s.blocks) == 0 {
		return s.small[pos:]
	}
	b, from := s.blocks[pos/blockSize], pos%blockSize
	return b[from:min(blockSize, from+s.memory-pos)]
}

// release gives the blocks back to their pools. Nobody may hold a reference.
func (s *Spool) release() {
	for i, b := range s.blocks {
		blockPool.Put(b)
		s.blocks[i] = nil
	}
	s.blocks = nil
	if s.small != nil {
		smallPool.Put(s.small)
		s.small = nil
	}
}
