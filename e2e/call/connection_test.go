package call

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Trap 16: whatever is answered, and how, the connection is in order for the next call:
// answers of every form, executed, replayed and refused, one after the other.
func TestOneConnection(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n consequential {\n  method HEAD\n }\n max_body 1KiB\n}", u.Addr)
	conn := g.Dial()
	in := bufio.NewReader(conn)
	send := func(method, path, id, body string) harness.Reply {
		t.Helper()
		harness.Write(t, conn, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nIdempotency-Key: %s\r\n\r\n%s", method, path, len(body), id, body))
		got := harness.Answers(t, in, method)
		if in.Buffered() > 0 {
			t.Fatalf("%s %s: %d bytes too many", method, path, in.Buffered())
		}
		return got
	}
	u.On("/trailers", trailers("body"))
	u.On("/lost", harness.Reset)
	for round := range 3 {
		execution := "replayed"
		if round == 0 {
			execution = "executed"
		}
		for i, row := range harness.Endings {
			path, method := fmt.Sprint("/", i), http.MethodPost
			if row.Method != "" {
				method = row.Method
			}
			u.On(path, row.Answer)
			got := send(method, path, "k", "hello")
			got.Want(t, got.Status, row.Body, execution)
			if got.Header.Get("Connection") == "close" {
				t.Errorf("%s ends the connection", row.Name)
			}
		}
		send("POST", "/trailers", "k", "").Want(t, 201, "body", execution)
		send("POST", "/lost", "k", "").Terminal(t, 409, "in-doubt")
		send("POST", "/trailers", "k", "other").Terminal(t, 422, "fingerprint-mismatch")
		send("POST", "/trailers", `"`, "").Terminal(t, 400, "execution-id-invalid")
		send("POST", "/large", "k", strings.Repeat("x", 1025)).Terminal(t, 413, "body-too-large")
	}
}
