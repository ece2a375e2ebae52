package ect_test

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestReplay: the second presentation is refused; the same id in another workflow is
// another id, and one without a workflow is global (14, 13).
func TestReplay(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	set := parseSet(t, clinical, a.jwk(t, nil))
	synctest.Test(t, func(t *testing.T) {
		cache := ect.NewReplayCache(0)
		v := verifier(t, set, func(p *ect.Policy) {
			p.Algorithms, p.Replays = ect.Algorithms(), cache
		})
		send := func(jti string, wid any) error {
			now := time.Now().Unix()
			raw := a.send(t, a.header(), with(map[string]any{"jti": jti, "wid": wid, "iat": now, "exp": now + 60}))
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: time.Now()})
			return err
		}
		wantCode(t, send(id(1), workflow), "")
		wantCode(t, send(id(1), workflow), ect.CodeReplayed)
		wantCode(t, send(id(1), other), "")
		wantCode(t, send(id(1), nil), ect.CodeReplayed)
		wantCode(t, send(id(2), nil), "")
		wantCode(t, send(id(2), workflow), ect.CodeReplayed)
		// Until exp + skew and not longer.
		time.Sleep(90 * time.Second)
		wantCode(t, send(id(1), workflow), ect.CodeReplayed)
		time.Sleep(time.Second)
		wantCode(t, send(id(1), workflow), "")
		if cache.Len() != 1 {
			t.Errorf("%d ids are remembered", cache.Len())
		}
	})
}

// TestReplayOnlyOfAccepted: a token that is refused uses up no id, so that nobody can
// burn the ids of others.
func TestReplayOnlyOfAccepted(t *testing.T) {
	a, thief := newAgent(t, "k", "EdDSA"), newAgent(t, "k", "EdDSA")
	cache := ect.NewReplayCache(0)
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) {
		p.Algorithms, p.Replays = ect.Algorithms(), cache
	})
	present := func(raw string, dag ect.DAG) error {
		_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: dag})
		return err
	}
	wantCode(t, present(thief.send(t, a.header(), figure()), nil), ect.CodeSignature)
	wantCode(t, present(a.send(t, a.header(), with(map[string]any{"aud": "x"})), nil), ect.CodeAudience)
	early := a.send(t, a.header(), with(map[string]any{"par": []string{id(1)}}))
	wantCode(t, present(early, graph{}), ect.CodeParentUnknown)
	if cache.Len() != 0 {
		t.Fatalf("%d ids are used up", cache.Len())
	}
	g := graph{}
	g.add(ect.Node{ID: id(1), Workflow: workflow})
	wantCode(t, present(early, g), "")
}

// TestReplayConcurrent: of many at once exactly one passes.
func TestReplayConcurrent(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) {
		p.Algorithms, p.Replays = ect.Algorithms(), ect.NewReplayCache(0)
	})
	raw := a.send(t, a.header(), figure())
	results := make(chan error, 32)
	var all sync.WaitGroup
	for range cap(results) {
		all.Go(func() {
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
			results <- err
		})
	}
	all.Wait()
	close(results)
	passed := 0
	for err := range results {
		if err == nil {
			passed++
			continue
		}
		wantCode(t, err, ect.CodeReplayed)
	}
	if passed != 1 {
		t.Errorf("%d passed", passed)
	}
}

// TestReplayFull: a full memory forgets nothing.
func TestReplayFull(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	set := parseSet(t, clinical, a.jwk(t, nil))
	synctest.Test(t, func(t *testing.T) {
		v := verifier(t, set, func(p *ect.Policy) {
			p.Algorithms, p.Replays = ect.Algorithms(), ect.NewReplayCache(2)
		})
		send := func(n int) error {
			now := time.Now().Unix()
			raw := a.send(t, a.header(), with(map[string]any{"jti": id(n), "iat": now, "exp": now + 60}))
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: time.Now()})
			return err
		}
		wantCode(t, send(1), "")
		wantCode(t, send(2), "")
		if err := send(3); !errors.Is(err, ect.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
		wantCode(t, send(1), ect.CodeReplayed)
		time.Sleep(2 * time.Minute)
		wantCode(t, send(3), "")
	})
}
