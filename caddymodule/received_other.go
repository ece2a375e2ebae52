//go:build !linux

package caddymodule

import "syscall"

// acknowledged is not known here: a client that has closed its own direction counts as gone.
func acknowledged(syscall.Conn) bool { return false }
