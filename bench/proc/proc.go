package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// Spec says which part to run, and how.
type Spec struct {
	Role string
	Args []string
	// Binary is the program that has the part; empty is this one.
	Binary string
	// Env is added to the environment.
	Env []string
	// Mark is in the line that says that the process works; empty is that of Ready.
	Mark string
	// Within is how long that may take; 0 is three minutes.
	Within time.Duration
}

// Proc is a running process.
type Proc struct {
	// Word is what stood behind the mark of the line that said that it works.
	Word string
	// Dead is closed once the process is gone.
	Dead <-chan struct{}

	cmd   *exec.Cmd
	mu    sync.Mutex
	lines []string // the last that it wrote
}

// patience is how long a process may take to start, unless it says so, or to end.
const patience = 3 * time.Minute

// Start runs a part and waits until it works.
func Start(s Spec) (*Proc, error) {
	binary := s.Binary
	if binary == "" {
		var err error
		if binary, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	mark := s.Mark
	if mark == "" {
		mark = readyMark
	}
	within := s.Within
	if within == 0 {
		within = patience
	}
	dead, ready := make(chan struct{}), make(chan string, 1)
	p := &Proc{cmd: exec.Command(binary, s.Args...), Dead: dead}
	p.cmd.Env = append(append(os.Environ(), s.Env...), roleVariable+"="+s.Role)
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, input := io.Pipe()
	p.cmd.Stdout, p.cmd.Stderr = input, input
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go p.read(output, mark, ready)
	go func() {
		_ = p.cmd.Wait() // how it ended is in what it wrote
		_ = stdin.Close()
		_ = input.Close()
		close(dead)
	}()
	select {
	case p.Word = <-ready:
		return p, nil
	case <-dead:
		return nil, fmt.Errorf("%s did not start:\n%s", s.Role, p.Tail())
	case <-time.After(within):
		p.Kill()
		return nil, fmt.Errorf("%s is not ready:\n%s", s.Role, p.Tail())
	}
}

func (p *Proc) read(output io.Reader, mark string, ready chan<- string) {
	lines := bufio.NewReader(output)
	for {
		line, err := lines.ReadString('\n')
		if line = strings.TrimRight(line, "\r\n"); line != "" {
			p.mu.Lock()
			p.lines = append(p.lines[max(0, len(p.lines)-40):], line)
			p.mu.Unlock()
			if _, word, found := strings.Cut(line, mark); found {
				select {
				case ready <- word:
				default:
				}
			}
		}
		if err != nil {
			return
		}
	}
}

// Pid is the process's id.
func (p *Proc) Pid() int { return p.cmd.Process.Pid }

// Tail is the last that the process wrote.
func (p *Proc) Tail() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// Kill ends the process at once (SIGKILL), and waits until it is gone.
func (p *Proc) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.Dead
}

// Stop asks the process to end, as a service manager does, and waits. One that does
// not is killed, and told of.
func (p *Proc) Stop() error {
	if err := p.cmd.Process.Signal(terminate); err != nil {
		p.Kill()
		return nil // there are no such signals here, or it is gone already
	}
	select {
	case <-p.Dead:
		return nil
	case <-time.After(patience):
		p.Kill()
		return fmt.Errorf("process %d does not end:\n%s", p.Pid(), p.Tail())
	}
}
