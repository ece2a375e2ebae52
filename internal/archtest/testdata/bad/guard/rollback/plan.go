// Package rollback may import the guard, tokens, but no store of flesh.
package rollback

import (
	_ "example.com/house/ect"
	_ "example.com/house/guard"
	_ "example.com/house/guard/checkpoint"
	_ "example.com/house/guard/store"
	_ "example.com/house/guard/store/badger"
)

// Plan waits where a product may.
func Plan() {
	// TODO: everything
	panic("not implemented")
}
