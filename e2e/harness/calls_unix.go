//go:build unix

package harness

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Rollbacks waits until so many rollbacks are finished, and lists all, the newest first.
func (s *ProcSite) Rollbacks(t *testing.T, finished int) []*rollback.Rollback {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for {
		all := ProcDocument[admin.RollbackPage](t, s.Operate(t, "rollbacks", "list", "--limit", "1000", "-o", "json").Says(t)).Rollbacks
		n := 0
		for _, doc := range all {
			if doc.State == rollback.Finished {
				n++
			}
		}
		if n >= finished {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d rollbacks are finished", n, finished)
		}
	}
}

// ProcDial makes a client over HTTP/1.
func ProcDial() *http.Client {
	return &http.Client{
		Timeout:   ProcBound,
		Transport: Recorded{&http.Transport{MaxIdleConnsPerHost: 64}},
	}
}

// Gateway is the site as tests see it that need no process of its own.
func (s *ProcSite) Gateway(t *testing.T) *Gateway {
	g := &Gateway{T: t, Addr: s.Addr, Scheme: "http"}
	g.Client = g.NewClient(nil)
	return g
}

// ProcDialH2 is procDial over HTTP/2 without TLS.
func ProcDialH2() *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Timeout: ProcBound, Transport: Recorded{&http.Transport{Protocols: protocols}}}
}

// ProcCall is one guarded call of a client.
type ProcCall struct {
	Id     string
	Path   string // default: /v1/charges
	Body   string // default: made of the id
	Host   string // default: that of the gateway
	Header map[string]string
}

// ProcAnswer is a complete answer: its end was seen.
type ProcAnswer struct {
	Status int
	Header http.Header
	Body   string
}

// Execution is what the answer says of the call's execution; empty where it is not one's.
func (a ProcAnswer) Execution() string {
	if a.Problem() != "" {
		return ""
	}
	return a.Header.Get("Execution-Status")
}

// Executed reports that the call was executed for this answer.
func (a ProcAnswer) Executed() bool { return a.Execution() == "executed" }

// Replayed reports that the answer says in both ways that it is a replay.
func (a ProcAnswer) Replayed() bool {
	return a.Execution() == "replayed" && a.Header.Get("Idempotent-Replayed") == "true"
}

// Problem is the slug of a problem document, empty for any other answer.
func (a ProcAnswer) Problem() string {
	if !strings.HasPrefix(a.Header.Get("Content-Type"), "application/problem+json") {
		return ""
	}
	var p struct {
		Type string `json:"type"`
	}
	if json.Unmarshal([]byte(a.Body), &p) != nil {
		return ""
	}
	return p.Type[strings.LastIndexByte(p.Type, '/')+1:]
}

func (a ProcAnswer) String() string {
	body := a.Body
	if len(body) > 300 {
		body = body[:300] + "..."
	}
	return fmt.Sprintf("%d %s %s", a.Status, a.Execution(), body)
}

// Digest is what a client remembers of an answer: status, body, and the header that
// the upstream wrote.
func (a ProcAnswer) Digest() [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%d %s\n%s", a.Status, a.Header.Get("Effect"), a.Body))
}

// ProcPost makes the call. An error says that the end of the answer was not seen.
func ProcPost(ctx context.Context, client *http.Client, addr string, c ProcCall) (ProcAnswer, error) {
	resp, err := ProcSend(ctx, client, addr, c)
	if err != nil {
		return ProcAnswer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return ProcAnswer{}, err
	}
	return ProcAnswer{Status: resp.StatusCode, Header: resp.Header, Body: string(body)}, nil
}

// ProcSend makes the call and returns with the header of the answer.
func ProcSend(ctx context.Context, client *http.Client, addr string, c ProcCall) (*http.Response, error) {
	path, body := c.Path, c.Body
	if path == "" {
		path = "/v1/charges"
	}
	if body == "" {
		body = fmt.Sprintf(`{"amount":4200,"for":%q}`, c.Id)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	// The client's own transport must not send anything twice.
	req.GetBody = nil
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+ProcCredential)
	if c.Id != "" {
		req.Header.Set("Idempotency-Key", c.Id)
	}
	if c.Host != "" {
		req.Host = c.Host
	}
	for name, value := range c.Header {
		req.Header.Set(name, value)
	}
	return client.Do(req)
}

// ProcCredential is the credential of all calls.
const ProcCredential = "secret-credential-5f1d"

// Post makes the call, whose end must be seen.
func (g *ProcGateway) Post(t *testing.T, c ProcCall) ProcAnswer {
	t.Helper()
	client := ProcDial()
	defer client.CloseIdleConnections()
	a, err := ProcPost(t.Context(), client, g.Site.Addr, c)
	if err != nil {
		t.Fatalf("call %s: %v", c.Id, err)
	}
	return a
}

// ProcRetry makes the call until it is answered: a reload of Caddy's closes some
// connections before a handler has seen a request of theirs, whatever handlers there
// are (see retry of gateway). It returns how often that happened.
func ProcRetry(t *testing.T, client *http.Client, addr string, c ProcCall) (a ProcAnswer, failures int) {
	t.Helper()
	EventuallyWithin(t, ProcBound, "an answer", func() bool {
		var err error
		a, err = ProcPost(t.Context(), client, addr, c)
		if err != nil {
			failures++
		}
		return err == nil
	})
	return a, failures
}

// Retry is post beside reloads.
func (g *ProcGateway) Retry(t *testing.T, c ProcCall) ProcAnswer {
	t.Helper()
	client := ProcDial()
	defer client.CloseIdleConnections()
	a, _ := ProcRetry(t, client, g.Site.Addr, c)
	return a
}

// ProcFuture is a call under way.
type ProcFuture struct {
	Answer ProcAnswer
	Err    error
}

// Begin makes the call in the background.
func (g *ProcGateway) Begin(ctx context.Context, client *http.Client, c ProcCall) <-chan ProcFuture {
	done := make(chan ProcFuture, 1)
	go func() {
		a, err := ProcPost(ctx, client, g.Site.Addr, c)
		done <- ProcFuture{a, err}
	}()
	return done
}

// ProcDefinite repeats the call until its answer is final: an answer of the
// upstream's, or in doubt.
func ProcDefinite(ctx context.Context, client *http.Client, addr string, c ProcCall) (ProcAnswer, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		a, err := ProcPost(ctx, client, addr, c)
		if err != nil {
			return a, err
		}
		switch a.Problem() {
		case "in-progress", "shutting-down", "store-unavailable":
			select {
			case <-tick.C:
			case <-ctx.Done():
				return a, ctx.Err()
			}
		default:
			return a, nil
		}
	}
}

// wantReplay fails unless a is the replay of first.
func WantProcReplay(t *testing.T, first, a ProcAnswer) {
	t.Helper()
	if !a.Replayed() || a.Digest() != first.Digest() {
		t.Errorf("P1: not a replay\nfirst: %v\nnow:   %v", first, a)
	}
}

// WantProcDoubt fails unless a says that the call is in doubt.
func WantProcDoubt(t *testing.T, a ProcAnswer) {
	t.Helper()
	if a.Status != http.StatusConflict || a.Problem() != "in-doubt" {
		t.Errorf("want 409 in-doubt, got %v", a)
	}
}

// Asked is an escalation, as operators list it.
type Asked struct {
	ID, Status, Cause, Workflow, Caller, Token string
	Level                                      int
	Held                                       bool
	Links                                      struct{ Error, Checkpoint, Rollback string }
}

// Asked lists the escalations once there are so many, the newest first.
func (s *ProcSite) Asked(t *testing.T, n int) (all []Asked) {
	t.Helper()
	EventuallyWithin(t, ProcBound, fmt.Sprint(n, " escalations"), func() bool {
		all = ProcDocument[struct{ Escalations []Asked }](t, s.Operate(t, "escalations", "list", "--all", "-o", "json").Says(t)).Escalations
		return len(all) >= n
	})
	if len(all) != n {
		t.Fatalf("%d escalations, want %d: %+v", len(all), n, all)
	}
	return all
}

// Fails makes a call that fails, and returns the id of the error that its caller gets.
func (s *Saga) Fails(r Request, after ...string) (SagaStep, string) {
	s.T.Helper()
	got := s.Try(r, after...)
	failure, err := ect.ParseInsecure(got.Header.Get("Execution-Context"))
	if err != nil || got.Status != http.StatusInternalServerError {
		s.T.Fatalf("%v: %d %v %s", err, got.Status, got.Header, got.Body)
	}
	return got, failure.ID()
}
