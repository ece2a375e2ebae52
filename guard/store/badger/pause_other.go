//go:build !linux

package badger

import "time"

func pause(d time.Duration) { time.Sleep(d) }
