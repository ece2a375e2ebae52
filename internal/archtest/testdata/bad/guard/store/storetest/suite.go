// Package storetest is made for tests, so it may not sleep either.
package storetest

import (
	"time"

	_ "example.com/house/guard/store"
	_ "github.com/anishathalye/porcupine"
)

func wait() { time.Sleep(time.Second) }
