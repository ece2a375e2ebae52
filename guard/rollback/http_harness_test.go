package rollback_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	. "github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	alice   = "spiffe://example.com/agent/alice"
	bob     = "spiffe://example.com/agent/bob"
	mallory = "spiffe://example.com/agent/mallory"
	foreign = "b0b1c2d3-e4f5-6789-abcd-ef0123456789"
	flow    = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
)

// reply is an answer.
type reply struct {
	*httptest.ResponseRecorder
	t *testing.T
}

// endpoints are those of a site with nothing but what g has.
func endpoints(g api.Gateway) *api.Endpoints {
	g.Close = func() {}
	return &api.Endpoints{
		Open: func() (*api.Gateway, error) { return &g, nil }, Refused: func(*problem.Problem, string) {},
		Write: func(w http.ResponseWriter, _ *http.Request, p *problem.Problem) { p.Write(w) },
	}
}

// read reads the answer as a document.
func (r reply) read(status int, doc any) {
	r.t.Helper()
	if r.Code != status {
		r.t.Fatalf("status %d, want %d: %s", r.Code, status, r.Body)
	}
	if err := json.Unmarshal(r.Body.Bytes(), doc); err != nil {
		r.t.Fatalf("%v: %s", err, r.Body)
	}
}

// same holds that two answers do not differ in anything.
func same(t *testing.T, what string, a, b reply) {
	t.Helper()
	if a.Code != b.Code || a.Body.String() != b.Body.String() || fmt.Sprint(a.Header()) != fmt.Sprint(b.Header()) {
		t.Errorf("%s: %d %v %s\n%d %v %s", what, a.Code, a.Header(), a.Body, b.Code, b.Header(), b.Body)
	}
}

const (
	coordinator = "spiffe://example.com/agent/coordinator"

	point   = "c1b1c2d3-e4f5-6789-abcd-ef0123456789" // alice's checkpoint, in flow
	taken   = "a2b1c2d3-e4f5-6789-abcd-ef0123456789" // the action that point was made for
	failure = "e1b1c2d3-e4f5-6789-abcd-ef0123456789" // an error, in flow
	askedID = "f1b1c2d3-e4f5-4789-abcd-ef0123456789"
)

// fake is a coordinator that accepts what alice asks for about point, with the contract of
// the real one, and tokens in maps.
type fake struct {
	mu        sync.Mutex
	accepted  map[string]Request
	done      map[string]*Rollback
	plans     int
	executed  int
	refusals  int                          // of Execute
	fail      error                        // of Plan
	result    func(*Rollback)              // what it ends with; nil never ends
	bound     map[string][sha256.Size]byte // by workflow and id
	digests   map[string][32]byte          // of those
	acted     map[string]bool              // by name
	entered   []string                     // ids
	onExecute func(Request)                // before it is accepted
	waited    chan struct{}                // gets one for each Wait
	readers   map[string]map[string]bool   // who is linked to which id
	reserved  map[string]*Prepared
	released  int
	obstacles []Obstacle                         // of what is prepared
	refusal   error                              // of what is prepared
	kept      func(id, checkpoint string) string // what Resolve says; nil is the id
}

func (f *fake) Resolve(_ context.Context, id, checkpoint string) (string, error) {
	if f.kept == nil {
		return id, nil
	}
	return f.kept(id, checkpoint), nil
}

func newFake() *fake {
	return &fake{
		accepted: map[string]Request{}, done: map[string]*Rollback{},
		bound: map[string][sha256.Size]byte{}, acted: map[string]bool{}, digests: map[string][32]byte{}, waited: make(chan struct{}, 100),
		result:  func(r *Rollback) { r.Status = Completed },
		readers: map[string]map[string]bool{alice: {point: true}}, reserved: map[string]*Prepared{},
	}
}

// plan says whether a rollback may be asked for.
func (f *fake) plan(r Request) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plans++
	if f.fail != nil {
		return f.fail
	}
	if r.Checkpoint != point || r.By != alice && !r.Coordinator {
		return ErrNotInWorkflow
	}
	if r.Unnamed && r.Error == "" {
		return ErrUnnamed
	}
	if r.Scope == FullWorkflow && !r.Coordinator {
		return &ScopeError{Scope: r.Scope}
	}
	return nil
}

func (f *fake) Prepare(ctx context.Context, r Request) (*Prepared, error) {
	f.mu.Lock()
	before, known := f.reserved[r.ID]
	f.mu.Unlock()
	if known {
		if before.Rollback.Checkpoint != r.Checkpoint || before.Rollback.Scope != r.Scope || before.Rollback.Requester != r.By {
			return nil, ErrMismatch
		}
		return before, nil
	}
	if err := f.plan(r); err != nil {
		return nil, err
	}
	p := &Prepared{Obstacles: f.obstacles, Refusal: f.refusal, Rollback: &Rollback{
		ID: r.ID, Checkpoint: r.Checkpoint, Workflow: flow, Scope: r.Scope, Requester: r.By, State: Reserved, Asked: time.Now(),
		Journal: Journal{Named: r.Named, Plan: &Plan{Workflow: flow, Target: r.Checkpoint, Scope: r.Scope}},
		Steps:   []Step{{Checkpoint: point, Agent: alice, StepJournal: StepJournal{What: Undo}}, {Checkpoint: "other", Agent: mallory, StepJournal: StepJournal{What: Undo}}},
	}}
	return p, nil
}

func (f *fake) Reserve(_ context.Context, p *Prepared, last time.Duration, writes ...store.Write) (*Prepared, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.bindAll(writes); err != nil {
		return nil, err
	}
	reserved := *p
	reserved.Rollback.Until = time.Now().Add(last)
	f.reserved[p.Rollback.ID] = &reserved
	return &reserved, nil
}

func (f *fake) Release(ctx context.Context, r Request, writes ...store.Write) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if known, ok := f.accepted[r.ID]; ok {
		if known.Checkpoint != r.Checkpoint || known.By != r.By {
			return ErrMismatch
		}
		return ErrAccepted
	}
	if p, ok := f.reserved[r.ID]; ok {
		if p.Rollback.Requester != r.By {
			return ErrMismatch
		}
		if err := f.bindAll(writes); err != nil {
			return err
		}
		f.released++
		delete(f.reserved, r.ID)
		return nil
	}
	if r.By != alice {
		return ErrNotInWorkflow
	}
	return nil
}

func (f *fake) Prepared(_ context.Context, id string) (*Prepared, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p, ok := f.reserved[id]; ok {
		return p, nil
	}
	return nil, ErrUnknown
}

// bindAll commits the uses of tokens, with mu held.
func (f *fake) bindAll(writes []store.Write) error {
	for _, w := range writes {
		bindingsMu.Lock()
		bound := bindings[string(w.Key)]
		bindingsMu.Unlock()
		if f.acted[name(bound.token)] || f.bound[name(bound.token)] != bound.use {
			return fmt.Errorf("commit: %w", &store.Conflict{Key: w.Key})
		}
		f.acted[name(bound.token)] = true
	}
	return nil
}

type binding struct {
	token *ect.Token
	use   [sha256.Size]byte
}

var (
	bindingsMu sync.Mutex
	bindings   = map[string]binding{}
)

func (f *fake) Execute(
	ctx context.Context, r Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
) (*Rollback, error) {
	found, err := f.found(r)
	if found != nil || err != nil {
		return found, err
	}
	planned := f.plan(r)
	refused := errors.Is(planned, checkpoint.ErrTampered) || errors.Is(planned, checkpoint.ErrExpired)
	if planned != nil && !refused {
		return nil, planned
	}
	writes, err := admit(ctx, refused)
	if err != nil {
		return nil, err
	}
	if f.onExecute != nil {
		f.onExecute(r)
	}
	if found, err := f.found(r); found != nil || err != nil {
		return found, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if refused {
		f.refusals++
		return nil, planned
	}
	if err := f.bindAll(writes); err != nil {
		return nil, err
	}
	f.executed++
	delete(f.reserved, r.ID)
	f.accepted[r.ID] = r
	made := &Rollback{
		ID: r.ID, Checkpoint: r.Checkpoint, Workflow: flow, Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency,
		Requester: r.By, State: Executing, Asked: time.Now(), Tokens: Tokens{Start: "start-" + r.ID}, Journal: Journal{Named: r.Named},
	}
	f.done[r.ID] = made
	return made, ctx.Err()
}

// found is the accepted rollback of a request; nil without one.
func (f *fake) found(r Request) (*Rollback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, ok := f.accepted[r.ID]
	if !ok {
		return nil, nil
	}
	before.Token, r.Token, before.Error, r.Error, before.Unnamed, r.Unnamed = "", "", "", "", false, false
	if before != r {
		return nil, ErrMismatch
	}
	return f.done[r.ID], nil
}

func (f *fake) AskedWith(context.Context, string, string) (string, error) { return "", nil }

func (f *fake) Get(_ context.Context, id string) (*Rollback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r, ok := f.done[id]; ok {
		seen := *r
		return &seen, nil
	}
	return nil, ErrUnknown
}

// finish ends a rollback.
func (f *fake) finish(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := *f.done[id]
	r.State, r.Finished, r.Complete = Finished, time.Now(), "complete-"+id
	r.Steps = []Step{{Checkpoint: point, Agent: alice, State: StepDone, Status: Completed, StepJournal: StepJournal{What: Undo}, HTTPStatus: 200, Attempts: 1}}
	f.result(&r)
	f.done[id] = &r
}

func (f *fake) Wait(ctx context.Context, id string) (*Rollback, error) {
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

func (f *fake) Recorded(_ context.Context, t *ect.Token, use [sha256.Size]byte) (used, acted bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, ok := f.bound[name(t)]
	if ok && (before != use || f.digests[name(t)] != t.Digest()) {
		return true, false, &ect.Error{Code: ect.CodeReplayed}
	}
	return ok, f.acted[name(t)], nil
}

func (f *fake) Enter(ctx context.Context, all []*ect.Token, t *ect.Token, use [sha256.Size]byte) error {
	if err := f.Bind(ctx, t, use, false); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range all {
		if !slices.Contains(f.entered, t.ID()) {
			f.entered = append(f.entered, t.ID())
		}
	}
	return nil
}

func (f *fake) Acted(_ context.Context, t *ect.Token, use [sha256.Size]byte) (store.Write, error) {
	key := uuid.NewString()
	bindingsMu.Lock()
	defer bindingsMu.Unlock()
	bindings[key] = binding{t, use}
	return store.Write{Key: []byte(key)}, nil
}

func (f *fake) Bind(_ context.Context, t *ect.Token, use [sha256.Size]byte, acted bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if before, ok := f.bound[name(t)]; ok && before != use {
		return &ect.Error{Code: ect.CodeReplayed}
	}
	f.bound[name(t)], f.digests[name(t)], f.acted[name(t)] = use, t.Digest(), f.acted[name(t)] || acted
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

func (f *fake) For(_ context.Context, workflow, checkpoint string, ids []string) (bool, error) {
	return workflow == flow && checkpoint == point && slices.Contains(ids, taken), nil
}

func (f *fake) Mine(_ context.Context, workflow, id string, who router.Reader) (bool, error) {
	return workflow == flow && f.readers[who.Issuer][id], nil
}

func (f *fake) Raw(_ context.Context, _, id string) (string, error) { return "signed." + id, nil }

func (f *fake) Result(_ context.Context, r *Rollback, request string, v ect.Vocabulary) (string, error) {
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
	issuer, err := ect.NewIssuer(identity, ring)
	if err != nil {
		panic(err)
	}
	i, _ := issuers.LoadOrStore(identity, issuer)
	return i.(*ect.Issuer)
}

// claims are those of a request's token, which names point in its par and says no more. A
// running gateway takes it so (TestCascadeFigure10Tokens).
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

// site is a Rollbacks over a fake.
type site struct {
	*fake
	t      *testing.T
	o      Rollbacks
	asking *Asker // who asks next
	refuse error
	reader router.Reader
}

func newSite(t *testing.T, change ...func(*Rollbacks)) *site {
	s := &site{fake: newFake(), t: t}
	s.o = Rollbacks{
		Wait: DefaultWait, Reservation: DefaultReservation, PrepareTimeout: DefaultPrepareTimeout,
		Waits: context.Background(), Logger: slog.New(slog.DiscardHandler),
		Coordinator: s.fake, Tokens: s.fake, Limit: new(Limit), Rate: 60, Lineage: Ancestor,
		Coordinators: []string{coordinator},
		Ask:          func(*http.Request) (*Asker, error) { return s.asking, s.refuse },
		Read:         func(*http.Request) (router.Reader, error) { return s.reader, s.refuse },
	}
	for _, c := range change {
		c(&s.o)
	}
	return s
}

func (s *site) do(r *http.Request) reply {
	s.t.Helper()
	w := httptest.NewRecorder()
	if !api.HandlesRollback(r) || !endpoints(api.Gateway{Rollbacks: &s.o}).Serve(w, r) {
		s.t.Fatalf("%s is not handled", r.URL)
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

func (s *site) get(path string, who router.Reader) reply {
	s.t.Helper()
	s.reader = who
	return s.do(httptest.NewRequestWithContext(s.t.Context(), http.MethodGet, path, nil))
}

func bodyOf(id, checkpoint, more string) string {
	return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "phase": "execute"%s}`, id, checkpoint, more)
}

func (r reply) document(status int) (doc Rollback) {
	r.t.Helper()
	r.read(status, &doc)
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
