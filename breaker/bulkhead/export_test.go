package bulkhead

// Lots is how many workflows p remembers.
func Lots(p *Pool) int { return len(p.lots) }
