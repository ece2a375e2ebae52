//go:build unix && !linux

package pgserver

import "syscall"

func mapped(int) bool { return true }

func asNobody(*syscall.SysProcAttr) {}
