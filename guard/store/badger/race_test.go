//go:build race

package badger

// manyRecords is small, since the race detector is twenty times slower.
const manyRecords = 30_000
