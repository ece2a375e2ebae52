package harness

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// Boundaries are a workflow's page and the gateway's tokens of its start and its ends, once so many nodes are
// recorded of it.
func (g *Gateway) Boundaries(ask func() Reply, nodes int) (v evidence.Workflow, starts, ends []string) {
	g.T.Helper()
	Eventually(g.T, fmt.Sprint(nodes, " nodes"), func() bool {
		got := ask()
		if got.Status != http.StatusOK {
			return false
		}
		v, starts, ends = Document[evidence.Workflow](g.T, got), nil, nil
		n := 0
		for _, node := range v.Nodes {
			if node.Event == "escalation" {
				continue
			}
			n++
			if node.Issuer == GatewayIdentity && node.Event == ect.EventWorkflowStart {
				starts = append(starts, node.ID)
			}
			if node.Issuer == GatewayIdentity && node.Event == ect.EventWorkflowComplete {
				ends = append(ends, node.ID)
			}
		}
		return n >= nodes
	})
	return v, starts, ends
}

// Complete says that a workflow has ended, with a token or with a credential.
func (g *Gateway) Complete(wid string, header map[string]string) Reply {
	g.T.Helper()
	return g.Call(Request{Path: "/.well-known/cascade/workflows/" + wid + "/complete", Reader: Nothing{}, Header: header})
}

// eventStream reads server-sent events.
type eventStream struct {
	t     *testing.T
	Res   *http.Response
	Lines chan string
}

// Follow opens a stream of events.
func (g *Gateway) Follow(r Request, accept, last string) *eventStream {
	g.T.Helper()
	r.Method = "GET"
	r.Header["Accept"] = accept
	if last != "" {
		r.Header["Last-Event-ID"] = last
	}
	res, err := g.Send(r)
	if err != nil {
		g.T.Fatal(err)
	}
	g.T.Cleanup(func() { _ = res.Body.Close() })
	s := &eventStream{g.T, res, make(chan string, 64)}
	go func() {
		defer close(s.Lines)
		for in := bufio.NewReader(res.Body); ; {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			s.Lines <- strings.TrimSuffix(line, "\n")
		}
	}()
	return s
}

// Next reads an event, or a comment as an event without a name.
func (s *eventStream) Next() (name, id string, doc *evidence.Workflow) {
	s.t.Helper()
	for line := Wait(s.t, s.Lines, "an event"); line != ""; line = Wait(s.t, s.Lines, "the rest of an event") {
		field, value, _ := strings.Cut(line, ": ")
		switch field {
		case "event":
			name = value
		case "id":
			id = value
		case "data":
			doc = new(evidence.Workflow)
			if err := json.Unmarshal([]byte(value), doc); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	return name, id, doc
}

// Endings are answers, by how they end.
var Endings = []struct {
	Name   string
	Method string
	Answer func(http.ResponseWriter, *Arrival)
	Body   string
	// early is how much of the body must come before its end may.
	Early int
}{
	{Name: "length", Answer: Status(200, "hello", "Content-Length", "5"), Body: "hello"},
	{Name: "one byte", Answer: Status(200, "x", "Content-Length", "1"), Body: "x"},
	// A server keeps a few KiB back to fill its packets.
	{Name: "large", Answer: Status(200, strings.Repeat("x", 100_000), "Content-Length", "100000"), Body: strings.Repeat("x", 100_000), Early: 90_000},
	{Name: "chunked", Answer: Flushed("hello"), Body: "hello", Early: 5},
	{Name: "no content", Answer: Status(204, "")},
	{Name: "not modified", Answer: Status(304, "")},
	{Name: "length 0", Answer: Status(200, "", "Content-Length", "0")},
	{Name: "head", Method: http.MethodHead, Answer: Status(200, "", "Content-Length", "5")},
	{Name: "error", Answer: Status(500, "broken", "Content-Length", "6"), Body: "broken"},
}

// Flushed answers with a text, after the header was sent.
func Flushed(text string) func(http.ResponseWriter, *Arrival) {
	return func(w http.ResponseWriter, _ *Arrival) {
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, text)
		_ = http.NewResponseController(w).Flush()
	}
}

const (
	// PlanType is the media type of plans.
	PlanType = "application/atd-workflow+json"
	// TripPlan is a plan with a branch.
	TripPlan = `{"wf_id": "the flow", "nodes": [{"id": "hold", "label": "hold_budget", "reversible": true}, {"id": "mail-1", "label": "mail"}, {"id": "mail-2", "label": "mail"}, {"id": "pay"}],
		"edges": [{"from": "hold", "to": "pay"}]}`
)
