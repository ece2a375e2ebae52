//go:build !linux

package proc

import "os"

// Measures says whether UsageOf works on this system.
const Measures = false

// UsageOf reads nothing here.
func UsageOf(int) (Usage, error) { return Usage{}, nil }

func allocated(info os.FileInfo) int64 { return info.Size() }
