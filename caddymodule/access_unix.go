//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package caddymodule

import "golang.org/x/sys/unix"

// mayWriteIn asks the system whether this process may make files in a directory. It makes none.
func mayWriteIn(dir string) error { return unix.Access(dir, unix.W_OK|unix.X_OK) }

// mayRead asks the system whether this process may read a file.
func mayRead(file string) error { return unix.Access(file, unix.R_OK) }
