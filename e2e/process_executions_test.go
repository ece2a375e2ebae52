//go:build unix

package e2e

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

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// procAsk makes a GET that is on its way to the gateway when procAsk returns: over
// HTTP/2 requests of one connection are taken in their order, and a later one is
// answered.
func procAsk(t *testing.T, client *http.Client, addr, path string) <-chan procFuture {
	t.Helper()
	get := func(ctx context.Context, path string) (procAnswer, error) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+path, nil)
		if err != nil {
			return procAnswer{}, err
		}
		req.Header.Set("Authorization", "Bearer "+procCredential)
		resp, err := client.Do(req)
		if err != nil {
			return procAnswer{}, err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return procAnswer{status: resp.StatusCode, header: resp.Header, body: string(body)}, err
	}
	wrote := make(chan httptrace.WroteRequestInfo, 1)
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		WroteRequest: func(info httptrace.WroteRequestInfo) { wrote <- info },
	})
	done := make(chan procFuture, 1)
	go func() {
		a, err := get(ctx, path)
		done <- procFuture{a, err}
	}()
	waitWithin(t, procBound, wrote, "the question is sent")
	if a, err := get(t.Context(), "/.well-known/cascade/policy"); err != nil || a.status != http.StatusOK {
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
		output func(a procAnswer) bool
	}{
		"completed": {"60s", true, `"state": "completed"`, func(a procAnswer) bool {
			return a.status == http.StatusCreated && (a.execution() == "attached" || a.replayed()) // it may come to look only then
		}},
		"too slow": {"300ms", false, `"state": "in_doubt"`, func(a procAnswer) bool { return a.problem() == "in-doubt" }},
	} {
		t.Run(name, func(t *testing.T) {
			upstream := procNewUpstream(t)
			site := procNewSite(t, upstream.addr)
			site.app = "drain " + c.drain
			gateway := site.start(t)
			hold := upstream.hold(t, "k")
			owner := gateway.begin(t.Context(), procDial(), procCall{id: "k"})
			waitWithin(t, procBound, hold.arrived, "arrival")
			client := procDialH2()
			state := procAsk(t, client, site.addr, executionsPath+"k?wait=60s")
			output := procAsk(t, client, site.addr, executionsPath+"k/output?wait=60s")
			gateway.term(t)
			waitWithin(t, procBound, gateway.log.when("exiting; byeee"), "the gateway knows")
			if c.answer {
				hold.open()
			}
			if f := waitWithin(t, procBound, state, "the state"); f.err != nil || f.answer.status != http.StatusOK || !strings.Contains(f.answer.body, c.status) {
				t.Errorf("%v, %v", f.answer, f.err)
			}
			if f := waitWithin(t, procBound, output, "the output"); f.err != nil || !c.output(f.answer) {
				t.Errorf("%v, %v", f.answer, f.err)
			}
			waitWithin(t, procBound, owner, "the call ends")
			client.CloseIdleConnections()
			gateway.wait(t)
			if gateway.err != nil {
				t.Errorf("the gateway ended with %v", gateway.err)
			}
		})
	}
}

// An exit does not wait for what runs on another node: whoever asks is told so.
func TestProcessExitEndsWaitsForOtherNodes(t *testing.T) {
	t.Parallel() // its gateways are processes
	site := procNewSite(t, "127.0.0.1:1")
	site.start(t).end(t) // makes the store
	st, err := badger.Open(site.path("data"), badger.Options{})
	if err != nil {
		t.Fatal(err)
	}
	bearer := "Bearer " + procCredential
	openBeside(t, st, site.path("data.key")).run("k", site.addr, fmt.Sprintf("Authorization=%d:%s;", len(bearer), bearer))
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	gateway := site.start(t)
	client := procDialH2()
	began := time.Now()
	state := procAsk(t, client, site.addr, executionsPath+"k?wait=60s")
	output := procAsk(t, client, site.addr, executionsPath+"k/output?wait=60s")
	gateway.term(t)
	if f := waitWithin(t, procBound, state, "the state"); f.err != nil || !strings.Contains(f.answer.body, `"state": "running"`) {
		t.Errorf("%v, %v", f.answer, f.err)
	}
	if f := waitWithin(t, procBound, output, "the output"); f.err != nil || f.answer.problem() != "in-progress" {
		t.Errorf("%v, %v", f.answer, f.err)
	}
	client.CloseIdleConnections()
	gateway.wait(t)
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
