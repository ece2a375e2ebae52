package memory_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A removed member writes nothing; the others learn of it, and of each other's commits only.
func TestMembersOfOneStore(t *testing.T) {
	st := memory.New(memory.Options{})
	a, b := st.Join("a"), st.Join("b")
	var seen []string
	cancel := b.Follow([]byte("x"), func(key []byte) { seen = append(seen, string(key)) })
	for _, m := range []*memory.Member{a, b} {
		for _, key := range []string{"x" + m.Self().Node, "y"} {
			if _, err := m.Commit(t.Context(), store.Write{Key: []byte(key)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if fmt.Sprint(seen) != "[xa]" {
		t.Errorf("b was told of %v", seen)
	}
	left := b.Left()
	a.Remove()
	select {
	case <-left:
	default:
		t.Error("b does not know that a was removed")
	}
	if _, err := a.Commit(t.Context(), store.Write{Key: []byte("x")}); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("a removed member commits: %v", err)
	}
	if gone, _ := b.Gone(t.Context(), a.Self().Boot); !gone {
		t.Error("a is not gone")
	}
	if gone, _ := b.Gone(t.Context(), b.Self().Boot); gone {
		t.Error("b is gone")
	}
	if all, _ := b.Members(t.Context()); len(all) != 1 || all[0].Node != "b" {
		t.Errorf("members %v", all)
	}
	cancel()
	cancel()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Get(t.Context(), []byte("xa")); err != nil {
		t.Errorf("the store is closed: %v", err)
	}
}
