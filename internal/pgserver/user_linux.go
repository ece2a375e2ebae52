package pgserver

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// mapped reports whether there is a user of that number: not in a namespace of users that has root alone.
func mapped(id int) bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true // no namespaces
	}
	for line := range strings.Lines(string(text)) {
		var inside, outside, size int
		if n, _ := fmt.Sscan(line, &inside, &outside, &size); n == 3 && id >= inside && id-inside < size {
			return true
		}
	}
	return false
}

// asNobody has a process run in a namespace in which the only user is nobody, and not root.
func asNobody(attr *syscall.SysProcAttr) {
	attr.Cloneflags |= syscall.CLONE_NEWUSER
	attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: 0, Size: 1}}
	attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: 0, Size: 1}}
}
