//go:build !race

package breaker_test

const raced = false
