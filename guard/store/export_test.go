package store

// Len is the number of watches that wait.
func (k *Watchers) Len() int {
	n := 0
	for i := range k.shards {
		s := &k.shards[i]
		s.mu.Lock()
		for _, waiters := range s.keys {
			n += len(waiters)
		}
		s.mu.Unlock()
	}
	return n
}
