// Command example shows what becomes of MCP tool calls whose answers are lost, behind a bare proxy
// and behind the guard: examples/mcp.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const meant = 3 // charges

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run has a client make its charges by each way, and prints how often it called and what was
// executed.
func run(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	server := newServer()
	defer server.Close()
	ways, stop, err := startGateway(ctx, server.Listener.Addr())
	if err != nil {
		return err
	}
	defer stop()
	_, _ = fmt.Fprintf(out, "%d charges are meant, and the answer to the first attempt at each is lost.\n\n%-14s %12s %14s\n", meant, "", "calls sent", "charges made")
	for _, way := range ways {
		server.charges.Store(0)
		sent, err := program(ctx, way.url, server)
		if err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		_, _ = fmt.Fprintf(out, "%-14s %12d %14d\n", way.name, sent, server.charges.Load())
	}
	return nil
}

// chargeServer is an MCP server with one tool that must not run twice.
type chargeServer struct {
	*httptest.Server
	charges atomic.Int64
	running atomic.Int64
	began   chan struct{} // a charge has begun
	goOn    chan struct{} // and may end
}

type charge struct {
	Order string `json:"order" jsonschema:"the order to charge"`
}

func newServer() *chargeServer {
	s := &chargeServer{began: make(chan struct{}, 2*meant), goOn: make(chan struct{}, 2*meant)}
	tools := mcp.NewServer(&mcp.Implementation{Name: "shop", Version: "1"}, nil)
	mcp.AddTool(tools, &mcp.Tool{Name: "charge", Description: "charges an order"}, func(_ context.Context, _ *mcp.CallToolRequest, in charge) (*mcp.CallToolResult, any, error) {
		s.running.Add(1)
		defer s.running.Add(-1)
		s.began <- struct{}{}
		<-s.goOn
		n := s.charges.Add(1)
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprintf("charge %d, for %s", n, in.Order)}}}, nil, nil
	})
	s.Server = httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return tools }, nil))
	return s
}

// loser is a connection that breaks while the first attempt at a call is running.
type loser struct {
	server *chargeServer
	sent   int
}

// RoundTrip sends a request.
func (l *loser) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer of-this-agent")
	if r.Body == nil || r.Method != http.MethodPost {
		return http.DefaultTransport.RoundTrip(r)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	if !bytes.Contains(body, []byte(`"tools/call"`)) {
		return http.DefaultTransport.RoundTrip(r)
	}
	l.sent++
	if l.sent%2 == 0 { // a second attempt arrives, and nothing is in its way
		l.server.goOn <- struct{}{} // for the first one, which still runs
		l.server.goOn <- struct{}{}
		return http.DefaultTransport.RoundTrip(r)
	}
	ctx, cut := context.WithCancelCause(r.Context())
	go func() {
		<-l.server.began
		cut(errors.New("the connection broke"))
	}()
	res, err := http.DefaultTransport.RoundTrip(r.WithContext(ctx))
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body) // the header may have come
		_ = res.Body.Close()
	}
	if err == nil {
		err = errors.New("the answer was to be lost")
	}
	return nil, err
}

// program makes the charges, each until it succeeds, and returns how many calls that took.
func program(ctx context.Context, url string, server *chargeServer) (int, error) {
	lossy := &loser{server: server}
	var session *mcp.ClientSession
	for n := range meant {
		for done := false; !done; {
			if session == nil {
				client := mcp.NewClient(&mcp.Implementation{Name: "agent", Version: "1"}, nil)
				var err error
				session, err = client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: &http.Client{Transport: lossy}, DisableStandaloneSSE: true}, nil)
				if err != nil {
					return 0, err
				}
			}
			result, err := session.CallTool(ctx, &mcp.CallToolParams{Name: "charge", Arguments: charge{fmt.Sprint("order ", n+1)}})
			switch {
			case ctx.Err() != nil:
				return 0, ctx.Err()
			case err != nil: // the answer was lost: call again, in a new session where this one is closed
				if session.Ping(ctx, nil) != nil {
					_ = session.Close()
					session = nil
				}
				<-time.After(time.Second)
			case result.IsError:
				return 0, errors.New("the tool failed")
			default:
				done = true
			}
		}
		drain(server)
	}
	return lossy.sent, session.Close()
}

// drain waits until nothing runs, and forgets what no call waits for any more.
func drain(server *chargeServer) {
	for server.running.Load() > 0 {
		<-time.After(time.Millisecond)
	}
	for {
		select {
		case <-server.began:
		case <-server.goOn:
		default:
			return
		}
	}
}

// way is a URL of the gateway.
type way struct{ name, url string }

// startGateway builds Caddy with the guard and runs it before a server.
func startGateway(ctx context.Context, server net.Addr) (ways []way, stop func(), err error) {
	root, err := checkout()
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		return nil, nil, err
	}
	build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(dir, "caddy"), "./cmd/caddy")
	build.Dir, build.Stderr = root, os.Stderr
	if err := build.Run(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, nil, err
	}
	// Another process can take a free port before the gateway does.
	for tries := 1; ; tries++ {
		ways, quit, err := runGateway(ctx, root, dir, server)
		if err == nil {
			return ways, func() {
				quit()
				_ = os.RemoveAll(dir)
			}, nil
		}
		if tries == 10 || !strings.Contains(err.Error(), "address already in use") {
			_ = os.RemoveAll(dir)
			return nil, nil, err
		}
	}
}

// runGateway runs the Caddy in dir, which keeps its state there, at ports that are free.
func runGateway(ctx context.Context, root, dir string, server net.Addr) (ways []way, stop func(), err error) {
	_, port, _ := net.SplitHostPort(server.String())
	guarded, bare := freePort(), freePort()
	var said bytes.Buffer
	caddy := exec.Command(filepath.Join(dir, "caddy"), "run", "--config", filepath.Join(root, "examples", "mcp", "Caddyfile"))
	caddy.Env = append(os.Environ(), "STORE="+filepath.Join(dir, "store"), "SERVER="+port, "GUARDED="+guarded, "BARE="+bare, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	caddy.Stdout, caddy.Stderr = &said, &said
	if err := caddy.Start(); err != nil {
		return nil, nil, err
	}
	ended := make(chan struct{})
	go func() {
		_ = caddy.Wait()
		close(ended)
	}()
	stop = func() {
		_ = caddy.Process.Signal(os.Interrupt)
		<-ended
	}
	for _, port := range []string{guarded, bare} {
		for {
			conn, err := net.Dial("tcp", "127.0.0.1:"+port)
			if err == nil {
				_ = conn.Close()
				break
			}
			select {
			case <-ended:
				return nil, nil, fmt.Errorf("the gateway did not start:\n%s", said.String())
			case <-ctx.Done():
				stop()
				return nil, nil, ctx.Err()
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return []way{{"bare proxy", "http://localhost:" + bare + "/mcp"}, {"with the guard", "http://localhost:" + guarded + "/mcp"}}, stop, nil
}

// checkout is the directory of the project.
func checkout() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "examples", "mcp", "Caddyfile")); err == nil {
			return dir, nil
		}
		above := filepath.Dir(dir)
		if above == dir {
			return "", errors.New("run this in a checkout of the project")
		}
		dir = above
	}
}

func freePort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "0" // starting the gateway tells
	}
	defer func() { _ = l.Close() }()
	return strings.TrimPrefix(l.Addr().String(), "127.0.0.1:")
}
