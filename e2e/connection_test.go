package e2e

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Trap 16: whatever is answered, and how, the connection is in order for the next call:
// answers of every form, executed, replayed and refused, one after the other.
func TestOneConnection(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n consequential {\n  method HEAD\n }\n max_body 1KiB\n}", u.addr)
	conn := g.dial()
	in := bufio.NewReader(conn)
	send := func(method, path, id, body string) reply {
		t.Helper()
		write(t, conn, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nIdempotency-Key: %s\r\n\r\n%s", method, path, len(body), id, body))
		got := answers(t, in, method)
		if in.Buffered() > 0 {
			t.Fatalf("%s %s: %d bytes too many", method, path, in.Buffered())
		}
		return got
	}
	u.on("/trailers", trailers("body"))
	u.on("/lost", reset)
	for round := range 3 {
		execution := "replayed"
		if round == 0 {
			execution = "executed"
		}
		for i, row := range endings {
			path, method := fmt.Sprint("/", i), http.MethodPost
			if row.method != "" {
				method = row.method
			}
			u.on(path, row.answer)
			got := send(method, path, "k", "hello")
			got.want(t, got.status, row.body, execution)
			if got.header.Get("Connection") == "close" {
				t.Errorf("%s ends the connection", row.name)
			}
		}
		send("POST", "/trailers", "k", "").want(t, 201, "body", execution)
		send("POST", "/lost", "k", "").terminal(t, 409, "in-doubt")
		send("POST", "/trailers", "k", "other").terminal(t, 422, "fingerprint-mismatch")
		send("POST", "/trailers", `"`, "").terminal(t, 400, "execution-id-invalid")
		send("POST", "/large", "k", strings.Repeat("x", 1025)).terminal(t, 413, "body-too-large")
	}
}
