//go:build !race

package cascade_test

const raced = false
