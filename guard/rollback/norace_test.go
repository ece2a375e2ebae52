//go:build !race

package rollback_test

const raced = false
