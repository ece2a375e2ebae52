//go:build !linux

package proc

import "fmt"

// Quota is not known here.
type Quota struct{}

// NewQuota fails: quotas are Linux's.
func NewQuota(string, float64) (*Quota, error) {
	return nil, fmt.Errorf("%w: only Linux has control groups", ErrNoQuota)
}

// Add does nothing here.
func (*Quota) Add(int) error { return nil }

// Pin does nothing here.
func (*Quota) Pin(int) error { return nil }

// Throttling is not known here.
func (*Quota) Throttling() (Throttling, error) { return Throttling{}, nil }

// Remove does nothing here.
func (*Quota) Remove() error { return nil }

// Quotas are none here.
func Quotas() []string { return nil }
