//go:build unix

package pgserver

import (
	"net"
	"strconv"
	"sync"
	"sync/atomic"
)

// Fate is what a Proxy does with bytes for the server.
type Fate int

// The fates.
const (
	Pass      Fate = iota
	CutBefore      // close the connection in place of handing them on
	CutAfter       // hand them on, and close the connection before any answer
	Hold           // keep them back until Release
)

// Proxy is a network between clients and a server, for its faults.
type Proxy struct {
	listener net.Listener
	server   *Server
	judge    atomic.Pointer[func([]byte) Fate]
	all      sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]bool
	release chan struct{} // closed by the next Release
}

// NewProxy listens on a port of the loopback.
func NewProxy(s *Server) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: l, server: s, conns: make(map[net.Conn]bool), release: make(chan struct{})}
	pass := func([]byte) Fate { return Pass }
	p.judge.Store(&pass)
	p.all.Go(p.accept)
	return p, nil
}

// Judge sets what decides on the bytes that clients send.
func (p *Proxy) Judge(judge func([]byte) Fate) { p.judge.Store(&judge) }

// DSN leads to the server through the proxy.
func (p *Proxy) DSN() string {
	return "host=127.0.0.1 port=" + strconv.Itoa(p.listener.Addr().(*net.TCPAddr).Port) + " user=postgres dbname=postgres sslmode=disable"
}

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// Release hands on what was held, also where the client has gone.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.release)
	p.release = make(chan struct{})
}

// Close ends the proxy and its connections.
func (p *Proxy) Close() {
	_ = p.listener.Close()
	p.Cut()
	p.mu.Lock()
	close(p.release)
	p.release = make(chan struct{})
	p.mu.Unlock()
	p.all.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("unix", p.server.Socket())
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		var cut atomic.Bool
		p.all.Go(func() { p.pump(client, server, &cut, true) })
		p.all.Go(func() { p.pump(server, client, &cut, false) })
	}
}

// pump hands on what comes from one side. Of a connection that was cut behind a request, the
// server's side stays until the server has carried it out.
func (p *Proxy) pump(from, to net.Conn, cut *atomic.Bool, judged bool) {
	defer func() {
		_ = from.Close()
		if !judged || !cut.Load() {
			_ = to.Close()
		}
		p.mu.Lock()
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if !judged && cut.Load() {
			if n >= 6 && buf[n-6] == 'Z' { // ready for the next request
				return
			}
			continue
		}
		fate := Pass
		if judged {
			fate = (*p.judge.Load())(buf[:n])
		}
		switch fate {
		case CutBefore:
			return
		case Hold:
			p.mu.Lock()
			release := p.release
			p.mu.Unlock()
			<-release
		case CutAfter:
			cut.Store(true)
		}
		if _, err := to.Write(buf[:n]); err != nil || fate == CutAfter {
			return
		}
	}
}
