package store

import (
	_ "example.com/house/guard/seal"
	_ "example.com/house/guard/store/badger"
)

const (
	Limit = 1 // explained beside it
	Bound = 2
)

// ErrGone is explained.
var ErrGone, errHidden error

var ErrLost error

type Store interface {
	// Get is explained.
	Get()
	Close()
}

// Once has one method, and the type says what it does.
type Once interface{ Do() }

// Box is explained.
type Box[T any] struct{ Value T }

func (b *Box[T]) Open() {}

func (b Box[T]) String() string { return "" }

type hidden struct{}

func (hidden) Loud() {}

func New() {}
