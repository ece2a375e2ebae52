package evidence_test

import (
	"context"
	"encoding/base64"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// refusal is the code that a token was refused with.
func refusal(err error) ect.Code {
	var refused *ect.Error
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}

// ECT level L3: tokens that were entered can be proven, parents first, and are good for
// this use alone, in the next life too.
func TestEnteredTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	parent := b.token(t, ect.Claims{Workflow: workflow})
	token := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{parent.ID()}})
	all, own := []*ect.Token{token, parent}, []*ect.Token{token}
	for range 2 {
		for range 2 {
			if err := b.told.Enter(ctx, all, own, evidence.Use{1}); err != nil {
				t.Fatal(err)
			}
		}
		var places []int64
		for _, one := range all {
			entry, err := b.told.Log().Lookup(ctx, workflow, one.ID())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.told.Log().Receipt(ctx, entry.Index); err != nil {
				t.Error(err)
			}
			places = append(places, entry.Index)
		}
		if places[0] <= places[1] || b.told.Log().Stats().Size != 2 {
			t.Errorf("child and parent stand at %v of %d", places, b.told.Log().Stats().Size)
		}
		if got := refusal(b.told.Enter(ctx, all, own, evidence.Use{2})); got != ect.CodeReplayed {
			t.Errorf("used for something else: %q", got)
		}
		altered := b.token(t, ect.Claims{Workflow: workflow, ID: token.ID(), Action: "else"})
		if got := refusal(b.told.Enter(ctx, []*ect.Token{altered}, nil, evidence.Use{1})); got != ect.CodeReplayed {
			t.Errorf("another token of the id: %q", got)
		}
		b.close(t)
		b.open(t)
	}
	// A parent that came along was not used: it is good for a use of its own.
	if err := b.told.Enter(ctx, []*ect.Token{parent}, []*ect.Token{parent}, evidence.Use{3}); err != nil {
		t.Error(err)
	}
	if got := refusal(b.told.Enter(ctx, []*ect.Token{parent}, []*ect.Token{parent}, evidence.Use{4})); got != ect.CodeReplayed {
		t.Errorf("used for something else: %q", got)
	}
}

// Of many uses at once exactly one enters.
func TestOneUseEnters(t *testing.T) {
	b := newBench(t)
	token := []*ect.Token{b.token(t, ect.Claims{Workflow: uuid.NewString()})}
	var entered atomic.Int64
	var all sync.WaitGroup
	for n := range 20 {
		all.Go(func() {
			switch err := b.told.Enter(t.Context(), token, token, evidence.Use{byte(n)}); {
			case err == nil:
				entered.Add(1)
			case refusal(err) != ect.CodeReplayed:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if entered.Load() != 1 {
		t.Errorf("%d uses entered", entered.Load())
	}
}

// P4: tokens that have entered and were used for nothing are free, over restarts too;
// then of many uses at once one is recorded, of all tokens or none.
func TestEnteredTokensAreSpentOnce(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	tokens := []*ect.Token{b.token(t, ect.Claims{Workflow: workflow}), b.token(t, ect.Claims{Workflow: workflow})}
	for range 2 {
		if err := b.told.Enter(ctx, tokens, nil, evidence.Use{1}); err != nil {
			t.Fatal(err)
		}
		b.close(t)
		b.open(t)
	}
	for _, token := range tokens {
		if got, err := b.told.Recorded(ctx, token, evidence.Use{2}); err != nil || got != evidence.Unused {
			t.Errorf("%v %v", got, err)
		}
	}
	var spent atomic.Int64
	var all sync.WaitGroup
	for n := range 20 {
		all.Go(func() {
			switch err := b.told.Spend(ctx, tokens, evidence.Use{byte(n)}); {
			case err == nil:
				spent.Add(1)
			case refusal(err) != ect.CodeReplayed:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if spent.Load() != 1 {
		t.Errorf("%d uses were recorded", spent.Load())
	}
	fresh := b.token(t, ect.Claims{Workflow: workflow})
	if got := refusal(b.told.Spend(ctx, append(tokens, fresh), evidence.Use{99})); got != ect.CodeReplayed {
		t.Errorf("%q", got)
	}
	if got, err := b.told.Recorded(ctx, fresh, evidence.Use{99}); err != nil || got != evidence.Unused {
		t.Errorf("used beside another that was refused: %v %v", got, err)
	}
}

// stuck is a store in which nothing leaves the ledger's outbox while it is.
type stuck struct {
	store.Store
	held  atomic.Bool
	tries atomic.Int64
}

func (s *stuck) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	for i := range batch {
		if batch[i].Delete && batch[i].If.None() && s.held.Load() {
			s.tries.Add(1)
			return 0, errors.New("the disk is full")
		}
	}
	return s.Store.Commit(ctx, batch...)
}

// P4: what cannot be proven has not entered, however durable it is. In the five seconds
// that are waited at level L3 the sequencer tries twice at least, so that whoever comes
// once the ledger goes on does so too.
func TestEnteringWaitsForTheTree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.close(t)
		held := &stuck{Store: b.store}
		b.store = held
		b.open(t)
		token := []*ect.Token{b.token(t, ect.Claims{Workflow: uuid.NewString()})}
		enter := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			return b.told.Enter(ctx, token, token, evidence.Use{1})
		}
		held.held.Store(true)
		for range 5 { // the pauses between the sequencer's tries grow
			before := held.tries.Load()
			if err := enter(); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v", err)
			}
			if tries := held.tries.Load() - before; tries < 2 {
				t.Errorf("%d tries while it was waited for", tries)
			}
		}
		held.held.Store(false)
		if err := enter(); err != nil {
			t.Error(err)
		}
		b.close(t)
	})
}

// What stands in the ledger is L3 where it carries a signature, in this life and the
// next; a token without one, and an event that could not be signed, are L1.
func TestLevelsOfRecordedTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	v, err := ect.NewVerifier(ect.Policy{Audience: []string{identity}, MinLevel: ect.L1})
	if err != nil {
		t.Fatal(err)
	}
	raw := base64.RawURLEncoding.EncodeToString([]byte(b.token(t, ect.Claims{Workflow: workflow}).Payload()))
	unsigned, err := v.Verify(ctx, raw, ect.Presentation{Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	signed := b.token(t, ect.Claims{Workflow: workflow})
	draft, err := b.witness.Checkpoint(time.Now(), &evidence.Call{Workflow: workflow, Action: "pay"})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.told.Append(ctx, time.Now(), []*ect.Token{unsigned, signed}, draft); err != nil {
		t.Fatal(err)
	}
	broken := ledger.Event{ID: uuid.NewString(), Workflow: workflow, Action: "pay", Time: time.Now(), Payload: []byte(`{"a.b":1}`), Unsigned: true}
	if err := b.told.Log().Append(ctx, []ledger.Event{broken}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		b.told.AcceptUnsigned()
		for id, want := range map[string]ect.Level{
			unsigned.ID(): ect.L1, signed.ID(): ect.L3, draft.ID(): ect.L3, broken.ID: ect.L1,
		} {
			nodes, err := b.told.Graph(workflow).Nodes(ctx, id)
			if err != nil || len(nodes) != 1 || nodes[0].Level != want {
				t.Errorf("%+v %v, want %v", nodes, err, want)
			}
		}
		b.close(t)
		b.open(t) // which remembers nothing
	}
}
