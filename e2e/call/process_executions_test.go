//go:build unix

package call

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// procAsk makes a GET that is on its way to the gateway when procAsk returns: over
// HTTP/2 requests of one connection are taken in their order, and a later one is
// answered.
func procAsk(t *testing.T, client *http.Client, addr, path string) <-chan harness.ProcFuture {
	t.Helper()
	get := func(ctx context.Context, path string) (harness.ProcAnswer, error) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+path, nil)
		if err != nil {
			return harness.ProcAnswer{}, err
		}
		req.Header.Set("Authorization", "Bearer "+harness.ProcCredential)
		resp, err := client.Do(req)
		if err != nil {
			return harness.ProcAnswer{}, err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return harness.ProcAnswer{Status: resp.StatusCode, Header: resp.Header, Body: string(body)}, err
	}
	wrote := make(chan httptrace.WroteRequestInfo, 1)
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		WroteRequest: func(info httptrace.WroteRequestInfo) { wrote <- info },
	})
	done := make(chan harness.ProcFuture, 1)
	go func() {
		a, err := get(ctx, path)
		done <- harness.ProcFuture{Answer: a, Err: err}
	}()
	harness.WaitWithin(t, harness.ProcBound, wrote, "the question is sent")
	if a, err := get(t.Context(), "/.well-known/cascade/policy"); err != nil || a.Status != http.StatusOK {
		t.Fatalf("%v, %v", a, err)
	}
	return done
}

// Section "Exit": who waits for an execution is told what becomes of it while the
// process drains, and keeps it no longer than that.
func TestProcessExitEndsWaits(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, c := range map[string]struct {
		drain  string
		answer bool
		status string
		output func(a harness.ProcAnswer) bool
	}{
		"completed": {"60s", true, `"state": "completed"`, func(a harness.ProcAnswer) bool {
			return a.Status == http.StatusCreated && (a.Execution() == "attached" || a.Replayed()) // it may come to look only then
		}},
		"too slow": {"300ms", false, `"state": "in_doubt"`, func(a harness.ProcAnswer) bool { return a.Problem() == "in-doubt" }},
	} {
		t.Run(name, func(t *testing.T) {
			upstream := harness.ProcNewUpstream(t)
			site := harness.ProcNewSite(t, upstream.Addr)
			site.App = "drain " + c.drain
			gateway := site.Start(t)
			hold := upstream.Hold(t, "k")
			owner := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "k"})
			harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
			client := harness.ProcDialH2()
			state := procAsk(t, client, site.Addr, harness.ExecutionsPath+"k?wait=60s")
			output := procAsk(t, client, site.Addr, harness.ExecutionsPath+"k/output?wait=60s")
			gateway.Term(t)
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("exiting; byeee"), "the gateway knows")
			if c.answer {
				hold.Open()
			}
			if f := harness.WaitWithin(t, harness.ProcBound, state, "the state"); f.Err != nil || f.Answer.Status != http.StatusOK || !strings.Contains(f.Answer.Body, c.status) {
				t.Errorf("%v, %v", f.Answer, f.Err)
			}
			if f := harness.WaitWithin(t, harness.ProcBound, output, "the output"); f.Err != nil || !c.output(f.Answer) {
				t.Errorf("%v, %v", f.Answer, f.Err)
			}
			harness.WaitWithin(t, harness.ProcBound, owner, "the call ends")
			client.CloseIdleConnections()
			gateway.Wait(t)
			if gateway.Err != nil {
				t.Errorf("the gateway ended with %v", gateway.Err)
			}
		})
	}
}

// An exit does not wait for what runs on another node: whoever asks is told so.
func TestProcessExitEndsWaitsForOtherNodes(t *testing.T) {
	t.Parallel() // its gateways are processes
	site := harness.ProcNewSite(t, "127.0.0.1:1")
	site.Start(t).End(t) // makes the store
	st, err := badger.Open(site.Path("data"), badger.Options{})
	if err != nil {
		t.Fatal(err)
	}
	bearer := "Bearer " + harness.ProcCredential
	openBeside(t, st, site.Path("data.key")).run("k", site.Addr, fmt.Sprintf("Authorization=%d:%s;", len(bearer), bearer))
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	gateway := site.Start(t)
	client := harness.ProcDialH2()
	began := time.Now()
	state := procAsk(t, client, site.Addr, harness.ExecutionsPath+"k?wait=60s")
	output := procAsk(t, client, site.Addr, harness.ExecutionsPath+"k/output?wait=60s")
	gateway.Term(t)
	if f := harness.WaitWithin(t, harness.ProcBound, state, "the state"); f.Err != nil || !strings.Contains(f.Answer.Body, `"state": "running"`) {
		t.Errorf("%v, %v", f.Answer, f.Err)
	}
	if f := harness.WaitWithin(t, harness.ProcBound, output, "the output"); f.Err != nil || f.Answer.Problem() != "in-progress" {
		t.Errorf("%v, %v", f.Answer, f.Err)
	}
	client.CloseIdleConnections()
	gateway.Wait(t)
	if took := time.Since(began); took > 50*time.Second {
		t.Errorf("the exit waited for %v", took)
	}
}

// otherNode is a second node on the store of a gateway.
type otherNode struct {
	*execution.Guard
	t *testing.T
}

// openBeside opens a gateway's store as another node, before the gateway does, which
// takes another name then.
func openBeside(t *testing.T, st store.Store, keyFile string) *otherNode {
	t.Helper()
	ring, err := seal.Load(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := execution.Open(t.Context(), st, ring)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Commit(t.Context(), store.Write{Key: []byte("mnode"), Value: []byte("node-of-the-gateway")}); err != nil {
		t.Fatal(err)
	}
	return &otherNode{other, t}
}

// run begins a call to /x of the caller with these credentials.
func (n *otherNode) run(id, host, credentials string) *execution.Execution {
	n.t.Helper()
	hash := n.Caller(credentials)
	c := execution.Call{
		Scope: execution.Scope{Caller: "credential:" + hex.EncodeToString(hash[:]), Guard: "default", Method: "POST", Path: "/x", ID: id},
		Host:  host, Action: "default", Deadline: time.Minute, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 20,
	}
	c.Key = n.Key(c.Scope)
	e, err := n.Claim(n.t.Context(), &c, execution.Finding{})
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}
