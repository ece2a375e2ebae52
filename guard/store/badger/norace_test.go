//go:build !race

package badger

const manyRecords = 300_000
