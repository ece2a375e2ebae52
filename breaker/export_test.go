package breaker

// Restored is restore: a breaker outside of any registry.
var Restored = restore

func (b *Breaker) SetRules(rules *Rules) { b.setRules(rules) }

// Overflowed is how many times Get found no room.
func (r *Registry) Overflowed() uint64 { return r.overflows.Load() }
