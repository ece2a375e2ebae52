package harness

import "testing"

// closed has nothing to wait with: a lock of another handle cannot be waited for here.
func closed(*testing.T, string) {}
