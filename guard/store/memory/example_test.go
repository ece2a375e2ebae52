package memory_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A batch lands whole, or says which of its conditions did not hold.
func Example() {
	ctx := context.Background()
	st := memory.New(memory.Options{})
	claim := store.Write{Key: []byte("k"), Value: []byte("mine"), If: store.Absent()}

	_, err := st.Commit(ctx, claim)
	fmt.Println(err)
	_, err = st.Commit(ctx, claim, store.Write{Key: []byte("other")})
	var lost *store.Conflict
	fmt.Println(errors.As(err, &lost), string(lost.Key), string(lost.Found.Value))
	// Output:
	// <nil>
	// true k mine
}
