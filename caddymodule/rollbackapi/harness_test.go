package rollbackapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	gateway     = "spiffe://example.com/gateway"
	alice       = "spiffe://example.com/agent/alice"
	mallory     = "spiffe://example.com/agent/mallory"
	coordinator = "spiffe://example.com/agent/coordinator"

	flow    = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
	foreign = "b0b1c2d3-e4f5-6789-abcd-ef0123456789"
	point   = "c1b1c2d3-e4f5-6789-abcd-ef0123456789" // alice's checkpoint, in flow
	failure = "e1b1c2d3-e4f5-6789-abcd-ef0123456789" // an error, in flow
	askedID = "f1b1c2d3-e4f5-4789-abcd-ef0123456789"
)

// fake is a coordinator that accepts what alice asks for about point, with the contract of
// the real one, and tokens in maps.
type fake struct {
	mu        sync.Mutex
	accepted  map[string]rollback.Request
	done      map[string]*rollback.Rollback
	plans     int
	executed  int
	refusals  int                        // of Execute
	fail      error                      // of Plan
	result    func(*rollback.Rollback)   // what it ends with; nil never ends
	bound     map[string]evidence.Use    // by workflow and id
	digests   map[string][32]byte        // of those
	entered   []string                   // ids
	onExecute func(rollback.Request)     // before it is accepted
	waited    chan struct{}              // gets one for each Wait
	readers   map[string]map[string]bool // who is linked to which id
}

func newFake() *fake {
	return &fake{
		accepted: map[string]rollback.Request{}, done: map[string]*rollback.Rollback{},
		bound: map[string]evidence.Use{}, digests: map[string][32]byte{}, waited: make(chan struct{}, 100),
		result:  func(r *rollback.Rollback) { r.Status = rollback.Completed },
		readers: map[string]map[string]bool{alice: {point: true}},
	}
}

func (f *fake) Plan(_ context.Context, r rollback.Request) (*rollback.Rollback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plans++
	if f.fail != nil {
		return nil, f.fail
	}
	if r.Checkpoint != point || r.By != alice && !r.Coordinator {
		return nil, rollback.ErrNotInWorkflow
	}
	if r.Unnamed && r.Error == "" {
		return nil, rollback.ErrUnnamed
	}
	if r.Scope == plan.FullWorkflow && !r.Coordinator {
		return nil, &plan.ScopeError{Scope: r.Scope}
	}
	return &rollback.Rollback{}, nil
}

type rider struct {
	token *ect.Token
	use   evidence.Use
}

var (
	ridersMu sync.Mutex
	riders   = map[string]rider{}
)

func (f *fake) Execute(ctx context.Context, r rollback.Request, writes ...store.Write) (*rollback.Rollback, error) {
	if f.onExecute != nil {
		f.onExecute(r)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if before, ok := f.accepted[r.ID]; ok {
		before.Token, r.Token, before.Error, r.Error, before.Unnamed, r.Unnamed = "", "", "", "", false, false
		if before != r {
			return nil, rollback.ErrMismatch
		}
		return f.done[r.ID], nil
	}
	if f.fail != nil {
		f.refusals++
		return nil, f.fail
	}
	for _, w := range writes {
		ridersMu.Lock()
		bound := riders[string(w.Key)]
		ridersMu.Unlock()
		if _, taken := f.bound[name(bound.token)]; taken {
			return nil, fmt.Errorf("commit: %w", &store.Conflict{Key: w.Key})
		}
		f.bound[name(bound.token)], f.digests[name(bound.token)] = bound.use, bound.token.Digest()
	}
	f.executed++
	f.accepted[r.ID] = r
	made := &rollback.Rollback{
		ID: r.ID, Checkpoint: r.Checkpoint, Workflow: flow, Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency,
		Requester: r.By, State: rollback.Executing, Asked: time.Now(), Start: "start-" + r.ID,
	}
	f.done[r.ID] = made
	return made, ctx.Err()
}

func (f *fake) Get(_ context.Context, id string) (*rollback.Rollback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r, ok := f.done[id]; ok {
		seen := *r
		return &seen, nil
	}
	return nil, rollback.ErrUnknown
}

// finish ends a rollback.
func (f *fake) finish(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := *f.done[id]
	r.State, r.Finished, r.Complete = rollback.Finished, time.Now(), "complete-"+id
	r.Steps = []rollback.Step{{Checkpoint: point, Agent: alice, State: rollback.StepDone, Status: rollback.Completed, What: plan.Undo, HTTPStatus: 200, Attempts: 1}}
	f.result(&r)
	f.done[id] = &r
}

func (f *fake) Wait(ctx context.Context, id string) (*rollback.Rollback, error) {
	f.waited <- struct{}{}
	if f.result == nil {
		<-ctx.Done()
		r, _ := f.Get(context.Background(), id)
		return r, ctx.Err()
	}
	f.finish(id)
	return f.Get(ctx, id)
}

func name(t *ect.Token) string { return t.Workflow() + "/" + t.ID() }

func (f *fake) Recorded(_ context.Context, t *ect.Token, use evidence.Use) (evidence.Standing, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, ok := f.bound[name(t)]
	switch {
	case !ok:
		return evidence.Unused, nil
	case before == use && f.digests[name(t)] == t.Digest():
		return evidence.Same, nil
	}
	return evidence.Other, nil
}

func (f *fake) Enter(_ context.Context, all []*ect.Token) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range all {
		if !slices.Contains(f.entered, t.ID()) {
			f.entered = append(f.entered, t.ID())
		}
	}
	return nil
}

func (f *fake) Bound(_ context.Context, t *ect.Token, use evidence.Use) (store.Write, error) {
	key := uuid.NewString()
	ridersMu.Lock()
	defer ridersMu.Unlock()
	riders[key] = rider{t, use}
	return store.Write{Key: []byte(key)}, nil
}

func (f *fake) Bind(_ context.Context, t *ect.Token, use evidence.Use) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if before, ok := f.bound[name(t)]; ok && before != use {
		return &ect.Error{Code: ect.CodeReplayed}
	}
	f.bound[name(t)], f.digests[name(t)] = use, t.Digest()
	return nil
}

func (f *fake) Event(_ context.Context, workflow, id string) (ect.Event, bool, error) {
	switch {
	case workflow == flow && id == point:
		return ect.EventCheckpoint, true, nil
	case workflow == flow && id == failure:
		return ect.EventError, true, nil
	}
	return "", false, nil
}

func (f *fake) Mine(_ context.Context, workflow, id string, who graph.Reader) (bool, error) {
	return workflow == flow && f.readers[who.Issuer][id], nil
}

func (f *fake) Raw(_ context.Context, _, id string) (string, error) { return "signed." + id, nil }

func (f *fake) Result(_ context.Context, r *rollback.Rollback, request string, v ect.Vocabulary) (string, error) {
	token, err := issuerOf(gateway).Issue(time.Now(), ect.Claims{
		Audience: []string{alice}, Workflow: r.Workflow, Action: string(ect.EventRollbackComplete), Parents: []string{request},
		Vocabulary: v, Ext: new(ect.ExtBuilder).Text(ect.MemberStatus, string(r.Status)).Text(ect.MemberCheckpointID, r.Checkpoint),
	})
	if err != nil {
		return "", err
	}
	return token.Raw(), nil
}

var issuers sync.Map

func issuerOf(identity string) *ect.Issuer {
	if i, ok := issuers.Load(identity); ok {
		return i.(*ect.Issuer)
	}
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		panic(err)
	}
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: identity, Ring: ring})
	if err != nil {
		panic(err)
	}
	i, _ := issuers.LoadOrStore(identity, issuer)
	return i.(*ect.Issuer)
}

// claims are those of a request's token, which names point in its par and says no more.
func claims(workflow string, more ...func(*ect.Claims)) ect.Claims {
	c := ect.Claims{Audience: []string{gateway}, Workflow: workflow, Action: "rollback_request", Parents: []string{point}}
	for _, m := range more {
		m(&c)
	}
	return c
}

func parents(ids ...string) func(*ect.Claims) { return func(c *ect.Claims) { c.Parents = ids } }

func in(v ect.Vocabulary) func(*ect.Claims) {
	return func(c *ect.Claims) {
		c.Vocabulary = v
		if v == ect.ATD {
			c.Ext = new(ect.ExtBuilder).Text(ect.MemberReason, "said in the token").Bool(ect.MemberCascade, true)
		}
	}
}

// saying is what the token says in its extensions.
func saying(ext *ect.ExtBuilder) func(*ect.Claims) { return func(c *ect.Claims) { c.Ext = ext } }

func issued(t *testing.T, by string, c ect.Claims) *ect.Token {
	t.Helper()
	token, err := issuerOf(by).Issue(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// site is a Server over a fake.
type site struct {
	*fake
	t      *testing.T
	o      Options
	asking *Asker // who asks next
	refuse error
	reader graph.Reader
}

func newSite(t *testing.T, change ...func(*Options)) *site {
	s := &site{fake: newFake(), t: t}
	s.o = Options{
		Coordinator: s.fake, Tokens: s.fake, Limit: new(Limit), Rate: 60, Lineage: plan.Ancestor,
		Coordinators: []string{coordinator},
		Ask:          func(*http.Request) (*Asker, error) { return s.asking, s.refuse },
		Read:         func(*http.Request) (graph.Reader, error) { return s.reader, s.refuse },
	}
	for _, c := range change {
		c(&s.o)
	}
	return s
}

type reply struct {
	*httptest.ResponseRecorder
	t *testing.T
}

func (s *site) do(r *http.Request) reply {
	s.t.Helper()
	w := httptest.NewRecorder()
	if !Handles(r) {
		s.t.Fatalf("%s is not handled", r.URL)
	}
	if Allowed(w, r) {
		if err := New(s.o).Serve(w, r); err != nil {
			var p *problem.Problem
			if !errors.As(err, &p) {
				s.t.Fatalf("%v, which is no problem", err)
			}
			p.Write(w)
		}
	}
	return reply{w, s.t}
}

// post asks on a path with a token.
func (s *site) post(path, body string, token *ect.Token, header ...string) reply {
	s.t.Helper()
	s.asking = &Asker{Token: token, All: []*ect.Token{token}}
	return s.send(path, body, header...)
}

func (s *site) send(path, body string, header ...string) reply {
	s.t.Helper()
	r := httptest.NewRequestWithContext(s.t.Context(), http.MethodPost, path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return s.do(r)
}

func (s *site) get(path string, who graph.Reader) reply {
	s.t.Helper()
	s.reader = who
	return s.do(httptest.NewRequestWithContext(s.t.Context(), http.MethodGet, path, nil))
}

func body(id, checkpoint, more string) string {
	return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "phase": "execute"%s}`, id, checkpoint, more)
}

func (r reply) document(status int) (doc Document) {
	r.t.Helper()
	if r.Code != status {
		r.t.Fatalf("status %d, want %d: %s", r.Code, status, r.Body)
	}
	if err := json.Unmarshal(r.Body.Bytes(), &doc); err != nil {
		r.t.Fatalf("%v: %s", err, r.Body)
	}
	if r.Header().Get("Cache-Control") != "no-store" {
		r.t.Errorf("header %v", r.Header())
	}
	return doc
}

// refused holds that the answer is this problem, with this reason if any.
func (r reply) refused(status int, slug, reason string) map[string]any {
	r.t.Helper()
	var doc map[string]any
	if err := json.Unmarshal(r.Body.Bytes(), &doc); err != nil {
		r.t.Fatalf("%d %v: %s", r.Code, err, r.Body)
	}
	got, _ := doc["reason"].(string)
	if r.Code != status || doc["type"] != problem.BasePath+slug || got != reason {
		r.t.Errorf("%d %v %q (%v), want %d %s %q", r.Code, doc["type"], got, doc["detail"], status, slug, reason)
	}
	return doc
}

func same(t *testing.T, what string, a, b reply) {
	t.Helper()
	if a.Code != b.Code || a.Body.String() != b.Body.String() || fmt.Sprint(a.Header()) != fmt.Sprint(b.Header()) {
		t.Errorf("%s: %d %v %s\n%d %v %s", what, a.Code, a.Header(), a.Body, b.Code, b.Header(), b.Body)
	}
}
