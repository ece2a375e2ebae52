//go:build unix

package e2e

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
)

// procDial makes a client over HTTP/1.
func procDial() *http.Client {
	return &http.Client{
		Timeout:   procBound,
		Transport: recorded{&http.Transport{MaxIdleConnsPerHost: 64}},
	}
}

// gateway is the site as tests see it that need no process of its own.
func (s *procSite) gateway(t *testing.T) *gateway {
	g := &gateway{t: t, addr: s.addr, scheme: "http"}
	g.client = g.newClient(nil)
	return g
}

// procDialH2 is procDial over HTTP/2 without TLS.
func procDialH2() *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Timeout: procBound, Transport: recorded{&http.Transport{Protocols: protocols}}}
}

// procCall is one guarded call of a client.
type procCall struct {
	id     string
	path   string // default: /v1/charges
	body   string // default: made of the id
	host   string // default: that of the gateway
	header map[string]string
}

// procAnswer is a complete answer: its end was seen.
type procAnswer struct {
	status int
	header http.Header
	body   string
}

// execution is what the answer says of the call's execution; empty where it is not one's.
func (a procAnswer) execution() string {
	if a.problem() != "" {
		return ""
	}
	return a.header.Get("Execution-Status")
}

func (a procAnswer) executed() bool { return a.execution() == "executed" }

// replayed reports that the answer says in both ways that it is a replay.
func (a procAnswer) replayed() bool {
	return a.execution() == "replayed" && a.header.Get("Idempotent-Replayed") == "true"
}

// problem is the slug of a problem document, empty for any other answer.
func (a procAnswer) problem() string {
	if !strings.HasPrefix(a.header.Get("Content-Type"), "application/problem+json") {
		return ""
	}
	var p struct {
		Type string `json:"type"`
	}
	if json.Unmarshal([]byte(a.body), &p) != nil {
		return ""
	}
	return p.Type[strings.LastIndexByte(p.Type, '/')+1:]
}

func (a procAnswer) String() string {
	body := a.body
	if len(body) > 300 {
		body = body[:300] + "..."
	}
	return fmt.Sprintf("%d %s %s", a.status, a.execution(), body)
}

// digest is what a client remembers of an answer: status, body, and the header that
// the upstream wrote.
func (a procAnswer) digest() [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%d %s\n%s", a.status, a.header.Get("Effect"), a.body))
}

// procPost makes the call. An error says that the end of the answer was not seen.
func procPost(ctx context.Context, client *http.Client, addr string, c procCall) (procAnswer, error) {
	resp, err := procSend(ctx, client, addr, c)
	if err != nil {
		return procAnswer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return procAnswer{}, err
	}
	return procAnswer{status: resp.StatusCode, header: resp.Header, body: string(body)}, nil
}

// procSend makes the call and returns with the header of the answer.
func procSend(ctx context.Context, client *http.Client, addr string, c procCall) (*http.Response, error) {
	path, body := c.path, c.body
	if path == "" {
		path = "/v1/charges"
	}
	if body == "" {
		body = fmt.Sprintf(`{"amount":4200,"for":%q}`, c.id)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	// The client's own transport must not send anything twice.
	req.GetBody = nil
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+procCredential)
	if c.id != "" {
		req.Header.Set("Idempotency-Key", c.id)
	}
	if c.host != "" {
		req.Host = c.host
	}
	for name, value := range c.header {
		req.Header.Set(name, value)
	}
	return client.Do(req)
}

// procCredential is the credential of all calls.
const procCredential = "secret-credential-5f1d"

// post makes the call, whose end must be seen.
func (g *procGateway) post(t *testing.T, c procCall) procAnswer {
	t.Helper()
	client := procDial()
	defer client.CloseIdleConnections()
	a, err := procPost(t.Context(), client, g.site.addr, c)
	if err != nil {
		t.Fatalf("call %s: %v", c.id, err)
	}
	return a
}

// procRetry makes the call until it is answered: a reload of Caddy's closes some
// connections before a handler has seen a request of theirs, whatever handlers there
// are (see retry of gateway). It returns how often that happened.
func procRetry(t *testing.T, client *http.Client, addr string, c procCall) (a procAnswer, failures int) {
	t.Helper()
	eventuallyWithin(t, procBound, "an answer", func() bool {
		var err error
		a, err = procPost(t.Context(), client, addr, c)
		if err != nil {
			failures++
		}
		return err == nil
	})
	return a, failures
}

// retry is post beside reloads.
func (g *procGateway) retry(t *testing.T, c procCall) procAnswer {
	t.Helper()
	client := procDial()
	defer client.CloseIdleConnections()
	a, _ := procRetry(t, client, g.site.addr, c)
	return a
}

// procFuture is a call under way.
type procFuture struct {
	answer procAnswer
	err    error
}

// begin makes the call in the background.
func (g *procGateway) begin(ctx context.Context, client *http.Client, c procCall) <-chan procFuture {
	done := make(chan procFuture, 1)
	go func() {
		a, err := procPost(ctx, client, g.site.addr, c)
		done <- procFuture{a, err}
	}()
	return done
}

// procDefinite repeats the call until its answer is final: an answer of the
// upstream's, or in doubt.
func procDefinite(ctx context.Context, client *http.Client, addr string, c procCall) (procAnswer, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		a, err := procPost(ctx, client, addr, c)
		if err != nil {
			return a, err
		}
		switch a.problem() {
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
func wantProcReplay(t *testing.T, first, a procAnswer) {
	t.Helper()
	if !a.replayed() || a.digest() != first.digest() {
		t.Errorf("P1: not a replay\nfirst: %v\nnow:   %v", first, a)
	}
}

// wantProcDoubt fails unless a says that the call is in doubt.
func wantProcDoubt(t *testing.T, a procAnswer) {
	t.Helper()
	if a.status != http.StatusConflict || a.problem() != "in-doubt" {
		t.Errorf("want 409 in-doubt, got %v", a)
	}
}
