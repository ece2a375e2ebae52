// Package segment is part of badger.
package segment
