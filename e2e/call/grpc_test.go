package call

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// grpcUpstream is a server of grpc-go that counts calls by method. Methods that end in
// Echo answer each message with itself; others one message, or the code of their name.
type grpcUpstream struct {
	addr string

	mu    sync.Mutex
	calls map[string]int
}

func newGRPCUpstream(t *testing.T) *grpcUpstream {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u := &grpcUpstream{addr: l.Addr().String(), calls: map[string]int{}}
	server := grpc.NewServer(grpc.ForceServerCodec(harness.RawCodec{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		u.mu.Lock()
		u.calls[method]++
		u.mu.Unlock()
		for {
			var message []byte
			if err := stream.RecvMsg(&message); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if strings.HasSuffix(method, "/Lost") {
				return grpcstatus.Error(codes.Unavailable, "lost")
			}
			if err := stream.SendMsg(&message); err != nil {
				return err
			}
		}
	}))
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return u
}

func (u *grpcUpstream) arrived(t *testing.T, method string, want int) {
	t.Helper()
	u.mu.Lock()
	defer u.mu.Unlock()
	if got := u.calls[method]; got != want {
		t.Errorf("%s was called %d times, want %d", method, got, want)
	}
}

// unary makes a call of grpc-go, and returns its answer and what came in header and trailer.
func unary(t *testing.T, conn *grpc.ClientConn, method, body string, fields ...string) (string, *grpcstatus.Status, metadata.MD) {
	t.Helper()
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), fields...), harness.Patience)
	defer cancel()
	in, out := []byte(body), []byte(nil)
	var header, trailer metadata.MD
	err := conn.Invoke(ctx, method, &in, &out, grpc.Header(&header), grpc.Trailer(&trailer))
	return string(out), grpcstatus.Convert(err), metadata.Join(header, trailer)
}

// C4: callers of gRPC get problems as statuses of gRPC, with what else they need in the
// trailer; grpc-go retries none that a retry does not cure, whatever it is configured to.
func TestGRPCProblems(t *testing.T) {
	u := newGRPCUpstream(t)
	g := harness.Start(t, `agent_proxy h2c://%s {
		missing_id require
		grpc unary
		max_body 1KiB
		breaker {
			consecutive 100
		}
	}`, u.addr)
	conn := g.GrpcClient()
	id := []string{"idempotency-key", "k"}
	for _, execution := range []string{"executed", "replayed"} {
		if body, s, md := unary(t, conn, "/pkg.Pay/Charge", "one", id...); body != "one" || s.Code() != codes.OK || md.Get("execution-status")[0] != execution {
			t.Errorf("%q %v %v, want it %s", body, s, md, execution)
		}
	}
	u.arrived(t, "/pkg.Pay/Charge", 1)
	if _, s, _ := unary(t, conn, "/pkg.Pay/Lost", "one", id...); s.Code() != codes.Unavailable || s.Message() != "lost" {
		t.Errorf("the upstream's own status: %v", s)
	}
	for _, c := range []struct {
		method, body string
		fields       []string
		prepare      func()
		code         codes.Code
		slug, state  string
		message      string
		pushback     string
	}{
		{"/pkg.Pay/Lost", "one", id, nil, codes.FailedPrecondition, "in-doubt", "in_doubt", "The call may have been executed, and nobody knows. Cause: upstream_status.", "-1"},
		{"/pkg.Pay/Charge", "two", id, nil, codes.AlreadyExists, "fingerprint-mismatch", "completed", "", "-1"},
		{"/pkg.Pay/New", "one", nil, nil, codes.InvalidArgument, "execution-id-missing", "", "", "-1"},
		{"/pkg.Pay/New", strings.Repeat("x", 2000), id, nil, codes.ResourceExhausted, "body-too-large", "", "", "-1"},
		{"/pkg.Pay/New", "one", id, func() { g.Store.FailCommits(harness.ErrBroken) }, codes.Unavailable, "store-unavailable", "", "", "5000"},
		{"/pkg.Pay/New", "one", id, func() { g.Store.OnCommit(nil); harness.Force(t, u.addr, breaker.ForcedOpen) }, codes.Unavailable, "circuit-open", "", "", "1000"},
	} {
		if c.prepare != nil {
			c.prepare()
		}
		_, s, md := unary(t, conn, c.method, c.body, c.fields...)
		if s.Code() != c.code || c.message != "" && s.Message() != c.message || s.Message() == "" {
			t.Errorf("%s: %v %q, want %v", c.slug, s.Code(), s.Message(), c.code)
		}
		for name, want := range map[string]string{
			"execution-problem": c.slug, "execution-state": c.state, "execution-safe-new-key": map[bool]string{true: "true", false: "false"}[c.slug == "execution-id-missing"],
			"execution-status": map[bool]string{true: "in_doubt", false: "refused"}[c.slug == "in-doubt"], "grpc-retry-pushback-ms": c.pushback,
		} {
			if got := strings.Join(md.Get(name), ","); got != want {
				t.Errorf("%s: %s is %q, want %q", c.slug, name, got, want)
			}
		}
	}
	u.arrived(t, "/pkg.Pay/New", 0)
	u.arrived(t, "/pkg.Pay/Lost", 1)
	harness.Force(t, u.addr, breaker.ForcedClosed)
}

// C4: a call that is declared unary and streams is refused as soon as that shows: with its
// second message, or when its body stands still before its end. None reaches the upstream.
func TestGRPCStreamsThatAreDeclaredUnary(t *testing.T) {
	u := newGRPCUpstream(t)
	g := harness.Start(t, `timeouts {
		read_timeout 3s
	}
	agent_proxy h2c://%s {
		action unary {
			match path /pkg.Unary/*
			grpc unary
		}
	}`, u.addr)
	conn := g.GrpcClient()
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	for messages, want := range map[int]struct {
		code codes.Code
		slug string
	}{1: {codes.Unavailable, "body-timeout"}, 2: {codes.Unimplemented, "stream-refused"}} {
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "k"), harness.Patience)
		stream, err := conn.NewStream(ctx, desc, "/pkg.Unary/Echo")
		if err != nil {
			t.Fatal(err)
		}
		message := []byte("ping")
		for range messages {
			if err := stream.SendMsg(&message); err != nil && !errors.Is(err, io.EOF) { // refused already
				t.Fatal(err)
			}
		}
		err = stream.RecvMsg(&message)
		if got := grpcstatus.Code(err); got != want.code || strings.Join(stream.Trailer().Get("execution-problem"), "") != want.slug {
			t.Errorf("%d messages: %v %v, want %v", messages, err, stream.Trailer(), want)
		}
		cancel()
	}
	u.arrived(t, "/pkg.Unary/Echo", 0)
}

// C4: streams that are not declared unary flow both ways at once, and say that nobody
// guards them.
func TestGRPCStreamsPass(t *testing.T) {
	u := newGRPCUpstream(t)
	g := harness.Start(t, "agent_proxy h2c://%s", u.addr)
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "k"), harness.Patience)
	defer cancel()
	stream, err := g.GrpcClient().NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/pkg.Stream/Echo")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "two"} {
		message, echo := []byte(text), []byte(nil)
		if err := stream.SendMsg(&message); err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(&echo); err != nil || string(echo) != text {
			t.Fatalf("%q %v", echo, err)
		}
	}
	header, err := stream.Header()
	if err != nil || strings.Join(header.Get("execution-status"), ",") != "unguarded" {
		t.Errorf("%v %v", header, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var end []byte
	if err := stream.RecvMsg(&end); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
}

// C4: callers of gRPC-Web read the same in the header, over any version of HTTP.
func TestGRPCWebProblems(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n missing_id require\n}", u.Addr)
	for _, media := range []string{"application/grpc-web+proto", "application/grpc-web-text"} {
		got := g.Call(harness.Request{Path: "/pkg.Pay/Charge", Body: "\x00\x00\x00\x00\x00", Header: harness.Headers{"Content-Type": media + "; x=y", "X-Grpc-Web": "1"}})
		if got.Status != 200 || got.Body != "" || got.Header.Get("Content-Type") != media || got.Header.Get("Grpc-Status") != "3" ||
			got.Header.Get("Execution-Problem") != "execution-id-missing" || got.Header.Get("Execution-Status") != "refused" {
			t.Errorf("%+v", got)
		}
	}
	u.Arrived("/pkg.Pay/Charge", 0)
}
