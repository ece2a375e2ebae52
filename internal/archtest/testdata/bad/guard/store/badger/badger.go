// Package badger knows the contract and its own parts, not another store's suite.
package badger

import (
	_ "example.com/house/guard/store"
	_ "example.com/house/guard/store/badger/segment"
	_ "example.com/house/guard/store/storetest"
	_ "github.com/dgraph-io/badger/v4"
)

// Open is explained.
func Open() {}
