//go:build race

package rollback_test

// raced is whether the race detector watches, which is ten to twenty times slower. What uses
// one goroutine has little to show it: a part of the cases is enough there, and plain tests run them all.
const raced = true
