// Package breaker knows neither the guard nor tokens.
package breaker

import (
	_ "example.com/house/ect"
	_ "example.com/house/guard"
	_ "github.com/google/uuid"
)
