package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

// Step 1: what changes nothing passes exactly as it would without the guard, in both
// directions; so does what is exempt.
func TestUnguardedCallsAreUntouched(t *testing.T) {
	u := newUpstream(t)
	u.on("/x", status(200, "body", "Execution-Id", "theirs", "Idempotent-Replayed", "true", "Set-Cookie", "a=b", "X-Any", "1"))
	proxy := "reverse_proxy " + u.addr
	seen := map[string][]string{}
	for _, site := range []string{proxy, "agent_proxy " + u.addr + " {\n exempt {\n method POST\n path /x\n}\n}"} {
		t.Run(strings.Fields(site)[0], func(t *testing.T) {
			g := start(t, "%s", site)
			for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "POST"} {
				for _, version := range []string{"1.0", "1.1"} {
					got := g.raw(method + " /x?q=%2f HTTP/" + version + "\r\nHost: h\r\nConnection: close\r\nIdempotency-Key: a, b\r\n" +
						"Execution-Id: e\r\nExecution-Parent: p\r\nWorkflow-Id: w\r\nAccept-Encoding: br, zstd\r\n" +
						"Authorization: DPoP x\r\nContent-Length: 2\r\n\r\nhi")
					last := u.last("/x")
					last.Header.Del("X-Forwarded-Host") // the port differs
					sent := fmt.Sprintf("%s %s %v %q", last.Method, last.RequestURI, last.Header, last.body)
					seen[method+version] = append(seen[method+version], dated(got), sent)
				}
			}
		})
	}
	for call, all := range seen {
		if len(all) != 4 || all[0] != all[2] || all[1] != all[3] {
			t.Errorf("%s differs:\n%q", call, all)
		}
		if strings.Contains(all[2], "Execution-Status") {
			t.Errorf("%s: %q", call, all[2])
		}
	}
}

// dated takes the Date out of an answer.
func dated(answer string) string {
	var lines []string
	for line := range strings.SplitSeq(answer, "\r\n") {
		if !strings.HasPrefix(line, "Date: ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}

// Step 1: every method that is not known to be harmless is guarded, in any spelling.
func TestGuardedMethods(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "post", "Post", "get", "MKCOL", "LOCK", "X-ANY"} {
		r := request{method: method, path: "/" + method, id: "k", body: "{}"}
		g.call(r).want(t, 201, "arrival 1", "executed")
		g.call(r).want(t, 201, "arrival 1", "replayed")
		if got := u.last(r.path).Method; got != method {
			t.Errorf("%s was forwarded as %s", method, got)
		}
	}
}

// Step 1: a POST can be exempt, a GET can be declared consequential.
func TestConfiguredClasses(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `agent_proxy %s {
		exempt {
			path /search
			method POST
		}
		exempt path /free/*
		consequential path /fire /do/*
		action measure {
			match path /measure/*
			consequential
		}
		action look {
			match path /look /measure/*
		}
	}`, u.addr)
	for i, row := range []struct {
		method, path string
		guarded      bool
	}{
		{"POST", "/search", false}, {"PUT", "/search", true}, {"POST", "/free/x", false}, {"POST", "/other", true},
		{"GET", "/fire", true}, {"GET", "/do/it", true}, {"GET", "/look", false}, {"HEAD", "/do/that", true},
		{"GET", "/measure/now", true}, {"POST", "/measure/it", true}, {"GET", "/measures", false},
	} {
		r := request{method: row.method, path: row.path, id: fmt.Sprint("k", i)}
		before := u.arrivals(r.path)
		one, two := g.call(r), g.call(r)
		if row.guarded {
			one.want(t, 201, one.body, "executed")
			two.want(t, 201, one.body, "replayed")
			u.arrived(r.path, before+1)
		} else {
			one.want(t, 201, one.body, "")
			two.want(t, 201, two.body, "")
			u.arrived(r.path, before+2)
		}
	}
}

// tunnelling answers an upgrade, and echoes.
func tunnelling(w http.ResponseWriter, _ *arrival) {
	conn, buf := hijack(w)
	defer conn.Close()
	_, _ = buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
	_ = buf.Flush()
	_, _ = io.Copy(conn, buf) // until the client leaves
}

// upgrade sends a request that asks for a protocol, and returns the answer and the connection.
func (g *gateway) upgrade(method, path, protocol string) (reply, io.ReadWriteCloser) {
	g.t.Helper()
	conn := g.dial()
	in := bufio.NewReader(conn)
	write(g.t, conn, method+" "+path+" HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		g.t.Fatal(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		return read(res), conn
	}
	return reply{status: res.StatusCode, header: res.Header}, struct {
		io.Reader
		io.WriteCloser
	}{in, conn}
}

// Step 1: upgrades go straight through, marked as what nobody guards.
func TestUpgradePasses(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n consequential path /declared\n}", u.addr)
	for _, path := range []string{"/ws", "/declared"} {
		u.on(path, tunnelling)
		got, conn := g.upgrade("GET", path, "websocket")
		if got.status != 101 || got.header.Get("Execution-Id") != "" || got.header.Get("Execution-Status") != "unguarded" {
			t.Fatalf("%s: %+v", path, got)
		}
		write(t, conn, "ping")
		echo := make([]byte, 4)
		if _, err := io.ReadFull(conn, echo); err != nil || string(echo) != "ping" {
			t.Errorf("%s: %q %v", path, echo, err)
		}
		_ = conn.Close()
		u.arrived(path, 1)
	}
}

// Step 1, "Settled here": gRPC passes through; an action with `grpc unary` is guarded
// and reads grpc-status.
func TestGRPC(t *testing.T) {
	u := newH2CUpstream(t)
	g := start(t, `agent_proxy h2c://%s {
		breaker off
		action unary {
			match path /unary/*
			grpc unary
		}
	}`, u.addr)
	client := g.h2cClient()
	message := "\x00\x00\x00\x00\x02hi"
	call := func(path string) reply {
		return g.call(request{
			path: path, id: "k", client: client, body: message,
			header: headers{"Content-Type": "application/grpc+proto", "Te": "trailers"},
		})
	}
	grpc := func(code string, only bool) func(http.ResponseWriter, *arrival) {
		return func(w http.ResponseWriter, a *arrival) {
			w.Header().Set("Content-Type", "application/grpc+proto")
			if only { // in the header of an answer that has nothing else
				w.Header().Set("Grpc-Status", code)
				return
			}
			w.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
			_, _ = io.WriteString(w, message)
			if code != "" {
				w.Header().Set("Grpc-Status", code)
				w.Header().Set("Grpc-Message", fmt.Sprint("arrival ", a.n))
			}
		}
	}
	t.Run("passes", func(t *testing.T) {
		u.on("/stream", grpc("0", false))
		for i := range 2 {
			got := call("/stream")
			if got.header.Get("Execution-Id") != "" || got.trailer.Get("Grpc-Message") != fmt.Sprint("arrival ", i+1) {
				t.Errorf("%v %v", got.header, got.trailer)
			}
		}
	})
	// One status of each outcome: TestJudgeGRPC of guard has them all.
	for code, want := range map[string]outcome{"3": completed, "8": released, "14": inDoubt, "": inDoubt} {
		for _, only := range []bool{false, true} {
			if code == "" && only {
				continue
			}
			t.Run(fmt.Sprintf("%q only=%v", code, only), func(t *testing.T) {
				path := fmt.Sprintf("/unary/%s-%v", code, only)
				u.on(path, grpc(code, only))
				one := call(path)
				two := call(path)
				mark := "executed"
				if only { // otherwise the header was sent before the trailer came
					mark = want.status()
				}
				if one.cut || one.header.Get("Execution-Status") != mark {
					t.Errorf("%+v", one)
				}
				switch want {
				case completed:
					if two.header.Get("Execution-Status") != "replayed" || two.body != one.body || !reflect.DeepEqual(two.trailer, one.trailer) ||
						two.header.Get("Grpc-Status") != one.header.Get("Grpc-Status") {
						t.Errorf("replayed %+v, want %+v", two, one)
					}
					u.arrived(path, 1)
				case released:
					if two.header.Get("Execution-Status") != "executed" {
						t.Errorf("%+v", two)
					}
					u.arrived(path, 2)
				case inDoubt:
					if two.status != 200 || two.header.Get("Grpc-Status") != "9" || two.header.Get("Execution-Problem") != "in-doubt" {
						t.Errorf("%+v", two)
					}
					u.arrived(path, 1)
				}
			})
		}
	}
}
