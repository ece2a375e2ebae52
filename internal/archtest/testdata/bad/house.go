// Package house is fine.
package house

import (
	_ "example.com/house/caddymodule"
	_ "example.com/house/guard"
)
