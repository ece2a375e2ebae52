package caddymodule

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Trust names the issuers whose Execution Context Tokens are accepted. With it, a token in the
// field `Execution-Context` is verified before anything else, and a bad one is refused with 403
// `ect-invalid`; its issuer is the caller, its `wid` the workflow. Without it, tokens are passed on
// and ignored.
type Trust struct {
	// The sources of public keys. A token whose key is in none of them is refused. Each key counts for its
	// own algorithm: `ES256`, `ES384` or `EdDSA`.
	Keys []KeySource `json:"keys,omitempty"`

	// Further names accepted in the `aud` of tokens, besides the gateway's identity. Default: none.
	Audience []string `json:"audience,omitempty"`

	// `L1` also accepts unsigned tokens. They are recorded as evidence and do not identify the
	// caller or allow anything, unless a verified client certificate has their issuer as its SPIFFE
	// ID. `L3` lets a request with a token continue only after the token is in the gateway's ledger
	// and can be proven; if that takes more than 5 s the request gets 503. Tokens in answers to
	// probes are not recorded. `L3` cannot be combined with `allow_partial`. Default: `L2`.
	MinLevel string `json:"min_level,omitempty"`

	// Accepts tokens with parents that the ledger does not hold, such as those of
	// another domain. Default: false.
	AllowPartial bool `json:"allow_partial,omitempty"`

	// Accepts parents from another workflow. Default: false.
	CrossWorkflow bool `json:"cross_workflow,omitempty"`

	sources []ect.Source
	origin  origin // of a Caddyfile's options, the last of each
}

// KeySource is a source of public keys. Exactly one of file and URL is set.
type KeySource struct {
	// A file with a JSON Web Key Set. It is read again when it changes.
	File string `json:"file,omitempty"`

	// A URL with a JSON Web Key Set: https, or http on the loopback interface. Keys are fetched
	// when they are first needed, again in the background when they are 15 minutes old, and when a
	// token names a key that no source has, at most twice a minute. If the URL stops responding,
	// its keys are used for another 24 hours. A token whose key some source already has never waits
	// for a fetch.
	URL string `json:"url,omitempty"`

	// The owner of the keys: an identity, or a SPIFFE trust domain like `spiffe://example.com` for
	// all identities in it. A key that names its own owner (by `sub`, or a certificate) is used
	// only if that is within this one. Without an owner here each key must name its own, and may
	// name anybody. A key with no owner is not used.
	Owner string `json:"owner,omitempty"`
}

// provision opens the sources of keys. An unreadable file is an error; a URL may be
// unreachable.
func (t *Trust) provision(logger *zap.Logger) error {
	if len(t.Keys) == 0 {
		return errNoTrust
	}
	for i := range t.Keys {
		source, err := t.Keys[i].open(logger)
		if err != nil {
			return &invalid{[]string{fmt.Sprintf("trust.%d", i+1)}, fmt.Errorf("keys: source %d: %w", i+1, err)}
		}
		t.sources = append(t.sources, source)
	}
	if err := t.checkLevel(); err != nil {
		return err
	}
	if t.minLevel() == ect.L1 {
		logger.Warn("`min_level L1` accepts tokens without a signature: anybody can write them. They are recorded as evidence, and name "+
			"nobody unless a client certificate of the connection has their issuer as its SPIFFE ID; leave it out where agents can sign",
			zap.String("min_level", t.MinLevel))
	}
	_, err := t.verifier("urn:agent-guard:check", nil, t.sources...)
	return err
}

// errNoTrust: there are options but no keys.
var errNoTrust = errors.New("no keys are given; name some with `jwks_file` or `jwks_url`")

// checkLevel refuses options that would weaken the level.
func (t *Trust) checkLevel() error {
	if t.AllowPartial && t.minLevel() == ect.L3 {
		return invalidOption("allow_partial", "it excludes `min_level L3`, at which every parent stands in the ledger; leave one of them out")
	}
	return nil
}

// lacksIdentity returns the error for an app without an identity and so without a ledger.
func (t *Trust) lacksIdentity() error {
	if t.minLevel() == ect.L3 {
		return invalidOption("min_level", "L3 needs an `identity`: only with one there is a ledger for tokens to stand in")
	}
	return errors.New("it needs an `identity`, which is what tokens name in their aud")
}

func (k *KeySource) open(logger *zap.Logger) (ect.Source, error) {
	var owner ect.Owner
	if k.Owner != "" {
		var err error
		if owner, err = ect.ParseOwner(k.Owner); err != nil {
			return nil, fmt.Errorf("owner: %w", err)
		}
	}
	if (k.File == "") == (k.URL == "") {
		return nil, errors.New("give either a file or a URL")
	}
	place := k.File + k.URL
	changed := func(set *ect.Set, err error) {
		if err != nil {
			logger.Warn("the keys of trusted issuers could not be read; those that were read before stay",
				zap.String("keys", place), zap.Error(err))
			return
		}
		logger.Info("keys of trusted issuers read", zap.String("keys", place), zap.Int("count", set.Len()))
		warnSkipped(logger, place, set)
	}
	if k.URL != "" {
		return ect.NewURLSource(ect.URLOptions{URL: k.URL, Owner: owner, OnFetch: changed})
	}
	path, err := caddy.NewReplacer().ReplaceOrErr(k.File, true, true)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return nil, fmt.Errorf("file %q: %w", k.File, err)
	}
	source, err := ect.NewFileSource(ect.FileOptions{Path: path, Owner: owner, OnReload: changed})
	if err != nil {
		return nil, err
	}
	if source.Set().Len() == 0 {
		return nil, fmt.Errorf("keys in %s: the set is empty; put the public key of an agent into it", path)
	}
	warnSkipped(logger, place, source.Set())
	return source, nil
}

// warnSkipped warns of keys that are not used: their owners' tokens will be refused.
func warnSkipped(logger *zap.Logger, place string, set *ect.Set) {
	for _, s := range set.Skipped() {
		logger.Warn("a key is not used", zap.String("keys", place), zap.String("kid", s.KeyID), zap.String("reason", s.Reason))
	}
}

// verifier makes the verifier of the gateway called identity.
func (t *Trust) verifier(identity string, former []string, sources ...ect.Source) (*ect.Verifier, error) {
	policy := ect.Policy{
		Audience: append([]string{identity}, t.Audience...), Former: former, Sources: sources,
		Algorithms: ect.Algorithms(), AllowPartial: t.AllowPartial, CrossWorkflow: t.CrossWorkflow,
	}
	if policy.MinLevel = t.minLevel(); policy.MinLevel == 0 {
		return nil, fmt.Errorf("min_level: %w", oneOf(t.MinLevel, levelNames...))
	}
	// The tokens are recorded in the commit of the call, or in one before the request goes
	// on.
	policy.CallerAppends = policy.MinLevel == ect.L3
	return ect.NewVerifier(policy)
}

var levelNames = []string{"L1", "L2", "L3"}

// minLevel returns the lowest accepted level; zero if it is unknown.
func (t *Trust) minLevel() ect.Level {
	switch strings.ToUpper(t.MinLevel) {
	case "", "L2":
		return ect.L2
	case "L1":
		return ect.L1
	case "L3":
		return ect.L3
	}
	return 0
}

// parseTrust reads
//
//	trust jwks_file <path> [<owner>]
//	trust jwks_url  <url>  [<owner>]
//	trust {
//		jwks_file     <path> [<owner>]
//		jwks_url      <url>  [<owner>]
//		audience      <names...>
//		min_level     L1 | L2 | L3
//		allow_partial
//		cross_workflow
//	}
//
// Several lines add to each other.
func parseTrust(d *caddyfile.Dispenser, a *App) error {
	at := originOf(d)
	if a.Trust == nil {
		a.Trust = &Trust{origin: originOf(d)}
	}
	if d.NextArg() {
		kind := d.Val()
		if err := oneOf(kind, "jwks_file", "jwks_url"); err != nil {
			return err
		}
		return a.parseKeySource(d, kind, at[""][0])
	}
	if err := trustOptions().Read(d, "trust", a, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it trusts nobody; name keys with `jwks_file` or `jwks_url`")
	}
	delete(at, "") // keep that of the first line
	maps.Copy(a.Trust.origin, at)
	return nil
}

// parseKeySource parses a source of keys with an optional owner. at is the option's token.
func (a *App) parseKeySource(d *caddyfile.Dispenser, kind string, at caddyfile.Token) error {
	words := d.RemainingArgs()
	if len(words) == 0 || len(words) > 2 || words[0] == "" {
		return option.ErrSyntax
	}
	var k KeySource
	if kind == "jwks_url" {
		k.URL = words[0]
		if _, err := ect.NewURLSource(ect.URLOptions{URL: k.URL}); err != nil { // checks the URL, fetches nothing
			return err
		}
	} else {
		k.File = words[0]
		a.writtenAt(fmt.Sprintf("trust.%d", len(a.Trust.Keys)+1), at)
	}
	if len(words) == 2 {
		k.Owner = words[1]
		if _, err := ect.ParseOwner(k.Owner); err != nil {
			return err
		}
	}
	a.Trust.Keys = append(a.Trust.Keys, k)
	return nil
}

// trustOptions are the options of a block of trust.
func trustOptions() option.Set[*App] {
	source := func(kind, what string) option.Option[*App] {
		return option.Option[*App]{Usage: "<" + what + "> [<owner>]", Several: true, Parse: func(d *caddyfile.Dispenser, a *App) error {
			return a.parseKeySource(d, kind, d.Token())
		}}
	}
	return merge(option.Set[*App]{
		"jwks_file": source("jwks_file", "path"),
		"jwks_url":  source("jwks_url", "url"),
	}, within(func(a *App) *Trust { return a.Trust }, option.Set[*Trust]{
		"audience":       repeated(words("<names...>", func(t *Trust) *[]string { return &t.Audience })),
		"min_level":      choice(func(t *Trust) *string { return &t.MinLevel }, levelNames...),
		"allow_partial":  flag(func(t *Trust) *bool { return &t.AllowPartial }),
		"cross_workflow": flag(func(t *Trust) *bool { return &t.CrossWorkflow }),
	}))
}

// tokenPolicy is the token policy of one configuration's identity and trust, with what the
// endpoints need in addition.
type tokenPolicy struct {
	*guard.TokenPolicy
	own *ect.Verifier // of the gateway's own tokens
	// records makes a verifier of what another agent has recorded for itself; nil without trust.
	records func(identity string) (*ect.Verifier, error)
}

// forCalls returns the policy in the form that package guard needs; nil for nil.
func (t *tokenPolicy) forCalls() *guard.TokenPolicy {
	if t == nil {
		return nil
	}
	return t.TokenPolicy
}

// openTokenPolicy opens the ledger of e for a configuration.
func openTokenPolicy(ctx context.Context, e *engine, i *Identity, t *Trust, logger *slog.Logger) (_ *tokenPolicy, err error) {
	ev, err := e.ledger.acquire(ctx, i, logger)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	part := "identity"
	defer func() {
		if err != nil {
			e.ledger.leave(i)
			err = fmt.Errorf("agent_guard: %s: %w", part, err)
		}
	}()
	events, err := ev.EventBuilder(i.Name)
	if err != nil {
		return nil, err
	}
	policy := &tokenPolicy{TokenPolicy: &guard.TokenPolicy{
		Engine: e.calls, Rule: e.ruleFor, Evidence: ev, Events: events, RollbackURI: strings.TrimRight(i.PublicURL, "/") + rollback.Path,
		Reports: evidence.NewLedger(evidence.Ledger{ // without executions and checkpoints
			Log: ev.Log(), Outcomes: ev.Outcomes, Identities: []string{events.Identity()}, Own: events.Own,
		}),
		HandlesRollback: api.HandlesRollback, FitsPhase: api.FitsPhase,
	}}
	ownKeys, err := events.Source()
	if err != nil {
		return nil, err
	}
	policy.own, err = ect.NewVerifier(ect.Policy{
		Audience: events.Names(), Sources: []ect.Source{ownKeys}, Algorithms: ect.Algorithms(), AllowPartial: true,
	})
	if err != nil || t == nil {
		return policy, err
	}
	part = "trust"
	// The gateway's own tokens are presented as parents.
	sources := append([]ect.Source{ownKeys}, t.sources...)
	if policy.Verifier, err = t.verifier(i.Name, events.Names()[1:], sources...); err != nil {
		return nil, err
	}
	policy.records = func(identity string) (*ect.Verifier, error) {
		return t.verifier(identity, nil, sources...)
	}
	if t.minLevel() == ect.L1 {
		ev.AcceptUnsigned()
	}
	policy.LedgerFirst = t.minLevel() == ect.L3
	return policy, nil
}

// graph returns the endpoint for the recorded workflows.
func (t *tokenPolicy) graph(e *engine) *evidence.Ledger {
	return evidence.NewLedger(evidence.Ledger{
		Log: t.Evidence.Log(), Outcomes: t.Evidence.Outcomes, HeadKey: t.Evidence.HeadKeyOf, Identities: []string{t.Events.Identity()}, Own: t.Events.Own,
		Verify: t.verifyErrors, Record: func(ctx context.Context, tokens []*ect.Token) error { return t.record(ctx, e, tokens) },
		Bind: func(ctx context.Context, token *ect.Token, use evidence.Use) error {
			return t.Bind(ctx, []*ect.Token{token}, use)
		},
		Refused:  t.RefusedErrors,
		Verified: t.verified, Undos: e.calls.Checkpoints, Execution: e.executionStatus, Waits: e.calls.Waits, Followers: &e.followers, Assigned: e.calls.Plans,
		OpenSince: t.Evidence.OpenSince, Complete: func(ctx context.Context, end *evidence.End, stated *ect.Token) (string, error) {
			return endWorkflow(ctx, e, t, end, stated, endedByRequest)
		},
		AwaitEnd: func(ctx context.Context, workflow string) error {
			now, err := e.calls.Store.Now(ctx)
			if err == nil {
				_, err = e.calls.Store.Commit(ctx, t.Evidence.Opened(now, workflow))
			}
			e.boundaries.follow(workflow)
			return err
		},
		Called: func(ctx context.Context, caller [16]byte) (bool, error) { return e.calls.Executions.Knows(ctx, caller) },
	})
}

// verified verifies a token of the gateway's own, ignoring its age.
func (t *tokenPolicy) verified(ctx context.Context, raw string) error {
	token, err := ect.ParseInsecure(raw)
	if err != nil {
		return err
	}
	_, err = t.own.Verify(ctx, raw, ect.Presentation{Now: token.IssuedAt()})
	return err
}

// verifyErrors verifies the error tokens that agents send.
func (t *tokenPolicy) verifyErrors(r *http.Request, raws []string) ([]*ect.Token, error) {
	if t.Verifier == nil {
		return nil, &ect.Error{Code: ect.CodeKeyID} // no keys are trusted
	}
	all, err := t.Verifier.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now(), Peer: caller.Peer(r), DAG: t.Evidence.GraphOf})
	for _, token := range all {
		if phase, _ := token.Ext().Text(rollback.MemberPhase); phase != "" {
			return nil, &ect.Error{Code: ect.CodeExt} // it is good for another endpoint (C-6.1-a)
		}
	}
	return all, err
}

// errorUse is the use of the tokens of reported errors.
var errorUse = evidence.Use(sha256.Sum256([]byte("agent_guard errors")))

// record records the error tokens that agents send. The tokens cannot be used again.
func (t *tokenPolicy) record(ctx context.Context, e *engine, tokens []*ect.Token) error {
	now, err := e.calls.Store.Now(ctx)
	if err != nil {
		return err
	}
	batch, err := t.Evidence.NewBatch(now, tokens)
	if err != nil {
		return err
	}
	for _, token := range tokens {
		batch.Add(t.Evidence.UseWrites(token, errorUse, time.Time{})...)
	}
	t.rollBackFor(e, tokens, batch)
	if err := t.escalateErrors(ctx, e, tokens, batch); err != nil {
		return batch.Done(err)
	}
	err = batch.Commit(ctx, e.calls.Store)
	if errors.Is(err, hitl.ErrAlreadyOpen) { // by an error that came at the same time
		return t.record(ctx, e, tokens)
	}
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
		for _, token := range tokens {
			status, failed := t.Evidence.UseStatus(ctx, token, errorUse)
			if failed != nil {
				return failed
			}
			if status == evidence.Other {
				return &ect.Error{Code: ect.CodeReplayed} // it was used for a call
			}
		}
	}
	if err == nil {
		e.logger.Info("agents have reported errors", zap.Int("count", len(tokens)), zap.String("issuer", tokens[0].Issuer()))
	}
	return err
}

// rollBackFor asks, in the commit of agents' errors, for the rollbacks of the calls that these
// name, by their checkpoint, or by a parent that is one (AERR, "Error ECT"); people are asked where
// nothing is rolled back and escalateErrors asks nobody. Whom the call concerns, and whether errors roll
// it back, is found out afterwards, so that the answer does not show it (P3).
func (t *tokenPolicy) rollBackFor(e *engine, tokens []*ect.Token, batch *store.Batch) {
	c, app := e.rollbacks.coordinator(), e.activeConfigs.latest()
	if c == nil || app == nil {
		return
	}
	var all []rollback.Failure
	for _, token := range tokens {
		severity, _ := token.Ext().Text(ect.MemberSeverity)
		if !token.Proven() || !evidence.Severe(severity) {
			continue
		}
		named := token.Parents()
		if id := evidence.NamedCheckpoint(token.Ext()); id != "" {
			named = []string{id}
		}
		asks := hitl.CauseFailed
		if _, fits := e.ruleFor(token); fits || severity == "critical" {
			asks = ""
		}
		for _, id := range named {
			all = append(all, rollback.Failure{
				Checkpoint: ledger.Canonical(id), Error: token.ID(), By: t.Events.Identity(), Asks: asks,
				Reporter: token.Issuer(), Lineage: rollback.Lineage(app.rollbackOptions().Lineage),
			})
		}
	}
	if len(all) > 0 {
		batch.Join(c.Failed(all...))
	}
}

// failureOf returns the id of the error that has opened a breaker, and sets the workflow of c.
// If the call has recorded no error, one is drafted: in the call's workflow and after its
// checkpoint, if it was guarded.
func (t *tokenPolicy) failureOf(ctx context.Context, now time.Time, c *evidence.Circuit, ev breaker.Event) (string, []*ect.Draft, error) {
	failure := evidence.Attempt{Downstream: c.Downstream, Cause: cmp.Or(ev.Cause, string(ev.Reason))}
	if of := guard.ParseEvidence(ev.Evidence); of.Checkpoint != "" {
		attempt := t.Evidence.AttemptID(of.Checkpoint, ev.Key.String())
		known, err := t.Evidence.Known(ctx, of.Workflow, []string{t.Evidence.ErrorID(of.Checkpoint), attempt, of.Checkpoint})
		if err != nil {
			return "", nil, err
		}
		if len(known) > 0 { // otherwise it is in another store
			c.Workflow = of.Workflow
			if known[0] != of.Checkpoint {
				return known[0], nil, nil
			}
			failure.Checkpoint, failure.ID, failure.Workflow = of.Checkpoint, attempt, of.Workflow
		}
	}
	draft, err := t.Events.Attempt(now, &failure)
	if err != nil {
		return "", nil, err
	}
	return draft.ID(), []*ect.Draft{draft}, nil
}

// lastFailure returns the id of the recorded error of a breaker's last failure; empty if
// there is none.
func (t *tokenPolicy) lastFailure(ctx context.Context, s *breaker.Status) string {
	of := guard.ParseEvidence(s.Evidence)
	if t == nil || of.Checkpoint == "" {
		return ""
	}
	ids := []string{t.Evidence.ErrorID(of.Checkpoint), t.Evidence.AttemptID(of.Checkpoint, s.Key.String())}
	if known, err := t.Evidence.Known(ctx, of.Workflow, ids); err == nil && len(known) > 0 {
		return known[0]
	}
	return ""
}

// proves verifies that a token proves that issuer answered a probe, and marks it as used.
func (t *tokenPolicy) proves(ctx context.Context, raw, issuer string, earliest time.Time) error {
	now := time.Now()
	// Without its parents: they are irrelevant for who answered.
	token, err := t.Verifier.Verify(ctx, raw, ect.Presentation{Now: now})
	switch {
	case err != nil:
		return err
	case token.Level() < ect.L2: // whatever `min_level` is: only a signature proves the issuer here
		return &ect.Error{Code: ect.CodeLevel}
	case token.Issuer() != issuer:
		return &ect.Error{Code: ect.CodeIssuer}
	case token.IssuedAt().Before(earliest):
		return &ect.Error{Code: ect.CodeTooOld}
	}
	var use evidence.Use     // random: of no other probe, and of no call
	_, _ = rand.Read(use[:]) // never fails
	return t.Evidence.Spend(ctx, []*ect.Token{token}, use)
}
