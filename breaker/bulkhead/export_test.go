package bulkhead

// Retrying is how many retries hold permits, or wait, that are not known to be sent.
func Retrying(p *Pool) int { return len(p.again) }

// Lots is how many workflows p remembers.
func Lots(p *Pool) int { return len(p.lots) }

// Failures is how many failed calls p remembers.
func Failures(p *Pool) int { return len(p.failed.keys[0]) + len(p.failed.keys[1]) }

const UnservedAfter = unservedAfter
