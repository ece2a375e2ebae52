package breaker

// Restored is restore: a breaker outside of any registry.
func Restored(s Snapshot, rules *Rules, hook Hook) (*Breaker, error) {
	b, err := restore(s, rules, hook)
	if err == nil {
		b.resume()
	}
	return b, err
}

func (b *Breaker) SetRules(rules *Rules) { b.rules.Store(rules) }

// Overflowed is how many times Get found no room.
func (r *Registry) Overflowed() uint64 { return r.overflows.Load() }
