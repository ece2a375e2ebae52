// Package stray has no place.
package stray
