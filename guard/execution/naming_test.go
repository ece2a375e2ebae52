package execution_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// P1: a guard that holds keys makes none under another naming, also if its configuration was loaded before the first
// key was made, as by another gateway; an empty one does, and so does one that may free keys.
func TestP1NamingStays(t *testing.T) {
	r := newRig(t)
	one, other := execution.Naming{Credentials: "X-A"}, execution.Naming{Credentials: "X-A", Tenant: "X-B"}
	refused := func(err error) bool {
		return err != nil && strings.Contains(err.Error(), "`tenant` differ") && !errors.Is(err, execution.ErrStore)
	}
	claim := func(id string, n execution.Naming, free bool) error {
		c := r.call(id)
		c.Naming, c.FreeKeys = &n, free
		_, err := r.Claim(t.Context(), c, execution.Finding{})
		return err
	}
	for _, n := range []execution.Naming{one, other, one} {
		if _, _, err := r.CheckNaming(t.Context(), "default", &n, false); err != nil {
			t.Fatalf("an empty store: %v", err)
		}
	}
	if err := claim("1", one, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.CheckNaming(t.Context(), "default", &other, false); !refused(err) {
		t.Errorf("%v", err)
	}
	if err := claim("2", other, false); !refused(err) {
		t.Errorf("%v", err)
	}
	if err := claim("3", one, false); err != nil {
		t.Errorf("%v", err)
	}
	if err := claim("4", other, true); err != nil {
		t.Errorf("%v", err)
	}
	if err := claim("5", one, false); !refused(err) {
		t.Errorf("the earlier naming, after another: %v", err)
	}
}

// overtaken is a member whose first commit comes behind what meanwhile does.
type overtaken struct {
	*memory.Member
	meanwhile func()
}

func (m *overtaken) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if meanwhile := m.meanwhile; meanwhile != nil {
		m.meanwhile = nil
		meanwhile()
	}
	return m.Member.Commit(ctx, batch...)
}

// P1: two gateways that name callers in different ways make their first keys over one store at the same moment: one of
// them makes its key, and the other is refused.
func TestP1NamingOfTwoAtOnce(t *testing.T) {
	disk, ring := memory.New(memory.Options{}), seal.Generate()
	open := func(st store.Store) *rig {
		r := &rig{t: t, ring: ring}
		g, _, err := execution.Open(ctx, st, ring)
		if err != nil {
			t.Fatal(err)
		}
		r.Guard = g
		return r
	}
	slow := &overtaken{Member: disk.Join("slow")}
	first, second := open(slow), open(disk.Join("quick"))
	claim := func(r *rig, id, tenant string) error {
		c := r.call(id)
		c.Naming = &execution.Naming{Tenant: tenant}
		_, err := r.Claim(ctx, c, execution.Finding{})
		return err
	}
	slow.meanwhile = func() { // it has read that nothing is recorded
		if err := claim(second, "2", "X-B"); err != nil {
			t.Error(err)
		}
	}
	if err := claim(first, "1", "X-A"); !errors.Is(err, execution.ErrTaken) {
		t.Fatalf("a claim whose naming came second: %v", err)
	}
	if err := claim(first, "1", "X-A"); err == nil || !strings.Contains(err.Error(), "`tenant` differ") {
		t.Errorf("another naming than the recorded one: %v", err)
	}
}
