package call

import (
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Step 1: what changes nothing passes exactly as it would without the guard, in both
// directions; so does what is exempt.
func TestUnguardedCallsAreUntouched(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/x", harness.Status(200, "body", "Execution-Id", "theirs", "Idempotent-Replayed", "true", "Set-Cookie", "a=b", "X-Any", "1"))
	proxy := "reverse_proxy " + u.Addr
	seen := map[string][]string{}
	for _, site := range []string{proxy, "agent_proxy " + u.Addr + " {\n exempt {\n method POST\n path /x\n}\n}"} {
		t.Run(strings.Fields(site)[0], func(t *testing.T) {
			g := harness.Start(t, "%s", site)
			for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "POST"} {
				for _, version := range []string{"1.0", "1.1"} {
					got := g.Raw(method + " /x?q=%2f HTTP/" + version + "\r\nHost: h\r\nConnection: close\r\nIdempotency-Key: a, b\r\n" +
						"Execution-Id: e\r\nExecution-Parent: p\r\nWorkflow-Id: w\r\nAccept-Encoding: br, zstd\r\n" +
						"Authorization: DPoP x\r\nContent-Length: 2\r\n\r\nhi")
					last := u.Last("/x")
					last.Header.Del("X-Forwarded-Host") // the port differs
					sent := fmt.Sprintf("%s %s %v %q", last.Method, last.RequestURI, last.Header, last.Body)
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
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "post", "Post", "get", "MKCOL", "LOCK", "X-ANY"} {
		r := harness.Request{Method: method, Path: "/" + method, Id: "k", Body: "{}"}
		g.Call(r).Want(t, 201, "arrival 1", "executed")
		g.Call(r).Want(t, 201, "arrival 1", "replayed")
		if got := u.Last(r.Path).Method; got != method {
			t.Errorf("%s was forwarded as %s", method, got)
		}
	}
}

// Step 1: a POST can be exempt, a GET can be declared consequential.
func TestConfiguredClasses(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `agent_proxy %s {
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
	}`, u.Addr)
	for i, row := range []struct {
		method, path string
		guarded      bool
	}{
		{"POST", "/search", false}, {"PUT", "/search", true}, {"POST", "/free/x", false}, {"POST", "/other", true},
		{"GET", "/fire", true}, {"GET", "/do/it", true}, {"GET", "/look", false}, {"HEAD", "/do/that", true},
		{"GET", "/measure/now", true}, {"POST", "/measure/it", true}, {"GET", "/measures", false},
	} {
		r := harness.Request{Method: row.method, Path: row.path, Id: fmt.Sprint("k", i)}
		before := u.Arrivals(r.Path)
		one, two := g.Call(r), g.Call(r)
		if row.guarded {
			one.Want(t, 201, one.Body, "executed")
			two.Want(t, 201, one.Body, "replayed")
			u.Arrived(r.Path, before+1)
		} else {
			one.Want(t, 201, one.Body, "")
			two.Want(t, 201, two.Body, "")
			u.Arrived(r.Path, before+2)
		}
	}
}

// tunnelling answers an upgrade, and echoes.
func tunnelling(w http.ResponseWriter, _ *harness.Arrival) {
	conn, buf := harness.Hijack(w)
	defer conn.Close()
	_, _ = buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
	_ = buf.Flush()
	_, _ = io.Copy(conn, buf) // until the client leaves
}

// Step 1: upgrades go straight through, marked as what nobody guards.
func TestUpgradePasses(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n consequential path /declared\n}", u.Addr)
	for _, path := range []string{"/ws", "/declared"} {
		u.On(path, tunnelling)
		got, conn := g.Upgrade("GET", path, "websocket")
		if got.Status != 101 || got.Header.Get("Execution-Id") != "" || got.Header.Get("Execution-Status") != "unguarded" {
			t.Fatalf("%s: %+v", path, got)
		}
		harness.Write(t, conn, "ping")
		echo := make([]byte, 4)
		if _, err := io.ReadFull(conn, echo); err != nil || string(echo) != "ping" {
			t.Errorf("%s: %q %v", path, echo, err)
		}
		_ = conn.Close()
		u.Arrived(path, 1)
	}
}

// Step 1, "Settled here": gRPC passes through; an action with `grpc unary` is guarded
// and reads grpc-status.
func TestGRPC(t *testing.T) {
	u := harness.NewH2CUpstream(t)
	g := harness.Start(t, `agent_proxy h2c://%s {
		breaker off
		action unary {
			match path /unary/*
			grpc unary
		}
	}`, u.Addr)
	client := g.H2cClient()
	message := "\x00\x00\x00\x00\x02hi"
	call := func(path string) harness.Reply {
		return g.Call(harness.Request{
			Path: path, Id: "k", Client: client, Body: message,
			Header: harness.Headers{"Content-Type": "application/grpc+proto", "Te": "trailers"},
		})
	}
	grpc := func(code string, only bool) func(http.ResponseWriter, *harness.Arrival) {
		return func(w http.ResponseWriter, a *harness.Arrival) {
			w.Header().Set("Content-Type", "application/grpc+proto")
			if only { // in the header of an answer that has nothing else
				w.Header().Set("Grpc-Status", code)
				return
			}
			w.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
			_, _ = io.WriteString(w, message)
			if code != "" {
				w.Header().Set("Grpc-Status", code)
				w.Header().Set("Grpc-Message", fmt.Sprint("arrival ", a.N))
			}
		}
	}
	t.Run("passes", func(t *testing.T) {
		u.On("/stream", grpc("0", false))
		for i := range 2 {
			got := call("/stream")
			if got.Header.Get("Execution-Id") != "" || got.Trailer.Get("Grpc-Message") != fmt.Sprint("arrival ", i+1) {
				t.Errorf("%v %v", got.Header, got.Trailer)
			}
		}
	})
	// One status of each outcome: TestJudgeGRPC of guard has them all.
	for code, want := range map[string]harness.Outcome{"3": harness.Completed, "8": harness.Released, "14": harness.InDoubt, "": harness.InDoubt} {
		for _, only := range []bool{false, true} {
			if code == "" && only {
				continue
			}
			t.Run(fmt.Sprintf("%q only=%v", code, only), func(t *testing.T) {
				path := fmt.Sprintf("/unary/%s-%v", code, only)
				u.On(path, grpc(code, only))
				one := call(path)
				two := call(path)
				mark := "executed"
				if only { // otherwise the header was sent before the trailer came
					mark = want.Status()
				}
				if one.Cut || one.Header.Get("Execution-Status") != mark {
					t.Errorf("%+v", one)
				}
				switch want {
				case harness.Completed:
					if two.Header.Get("Execution-Status") != "replayed" || two.Body != one.Body || !reflect.DeepEqual(two.Trailer, one.Trailer) ||
						two.Header.Get("Grpc-Status") != one.Header.Get("Grpc-Status") {
						t.Errorf("replayed %+v, want %+v", two, one)
					}
					u.Arrived(path, 1)
				case harness.Released:
					if two.Header.Get("Execution-Status") != "executed" {
						t.Errorf("%+v", two)
					}
					u.Arrived(path, 2)
				case harness.InDoubt:
					if two.Status != 200 || two.Header.Get("Grpc-Status") != "9" || two.Header.Get("Execution-Problem") != "in-doubt" {
						t.Errorf("%+v", two)
					}
					u.Arrived(path, 1)
				}
			})
		}
	}
}
