package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
)

// Identity is the gateway's identity in the tokens that it issues. With one, every decision about a
// guarded call becomes a signed Execution Context Token in the ledger of the store: a checkpoint
// before the call is sent, a node with its outcome, and an error if it failed.
type Identity struct {
	// The issuer (`iss`) of the gateway's tokens, a URI, usually a SPIFFE ID like
	// `spiffe://example.com/gateway`. Callers name it in the `aud` of their tokens.
	Name string `json:"name"`

	// The file with the keys that sign tokens: a JSON Web Key, a set of them, or PEM. It is created
	// with a new ledger, with a key for ES256 and mode 0600, and never for a ledger that already holds
	// something. A rotation makes a key for the algorithm of the one that signs; for ES384 or EdDSA put a
	// key into the file. It is read again with every configuration. Default: the store's path with `.identity` appended.
	KeyFile string `json:"key_file,omitempty"`

	// Where others reach this gateway, like `https://gateway.example.com`. Checkpoints name it as
	// the place to ask for a rollback; without it they name only the path. It is never taken from a
	// request. Default: none.
	PublicURL string `json:"public_url,omitempty"`

	// How long the ledger keeps the content of its entries. Their hashes stay, so that the ledger
	// can still be verified. Default: 90d.
	Retain caddy.Duration `json:"retain,omitempty"`
}

const defaultRetain = 90 * 24 * time.Hour

// provision checks the options and completes them.
func (i *Identity) provision(store string) error {
	if i.Name == "" {
		return errors.New("name it with a URI like spiffe://example.com/gateway")
	}
	if err := checkIdentity(i.Name); err != nil {
		return err
	}
	inherit(&i.Retain, caddy.Duration(defaultRetain))
	if err := checkOptions(identityOptions(), i); err != nil {
		return err
	}
	if err := i.provisionKeys(store); err != nil {
		return &invalid{[]string{"identity.key_file"}, fmt.Errorf("key_file: %w", err)}
	}
	return nil
}

// provisionKeys finds the identity's keys, and checks them if they exist already.
func (i *Identity) provisionKeys(store string) error {
	if i.KeyFile == "" && !filepath.IsAbs(store) {
		return errors.New("a store that is no directory has no place for a key file beside it; name one with `key_file <path>` in the identity")
	}
	if i.KeyFile == "" {
		i.KeyFile = store + ".identity"
	} else {
		path, err := caddy.NewReplacer().ReplaceOrErr(i.KeyFile, true, true)
		if err == nil {
			path, err = filepath.Abs(path)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", i.KeyFile, err)
		}
		i.KeyFile = path
	}
	if err := checkKeyFile(i.KeyFile); err != nil {
		return err
	}
	if _, err := ect.LoadRing(i.KeyFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// checkPublicURL checks the public URL; empty is allowed.
func checkPublicURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case text == "":
		return nil
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("%q is no address of a gateway; use one like https://gateway.example.com", text)
	case len(text) > maxPublicURL:
		return fmt.Errorf("it is longer than %d bytes", maxPublicURL)
	}
	return nil
}

// maxPublicURL bounds the URL, in bytes, so that it fits into a token's extensions.
const maxPublicURL = 512

// loadRing reads the keys of the identity. If fresh, nothing was signed before, and it may
// create the first key. Otherwise a new key would make earlier tokens unverifiable.
func (i *Identity) loadRing(fresh bool, logger *slog.Logger) (*ect.Ring, error) {
	ring, err := i.readRing(fresh, logger)
	if err != nil {
		return nil, &invalid{[]string{"identity.key_file"}, err}
	}
	return ring, nil
}

func (i *Identity) readRing(fresh bool, logger *slog.Logger) (*ect.Ring, error) {
	ring, err := ect.LoadRing(i.KeyFile)
	if info, statErr := os.Stat(i.KeyFile); statErr == nil && info.Mode().Perm()&0o077 != 0 {
		logger.Warn("others than the owner may use the identity's key file; give it the mode 0600",
			slog.String("file", i.KeyFile), slog.String("mode", info.Mode().String()))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	if fresh {
		if ring, err = ect.CreateRing(i.KeyFile, ect.ES256); !errors.Is(err, fs.ErrExist) {
			return ring, err
		}
	}
	// Another gateway may have made the file since it was read, and have signed with it.
	if ring, err = ect.LoadRing(i.KeyFile); fresh || !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	return nil, fmt.Errorf("the key file %s is missing, and the ledger holds tokens that were signed with it: put it back from "+
		"your backup, or correct its path; if it is lost for good, make another with `keygen` of examples/ect, "+
		"knowing that earlier tokens can then not be verified any more", i.KeyFile)
}

// recordName records the name and key that sign tokens from now on. It warns of missing
// keys, since the key file may have been replaced.
func (i *Identity) recordName(ctx context.Context, ev *evidence.Evidence, ring *ect.Ring, logger *slog.Logger) error {
	if lacks := ev.MissingKeys(ring); len(lacks) > 0 {
		logger.Warn("the key file lacks keys that the gateway has signed with: what they have signed cannot be verified; "+
			"if the file was exchanged by mistake, put the right one back and load the configuration again",
			slog.String("file", i.KeyFile), slog.Any("keys", lacks))
	}
	if err := ev.RecordName(ctx, i.Name, ring); err != nil {
		return err
	}
	if gone := unsignable(ev, ring); len(gone) > 0 {
		logger.Warn("the key file lacks the private parts of keys under which recorded tokens are not signed yet: their entries are "+
			"shown with their claims and proofs, and without tokens; put the key file back that holds them",
			slog.String("file", i.KeyFile), slog.Any("keys", gone))
	}
	return ev.SignWhenShown(ctx, ring)
}

// unsignable are the keys under which something recorded is not signed, and that cannot sign.
func unsignable(ev *evidence.Evidence, ring *ect.Ring) []string {
	keys := ring.List()
	return slices.DeleteFunc(ev.KeysToSign(), func(kid string) bool {
		return slices.ContainsFunc(keys, func(k ect.RingKey) bool { return k.ID == kid && k.Private && !k.Revoked })
	})
}

// parseIdentity reads
//
//	identity <uri> {
//		key_file   <path>
//		retain     <duration>
//		public_url <url>
//	}
func parseIdentity(d *caddyfile.Dispenser, a *App) error {
	a.Identity = new(Identity)
	at := originOf(d)
	if err := parseWord(d, &a.Identity.Name); err != nil {
		return err
	}
	if err := checkIdentity(a.Identity.Name); err != nil {
		return err
	}
	if err := identityOptions().Read(d, "identity", a.Identity, at); err != nil {
		return err
	}
	if file, ok := at["key_file"]; ok {
		a.writtenAt("identity.key_file", file[0])
	}
	return nil
}

func identityOptions() option.Set[*Identity] {
	return option.Set[*Identity]{
		"key_file":   word("<path>", func(i *Identity) *string { return &i.KeyFile }),
		"public_url": word("<url>", func(i *Identity) *string { return &i.PublicURL }, checkPublicURL),
		"retain":     duration(func(i *Identity) *caddy.Duration { return &i.Retain }),
	}
}

// checkIdentity checks an identity, a URI.
func checkIdentity(name string) error {
	u, err := url.Parse(name)
	if err != nil || u.Scheme == "" {
		return fmt.Errorf("%q is no URI; use one like spiffe://example.com/gateway", name)
	}
	if u.Scheme == "spiffe" && strings.Trim(u.Path, "/") == "" {
		return fmt.Errorf("%q is a whole trust domain; use an identity in it, like %s/gateway", name, strings.TrimRight(name, "/"))
	}
	_, err = ect.ParseOwner(name)
	return err
}

// keepReplaced is how long a replaced key is published: the longest life of a token and the
// clock skew of verifiers.
const keepReplaced = ect.MaxLife + time.Minute

const (
	// ledgerCloseTime bounds how long followers of the ledger may take when the store closes.
	ledgerCloseTime = 10 * time.Second
	pruneEvery      = time.Hour
	headEvery       = 10 * time.Second // how often the newest head is written to the file beside the store
	orphansTime     = 30 * time.Second // for recording orphans at startup
)

var (
	errNoIdentity = errors.New("the running configuration has no `identity`, whose key could be rotated")
	// errKeyElsewhere: rotating this file would lose the current signing key.
	errKeyElsewhere = errors.New("the key file does not hold the key that signs now")
	errSealedLedger = errors.New("the store holds a ledger, which is sealed anew only while `identity` is configured; " +
		"until then the older keys are needed")
)

// ledgerHandle is the engine's ledger. The first configuration with an identity opens it, and
// it stays open with the engine: after a reload without an identity nothing more is
// recorded, but pending entries still move into the tree.
type ledgerHandle struct {
	engine *engine

	mu         sync.Mutex  // held while it is opened and while its keys change; guards identities
	identities []*Identity // of the configurations that hold it, the latest last
	open       atomic.Pointer[evidence.Evidence]
	retain     atomic.Int64  // nanoseconds, of the latest configuration
	coming     atomic.Bool   // a configuration with an identity is about to open it
	replaced   chan struct{} // buffers one signal: the ring may have keys to retire
	ends       []func()      // stop the jobs of the open ledger
	// unsealed says that re-sealing was not possible, because no configuration held the
	// engine.
	unsealed atomic.Bool
	left     atomic.Bool // executions that another gateway has left were settled here
}

// acquire returns the open ledger, opening it for the first configuration with an identity.
// Later configurations bring their keys.
func (l *ledgerHandle) acquire(ctx context.Context, i *Identity, logger *slog.Logger) (*evidence.Evidence, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ev := l.open.Load(); ev != nil {
		ring, err := i.loadRing(false, logger)
		if err != nil {
			return nil, err
		}
		if err := i.recordName(ctx, ev, ring, logger); err != nil {
			return nil, err
		}
		ev.Ring().Reload(ring)
		l.join(i)
		l.retireSoon()
		return ev, nil
	}
	e := l.engine
	signed, err := evidence.Signed(ctx, e.calls.Store, e.keys.Ring)
	if err != nil {
		return nil, err
	}
	ring, err := i.loadRing(!signed, logger)
	if err != nil {
		return nil, err
	}
	ev, err := evidence.Open(ctx, evidence.Options{
		Store: e.calls.Store, Sealer: e.keys.Ring, Node: e.calls.Executions.Node(), Ring: ring, HeadFile: i.KeyFile + ".head", Logger: logger,
		Placed: e.placed,
	})
	if errors.Is(err, ledger.ErrTampered) {
		err = fmt.Errorf("%w: %s holds a ledger that is not as it was written, or an older copy of it; "+
			"if you have put a backup back, move %s away, the newest head that was seen: what it covers beyond the backup is lost; "+
			"else keep the store for examination, and start without `identity`, or with another store", err, e.path, i.KeyFile+".head")
	}
	if err != nil {
		return nil, err
	}
	if err := i.recordName(ctx, ev, ring, logger); err != nil {
		_ = ev.Close(ctx) // nothing is pending yet
		return nil, err
	}
	l.recordOrphans(ctx, ev, i)
	e.logger.Info("ledger open", zap.String("log", ev.Log().Origin()), zap.String("key", ev.HeadKey()),
		zap.Int64("entries", ev.Log().Head().Size))
	l.open.Store(ev)
	l.join(i)
	if l.left.Load() { // while the ledger was being opened
		go l.recordLeft()
	}
	l.keep(ev)
	return ev, nil
}

// join makes i the latest identity that holds the ledger: rotations write its key file. mu is
// held.
func (l *ledgerHandle) join(i *Identity) {
	l.identities = append(l.identities, i)
	l.retain.Store(int64(i.Retain))
}

// latest returns the identity of the latest configuration, or nil. mu is held.
func (l *ledgerHandle) latest() *Identity {
	if len(l.identities) == 0 {
		return nil
	}
	return l.identities[len(l.identities)-1]
}

// leave removes the identity of a configuration. If that was the latest, for example
// because its load failed, the previous identity's keys are used again.
func (l *ledgerHandle) leave(i *Identity) {
	l.mu.Lock()
	defer l.mu.Unlock()
	failed := l.latest() == i
	l.identities = slices.DeleteFunc(l.identities, func(other *Identity) bool { return other == i })
	back := l.latest()
	if !failed || back == nil {
		return
	}
	l.retain.Store(int64(back.Retain))
	ev := l.open.Load()
	if back.KeyFile != i.KeyFile {
		ring, err := back.loadRing(false, slog.New(slog.DiscardHandler))
		if err != nil {
			l.engine.logger.Error("the key file of the running configuration cannot be read again; tokens are signed with the key "+
				"of the one that failed to load, until the next reload", zap.Error(err))
		} else {
			ev.Ring().Reload(ring)
		}
	}
	if err := ev.SignWhenShown(context.Background(), ev.Ring()); err != nil {
		l.engine.logger.Warn("tokens are signed when they are recorded, until the next load of the configuration", zap.Error(err))
	}
	l.retireSoon()
}

// close closes the ledger after the last use of the engine.
func (l *ledgerHandle) close() {
	ev := l.open.Load()
	if ev == nil {
		return
	}
	for _, end := range l.ends {
		end()
	}
	ctx, cancel := context.WithTimeout(context.Background(), ledgerCloseTime)
	defer cancel()
	if err := ev.Close(ctx); err != nil {
		l.engine.logger.Warn("the ledger was closed before all followers had its last entries", zap.Error(err))
	}
}

// head is the newest head of the ledger; nil without a ledger.
func (l *ledgerHandle) head() *ledger.Head {
	ev := l.open.Load()
	if ev == nil {
		return nil
	}
	head := ev.Log().Head()
	return &head
}

// prune deletes old entries.
func (l *ledgerHandle) prune(ctx context.Context, ev *evidence.Evidence) {
	n, err := ev.Prune(ctx, time.Duration(l.retain.Load()))
	switch {
	case err != nil && ctx.Err() == nil:
		l.engine.logger.Warn("the ledger could not be pruned", zap.Error(err))
	case n > 0:
		l.engine.logger.Info("the ledger was pruned", zap.Int("entries", n))
	}
}

// keep prunes the ledger, writes its newest head to the file beside the key, and removes the private parts of
// replaced keys once all is signed that was recorded under them. What fails is tried again, also after a restart.
func (l *ledgerHandle) keep(ev *evidence.Evidence) {
	warned := false
	l.replaced = make(chan struct{}, 1)
	l.ends = []func(){
		fleet.Job{Every: pruneEvery, Do: func(ctx context.Context, _ bool) (time.Duration, error) {
			l.prune(ctx, ev)
			return 0, nil
		}}.Start(),
		fleet.Every(headEvery, func(context.Context) {
			err := ev.WriteHead()
			if err != nil && !warned {
				l.engine.logger.Warn("the head of the ledger cannot be kept beside the store", zap.Error(err))
			}
			warned = err != nil
		}).Start(),
		fleet.Job{Every: pruneEvery, Wake: l.replaced, Do: func(ctx context.Context, _ bool) (time.Duration, error) {
			if err := l.retire(ctx, ev); err != nil && ctx.Err() == nil {
				l.engine.logger.Warn("replaced signing keys stay in the key file for now", zap.Error(err))
			}
			return 0, nil
		}}.Start(),
	}
}

func (l *ledgerHandle) retireSoon() {
	select {
	case l.replaced <- struct{}{}:
	default:
	}
}

func (l *ledgerHandle) retire(ctx context.Context, ev *evidence.Evidence) error {
	signed, unsigned := ev.SignReplaced(ctx)
	if errors.Is(unsigned, ledger.ErrTampered) {
		l.engine.logger.Error("entries of the ledger were altered and cannot be signed; the signing keys that they may name stay "+
			"in the key file", zap.Error(unsigned))
		unsigned = nil
	}
	l.mu.Lock() // excludes a reload and a rotation, as rotate does
	defer l.mu.Unlock()
	done, err := ev.ForgetSigned(ctx)
	if err != nil {
		return errors.Join(unsigned, err)
	}
	if len(done) == 0 {
		return unsigned
	}
	i := l.latest()
	if i == nil {
		return errNoIdentity
	}
	if err := i.checkSigner(ev.Ring()); err != nil {
		return err
	}
	if err := ev.Ring().Retire(i.KeyFile, done...); err != nil {
		return err
	}
	l.engine.logger.Info("replaced signing keys retired", zap.Strings("keys", done), zap.Int("signed", signed))
	return unsigned
}

// recordOrphans records the executions that a crashed process left in doubt. Errors, such
// as a full disk, do not stop the startup; the next one tries again.
func (l *ledgerHandle) recordOrphans(ctx context.Context, ev *evidence.Evidence, i *Identity) {
	ctx, cancel := context.WithTimeout(ctx, orphansTime)
	defer cancel()
	if err := l.recordEachOrphan(ctx, ev, i); err != nil {
		l.engine.logger.Error("the executions that the last process has left in doubt cannot all be recorded in the ledger; the next start goes on",
			zap.Error(err))
	}
}

// recordLeft is recordOrphans for what a gateway that has left the store had open, which this one has settled. Several
// gateways may do so at once: each execution is recorded once. Where this one ends before, the next start records it.
func (l *ledgerHandle) recordLeft() {
	l.left.Store(true)
	ctx, cancel := context.WithTimeout(l.engine.calls.Waits, orphansTime)
	defer cancel()
	l.mu.Lock()
	ev, i := l.open.Load(), l.latest()
	l.mu.Unlock()
	if ev == nil || i == nil {
		return // no identity, or the ledger is being opened
	}
	if err := l.recordEachOrphan(ctx, ev, i); err != nil && l.engine.calls.Waits.Err() == nil {
		l.engine.logger.Error("the executions that another gateway has left in doubt cannot all be recorded in the ledger; the next start goes on",
			zap.Error(err))
	}
}

func (l *ledgerHandle) recordEachOrphan(ctx context.Context, ev *evidence.Evidence, i *Identity) error {
	events, err := ev.EventBuilder(i.Name)
	if err != nil {
		return err
	}
	filter := execution.Filter{States: []execution.State{execution.StateInDoubt}}
	for after := ""; ; {
		page, err := l.engine.calls.Executions.List(ctx, filter, after, execution.MaxPage)
		if err != nil {
			return err
		}
		for n := range page.Executions {
			found := &page.Executions[n]
			if found.Record == nil || found.Record.Checkpoint == "" {
				continue
			}
			if found.Record.State != execution.StateInDoubt && found.Record.Boot == l.engine.calls.Executions.Boot() {
				continue // its outcome may come yet (ADR 0147)
			}
			if err := ev.RecordOrphan(ctx, events, found.Key, found.Record); err != nil {
				return err
			}
		}
		if after = page.Next; after == "" {
			return nil
		}
	}
}

// reseal seals the ledger with the newest key. It runs before the guard records which keys are
// still needed.
func (l *ledgerHandle) reseal(ctx context.Context) error {
	if ev := l.open.Load(); ev != nil {
		return ev.Reseal(ctx)
	}
	exists, err := evidence.Exists(ctx, l.engine.calls.Store)
	if err != nil || !exists {
		return err
	}
	if l.engine.activeConfigs.latest() == nil {
		l.unsealed.Store(true) // the configuration that opens the ledger requests another pass
		return gateway.ErrLater
	}
	return errSealedLedger
}

// rotate writes a new signing key, for the algorithm of the one before it, into the key file of the latest
// configuration and signs with it. The previous key stays published until its tokens have
// expired, and keeps its private part until what was recorded under it is signed; with stolen,
// no older key is published any more, and none signs anything any more.
func (l *ledgerHandle) rotate(stolen bool) error {
	l.mu.Lock() // excludes a reload, which could restore the ring it has read before
	defer l.mu.Unlock()
	ev, i := l.open.Load(), l.latest()
	if ev == nil || i == nil {
		return errNoIdentity
	}
	if err := i.checkSigner(ev.Ring()); err != nil {
		return err
	}
	keep := keepReplaced
	if stolen {
		keep = 0
	}
	ctx := context.Background()
	algorithm := signer(ev.Ring()).Algorithm
	id, err := ev.Ring().Rotate(i.KeyFile, algorithm, time.Now(), keep, ev.KeysToSign()...)
	if err != nil {
		return err
	}
	err = ev.RecordName(ctx, i.Name, ev.Ring())
	if err == nil && stolen {
		err = ev.ForgetKeys(ctx, unsignable(ev, ev.Ring())...)
	}
	if err == nil {
		err = ev.SignWhenShown(ctx, ev.Ring())
	}
	if err != nil {
		l.engine.logger.Error("that the new key signs in this name is noted with the next load of the configuration", zap.Error(err))
	}
	l.retireSoon()
	l.engine.logger.Info("signing key rotated", zap.String("identity", i.Name), zap.String("key", id),
		zap.Stringer("algorithm", algorithm), zap.Bool("stolen", stolen))
	l.engine.emit(eventIdentityRotated, nil)
	return nil
}

// signer is the key of a ring that signs.
func signer(ring *ect.Ring) ect.RingKey {
	keys := ring.List()
	return keys[len(keys)-1]
}

// checkSigner checks that the key file has the key that signs now: if another ring replaced it,
// tokens under that key could not be verified any more.
func (i *Identity) checkSigner(open *ect.Ring) error {
	found, err := ect.LoadRing(i.KeyFile)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is missing: put it back from your backup; without it the gateway does not start again",
			errKeyElsewhere, i.KeyFile)
	}
	if err != nil {
		return err
	}
	signs := signer(open).ID
	if !slices.ContainsFunc(found.List(), func(k ect.RingKey) bool { return k.ID == signs }) {
		return fmt.Errorf("%w: %s is another one than was loaded: put it back, or load the configuration again to sign with what it holds",
			errKeyElsewhere, i.KeyFile)
	}
	return nil
}

// status describes the identity and its keys for operators; nil if the latest configuration
// has none.
func (l *ledgerHandle) status() *admin.Identity {
	l.mu.Lock()
	defer l.mu.Unlock()
	ev, i := l.open.Load(), l.latest()
	if ev == nil || i == nil {
		return nil
	}
	status := &admin.Identity{Name: i.Name, File: i.KeyFile, Algorithm: signer(ev.Ring()).Algorithm.String()}
	for _, k := range ev.Ring().List() {
		status.Keys = append(status.Keys, admin.IdentityKey{
			ID: k.ID, Algorithm: k.Algorithm.String(), Created: k.Created, Until: k.Until, Signs: k.Signs, Revoked: k.Revoked,
		})
	}
	return status
}
