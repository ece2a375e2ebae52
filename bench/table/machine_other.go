//go:build !linux

package table

import "os"

// syncData makes the bytes of f durable.
func syncData(f *os.File) error { return f.Sync() }

func processor() string { return "unknown processor" }

func fileSystem(string) string { return "unknown" }
