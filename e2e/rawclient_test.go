package e2e

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// dial opens a bare connection to the gateway.
func (g *gateway) dial() net.Conn {
	g.t.Helper()
	conn, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// raw sends these bytes and returns what comes back until the connection ends.
func (g *gateway) raw(text string) string {
	g.t.Helper()
	conn := g.dial()
	write(g.t, conn, text)
	all, err := io.ReadAll(conn)
	if err != nil {
		g.t.Fatal(err)
	}
	return string(all)
}

func write(t *testing.T, w io.Writer, text string) {
	t.Helper()
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
}

// answers reads one answer from a bare connection.
func answers(t *testing.T, in *bufio.Reader, method string) reply {
	t.Helper()
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	return read(watchWire(t, "").watch(method, "", res))
}
