// Package seal is a leaf.
package seal

import (
	_ "example.com/house/guard/store"
	_ "github.com/anishathalye/porcupine"
)
