// Package ect is the only one that knows jwx.
package ect

import (
	_ "example.com/house/breaker"
	_ "example.com/house/guard"
	_ "github.com/lestrrat-go/jwx/v2/jwt"
)
