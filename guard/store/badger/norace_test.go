//go:build !race

package badger

const manyRecords = 100_000
