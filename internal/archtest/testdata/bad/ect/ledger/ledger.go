// Package ledger does not know jwx.
package ledger

import (
	_ "example.com/house/ect"
	_ "github.com/lestrrat-go/jwx/v2/jws"
)
