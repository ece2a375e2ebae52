package proc

import "syscall"

// terminate is how a service manager ends a process.
const terminate = syscall.SIGTERM
