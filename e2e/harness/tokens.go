package harness

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Get asks below /.well-known/cascade/ with a fresh token of the agent.
func (g *Gateway) Get(a *Agent, path string) Reply {
	g.T.Helper()
	r := Request{Method: "GET", Path: "/.well-known/cascade/" + path}
	if a == nil {
		return g.Call(r)
	}
	return g.Call(With(a.Issue(ect.Claims{Action: "look"}), r))
}

// Document reads the JSON of an answer.
func Document[T any](t *testing.T, r Reply) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.Body), &v); err != nil || r.Status >= 300 {
		t.Fatalf("%d %s: %v", r.Status, r.Body, err)
	}
	return v
}

// WorkflowView is what a workflow's page tells.
type WorkflowView struct {
	Nodes []WorkflowNode
	Edges []struct{ From, To, Kind string }
}

// WorkflowNode is a token in the document of a workflow.
type WorkflowNode struct {
	JTI      string `json:"jti"`
	ExecAct  string `json:"exec_act"`
	Event    string
	State    string
	Detail   string
	Outcome  string
	Severity string
	Iss      string
}

// Begins reports whether it is the start of the workflow that the gateway has written.
func (n WorkflowNode) Begins() bool { return n.Event == "workflow_start" && n.Iss == GatewayIdentity }

// State is that of a token.
func (v WorkflowView) State(id string) string {
	for _, n := range v.Nodes {
		if n.JTI == id {
			return n.State
		}
	}
	return "none"
}

// Follows reports whether one token follows from another.
func (v WorkflowView) Follows(id, parent string) bool {
	return slices.ContainsFunc(v.Edges, func(e struct{ From, To, Kind string }) bool { return e.From == parent && e.To == id })
}

// SettledView is the view of a workflow once so many nodes are in the ledger, without escalations: those
// of failed calls come in their own time. Nor does it count the start of the gateway, which is there where no
// agent has sent one.
func (g *Gateway) SettledView(a *Agent, wid string, nodes int) (v WorkflowView) {
	g.T.Helper()
	deadline := time.Now().Add(Patience)
	for {
		// Before anything is in the tree there is no workflow.
		if got := g.Get(a, "workflows/"+wid); got.Status != http.StatusNotFound {
			v = Document[WorkflowView](g.T, got)
			v.Nodes = slices.DeleteFunc(v.Nodes, func(n WorkflowNode) bool { return n.Event == "escalation" || n.Begins() })
			if len(v.Nodes) >= nodes {
				return v
			}
		}
		if time.Now().After(deadline) {
			g.T.Fatalf("%d nodes, want %d: %+v", len(v.Nodes), nodes, v)
		}
	}
}

// Nothing is a body of no bytes.
type Nothing struct{}

// Read implements io.Reader.
func (Nothing) Read([]byte) (int, error) { return 0, io.EOF }

// Lose makes a call of a tool whose client leaves while it runs, and waits until it has run.
func (g *Gateway) Lose(t *testing.T, s *toolServer, r Request) {
	t.Helper()
	hold, known := NewGate(t), Left.Load()
	hold.on(s)
	r.Client, r.Header = g.Client, maps.Clone(r.Header)
	r.Header[Leaver] = "yes"
	leave := g.Leaving(r)
	Wait(t, hold.Arrived, "the call of the tool")
	leave()
	Eventually(t, "the gateway knows that the client has left", func() bool { return Left.Load() == known+1 })
	(*Gate)(nil).on(s)
	hold.Open()
	Idle(t)
}

// on holds the calls of a server's tools; a nil gate holds none.
func (g *Gate) on(s *toolServer) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Hold = g
}

// TokenSetup is a gateway at which agent may do whatever tokenUses has.
func TokenSetup(t *testing.T, a *Agent, lab *RestLab) Setup {
	return Setup{
		App:  Trusting(t, a) + "\nrollback {\n coordinators " + a.Issuer.Identity() + "\n rate 100000\n reservation 10m\n }",
		Site: "agent_proxy " + lab.Addr + " {" + tokenActions(a) + "\n}",
	}
}

// tokenActions are SagaActions, and one that the agent approves.
func tokenActions(a *Agent) string {
	return SagaActions + "\n operators issuer:" + a.Issuer.Identity() + "\n action approved {\n match path /approved\n approve {\n within 1h\n }\n }"
}

// Level3 trusts signed tokens in the ledger only.
const Level3 = "\n trust {\n min_level L3\n }"

// Proves holds that the ledger can prove a token: its entry with a receipt, and the
// inclusion proof by itself.
func (g *Gateway) Proves(a *Agent, token *ect.Token) {
	g.T.Helper()
	got := g.Get(a, "ledger/entries?jti="+token.ID()+"&wid="+token.Workflow())
	if got.Status != http.StatusOK {
		g.T.Errorf("the entry of %s: %d %s", token.Action(), got.Status, got.Body)
		return
	}
	entry := Document[struct {
		Log     string
		Token   string
		Leaf    []byte
		Receipt *ledger.Receipt
	}](g.T, got)
	log := "log=" + url.QueryEscape(entry.Log) // that of another gateway, where several share a store
	head := Document[struct{ Origin, Key string }](g.T, g.Get(a, "ledger/head?"+log))
	key, err := note.NewVerifier(head.Key)
	if err != nil {
		g.T.Error(err)
		return
	}
	if entry.Token != token.Raw() || entry.Receipt == nil {
		g.T.Errorf("of %s the ledger has %s", token.Action(), got.Body)
		return
	}
	if _, err := entry.Receipt.Check(entry.Leaf, head.Origin, note.VerifierList(key)); err != nil {
		g.T.Error(err)
	}
	if got := g.Get(a, "ledger/proof?index="+strconv.FormatInt(entry.Receipt.Index, 10)+"&"+log); got.Status != http.StatusOK {
		g.T.Errorf("the inclusion proof: %d %s", got.Status, got.Body)
	}
}

// GatewayIdentity is the name of the tests' gateway in tokens.
const GatewayIdentity = "spiffe://example.com/gateway"

// Agent issues tokens of its own.
type Agent struct {
	T      *testing.T
	ring   *ect.Ring
	Issuer *ect.Issuer
	Also   []string // verifies its tokens besides the gateway
}

// NewAgent makes an agent with keys of its own.
func NewAgent(t *testing.T, name string) *Agent {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/agent/"+name, ring)
	if err != nil {
		t.Fatal(err)
	}
	return &Agent{T: t, ring: ring, Issuer: issuer}
}

// Issue makes a token for the gateway.
func (a *Agent) Issue(c ect.Claims) *ect.Token {
	a.T.Helper()
	return a.IssueAt(time.Now(), c)
}

// IssueAt issues a token at a time.
func (a *Agent) IssueAt(at time.Time, c ect.Claims) *ect.Token {
	a.T.Helper()
	if len(c.Audience) == 0 {
		c.Audience = append([]string{GatewayIdentity}, a.Also...)
	}
	if c.Action == "" {
		c.Action = "charge_card"
	}
	token, err := a.Issuer.Issue(at, c)
	if err != nil {
		a.T.Fatal(err)
	}
	return token
}

// Trusting are options of the app with which the gateway has an identity and believes
// agents.
func Trusting(t *testing.T, agents ...*Agent) string {
	t.Helper()
	if len(agents) == 0 {
		agents = []*Agent{NewAgent(t, "nobody")}
	}
	// What outlives the test for a moment may write the head of its ledger yet.
	dir, err := os.MkdirTemp("", "agt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	all := struct {
		Keys []json.RawMessage `json:"keys"`
	}{}
	for _, a := range agents {
		text, err := a.ring.PublicSet(time.Now(), a.Issuer.Identity())
		if err != nil {
			t.Fatal(err)
		}
		one := all
		one.Keys = nil
		if err := json.Unmarshal(text, &one); err != nil {
			t.Fatal(err)
		}
		all.Keys = append(all.Keys, one.Keys...)
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agents.jwks")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return "identity " + GatewayIdentity + " {\n key_file " + filepath.Join(dir, "identity") + "\n }\n trust jwks_file " + path
}

// With is a call that carries a token.
func With(token *ect.Token, r Request) Request {
	if r.Header == nil {
		r.Header = map[string]string{}
	}
	r.Header[ect.FieldName] = token.Raw()
	return r
}

// Late reports that a call was refused and that the time of its token is over: on a slow
// machine the call may have come after it.
func (r Reply) Late(token *ect.Token) bool {
	return r.Status == http.StatusForbidden && time.Now().After(token.Expires())
}

// RefusedFor holds that a call was refused for this reason.
func (r Reply) RefusedFor(t *testing.T, status int, reason string) {
	t.Helper()
	var doc struct{ Type, Reason string }
	_ = json.Unmarshal([]byte(r.Body), &doc)
	if r.Status != status || doc.Type != "/.well-known/cascade/problems/ect-invalid" || doc.Reason != reason {
		t.Errorf("%d %s, want %d %s", r.Status, r.Body, status, reason)
	}
}

// Level1 trusts tokens without a signature, too.
const Level1 = "\n trust {\n min_level L1\n }"

// Bare is an unsigned token (level L1) with these claims.
func Bare(t *testing.T, claims map[string]any) string {
	t.Helper()
	now := time.Now().Unix()
	all := map[string]any{"aud": GatewayIdentity, "iat": now, "exp": now + 600, "jti": uuid.NewString(), "exec_act": "act", "par": []string{}}
	for name, v := range claims {
		all[name] = v
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// WithRaw adds a token to a request.
func WithRaw(raw string, r Request) Request {
	header := Headers{ect.FieldName: raw}
	for name, v := range r.Header {
		header[name] = v
	}
	r.Header = header
	return r
}

// Sees is what an agent gets, once what was told has its place in the ledger.
func (g *Gateway) Sees(a *Agent, path string) (got Reply) {
	g.T.Helper()
	Eventually(g.T, path+" is to be seen", func() bool {
		got = g.Get(a, path)
		return got.Status == http.StatusOK
	})
	return got
}
