//go:build race

package badger

// manyRecords is what the race detector, twenty times slower, gets through in time.
const manyRecords = 30_000
