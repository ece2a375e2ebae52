package harness

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Bulkhead is a metric of the site's bulkhead.
func (g *Gateway) Bulkhead(name string) int {
	g.T.Helper()
	for line := range strings.Lines(g.Call(Request{Method: "GET", Path: "/metrics"}).Body) {
		if rest, ok := strings.CutPrefix(line, "agent_guard_bulkhead_"+name+`{guard="shared"} `); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				g.T.Fatal(err)
			}
			return int(n)
		}
	}
	g.T.Fatalf("no metric %s", name)
	return 0
}

// Waiting waits until n calls wait at the bulkhead.
func (g *Gateway) Waiting(n int) {
	g.T.Helper()
	Eventually(g.T, fmt.Sprintf("%d calls wait", n), func() bool { return g.Bulkhead("waiting") == n })
}

// line is the order in which calls come to an upstream that lets one in at a time.
type line struct {
	mu   sync.Mutex
	Came []string
	Next chan struct{}
}

// Line has the requests of a path wait, until the test lets them go one by one.
func (u *Upstream) Line(path string) *line {
	l := &line{Next: make(chan struct{})}
	u.On(path, func(w http.ResponseWriter, a *Arrival) {
		l.mu.Lock()
		l.Came = append(l.Came, a.Header.Get("Idempotency-Key"))
		l.mu.Unlock()
		<-l.Next
		Status(201, "done")(w, a)
	})
	return l
}

func (l *line) Arrived() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.Came)
}

// CascadeView is what a workflow's page says of alerts.
type CascadeView struct{ Nodes []CascadeNode }

// CascadeNode is a token of a workflow that belongs to a cascade.
type CascadeNode struct{ JTI, Event, Cascade string }

// Errs reports an error of a checkpoint.
func (s *Saga) Errs(severity, checkpoint string) string {
	s.T.Helper()
	token := s.A.Issue(ect.Claims{
		Workflow: s.Wid, Action: "error", Parents: []string{checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).
				Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberDescription, "wrong amount"),
	})
	got := s.G.Call(Request{Path: "/.well-known/cascade/errors", Reader: Nothing{}, Header: map[string]string{ect.FieldName: token.Raw()}})
	if got.Status != http.StatusCreated {
		s.T.Fatalf("%d %s", got.Status, got.Body)
	}
	return token.ID()
}

// WaitingDoc is a rollback that waits for people: its document, and what they are asked.
type WaitingDoc struct {
	RollbackDoc
	Waits    string `json:"waits_for"`
	PlanHash string `json:"plan_hash"`
}

// Waits asks for a rollback that waits for people.
func (s *Saga) Waits(b RollbackBody) WaitingDoc {
	s.T.Helper()
	s.Begun(b)
	var doc WaitingDoc
	EventuallyWithin(s.T, Patience, "a question to people", func() bool {
		doc = Document[WaitingDoc](s.T, s.Look(b.ID))
		return doc.Waits != "" || doc.Status != ""
	})
	if doc.Waits == "" || !slices.Contains(doc.Escalations, doc.Waits) || doc.State != "executing" {
		s.T.Fatalf("nobody is asked: %+v", doc)
	}
	return doc
}
