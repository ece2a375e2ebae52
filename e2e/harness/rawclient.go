package harness

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// Dial opens a bare connection to the gateway.
func (g *Gateway) Dial() net.Conn {
	g.T.Helper()
	conn, err := net.Dial("tcp", g.Addr)
	if err != nil {
		g.T.Fatal(err)
	}
	g.T.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(Patience))
	return conn
}

// Raw sends these bytes and returns what comes back until the connection ends.
func (g *Gateway) Raw(text string) string {
	g.T.Helper()
	conn := g.Dial()
	Write(g.T, conn, text)
	all, err := io.ReadAll(conn)
	if err != nil {
		g.T.Fatal(err)
	}
	return string(all)
}

// Write writes the whole text.
func Write(t *testing.T, w io.Writer, text string) {
	t.Helper()
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
}

// Answers reads one answer from a bare connection.
func Answers(t *testing.T, in *bufio.Reader, method string) Reply {
	t.Helper()
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	return Read(watchWire(t, "").watch(method, "", res))
}
