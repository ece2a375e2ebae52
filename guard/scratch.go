package guard

import "sync"

// scratch is memory for what is encoded only to be sealed.
var scratch = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// maxScratch bounds what is kept of it for the next one.
const maxScratch = 64 << 10

func freeScratch(b *[]byte) {
	if cap(*b) <= maxScratch {
		scratch.Put(b)
	}
}
