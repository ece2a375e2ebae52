package ledger_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const origin = "gateway.example/ledger"

func open(st store.Store) (*ledger.Log, note.Verifiers) {
	private, public, _ := note.GenerateKey(rand.Reader, "gateway.example")
	signer, _ := note.NewSigner(private)
	verifier, _ := note.NewVerifier(public)
	keys := note.VerifierList(verifier)
	log, err := ledger.Open(context.Background(), ledger.Options{
		Store: st, Sealer: seal.Generate(), Origin: origin, HeadSigner: signer, HeadKeys: keys,
	})
	if err != nil {
		panic(err)
	}
	return log, keys
}

// A state change and the event that describes it are one commit. What came of it is
// proved by a receipt.
func Example() {
	ctx := context.Background()
	st := memory.New(memory.Options{})
	log, keys := open(st)
	defer log.Close(ctx)

	event := ledger.Event{ID: "ckpt-1", Workflow: "wf-1", Action: "checkpoint", Payload: []byte("eyJ...")}
	batch, err := log.Record(event)
	if err != nil {
		panic(err)
	}
	batch.Add(store.Write{Key: []byte("state"), Value: []byte("claimed"), If: store.Absent()})
	if err := batch.Commit(ctx, st); err != nil {
		panic(err)
	}

	entry, _ := log.Lookup(ctx, "wf-1", "ckpt-1")
	receipt, _ := log.Receipt(ctx, entry.Index)
	head, err := receipt.Check(entry.Leaf, origin, keys)
	fmt.Println(entry.Index, head.Size, err)
	// Output: 0 1 <nil>
}

// Two heads of one log are linked by a proof that needs neither the entries nor trust.
func ExampleCheckConsistency() {
	ctx := context.Background()
	st := memory.New(memory.Options{})
	log, _ := open(st)
	defer log.Close(ctx)
	older := log.Head()
	for _, id := range []string{"a", "b", "c"} {
		if err := log.Append(ctx, []ledger.Event{{ID: id, Payload: []byte("token")}}); err != nil {
			panic(err)
		}
		proof, _ := log.ProveConsistency(ctx, older.Size, log.Head().Size)
		fmt.Println(ledger.CheckConsistency(proof, older, log.Head()))
		older = log.Head()
	}
	// Output:
	// <nil>
	// <nil>
	// <nil>
}

// An export is verified with the public keys alone.
func ExampleVerifyExport() {
	ctx := context.Background()
	log, keys := open(memory.New(memory.Options{}))
	if err := log.Append(ctx, []ledger.Event{{ID: "a", Action: "pay", Payload: []byte("token")}}); err != nil {
		panic(err)
	}
	var file bytes.Buffer
	if _, err := log.Export(ctx, &file); err != nil {
		panic(err)
	}

	found, err := ledger.VerifyExport(bytes.NewReader(file.Bytes()), origin, keys, func(e ledger.Entry) error {
		fmt.Println(e.Index, e.Action)
		return nil
	})
	fmt.Println(found.Entries, err)
	altered := bytes.Replace(file.Bytes(), []byte("entry AQ"), []byte("entry AR"), 1)
	_, err = ledger.VerifyExport(bytes.NewReader(altered), origin, keys, nil)
	fmt.Println(err != nil)
	// Output:
	// 0 pay
	// 1 <nil>
	// true
}
