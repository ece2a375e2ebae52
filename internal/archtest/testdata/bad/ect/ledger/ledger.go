// Package ledger knows the storage contract, and neither jwx nor the guard.
package ledger

import (
	_ "example.com/house/ect"
	_ "example.com/house/guard"
	_ "example.com/house/guard/store"
	_ "example.com/house/guard/store/badger"
	_ "github.com/lestrrat-go/jwx/v2/jws"
)
