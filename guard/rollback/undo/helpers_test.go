package undo_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	rollbackID   = "3f0e8d5a-6d3b-4f5e-9a51-0d9a4f3c2b11"
	checkpointID = "ckpt-1"
	key          = rollbackID + "/" + checkpointID
)

var errDead = errors.New("the process has died")

// mortal is a store that takes nothing any more once its process is dead. Each commit is
// two steps: before it lands, and after.
type mortal struct {
	store.Store
	step func() (dead bool)
}

func (m *mortal) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if m.step() {
		return 0, errDead
	}
	version, err := m.Store.Commit(ctx, batch...)
	if m.step() {
		return 0, errDead
	}
	return version, err
}

// rig is an Undoer over a store that outlives it, and an upstream that answers as it is
// told.
type rig struct {
	t     *testing.T
	mem   *memory.Store
	ring  *seal.Ring
	guard *guard.Guard
	vault *checkpoint.Vault
	*undo.Undoer
	options undo.Options

	mu    sync.Mutex
	steps int // until the process dies; negative is never
	dead  bool
	life  context.Context
	die   func()
	// pass lets time pass.
	pass func(time.Duration)
	// crashes counts the lives that ended early.
	crashes int
	// answer is what the upstream does.
	answer func(r *undo.Outgoing) (*undo.Answer, error)
	sent   []*undo.Outgoing
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	r.restart(-1)
	return r
}

// bubble runs a test with a rig under a clock of its own.
func bubble(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.pass = func(d time.Duration) { time.Sleep(d) }
		test(t, r)
	})
}

// restart begins another life, which dies after so many steps.
func (r *rig) restart(steps int) {
	r.t.Helper()
	r.steps, r.dead = -1, false
	r.life, r.die = context.WithCancel(context.Background())
	r.t.Cleanup(r.die)
	st := &mortal{Store: r.mem, step: r.step}
	g, _, err := guard.Open(context.Background(), st, r.ring)
	if err != nil {
		r.t.Fatal(err)
	}
	r.steps = steps
	r.guard, r.vault = g, checkpoint.New(st, r.ring)
	o := r.options
	o.Guard, o.Vault, o.Sender = g, r.vault, r
	r.Undoer = undo.New(o)
	r.HashPlainly()
}

func (r *rig) step() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.steps == 0 {
		r.dead = true
		r.die()
	}
	r.steps--
	return r.dead
}

// Send implements undo.Sender. The process can die before and after the upstream has the
// request.
func (r *rig) Send(ctx context.Context, o *undo.Outgoing) (*undo.Answer, error) {
	if r.step() {
		return nil, errDead
	}
	r.mu.Lock()
	kept := *o
	kept.Header = o.Header.Clone()
	r.sent = append(r.sent, &kept)
	answer := r.answer
	r.mu.Unlock()
	a, err := answer(o)
	for name := range o.Header { // a sender may do what it likes with its request
		o.Header.Set(name, "spoilt")
	}
	o.URL = "spoilt"
	if r.step() {
		return nil, errDead
	}
	return a, err
}

// changing are the requests that were to change something.
func (r *rig) changing() (all []*undo.Outgoing) {
	for _, o := range r.sent {
		if o.Method != http.MethodGet {
			all = append(all, o)
		}
	}
	return all
}

func (r *rig) asked() int { return len(r.sent) - len(r.changing()) }

func (r *rig) undo(t undo.Task) undo.Result {
	r.t.Helper()
	got, err := r.Undo(context.Background(), t)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

func (r *rig) wants(t undo.Task, want undo.Result) {
	r.t.Helper()
	if got := r.undo(t); got != want {
		r.t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// answers gives one answer after the other, the last again and again.
func (r *rig) answers(all ...any) {
	n := 0
	r.answer = func(*undo.Outgoing) (*undo.Answer, error) {
		next := all[min(n, len(all)-1)]
		n++
		switch next := next.(type) {
		case int:
			return &undo.Answer{Status: next}, nil
		case string:
			return &undo.Answer{Status: 200, Body: []byte(next)}, nil
		case *undo.Answer:
			return next, nil
		case error:
			return nil, next
		}
		panic(fmt.Sprint(next))
	}
}

var (
	errLost   = errors.New("connection reset")
	errUnsent = &undo.SendError{NotSent: true, Err: errors.New("connection refused")}
)

func accepted(location string) *undo.Answer {
	return &undo.Answer{Status: 202, Header: http.Header{"Location": {location}}}
}

func later(status int, after string) *undo.Answer {
	return &undo.Answer{Status: status, Header: http.Header{"Retry-After": {after}}}
}

// due is how long tasks of these tests have.
const due = time.Hour

func task(way checkpoint.Way, spec undo.Spec) undo.Task {
	spec.Guard, spec.ExecutionID = "default", "order-7"
	if way == checkpoint.Compensate && spec.Compensate == nil {
		spec.Compensate = &template.Spec{Method: "POST", URL: "/refunds", ContentType: "application/json", Body: `{{"charge":"{response.json./id}"}}`}
	}
	if way == checkpoint.Delegate && spec.Delegate == "" {
		spec.Delegate = "https://agent.example/.well-known/cascade/rollback"
	}
	return undo.Task{Rollback: rollbackID, Due: time.Now().Add(due), Reason: "wrong order", Checkpoint: &checkpoint.Checkpoint{
		Snapshot: &checkpoint.Snapshot{
			ID: checkpointID, Workflow: "w-1", Action: "charge", Upstream: "up:9001", Way: way, Undo: spec.Encode(),
			Request: checkpoint.Request{Method: "POST", Host: "api.example", Path: "/charges", Query: "a=1"},
		},
		Result: &checkpoint.Result{Status: 201, Answer: checkpoint.Message{Body: []byte(`{"id":"ch_1"}`)}},
	}}
}

// status is a request that asks.
var status = &template.Spec{Method: "GET", URL: "/refunds/{rollback.id}"}

// resource is an upstream with one resource under entity tags.
type resource struct {
	there   bool
	body    []byte
	version int
	tags    bool // it has entity tags, and honours conditions
	// before and after run around a change, which is lost or refused where they say so.
	before func(o *undo.Outgoing) (*undo.Answer, error)
	after  func(o *undo.Outgoing) (*undo.Answer, error)
	writes int
}

func (u *resource) etag() string {
	if !u.tags {
		return ""
	}
	return fmt.Sprintf(`"v%d"`, u.version)
}

func (u *resource) set(there bool, body string) {
	u.there, u.body, u.version = there, []byte(body), u.version+1
}

func (u *resource) image() *checkpoint.Image {
	i := undo.ImageOf(u.get())
	return i
}

func (u *resource) get() *undo.Answer {
	if !u.there {
		return &undo.Answer{Status: 404}
	}
	h := http.Header{"Content-Type": {"application/json"}, "Content-Language": {"en"}}
	if e := u.etag(); e != "" {
		h.Set("ETag", e)
	}
	return &undo.Answer{Status: 200, Header: h, Body: bytes.Clone(u.body)}
}

func (u *resource) serve(o *undo.Outgoing) (*undo.Answer, error) {
	if o.Method == http.MethodGet {
		return u.get(), nil
	}
	if u.before != nil {
		if a, err := u.before(o); a != nil || err != nil {
			return a, err
		}
	}
	match, none := o.Header.Get("If-Match"), o.Header.Get("If-None-Match")
	switch {
	case match != "" && (!u.there || match != u.etag()), none == "*" && u.there:
		return &undo.Answer{Status: 412}, nil
	case o.Method == http.MethodDelete && !u.there:
		return &undo.Answer{Status: 404}, nil
	}
	u.writes++
	u.set(o.Method == http.MethodPut, string(o.Body))
	if u.after != nil {
		if a, err := u.after(o); a != nil || err != nil {
			return a, err
		}
	}
	return &undo.Answer{Status: 204}, nil
}
