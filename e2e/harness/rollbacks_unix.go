//go:build unix

package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// holdsView is what the workflow's page says of its participants.
type holdsView struct {
	Holds []struct {
		Escalation   string `json:"escalation_id"`
		Level, State string
		Participants []struct {
			Agent, State, Confirmed, Reason string
			Since                           time.Time `json:"unreachable_since"`
		}
	}
}

// Holds reads what holds the workflow.
func (s *Saga) Holds() holdsView {
	s.T.Helper()
	token := s.A.Issue(ect.Claims{Workflow: s.Wid}).Raw()
	got := s.G.Call(Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + s.Wid, Header: Headers{ect.FieldName: token}})
	if got.Status != http.StatusOK {
		s.T.Fatalf("%d %s", got.Status, got.Body)
	}
	return Document[holdsView](s.T, got)
}

// Tried is what comes of a call at the gateway at a place.
func (c *Star) Tried(n int, wid string) Reply {
	c.T.Helper()
	s := *c.Saga
	s.G = c.Sites[n].Gateway(c.T)
	return s.G.Call(With(s.A.Issue(ect.Claims{Audience: []string{StarIdentity(n)}, Workflow: wid}), Charge(9)))
}

// Star is a gateway before others, which stand before one restLab: the first of them has its
// charges, the second its documents. Each has its own store and trusts the agent and the others.
type Star struct {
	T       *testing.T
	A       *Agent
	Lab     *RestLab
	Sites   []*ProcSite
	Running []*ProcGateway
	Saga    *Saga
}

// StarIdentity names the nth gateway of a star; the one in its middle is the 0th.
func StarIdentity(n int) string {
	if n == 0 {
		return GatewayIdentity
	}
	return fmt.Sprintf("%s/%d", GatewayIdentity, n)
}

// NewStar starts the gateways; options are further ones of the first one's block. The agent issues
// its tokens for all of them. With stages, one for each, they wait there at each commit.
func NewStar(t *testing.T, options string, stages ...*ProcStages) *Star {
	t.Helper()
	c := LayStar(t)
	for i, stage := range stages {
		c.Sites[i].Store = "staged " + c.Sites[i].Path("data") + " " + stage.Url
	}
	for i := 1; i < len(c.Sites); i++ {
		c.A.Also = append(c.A.Also, StarIdentity(i))
		c.Sites[i].App += "rollback {\n coordinators " + GatewayIdentity + "\n }"
	}
	c.Sites[0].App += options
	c.Before(0, c.Behind(1, "/charges /mail"), c.Behind(2, "/docs/*"))
	return c.Begin()
}

// LayStar makes the sites of three gateways, each before the restLab, and starts none. They trust the agents.
func LayStar(t *testing.T, agents ...*Agent) *Star {
	t.Helper()
	const n = 3
	c := &Star{T: t, A: NewAgent(t, "a"), Lab: NewRestLab(t)}
	type set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	var all set
	add := func(ring *ect.Ring, owner string) {
		text, err := ring.PublicSet(time.Now(), owner)
		if err != nil {
			t.Fatal(err)
		}
		var one set
		if err := json.Unmarshal(text, &one); err != nil {
			t.Fatal(err)
		}
		all.Keys = append(all.Keys, one.Keys...)
	}
	for _, a := range append(agents, c.A) {
		add(a.ring, a.Issuer.Identity())
	}
	for i := range n {
		site := ProcNewSite(t, c.Lab.Addr)
		ring, err := ect.CreateRing(site.Path("identity"), ect.ES256)
		if err != nil {
			t.Fatal(err)
		}
		add(ring, StarIdentity(i))
		c.Sites = append(c.Sites, site)
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	keys := filepath.Join(c.Sites[0].Dir, "all.jwks")
	if err := os.WriteFile(keys, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, site := range c.Sites {
		site.App = fmt.Sprintf("identity %s {\n key_file %s\n public_url http://%s\n }\n trust {\n jwks_file %s\n allow_partial\n }\n",
			StarIdentity(i), site.Path("identity"), site.Addr, keys)
		site.Guard = SagaActions
		site.Store = "badger " + site.Path("data")
	}
	return c
}

// Before makes a gateway stand before others, instead of the restLab.
func (c *Star) Before(n int, ways ...string) {
	first := c.Sites[n]
	first.Raw = fmt.Sprintf(`{
	admin %s
	persist_config off
	agent_guard {
		store %s
		%s
	}
}
http://%s {
	bind 127.0.0.1
	agent_guard_endpoints
	%s
}`, first.Admin, first.Store, first.App, first.Addr, strings.Join(ways, "\n\t"))
}

// Begin starts the gateways.
func (c *Star) Begin() *Star {
	c.T.Helper()
	c.Running = make([]*ProcGateway, len(c.Sites))
	for i := range c.Sites {
		c.Start(i)
	}
	c.Saga = c.Sites[0].Gateway(c.T).Saga(c.A)
	return c
}

// Behind is the way to the gateway at a place, for these paths.
func (c *Star) Behind(n int, paths string) string {
	at, is := c.Sites[n].Addr, StarIdentity(n)
	return fmt.Sprintf("@g%d path %s\n agent_proxy @g%d %s {\n name g%d\n identity %s\n action next {\n match path %s\n delegate http://%s/.well-known/cascade/rollback %s\n }\n }",
		n, paths, n, at, n, is, paths, at, is)
}

// Parts are the rollbacks of a gateway.
func (c *Star) Parts(i int) (all []RollbackDoc) {
	c.T.Helper()
	status, text, err := c.Running[i].Admin("GET", "/agent_guard/rollbacks", "", "")
	if err != nil || status != http.StatusOK {
		c.T.Fatalf("%d %s, %v", status, text, err)
	}
	var page struct{ Rollbacks []RollbackDoc }
	if err := json.Unmarshal([]byte(text), &page); err != nil {
		c.T.Fatal(err)
	}
	for _, r := range page.Rollbacks {
		status, text, err := c.Running[i].Admin("GET", "/agent_guard/rollback/"+r.ID, "", "")
		var doc RollbackDoc
		if err = errors.Join(err, json.Unmarshal([]byte(text), &doc)); err != nil || status != http.StatusOK {
			c.T.Fatalf("%d %s, %v", status, text, err)
		}
		all = append(all, doc)
	}
	return all
}

// Start starts the ith gateway.
func (c *Star) Start(i int) { c.Running[i] = c.Sites[i].Start(c.T) }

// WantTree holds that the ledger, proved, shows the tree of cascade 4.4.2: the request, the
// rollback's start as its child, and below that a compensate or rollback_complete for each
// step and one rollback_complete for the whole.
func (c *CrashRollback) WantTree(s *crashSaga) {
	c.T.Helper()
	var tokens []*ect.Unverified
	c.Site.Exported(c.T, func(token *ect.Unverified) {
		if token.Workflow() == s.Wid {
			tokens = append(tokens, token)
		}
	})
	children := func(parent string, event ect.Event) (all []*ect.Unverified) {
		for _, token := range tokens {
			if token.Event() == event && slices.Contains(token.Parents(), parent) {
				all = append(all, token)
			}
		}
		return all
	}
	var starts []*ect.Unverified
	for _, token := range tokens {
		if token.Event() == ect.EventRollbackStart {
			starts = append(starts, token)
		}
	}
	if len(starts) != 1 {
		c.T.Fatalf("cascade 4.4.1: %d starts of one rollback", len(starts))
	}
	if got := len(children(starts[0].ID(), ect.EventCompensate)); got != 2 {
		c.T.Errorf("cascade 4.4.2: %d compensations, want 2", got)
	}
	if got := len(children(starts[0].ID(), ect.EventRollbackComplete)); got != 3 {
		c.T.Errorf("cascade 4.4.2: %d ends of restorations and of the whole, want 3", got)
	}
}
