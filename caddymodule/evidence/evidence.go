// Package evidence tells the ledger what the gateway decides about calls: a checkpoint
// before a call leaves, what came of it afterwards, and errors. What is told lands in
// the commit of the decision itself.
//
// It also keeps the tokens of callers from being used twice, and finds recorded tokens
// for those that name them as parents.
package evidence

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Options are the settings of an Evidence. All but HeadFile and Logger are required.
type Options struct {
	// Store is the guard's own, so that evidence lands in its commits.
	Store store.Store
	// Sealer is the guard's own.
	Sealer ledger.Sealer
	// Node names the gateway for ever; its log is named after it.
	Node string
	// Ring holds the keys that tokens are signed with.
	Ring *ect.Ring
	// HeadFile is where the newest head is kept beside the store; empty is nowhere.
	HeadFile string
	// Logger gets what the sequencer cannot tell anybody; nil is none.
	Logger *slog.Logger
}

// Evidence is the ledger over one store, and what is remembered beside it. It is safe
// for concurrent use.
type Evidence struct {
	headFile string
	kept     atomic.Int64 // the size of the head in the file

	log    *ledger.Log
	store  store.Store
	sealer ledger.Sealer
	ring   *ect.Ring
	key    string
	recent *recent[ect.Node]   // recorded, or asked for
	seen   *recent[*ect.Token] // presented, and not recorded
	uses   *uses
	names  names
	// unsigned: tokens may be known that nobody is proven to have issued.
	unsigned atomic.Bool
}

// Open opens the ledger in the store, or begins one. ledger.ErrTampered says that what
// stands there was altered.
func Open(ctx context.Context, o Options) (*Evidence, error) {
	origin := "agent-guard/" + o.Node
	head, err := newHeadKey(o.Sealer, origin)
	if err != nil {
		return nil, err
	}
	signer, err := newSigner(o.Ring)
	if err != nil {
		return nil, err
	}
	known, err := readHead(o.HeadFile, origin, head)
	if err != nil {
		return nil, err
	}
	log, err := ledger.Open(ctx, ledger.Options{
		Store: o.Store, Sealer: o.Sealer, Origin: origin, HeadSigner: head,
		HeadKeys: note.VerifierList(head.Verifier), Signer: signer, Logger: o.Logger,
		Known: known,
	})
	if err != nil {
		return nil, fmt.Errorf("evidence: %w", err)
	}
	e := &Evidence{
		headFile: o.HeadFile, log: log, store: o.Store, sealer: o.Sealer, ring: o.Ring, key: head.text,
		recent: newRecent[ect.Node](), seen: newRecent[*ect.Token](), uses: newUses(maxUses),
	}
	if err := e.readNames(ctx); err != nil {
		return nil, err
	}
	log.Start()
	if err := e.KeepHead(); err != nil && o.Logger != nil {
		o.Logger.Warn("the head of the ledger cannot be kept beside the identity's key: an older copy of the store would not be told from it",
			slog.Any("error", err))
	}
	return e, nil
}

// Log is the ledger.
func (e *Evidence) Log() *ledger.Log { return e.log }

// Ring holds the keys that tokens are signed with.
func (e *Evidence) Ring() *ect.Ring { return e.ring }

// HeadKey is the public key of the log's heads, in the form of signed notes.
func (e *Evidence) HeadKey() string { return e.key }

// Close lets the sequencer finish until ctx ends; what is left is found by the next
// life of the gateway.
func (e *Evidence) Close(ctx context.Context) error {
	return errors.Join(e.log.Close(ctx), e.KeepHead())
}

// headKey signs the heads of a log. It is derived from the key with which the store's
// index was made: it belongs to the store as that does, and never changes (ADR 0023).
type headKey struct {
	note.Verifier
	private ed25519.PrivateKey
	text    string
}

func newHeadKey(sealer ledger.Sealer, origin string) (*headKey, error) {
	seed := sealer.Index("ledger head key", origin)
	private := ed25519.NewKeyFromSeed(seed[:])
	text, err := note.NewEd25519VerifierKey(origin, private.Public().(ed25519.PublicKey))
	if err != nil {
		return nil, fmt.Errorf("evidence: the name of the log: %w", err)
	}
	verifier, err := note.NewVerifier(text)
	if err != nil {
		return nil, fmt.Errorf("evidence: the key of the log's heads: %w", err)
	}
	return &headKey{verifier, private, text}, nil
}

// Sign implements note.Signer.
func (k *headKey) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(k.private, msg), nil }

// signer makes the tokens of drafts, off the way of the requests that they tell of.
type signer struct{ issuer *ect.Issuer }

func newSigner(ring *ect.Ring) (signer, error) {
	// A draft says itself who issues it.
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: "urn:agent-guard:sequencer", Ring: ring})
	return signer{issuer}, err
}

// Sign implements ledger.Signer.
func (s signer) Sign(_ context.Context, e ledger.Event) ([]byte, error) {
	draft, ok := e.Draft.(*ect.Draft)
	if !ok { // recorded in an earlier life
		var err error
		if draft, err = ect.ParseDraft(string(e.Payload)); err != nil {
			return nil, fmt.Errorf("%w: %w", ledger.ErrRefused, err)
		}
	}
	token, err := s.issuer.Sign(draft)
	if err != nil {
		return nil, err
	}
	return []byte(token.Raw()), nil
}

// Prune takes away what is older than retain and what nobody asked to keep longer,
// and returns how many entries that were.
func (e *Evidence) Prune(ctx context.Context, retain time.Duration) (int, error) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	return e.log.Prune(ctx, now.Add(-retain))
}
