package harness

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// CheckpointView is what a checkpoint's page tells.
type CheckpointView struct {
	JTI    string `json:"jti"`
	Token  string
	Claims struct {
		Act string `json:"exec_act"`
		Out string `json:"out_hash"`
		Ext map[string]any
	}
	Verification struct {
		Signature, Snapshot string
		Out                 string `json:"out_hash"`
		Expired             bool
	}
	Reversible  bool
	Way, Reason string
	Undo        struct{ State string }
	Execution   struct {
		State  string
		Status int
	}
}

// CheckpointOf reads the checkpoint of an answer once its call is settled.
func (g *Gateway) CheckpointOf(a *Agent, r Reply) (v CheckpointView) {
	g.T.Helper()
	Eventually(g.T, "the checkpoint of a settled call", func() bool {
		v = Document[CheckpointView](g.T, g.Get(a, "checkpoints/"+r.Header.Get("Execution-Checkpoint")))
		return v.Execution.State != "sending"
	})
	if v.Verification.Signature != "valid" || v.Verification.Out != v.Claims.Out || v.Claims.Act != "checkpoint" || v.Verification.Expired ||
		v.JTI != r.Header.Get("Execution-Checkpoint") || v.Undo.State != "standing" {
		g.T.Errorf("%+v", v)
	}
	return v
}

// Remote proxies to p, which undoes what it has done.
func (p *Participant) Remote(options, undo string) string {
	return fmt.Sprintf(
		"agent_proxy %s {\n %s\n identity %s\n action remote {\n match path /remote\n %s\n delegate http://%[1]s/.well-known/cascade/rollback %[3]s\n }\n }",
		strings.TrimPrefix(p.URL, "http://"), options, p.As.Issuer.Identity(), undo)
}

// Undid is how often the participant has undone something, in all.
func (p *Participant) Undid() (n int) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, times := range p.Undone {
		n += times
	}
	return n
}

// CarryOut is result, from outside.
func (p *Participant) CarryOut(asked ParticipantAsked) string {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.result(asked)
}

// Participant is an agent that speaks the protocol of cascade 4.2.2 and 4.3.2, and lies where it
// is told to. It has one checkpoint for each call.
type Participant struct {
	t  *testing.T
	As *Agent
	*httptest.Server

	Mu          sync.Mutex
	made        map[string]string // its checkpoints: their tokens
	Calls       []string          // their ids, in the order of the calls
	Undone      map[string]int
	Prepared    int
	Prepares    string                 // the id of the last token that asked for that
	Away        bool                   // to prepare
	Parent      func(id string) string // of the checkpoint for a call; nil is the call's
	Name        func(id string) string // of the checkpoint in the answer; nil is its own
	RollbackURI string
	Said        map[ect.Member]string      // in a completion, in the place of the truth
	Complete    func(c *ect.Claims) *Agent // who signs a completion, after a change; nil is nobody
	along       func() []string            // tokens that come with a completion; nil is none
	Body        string                     // of the answer to execute; empty says that it is completed
	Answers     []int                      // to execute, before it does anything
	Results     map[string]string          // of rollbacks that it has done: their tokens
	// before answers in its place, if it reports so; path is that below the well-known one.
	Before func(path string, w http.ResponseWriter, asked ParticipantAsked) bool
}

// ParticipantAsked is a request of the protocol.
type ParticipantAsked struct {
	ID         string `json:"rollback_id"`
	Checkpoint string `json:"checkpoint_id"`
	Phase      string
	DryRun     bool `json:"dry_run"`
	Token      *ect.Unverified
}

// NewParticipant starts a participant.
func NewParticipant(t *testing.T) *Participant {
	p := &Participant{t: t, As: NewAgent(t, "remote"), made: map[string]string{}, Undone: map[string]int{}, Results: map[string]string{}}
	p.Complete = func(*ect.Claims) *Agent { return p.As }
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	p.RollbackURI = p.URL + "/.well-known/cascade/rollback"
	return p
}

// ServeHTTP answers calls and requests for rollbacks.
func (p *Participant) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body ParticipantAsked
	_ = json.NewDecoder(r.Body).Decode(&body) // calls have another one
	field, _, _ := strings.Cut(r.Header.Get(ect.FieldName), ",")
	token, err := ect.ParseInsecure(strings.TrimSpace(field))
	if err != nil {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	body.Token = token
	path := strings.TrimPrefix(r.URL.Path, "/.well-known/cascade/")
	if p.Before != nil && p.Before(path, w, body) {
		return
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	switch {
	case strings.HasPrefix(path, "workflows/"): // which the draft does not have
		w.WriteHeader(http.StatusNotFound)
	case strings.HasPrefix(path, "checkpoints/"):
		_ = json.NewEncoder(w).Encode(map[string]string{"token": p.made[strings.TrimPrefix(path, "checkpoints/")]})
	case path == "rollback/prepare":
		if body.Phase != "release" { // that may come right after
			p.Prepared++
		}
		p.Prepares = body.Token.ID()
		if p.Away {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprint(w, `{"status":"prepared"}`)
	case path == "rollback" && len(p.Answers) > 0:
		w.WriteHeader(p.Answers[0])
		p.Answers = p.Answers[1:]
	case path == "rollback":
		if raw := p.result(body); raw != "" {
			w.Header().Set(ect.FieldName, raw)
			if p.along != nil {
				w.Header()[ect.FieldName] = append(w.Header()[ect.FieldName], p.along()...)
			}
		}
		_, _ = fmt.Fprint(w, cmp.Or(p.Body, `{"status":"completed"}`))
	default: // a call
		id, parent := uuid.NewString(), ""
		for raw := range strings.SplitSeq(strings.Join(r.Header.Values(ect.FieldName), ","), ",") {
			if one, err := ect.ParseInsecure(strings.TrimSpace(raw)); err == nil && one.Issuer() == GatewayIdentity {
				parent = one.ID()
			}
		}
		if p.Parent != nil {
			parent = p.Parent(parent)
		}
		p.Calls = append(p.Calls, id)
		p.made[id] = p.As.Issue(ect.Claims{
			Audience: []string{p.As.Issuer.Identity()}, ID: id, Workflow: token.Workflow(), Action: "checkpoint", Parents: []string{parent}, Output: ect.Sum([]byte(id)),
			Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.RollbackURI).Int(ect.MemberTTL, 3600),
		}).Raw()
		if p.Name != nil {
			id = p.Name(id)
		}
		if id != "" {
			w.Header().Set("Execution-Checkpoint", id)
		}
		w.WriteHeader(http.StatusCreated)
	}
}

// result carries out what it is asked for, and returns what it signs. One id has one result (cascade
// 4.3.4).
func (p *Participant) result(asked ParticipantAsked) string {
	if _, again := p.Results[asked.ID]; !again {
		p.Undone[asked.Checkpoint]++
		p.Results[asked.ID] = p.Completion(asked)
	}
	return p.Results[asked.ID]
}

// Completion is what it signs of a request that it has carried out; empty if nobody does.
func (p *Participant) Completion(asked ParticipantAsked) string {
	c := ect.Claims{
		Audience: []string{GatewayIdentity}, Workflow: asked.Token.Workflow(), Action: "rollback_complete", Parents: []string{asked.Token.ID()},
		Ext: new(ect.ExtBuilder),
	}
	for _, m := range []struct {
		name ect.Member
		true string
	}{{ect.MemberRollbackID, asked.ID}, {ect.MemberCheckpointID, asked.Checkpoint}, {ect.MemberStatus, "completed"}} {
		if lie := p.Said[m.name]; lie != "" {
			m.true = lie
		}
		c.Ext.Text(m.name, m.true)
	}
	by := p.Complete(&c)
	if by == nil {
		return ""
	}
	return by.Issue(c).Raw()
}

// Start lets a completion follow from a rollback_start of by that comes along, as in Figure 12, and that
// from the request; from another node if one is given.
func (p *Participant) Start(by *Agent, from string) {
	var started *ect.Token
	p.Complete = func(c *ect.Claims) *Agent {
		started = by.Issue(ect.Claims{
			Audience: []string{GatewayIdentity}, Workflow: c.Workflow, Action: "rollback_start", Parents: []string{cmp.Or(from, c.Parents[0])},
		})
		c.Parents = []string{started.ID()}
		return p.As
	}
	p.along = func() []string { return []string{started.Raw()} }
}

// Chain changes a document again and again, each time following from the change before. Two
// changes in ten write what stands there already.
func (s *Saga) Chain(path string, n int) (checkpoints []string) {
	s.T.Helper()
	var after []string
	for i := range n {
		step := s.Do(Put(path, fmt.Sprintf(`{"n":%d}`, (i+i%5/4)+1)), after...)
		checkpoints, after = append(checkpoints, step.Checkpoint), []string{step.Checkpoint}
	}
	return checkpoints
}

// WantResult checks the token with which an older draft is answered.
func (s *Saga) WantResult(got Reply, action string, member ect.Member, value string) {
	s.T.Helper()
	doc := Document[struct {
		Action string `json:"exec_act"`
		ECT    string
	}](s.T, got)
	token, err := ect.ParseInsecure(doc.ECT)
	if err != nil || doc.Action != action || token.Action() != action {
		s.T.Fatalf("%v: %s", err, got.Body)
	}
	if text, _ := token.Ext().Text(member); text != value {
		s.T.Errorf("%s is %q, want %q", member, text, value)
	}
}

// PreparedDoc is the answer to a request to prepare.
type PreparedDoc struct {
	RollbackDoc
	PlanHash     string `json:"plan_hash"`
	Until        string `json:"reserved_until"`
	Code         string `json:"reason_code"`
	Conflicting  string `json:"conflicting_rollback_id"`
	Irreversible []string
	Agents       []struct{ Agent, Status, Reason, Checkpoint string }
}

// Prepare asks for phase 1 of a rollback, as cascade Figure 9 does.
func (s *Saga) Prepare(b RollbackBody, status int) PreparedDoc {
	s.T.Helper()
	r := s.Asking(b)
	r.Path += "/prepare"
	got := s.G.Call(r)
	if got.Status != status {
		s.T.Fatalf("prepare: %d %s", got.Status, got.Body)
	}
	var doc PreparedDoc
	if err := json.Unmarshal([]byte(got.Body), &doc); err != nil {
		s.T.Fatalf("%v: %s", err, got.Body)
	}
	return doc
}

// Executing is phase 2 of a rollback, as cascade Figure 10 has it, for one plan.
func (s *Saga) Executing(b RollbackBody, hash string) Request {
	s.T.Helper()
	text, err := json.Marshal(map[string]string{"rollback_id": b.ID, "checkpoint_id": b.Checkpoint, "phase": "execute", "plan_hash": hash})
	if err != nil {
		s.T.Fatal(err)
	}
	token := s.A.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_start", Parents: []string{b.Checkpoint}})
	return With(token, Request{Path: "/.well-known/cascade/rollback", Body: string(text)})
}

// Alter changes one bit of a checkpoint's entry in the ledger.
func (g *Gateway) Alter(a *Agent, wid, checkpoint string) {
	g.T.Helper()
	g.Entry(a, wid, checkpoint)
	at := Document[struct{ Index uint64 }](g.T, g.Get(a, "ledger/entries?jti="+checkpoint)).Index
	for e, err := range g.Store.Memory.Scan(context.Background(), store.Prefix([]byte("le"))) {
		if err != nil {
			g.T.Fatal(err)
		}
		if binary.BigEndian.Uint64(e.Key[len(e.Key)-8:]) != at {
			continue
		}
		value := append([]byte(nil), e.Value...)
		value[len(value)/2] ^= 1
		if _, err := g.Store.Memory.Commit(context.Background(), store.Write{Key: e.Key, Value: value, Expires: e.Expires}); err != nil {
			g.T.Fatal(err)
		}
		return
	}
	g.T.Fatalf("no entry of %s", checkpoint)
}

// Flow is one workflow of agents over a site.
type Flow struct {
	*Gateway
	Wid string
}

// Workflow begins a workflow of several agents.
func (g *Gateway) Workflow() *Flow { return &Flow{g, uuid.NewString()} }

// Does makes a call of an agent that follows from others' tokens, and returns its token
// and checkpoint.
func (f *Flow) Does(a *Agent, method, path, body string, parents ...string) (token *ect.Token, checkpoint string) {
	f.T.Helper()
	token = a.Issue(ect.Claims{Workflow: f.Wid, Action: "do", Parents: parents})
	got := f.Call(With(token, Request{Method: method, Path: path, Body: body, Header: Headers{"Content-Type": "text/plain"}}))
	if got.Status >= 300 || got.Header.Get("Execution-Checkpoint") == "" {
		f.T.Fatalf("%s %s: %d %v %s", method, path, got.Status, got.Header, got.Body)
	}
	return token, got.Header.Get("Execution-Checkpoint")
}

// Asks asks for a rollback with a fresh token.
func (f *Flow) Asks(a *Agent, id, checkpoint, more string) Reply {
	f.T.Helper()
	return f.AsksWith(a.Issue(f.Request(checkpoint, more)), id, checkpoint, more)
}

// Request is a token that asks for what a body with these members does.
func (f *Flow) Request(checkpoint, more string) ect.Claims {
	f.T.Helper()
	said := struct {
		Scope, Reason string
		Cascade       bool
	}{}
	if err := json.Unmarshal([]byte(`{"of": ""`+more+"}"), &said); err != nil {
		f.T.Fatal(err)
	}
	ext := new(ect.ExtBuilder).Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberReason, said.Reason).
		Bool(ect.MemberCascade, said.Cascade || said.Scope != "" && said.Scope != "single")
	if said.Scope != "" {
		ext.Text(ect.MemberScope, said.Scope)
	}
	return ect.Claims{Workflow: f.Wid, Action: "rollback_request", Ext: ext}
}

// AsksWith asks for a rollback to a checkpoint, with a token. more are further members of the request.
func (f *Flow) AsksWith(token *ect.Token, id, checkpoint, more string) Reply {
	f.T.Helper()
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "phase": "execute"%s}`, id, checkpoint, more)
	return f.Call(With(token, Request{Path: rollback.Path, Body: body}))
}

// Undone reads the answer to a rollback that is finished.
func (r Reply) Undone(t *testing.T, want rollback.Status) (doc rollback.Rollback) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.Body), &doc); err != nil || r.Status != http.StatusOK || doc.Status != want {
		t.Fatalf("%d %s, want %s (%v)", r.Status, r.Body, want, err)
	}
	return doc
}

// Is holds that the answer is this problem.
func (r Reply) Is(t *testing.T, status int, slug string) {
	t.Helper()
	var doc struct{ Type string }
	_ = json.Unmarshal([]byte(r.Body), &doc)
	if r.Status != status || doc.Type != "/.well-known/cascade/problems/"+slug {
		t.Errorf("%d %s, want %d %s", r.Status, r.Body, status, slug)
	}
}

// SagaActions are the actions of a gateway before a restLab: one for each way to undo.
const SagaActions = `
	action doc {
		match path /docs/* /plain/* /versions/*
		restore
	}
	action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
		}
	}
	action mail {
		match path /mail
		irreversible
	}`

// Site is the site over a restLab.
func (l *RestLab) Site() string { return "agent_proxy " + l.Addr + " {" + SagaActions + "\n}" }

// Saga is an agent's workflow at a gateway.
type Saga struct {
	T   *testing.T
	G   *Gateway
	A   *Agent
	Wid string
}

// Saga begins a workflow of one agent.
func (g *Gateway) Saga(a *Agent) *Saga {
	return &Saga{g.T, g, a, uuid.NewString()}
}

// In is the saga in a subtest, which fails where something of it does.
func (s *Saga) In(t *testing.T) *Saga {
	g := *s.G
	g.T = t
	return &Saga{t, &g, s.A, s.Wid}
}

// lab runs a gateway before a RestLab, with these actions.
func LaunchLab(t *testing.T, actions string, agents ...*Agent) (*RestLab, *Gateway) {
	t.Helper()
	lab := NewRestLab(t)
	return lab, Launch(t, Setup{App: Trusting(t, agents...), Site: "agent_proxy " + lab.Addr + " {\n" + actions + "\n}"})
}

// UndoesParts is the option with which a rollback undoes what can be undone.
const UndoesParts = "\nrollback {\n partial allow\n}\n"

// LaunchParts is launchLab with undoesParts.
func LaunchParts(t *testing.T, actions string, agents ...*Agent) (*RestLab, *Gateway) {
	t.Helper()
	lab := NewRestLab(t)
	return lab, Launch(t, Setup{App: Trusting(t, agents...) + UndoesParts, Site: "agent_proxy " + lab.Addr + " {\n" + actions + "\n}"})
}

// SagaStep is a call of a saga.
type SagaStep struct {
	Checkpoint string
	Reply
}

// Try makes a call that follows from others.
func (s *Saga) Try(r Request, after ...string) SagaStep {
	s.T.Helper()
	got := s.G.Call(s.Calling(r, after...))
	return SagaStep{got.Header.Get("Execution-Checkpoint"), got}
}

// Calling is a call with a token that follows from others.
func (s *Saga) Calling(r Request, after ...string) Request {
	s.T.Helper()
	return With(s.A.Issue(ect.Claims{Workflow: s.Wid, Parents: after}), r)
}

// Do makes a call that must succeed, and names a checkpoint.
func (s *Saga) Do(r Request, after ...string) SagaStep {
	s.T.Helper()
	step := s.Try(r, after...)
	if step.Status >= 300 || step.Checkpoint == "" {
		s.T.Fatalf("%s %s: %d %q %v", r.Method, r.Path, step.Status, step.Body, step.Header)
	}
	return step
}

// Put is a request that sets a state.
func Put(path, body string) Request { return Request{Method: "PUT", Path: path, Body: body} }

// Charge is a request that charges an amount.
func Charge(amount int) Request {
	return Request{Path: "/charges", Body: fmt.Sprintf(`{"amount":%d}`, amount)}
}

// Id is the id in the answer of a step.
func (s SagaStep) Id(t *testing.T) string {
	t.Helper()
	return Document[struct{ ID string }](t, s.Reply).ID
}

// RollbackBody is what is asked of a rollback.
type RollbackBody struct {
	ID         string `json:"rollback_id,omitempty"`
	Checkpoint string `json:"checkpoint_id,omitempty"`
	Phase      string `json:"phase,omitempty"`
	Scope      string `json:"scope,omitempty"`
	Cascade    bool   `json:"cascade,omitempty"`
	Keep       bool   `json:"keep_dependants,omitempty"`
	Reason     string `json:"reason,omitempty"`
}

// RollbackDoc is what is told of a rollback.
type RollbackDoc struct {
	ID          string `json:"rollback_id"`
	Checkpoint  string `json:"checkpoint_id"`
	Scope       string
	State       string
	Status      string
	Effect      string
	Joined      string
	TimedOut    bool   `json:"timed_out"`
	Before      string `json:"state_hash_before"`
	After       string `json:"state_hash_after"`
	Cascaded    []struct{ Agent, Status string }
	Failed      []string `json:"failed_agents"`
	Dependants  []string
	Steps       []RollbackStep
	Others      int
	Elsewhere   []string
	Escalations []string
	Tokens      struct{ Start, Complete string }
	ECT         string
}

// RollbackStep is a step in the document of a rollback.
type RollbackStep struct {
	Checkpoint                            string `json:"checkpoint_id"`
	Action, State, Status, Effect, Reason string
	Critical, Via                         string
	Review                                bool
	Level, Attempts                       int
}

// Ask asks for a rollback, with a token of its own.
func (s *Saga) Ask(b RollbackBody) Reply {
	s.T.Helper()
	return s.G.Call(s.Asking(b))
}

// Asking is a request for a rollback of the workflow.
func (s *Saga) Asking(b RollbackBody) Request {
	s.T.Helper()
	return s.AskingAfter(b, b.Checkpoint)
}

// AskingAfter is a request for a rollback whose token has these parents.
func (s *Saga) AskingAfter(b RollbackBody, after ...string) Request {
	s.T.Helper()
	text, err := json.Marshal(b)
	if err != nil {
		s.T.Fatal(err)
	}
	ext := new(ect.ExtBuilder).Text(ect.MemberReason, b.Reason).
		Bool(ect.MemberCascade, b.Cascade || b.Scope != "" && b.Scope != "single")
	if b.Scope != "" {
		ext.Text(ect.MemberScope, b.Scope)
	}
	token := s.A.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Parents: after, Ext: ext})
	return With(token, Request{Path: "/.well-known/cascade/rollback", Body: string(text)})
}

// Begun asks for a rollback, and does not wait for more than that it is accepted.
func (s *Saga) Begun(b RollbackBody) {
	s.T.Helper()
	r := s.Asking(b)
	r.Header["Prefer"] = "respond-async"
	if got := s.G.Call(r); got.Status != http.StatusAccepted || got.Header.Get("Location") == "" {
		s.T.Fatalf("the rollback is not accepted: %d %v %s", got.Status, got.Header, got.Body)
	}
}

// Back asks for a rollback and waits until it is finished.
func (s *Saga) Back(b RollbackBody) RollbackDoc {
	s.T.Helper()
	if b.ID == "" {
		b.ID = "urn:uuid:" + uuid.NewString()
	}
	got := s.Ask(b)
	if got.Status >= 400 {
		s.T.Fatalf("the rollback is refused: %d %s", got.Status, got.Body)
	}
	if got.Status == http.StatusAccepted {
		return s.Finished(b.ID)
	}
	return Document[RollbackDoc](s.T, got)
}

// Finished is the rollback once it is.
func (s *Saga) Finished(id string) (doc RollbackDoc) {
	s.T.Helper()
	deadline := time.Now().Add(Patience)
	for {
		got := s.Look(id + "?wait=10s")
		if doc = Document[RollbackDoc](s.T, got); doc.Status != "" {
			return doc
		}
		if time.Now().After(deadline) {
			s.T.Fatalf("the rollback does not end: %s", got.Body)
		}
	}
}

// Look asks how far a rollback is.
func (s *Saga) Look(id string) Reply {
	s.T.Helper()
	token := s.A.Issue(ect.Claims{Workflow: s.Wid, Action: "look"})
	return s.G.Call(With(token, Request{Method: "GET", Path: "/.well-known/cascade/rollback/" + id}))
}

// Want checks what came of a rollback.
func (d RollbackDoc) Want(t *testing.T, status string, reasons ...string) {
	t.Helper()
	var got []string
	for _, s := range d.Steps {
		if s.Reason != "" {
			got = append(got, s.Reason)
		}
	}
	if d.Status != status || strings.Join(got, " ") != strings.Join(reasons, " ") {
		t.Errorf("the rollback is %s %q, want %s %q: %+v", d.Status, got, status, reasons, d)
	}
}

// RollbackID is the id of a test's nth rollback.
func RollbackID(n int) string { return fmt.Sprintf("urn:uuid:5f0c8b66-5c1b-4f0e-9d0f-%012d", n) }

// Checkpoint looks at a checkpoint.
func (s *Saga) Checkpoint(id string) Reply {
	s.T.Helper()
	token := s.A.Issue(ect.Claims{Workflow: s.Wid, Action: "look"})
	return s.G.Call(With(token, Request{Method: "GET", Path: "/.well-known/cascade/checkpoints/" + id + "?wait=0s"}))
}

// CheckpointDoc is what is told of a checkpoint.
type CheckpointDoc struct {
	JTI          string
	Token        string
	Verification struct{ Signature, Snapshot string }
	Reversible   bool
	Way          string
	Undo         struct{ State, Rollback string }
}

// View is the workflow as its tokens tell it.
func (s *Saga) View() WorkflowView {
	s.T.Helper()
	return Document[WorkflowView](s.T, s.G.Get(s.A, "workflows/"+s.Wid))
}
