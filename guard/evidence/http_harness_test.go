package evidence_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/api"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	origin   = "gateway.example/ledger"
	mallory  = "spiffe://example.com/agent/mallory"
	flow     = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
	foreign  = "b0b1c2d3-e4f5-6789-abcd-ef0123456789"
	nowhere  = "c0b1c2d3-e4f5-6789-abcd-ef0123456789"
	basePath = "/.well-known/cascade/"
)

// callerKey is the keyed hash of a caller without tokens.
var callerKey = [16]byte{1, 2, 3}

// gate is a Ledger over a real ledger, with tokens that are really signed.
type gate struct {
	*Ledger
	t       *testing.T
	log     *ledger.Log
	logs    ledger.Options
	store   fragile
	keys    note.Verifiers
	issuers map[string]*ect.Issuer
	// onRecord comes before a recording, and can refuse it.
	onRecord func([]*ect.Token) error
	verified int
	recorded int
	// outcomes are the ids of what came of calls, by their checkpoints; derived are these ids,
	// which the log has no links of.
	outcomes, derived sync.Map
}

func newGate(t *testing.T, change ...func(*Ledger)) *gate {
	t.Helper()
	private, public, err := note.GenerateKey(nil, "gateway.example")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := note.NewVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{t: t, keys: note.VerifierList(verifier), issuers: make(map[string]*ect.Issuer)}
	g.store.Store = memory.New(memory.Options{})
	g.logs = ledger.Options{
		Store: &g.store, Sealer: seal.Generate(), Origin: origin,
		HeadSigner: signer, HeadKeys: g.keys, KeysOf: func(string) (note.Verifiers, error) { return g.keys, nil },
		Links: func(e *ledger.Event) []string {
			if _, derived := g.derived.Load(e.ID); derived {
				return nil
			}
			return e.Parents
		},
	}
	g.log = g.open(origin)
	var sources []ect.Source
	for _, identity := range []string{gateway, alice, bob, mallory} {
		ring, err := ect.GenerateRing(ect.ES256)
		if err != nil {
			t.Fatal(err)
		}
		owner, err := ect.ParseOwner(identity)
		if err != nil {
			t.Fatal(err)
		}
		if g.issuers[identity], err = ect.NewIssuer(identity, ring); err != nil {
			t.Fatal(err)
		}
		sources = append(sources, ring.Source(owner))
	}
	policy, err := ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: sources})
	if err != nil {
		t.Fatal(err)
	}
	o := Ledger{
		Log: g.log, HeadKey: func(string) string { return public }, Identities: []string{gateway},
		Verify: func(r *http.Request, raws []string) ([]*ect.Token, error) {
			g.verified++
			return policy.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now()})
		},
		Record: g.keep,
		Outcomes: func(e *ledger.Entry) []string {
			if id, there := g.outcomes.Load(e.ID); there {
				return []string{id.(string)}
			}
			return nil
		},
	}
	for _, c := range change {
		c(&o)
	}
	g.Ledger = NewLedger(o)
	return g
}

// open starts a log in the store: this node's, or another's.
func (g *gate) open(origin string) *ledger.Log {
	g.t.Helper()
	o := g.logs
	o.Origin = origin
	log, err := ledger.Open(g.t.Context(), o)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := log.Close(ctx); err != nil {
			g.t.Error(err)
		}
	})
	return log
}

// fragile is a store that cannot be read while it is broken.
type fragile struct {
	onWatch func() // comes after each Watch; nil is none
	store.Store
	broken atomic.Bool
}

var errBroken = errors.New("broken")

func (s *fragile) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if s.broken.Load() {
		return store.Entry{}, errBroken
	}
	return s.Store.Get(ctx, key)
}

func (s *fragile) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if s.broken.Load() {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, errBroken) }
	}
	return s.Store.Scan(ctx, r)
}

func (g *gate) keep(ctx context.Context, tokens []*ect.Token) error {
	if g.onRecord != nil {
		if err := g.onRecord(tokens); err != nil {
			return err
		}
	}
	g.recorded++
	return g.log.Append(ctx, events(tokens...))
}

func events(tokens ...*ect.Token) []ledger.Event {
	var all []ledger.Event
	for _, t := range tokens {
		all = append(all, ledger.Event{
			ID: t.ID(), Workflow: t.Workflow(), Action: t.Action(), Issuer: t.Issuer(), Parents: t.Parents(),
			Time: t.IssuedAt(), Payload: []byte(t.Raw()),
		})
	}
	return all
}

// token is a token that is not recorded.
func (g *gate) token(issuer string, c ect.Claims) *ect.Token {
	g.t.Helper()
	c.Audience = []string{gateway, bob}
	token, err := g.issuers[issuer].Issue(time.Now(), c)
	if err != nil {
		g.t.Fatal(err)
	}
	return token
}

// add records a token of a workflow and waits for its place.
func (g *gate) add(issuer, wid, action string, ext *ect.ExtBuilder, parents ...*ect.Token) *ect.Token {
	g.t.Helper()
	token := g.token(issuer, ect.Claims{Workflow: wid, Action: action, Ext: ext, Parents: idsOf(parents)})
	g.put(events(token)...)
	return token
}

// outcome records what came of the call of a checkpoint, as the gateway does.
func (g *gate) outcome(wid string, by [16]byte, checkpoint *ect.Token) *ect.Token {
	g.t.Helper()
	token := g.token(gateway, ect.Claims{Workflow: wid, Action: "pay", Ext: ofCall("completed", by), Parents: append(checkpoint.Parents(), checkpoint.ID())})
	g.outcomes.Store(checkpoint.ID(), token.ID())
	g.derived.Store(token.ID(), true)
	g.put(events(token)...)
	return token
}

// put records events.
func (g *gate) put(all ...ledger.Event) {
	g.t.Helper()
	if err := g.log.Append(g.t.Context(), all); err != nil {
		g.t.Fatal(err)
	}
}

func idsOf(tokens []*ect.Token) []string {
	var ids []string
	for _, t := range tokens {
		ids = append(ids, t.ID())
	}
	return ids
}

func ext() *ect.ExtBuilder { return &ect.ExtBuilder{} }

// ofCall are the members of the gateway's node of a call.
func ofCall(outcome string, by [16]byte) *ect.ExtBuilder {
	return ext().Text("agent_guard.outcome", outcome).Int(MemberStatus, 201).Text("agent_guard.caller", hex.EncodeToString(by[:])).Text("agent_guard.execution", "e1")
}

func checkpointToken() *ect.ExtBuilder {
	return ext().Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://gateway.example/rollback").Int(ect.MemberTTL, 3600)
}

func anError(of *ect.Token) ect.Claims {
	return ect.Claims{
		Workflow: of.Workflow(), Action: "error", Parents: []string{of.ID()},
		Ext: ext().Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, ""),
	}
}

// The readers.
var (
	asAlice   = router.Reader{Issuer: alice}
	asMallory = router.Reader{Issuer: mallory, Caller: [16]byte{9}}
	asCaller  = router.Reader{Caller: callerKey}
	anonymous = router.Reader{Anonymous: true}
)

// reply is an answer.
type reply struct {
	*httptest.ResponseRecorder
	t *testing.T
}

// do sends a request, and writes problems as the gateway does.
func (g *gate) do(r *http.Request, who router.Reader) reply {
	g.t.Helper()
	w := httptest.NewRecorder()
	if !g.serve(w, r, who) {
		g.t.Fatalf("%s is not handled", r.URL)
	}
	return reply{w, g.t}
}

// serve answers through the endpoints; false is for foreign paths.
func (g *gate) serve(w http.ResponseWriter, r *http.Request, who router.Reader) bool {
	return endpoints(api.Gateway{
		Ledger: g.Ledger, Reader: func(*http.Request) (router.Reader, error) { return who, nil },
	}).Serve(w, r)
}

// endpoints are those of a site with nothing but what g has.
func endpoints(g api.Gateway) *api.Endpoints {
	g.Close = func() {}
	return &api.Endpoints{
		Open: func() (*api.Gateway, error) { return &g, nil }, Refused: func(*problem.Problem, string) {},
		Write: func(w http.ResponseWriter, _ *http.Request, p *problem.Problem) { p.Write(w) },
	}
}

func (g *gate) get(path string, who router.Reader) reply {
	g.t.Helper()
	return g.do(httptest.NewRequestWithContext(g.t.Context(), http.MethodGet, basePath+path, nil), who)
}

// post sends tokens in the body, as JSON where there are several.
func (g *gate) post(who router.Reader, raws ...string) reply {
	g.t.Helper()
	body, kind := "", ect.MediaType
	if len(raws) == 1 {
		body = raws[0]
	} else {
		text, err := json.Marshal(raws)
		if err != nil {
			g.t.Fatal(err)
		}
		body, kind = string(text), "application/json"
	}
	r := httptest.NewRequestWithContext(g.t.Context(), http.MethodPost, basePath+"errors", strings.NewReader(body))
	r.Header.Set("Content-Type", kind)
	return g.do(r, who)
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

// private holds that nobody keeps the answer.
func (r reply) private() {
	r.t.Helper()
	if r.Header().Get("Cache-Control") != "no-store" || r.Header().Get("Content-Length") != fmt.Sprint(r.Body.Len()) {
		r.t.Errorf("header %v of %d bytes", r.Header(), r.Body.Len())
	}
}

// same holds that two answers do not differ in anything.
func same(t *testing.T, what string, a, b reply) {
	t.Helper()
	if a.Code != b.Code || a.Body.String() != b.Body.String() || fmt.Sprint(a.Header()) != fmt.Sprint(b.Header()) {
		t.Errorf("%s: %d %v %s\n%d %v %s", what, a.Code, a.Header(), a.Body, b.Code, b.Header(), b.Body)
	}
}

func sorted(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}

func (s *fragile) Watch(key []byte) (<-chan struct{}, func()) {
	changed, cancel := s.Store.Watch(key)
	if s.onWatch != nil {
		s.onWatch()
	}
	return changed, cancel
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
