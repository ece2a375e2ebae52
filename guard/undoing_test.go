package guard_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// service is an upstream whose state changes, so that a test can compare what was put back:
// documents with entity tags (/docs/) and without (/plain/), charges and refunds, and mails.
type service struct {
	mu      sync.Mutex
	docs    map[string]string
	refunds map[string]bool               // by Idempotency-Key
	next    map[string][]http.HandlerFunc // answers, in place of the service's own
	effects []string                      // in their order
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	route, answer := r.Method+" "+r.URL.Path, http.HandlerFunc(s.act)
	s.mu.Lock()
	if next := s.next[route]; len(next) > 0 {
		answer, s.next[route] = next[0], next[1:]
	}
	s.mu.Unlock()
	answer(w, r)
}

// on answers the next requests in another way.
func (s *service) on(route string, answers ...http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next[route] = append(s.next[route], answers...)
}

// act does what is asked for.
func (s *service) act(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	path := r.URL.Path
	var doc struct{ ID, Charge string }
	switch key := r.Header.Get("Idempotency-Key"); path {
	case "/charges", "/refunds":
		if err := json.Unmarshal(body, &doc); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if doc.ID = cmp.Or(doc.ID, fmt.Sprint("ch_", len(s.effects)+1)); path == "/charges" {
			s.effects = append(s.effects, "charged "+doc.ID)
		} else if !s.refunds[key] {
			s.refunds[key] = true
			s.effects = append(s.effects, "refunded "+doc.Charge)
		}
		says(http.StatusOK, fmt.Sprintf(`{"id":%q}`, doc.ID), "Content-Type", "application/json")(w, r)
		return
	case "/mail":
		s.effects = append(s.effects, "mailed")
		return
	}
	was, exists := s.docs[path]
	match, none := r.Header.Get("If-Match"), r.Header.Get("If-None-Match")
	switch {
	case match != "" && (!exists || match != fmt.Sprintf("%q", was)), none == "*" && exists:
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	case r.Method != http.MethodPut && !exists:
		w.WriteHeader(http.StatusNotFound)
		return
	case r.Method == http.MethodDelete:
		delete(s.docs, path)
		s.effects = append(s.effects, "deleted "+path)
		w.WriteHeader(http.StatusNoContent)
		return
	case r.Method != http.MethodGet:
		s.docs[path] = string(body)
		if r.Method == http.MethodPatch {
			s.docs[path] = was + string(body)
		}
		s.effects = append(s.effects, path+" is "+s.docs[path])
	}
	if strings.HasPrefix(path, "/docs/") {
		w.Header().Set("ETag", fmt.Sprintf("%q", s.docs[path]))
	}
	if !exists {
		w.WriteHeader(http.StatusCreated)
	}
	if r.Method == http.MethodGet {
		_, _ = io.WriteString(w, was)
	}
}

// does acts and answers something else.
func (s *service) does(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.act(httptest.NewRecorder(), r)
		w.WriteHeader(status)
	}
}

// gate is where a request waits until a test opens it.
type gate struct{ arrived, open chan struct{} }

func newGate() *gate { return &gate{make(chan struct{}), make(chan struct{})} }

func (g *gate) pass() {
	close(g.arrived)
	<-g.open
}

// late acts, and answers once the gate is open.
func (s *service) late(g *gate) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		answer := httptest.NewRecorder()
		s.act(answer, r)
		g.pass()
		play(w, answer)
	}
}

// waits acts once the gate is open.
func (s *service) waits(g *gate) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		g.pass()
		s.act(w, r)
	}
}

func play(w http.ResponseWriter, answer *httptest.ResponseRecorder) {
	for name, values := range answer.Header() {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.Code)
	_, _ = answer.Body.WriteTo(w)
}

// saga is a workflow of agent a before a service, whose calls can be undone.
type saga struct {
	*trust
	*service
	*rollbacks
	wid string
}

// rollbacks are those of a process.
type rollbacks struct {
	*rollback.Coordinator
	escalations *hitl.Store
	ledger      rollback.Ledger
	sending     func() // called before an undo changes something; nil is nothing
}

const keepRollbacks = 30 * 24 * time.Hour

// undoing runs a test of rollbacks. Its actions are doc, which restores, charge, which
// compensates, and mail, which is irreversible.
func undoing(t *testing.T, test func(b *saga)) {
	t.Helper()
	trusting(t, ect.L2, func(b *trust) {
		u := &saga{trust: b, wid: uuid.NewString(), service: &service{docs: map[string]string{}, refunds: map[string]bool{}, next: map[string][]http.HandlerFunc{}}}
		b.answer = u.service.ServeHTTP
		at := func(places ...string) guard.Match {
			return func(r *http.Request) (bool, error) {
				return slices.ContainsFunc(places, func(place string) bool { return strings.HasPrefix(r.URL.Path, place) }), nil
			}
		}
		b.config.Send = func(ctx context.Context, r *guard.InternalRequest) (*guard.InternalAnswer, error) {
			a, err := u.ask(ctx, r.Method, r.Path, r.Header, nil)
			if err != nil {
				return nil, err
			}
			return &guard.InternalAnswer{Status: a.Code, Header: a.Header(), Body: a.Body.Bytes()}, nil
		}
		spec := rollback.Spec{Guard: "default", Auth: rollback.AuthConfig}
		b.config.Actions = []*guard.Action{
			{Name: "doc", Match: at("/docs/", "/plain/"), Undo: &guard.UndoPlan{Spec: spec, Restore: true, Verify: true}},
			{Name: "charge", Match: at("/charges"), Undo: u.compensated("{response.json./id}")},
			{Name: "mail", Irreversible: true},
		}
		b.config.Host = guard.StatusHost{}
		u.begin()
		test(u)
	})
}

// retrying is undoing where calls in doubt run again, and charges have the ids that calls give
// them.
func retrying(t *testing.T, test func(b *saga)) {
	t.Helper()
	undoing(t, func(b *saga) {
		for _, a := range b.config.Actions {
			a.OnUnknown = guard.OnUnknownRetry
		}
		b.config.Actions[1].Undo = b.compensated("{request.json./id}")
		b.begin()
		test(b)
	})
}

// compensated is the plan of charges, whose refund has an id.
func (b *saga) compensated(id string) *guard.UndoPlan {
	body, err := template.JSONObject([]template.Field{{Name: "charge", Value: id}})
	b.check(err)
	request := template.Spec{Method: http.MethodPost, URL: "/refunds", ContentType: "application/json", Body: body}
	plan := &guard.UndoPlan{Spec: rollback.Spec{Guard: "default", Auth: rollback.AuthConfig, Compensate: &request}}
	plan.Compensate, err = template.Parse(request)
	b.check(err)
	plan.Needs, err = plan.Spec.Needs()
	b.check(err)
	return plan
}

// begin is a process that begins over what is stored. One that runs dies at once.
func (b *saga) begin() {
	b.Helper()
	if b.rollbacks != nil {
		b.disk.broken.Store(true)
		b.disk = &disk{Store: b.disk.Store}
		b.stop()
		over, cancel := context.WithCancel(b.Context())
		cancel()
		_ = b.evidence.Close(over)
	}
	policy := b.trust.begin()
	e := b.engine
	b.rollbacks = &rollbacks{escalations: hitl.NewStore(b.disk, b.bed.ring)}
	b.ledger = evidence.NewRollbackLedger(evidence.RollbackLedgerOptions{Keep: keepRollbacks, Recorder: func() (evidence.Recorder, bool) {
		return evidence.Recorder{Evidence: policy.Evidence, EventBuilder: policy.Events, Verifier: policy.Verifier}, true
	}})
	var err error
	b.Coordinator, err = rollback.Open(rollback.Options{
		Store: b.disk, Sealer: b.bed.ring, Guard: e.Executions, Checkpoints: e.Checkpoints, Escalations: b.escalations, Keep: keepRollbacks,
		Ledger: b.ledger,
		Sender: b,
	})
	b.check(err)
	c := b.Coordinator
	b.check(c.Load(b.Context()))
	e.Coordinator = func() *rollback.Coordinator { return c }
	b.check(c.Start(b.Context()))
	b.Cleanup(b.rollbacks.stop)
}

// stop ends the steps that are under way.
func (u *rollbacks) stop() {
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = u.Stop(over)
}

// ask sends a request of the guard's own, and gives up when ctx ends.
func (b *saga) ask(ctx context.Context, method, path string, header http.Header, body []byte) (*httptest.ResponseRecorder, error) {
	r := httptest.NewRequestWithContext(ctx, method, path, bytes.NewReader(body))
	r.Header = header
	answer, ended := httptest.NewRecorder(), make(chan error, 1)
	go func() {
		defer func() {
			if recover() != nil {
				ended <- errors.New("the answer was cut off")
			}
		}()
		b.service.ServeHTTP(answer, r)
		ended <- nil
	}()
	select {
	case err := <-ended:
		return answer, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Send implements rollback.Sender.
func (b *saga) Send(ctx context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
	if o.Method != http.MethodGet {
		if b.sending != nil {
			b.sending()
		}
		over, err := b.engine.Writes.WriteUndo(checkpoint.TargetOf("", o.URL), o.Execution, o.Window)
		if err != nil {
			return nil, err
		}
		defer over()
	}
	o.Header.Set("Idempotency-Key", o.Rollback+":"+o.Checkpoint)
	a, err := b.ask(ctx, o.Method, o.URL, o.Header, o.Body)
	if err != nil {
		return nil, &rollback.SendError{Err: err}
	}
	return &rollback.Answer{Status: a.Code, Header: a.Header(), Body: a.Body.Bytes()}, nil
}

// Watch implements rollback.Watcher.
func (b *saga) Watch(o *rollback.Outgoing) rollback.WriteWindow {
	return b.engine.Writes.Open(checkpoint.TargetOf("", o.URL), o.Execution)
}

// other is another workflow of the agent.
func (b *saga) other() *saga {
	o := *b
	o.wid = uuid.NewString()
	return &o
}

// step is a call of a saga.
type step struct {
	*httptest.ResponseRecorder
	checkpoint string
}

// try makes a call, such as "PUT /docs/x", that follows from others.
func (b *saga) try(route, body string, after ...string) step {
	return b.attempt(b.token(b.agents["a"], ect.Claims{Workflow: b.wid, Parents: after}), route, body)
}

// attempt makes a call with a token, by which it is known.
func (b *saga) attempt(token *ect.Token, route, body string, fields ...string) step {
	s := step{ResponseRecorder: httptest.NewRecorder()}
	b.serve(s, b.call(token, route, body, fields...))
	s.checkpoint = s.Header().Get("Execution-Checkpoint")
	return s
}

func (b *saga) call(token *ect.Token, route, body string, fields ...string) *http.Request {
	method, path, _ := strings.Cut(route, " ")
	r := httptest.NewRequestWithContext(b.Context(), method, path, strings.NewReader(body))
	r.Header.Set(ect.FieldName, token.Raw())
	if strings.HasPrefix(body, "{") {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	return r
}

// pending makes a call that comes to a gate, which ended opens.
func (b *saga) pending(g *gate, route, body string) (ended func() step) {
	var s step
	done := make(chan struct{})
	go func() {
		defer close(done)
		s = b.try(route, body)
	}()
	<-g.arrived
	return func() step {
		close(g.open)
		<-done
		return s
	}
}

// do makes a call that must succeed.
func (b *saga) do(route, body string, after ...string) step {
	b.Helper()
	s := b.try(route, body, after...)
	if s.Code >= 300 || s.checkpoint == "" {
		b.Fatalf("%s: %d %v %s", route, s.Code, s.Header(), s.Body)
	}
	return s
}

// begun asks for the rollback of a checkpoint, in its own scope only unless another is given.
func (b *saga) begun(id string, s step, scope ...rollback.Scope) error {
	_, err := b.Execute(b.Context(), rollback.Request{
		ID: id, Checkpoint: s.checkpoint, Scope: append(scope, rollback.Single)[0], By: agentName + "a", Lineage: rollback.Ancestor,
	}, nil)
	return err
}

// ended compares the status of a rollback, and the reasons of its steps, with "escalated
// changed-since".
func (b *saga) ended(id, want string) *rollback.Rollback {
	b.Helper()
	patience, cancel := context.WithTimeout(b.Context(), keepRollbacks)
	defer cancel()
	r, err := b.Wait(patience, id)
	b.check(err)
	got := []string{string(r.Status)}
	for _, s := range r.Steps {
		if s.Reason != "" {
			got = append(got, s.Reason)
		}
	}
	if strings.Join(got, " ") != want {
		b.Errorf("the rollback is %q, want %q: %+v", got, want, r.Steps)
	}
	return r
}

// back asks for a rollback and compares its end.
func (b *saga) back(want string, s step, scope ...rollback.Scope) *rollback.Rollback {
	b.Helper()
	id := uuid.NewString()
	b.check(b.begun(id, s, scope...))
	return b.ended(id, want)
}

// reason is why a call that has ended cannot be undone; empty if it can.
func (b *saga) reason(s step) string {
	b.Helper()
	token, err := b.ledger.Checkpoint(b.Context(), s.checkpoint)
	b.check(err)
	c, err := b.engine.Checkpoints.Open(b.Context(), s.checkpoint, checkpoint.Want{Sum: token.Sum, Expires: token.Expires})
	b.check(err)
	if c.Result != nil && c.Result.Reason != "" {
		return string(c.Result.Reason)
	}
	return string(c.Snapshot.Reason)
}

// had compares what has happened at the service.
func (b *saga) had(want ...string) {
	b.Helper()
	b.service.mu.Lock()
	defer b.service.mu.Unlock()
	if !slices.Equal(b.effects, want) {
		b.Errorf("the service had %q, want %q", b.effects, want)
	}
}

// write changes a document past the guard; empty deletes it.
func (b *saga) write(path, text string) {
	b.service.mu.Lock()
	defer b.service.mu.Unlock()
	if b.docs[path] = text; text == "" {
		delete(b.docs, path)
	}
}

// stands compares a document; empty is none.
func (b *saga) stands(path, want string) {
	b.Helper()
	b.service.mu.Lock()
	defer b.service.mu.Unlock()
	if got := b.docs[path]; got != want {
		b.Errorf("%s is %q, want %q", path, got, want)
	}
}
