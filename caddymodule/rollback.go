package caddymodule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// rollbackService has the rollbacks of an engine. The first configuration with an identity
// opens it: undos must be recorded. Rollbacks continue over reloads.
type rollbackService struct {
	mu   sync.Mutex // held while it is opened
	open atomic.Pointer[rollback.Coordinator]
	keep time.Duration // how long a finished rollback is kept; set before open
	// limit bounds the rate of requests, over all configurations.
	limit rollback.Limit
	// trials are the undos that are being retried.
	trials undoTrials
}

// coordinator returns the coordinator; nil before openRollbacks.
func (u *rollbackService) coordinator() *rollback.Coordinator { return u.open.Load() }

// openRollbacks makes the coordinator, unless there is one. It starts nothing.
func (e *engine) openRollbacks(keep time.Duration) error {
	u := &e.rollbacks
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open.Load() != nil {
		return nil
	}
	u.keep = keep
	sender := newUndoSender(e)
	c, err := rollback.Open(rollback.Options{
		Store: e.calls.Store, Sealer: e.keys.Ring, Guard: e.calls.Executions, Checkpoints: e.calls.Checkpoints, Escalations: e.calls.Escalations,
		Ledger:       &observedLedger{Ledger: e.rollbackLedger(keep), e: e},
		Sender:       sender,
		Participants: e.participantAt, Discover: sender.discover, Configured: e.participants,
		Whole:          func() bool { return e.rollbackOptions().Partial == partialNever },
		PrepareTimeout: func() time.Duration { return time.Duration(e.rollbackOptions().PrepareTimeout) },
		Reservation:    func() time.Duration { return time.Duration(e.rollbackOptions().Reservation) },
		Keep:           keep, Logger: slogOf(e.logger.Named("rollback")),
	})
	if err != nil {
		return fmt.Errorf("agent_guard: rollback: %w", err)
	}
	if err := c.Load(context.Background()); err != nil { // before the first call
		return fmt.Errorf("agent_guard: rollback: %w", err)
	}
	u.open.Store(c)
	return nil
}

// startRollbacks resumes the rollbacks that the last process left unfinished. It runs after
// the configuration has started, since undos use its routes.
func (e *engine) startRollbacks(ctx context.Context) {
	c := e.rollbacks.coordinator()
	if c == nil {
		return
	}
	if err := c.Start(ctx); err != nil {
		// The others and new ones go on; the next start tries again.
		e.logger.Error("rollbacks that are not finished cannot be taken up again", zap.Error(err))
	}
}

// stopRollbacks starts no further steps and waits for running ones until ctx ends. The rest
// is resumed after a restart.
func (e *engine) stopRollbacks(ctx context.Context) {
	c := e.rollbacks.coordinator()
	if c == nil {
		return
	}
	if err := c.Stop(ctx); err != nil {
		e.logger.Warn("rollbacks are not finished; the next start goes on", zap.Error(err))
	}
}

// rollbackGrace bounds how long rollbacks may take to stop when the store closes.
const rollbackGrace = 10 * time.Second

// rollbackLedger returns the ledger for the coordinator. It verifies and records with the
// latest configuration, and keeps its events for keep.
func (e *engine) rollbackLedger(keep time.Duration) rollback.Ledger {
	return evidence.NewRollbackLedger(evidence.RollbackLedgerOptions{Keep: keep, Recorder: e.evidenceRecorder})
}

// evidenceRecorder records and verifies by the latest configuration; false without an identity.
func (e *engine) evidenceRecorder() (evidence.Recorder, bool) {
	policy := e.latestPolicy()
	if policy == nil {
		return evidence.Recorder{}, false
	}
	return evidence.Recorder{Evidence: policy.Evidence, EventBuilder: policy.Events, Verifier: policy.Verifier}, true
}

// rollbackOptions are those of the latest configuration, or the defaults.
func (e *engine) rollbackOptions() Rollback {
	if a := e.activeConfigs.latest(); a != nil {
		return a.rollbackOptions()
	}
	return new(App).rollbackOptions()
}

// Rollback says who may ask for rollbacks, and how often. Agents ask with tokens that `trust`
// accepts; without `trust` only operators can ask.
type Rollback struct {
	// Who may ask. With `ancestor`, whoever made the call, or a call that led to it. With
	// `workflow`, everybody who has a part in the workflow that is linked to it. Default:
	// `ancestor`.
	Lineage string `json:"lineage,omitempty"`

	// The issuers that are rollback coordinators: they may ask for every checkpoint of their
	// token's workflow and for the scope `full_workflow`, and may read every rollback and the
	// tokens of every workflow. Default: none.
	Coordinators []string `json:"coordinators,omitempty"`

	// The agents that are asked to roll back checkpoints that they have made themselves: those that
	// came with calls as tokens, and those that the agents show when a rollback with the scope
	// `sub_dag` or `full_workflow` asks them for what they have of the workflow. Checkpoints of all
	// others are left to people. It needs `trust`. Default: none.
	Participants []Participant `json:"participants,omitempty"`

	// What is done where a part cannot be undone. With `never`, nothing is, and a person is asked whether
	// the rest is undone all the same; with `allow`, the rest is undone, unless what cannot be undone is
	// critical. It also counts for rollbacks because of an error (`on_error`). Default: `never`.
	Partial string `json:"partial,omitempty"`

	// How many new rollbacks one issuer may ask for per minute, and how many may be asked for per
	// minute in one workflow. Above it the answer is 429 `quota-exceeded`; repeated requests are
	// still answered, and operators are not counted. It is of each gateway: of several that share a store, each allows
	// so many. Default: 60.
	Rate int `json:"rate,omitempty"`

	// How long an answer waits for the end of its rollback before it is 202, at most 30s; a request
	// can change it with `Prefer: wait=N`. Default: 10s.
	Wait caddy.Duration `json:"wait,omitempty"`

	// How long another gateway or agent that is asked in the first phase of a rollback, again and again,
	// may be silent before it counts as `unreachable`; at most 1m. Each answer for a part of the rollback
	// begins the time anew, and parts that wait for their turn do not count. All together are asked for
	// no longer than `reservation`, or this time if that is longer. Default: 10s.
	PrepareTimeout caddy.Duration `json:"prepare_timeout,omitempty"`

	// How long a prepared rollback is reserved, at most 10m: for so long no call begins that would
	// follow from what it covers, unless it is carried out before. Default: 60s.
	Reservation caddy.Duration `json:"reservation,omitempty"`

	// How long a finished rollback is kept, so that the same request gets the same answer. At least
	// as long as the longest `retain_key`. Default: 30d.
	Retain caddy.Duration `json:"retain,omitempty"`

	origin origin // of a Caddyfile's options, the last of each
}

// Participant is an agent, or another gateway, that rolls back its own checkpoints.
type Participant struct {
	// Where it is asked: https, or http on the same machine. The `cascade.rollback_uri` of its
	// checkpoints must have the same scheme, host and port; its path may be another one.
	URI string `json:"uri,omitempty"`

	// Its identity, which must have issued the checkpoint, and must sign what it has done.
	Identity string `json:"identity,omitempty"`
}

// participantAt is where the issuer of a checkpoint is asked, whose token names rollbackURI; empty
// if it must not be. Nobody but the configuration chooses the address: of the token only the path
// counts.
func (o *Rollback) participantAt(issuer, rollbackURI string) string {
	named, err := parseWhole(rollbackURI)
	if err != nil || checkDelegate(rollbackURI) != nil || named.RawQuery != "" || named.ForceQuery || strings.Trim(named.Path, "/") == "" {
		return ""
	}
	for i := range o.Participants {
		p := &o.Participants[i]
		at, err := parseWhole(p.URI)
		if err == nil && p.Identity == issuer && at.Scheme == named.Scheme && addressOf(at) == addressOf(named) {
			return at.Scheme + "://" + at.Host + strings.TrimRight(named.EscapedPath(), "/")
		}
	}
	return ""
}

const defaultRollbackRetain = 30 * 24 * time.Hour

// provision checks the options and sets defaults. The zero value is valid.
func (o *Rollback) provision() error {
	inherit(&o.Lineage, string(rollback.Ancestor))
	inherit(&o.Partial, partialNever)
	inherit(&o.Rate, rollback.DefaultRate)
	inherit(&o.Wait, caddy.Duration(rollback.DefaultWait))
	inherit(&o.PrepareTimeout, caddy.Duration(rollback.DefaultPrepareTimeout))
	inherit(&o.Reservation, caddy.Duration(rollback.DefaultReservation))
	inherit(&o.Retain, caddy.Duration(defaultRollbackRetain))
	return checkOptions(rollbackOptions(), o)
}

const (
	partialAllow = "allow"
	partialNever = "never"
)

var partials = []string{partialNever, partialAllow}

var lineages = []string{string(rollback.Ancestor), string(rollback.Workflow)}

func atMost(longest time.Duration) func(caddy.Duration) error {
	return func(v caddy.Duration) error {
		if time.Duration(v) > longest {
			return fmt.Errorf("%v is too long; it must be at most %v", time.Duration(v), longest)
		}
		return nil
	}
}

// longestPrepare bounds how long a request to prepare may take.
const longestPrepare = time.Minute

// longestReservation bounds how long calls are held back for a rollback that never comes.
const longestReservation = 10 * time.Minute

// parseRollback reads
//
//	rollback {
//		lineage         ancestor | workflow
//		coordinators    <issuers...>
//		participants    <uri> <identity>
//		partial         never | allow
//		rate            <number>
//		wait            <duration>
//		prepare_timeout <duration>
//		reservation     <duration>
//		retain          <duration>
//	}
func parseRollback(d *caddyfile.Dispenser, a *App) (err error) {
	a.Rollback = new(Rollback)
	a.Rollback.origin, err = readOnly(rollbackOptions(), d, "rollback", a.Rollback, "it says nothing; leave it out for the defaults")
	return err
}

func rollbackOptions() option.Set[*Rollback] {
	return option.Set[*Rollback]{
		"lineage": choice(func(o *Rollback) *string { return &o.Lineage }, lineages...),
		"coordinators": repeated(words("<issuers...>", func(o *Rollback) *[]string { return &o.Coordinators },
			each(checkIdentity))),
		"participants": repeated(option.Value("<uri> <identity>", func(o *Rollback) *[]Participant { return &o.Participants },
			parseParticipant, checkParticipants)),
		"partial": choice(func(o *Rollback) *string { return &o.Partial }, partials...),
		"rate":    count(func(o *Rollback) *int { return &o.Rate }),
		"wait":    duration(func(o *Rollback) *caddy.Duration { return &o.Wait }, atMost(rollback.LongestWait)),
		"prepare_timeout": duration(func(o *Rollback) *caddy.Duration { return &o.PrepareTimeout },
			atMost(longestPrepare)),
		"reservation": duration(func(o *Rollback) *caddy.Duration { return &o.Reservation },
			atMost(longestReservation)),
		"retain": duration(func(o *Rollback) *caddy.Duration { return &o.Retain }),
	}
}

func parseParticipant(d *caddyfile.Dispenser, into *[]Participant) error {
	var p Participant
	if !d.Args(&p.URI, &p.Identity) {
		return option.ErrSyntax
	}
	*into = append(*into, p)
	return nil
}

func checkParticipants(all []Participant) error {
	for _, p := range all {
		if err := cmp.Or(checkDelegate(p.URI), checkIdentity(p.Identity)); err != nil {
			return err
		}
	}
	return nil
}

// policyRollback says where rollbacks are requested, and by whom.
type policyRollback struct {
	Request string  `json:"request"`
	Prepare string  `json:"prepare"`
	Status  string  `json:"status"` // a URI template (RFC 6570)
	ATD     string  `json:"atd"`
	AERR    string  `json:"aerr"`
	Lineage string  `json:"lineage"`
	Rate    int     `json:"rate_per_minute"`
	Wait    float64 `json:"wait_s"`
	MaxWait float64 `json:"max_wait_s"`

	Reservation float64 `json:"reservation_s"`
}

// ofParents reports whether a token was, or may have been, refused because of its parents.
func ofParents(err error) bool {
	var refusal *ect.Error
	return errors.As(err, &refusal) && slices.Contains([]ect.Code{
		ect.CodeParentUnknown, ect.CodeParentLater, ect.CodeLevel, ect.CodeCycle, ect.CodeTooManyAncestors,
	}, refusal.Code)
}

// unseen verifies the tokens except for what they say of their parents. An error is the
// same with any parents.
func (t *tokenPolicy) unseen(r *http.Request) (guard.Tokens, error) {
	raws, err := ect.ParseFields(r.Header[ect.FieldName])
	if err != nil {
		return guard.Tokens{}, err
	}
	var p guard.Tokens
	for _, raw := range raws {
		token, err := t.Verifier.VerifyStored(r.Context(), raw)
		if err != nil {
			return guard.Tokens{}, err
		}
		p.All = append(p.All, token)
	}
	return t.Sort(r, p)
}

// rollbackTokens implements rollback.RequestTokens.
type rollbackTokens struct {
	e      *engine
	policy *tokenPolicy
	keep   time.Duration // how long a rollback is kept
}

// Recorded implements rollback.RequestTokens. A token that stands in the ledger for something else, such as a
// parent that came along with a call, cannot request a rollback.
func (t *rollbackTokens) Recorded(ctx context.Context, token *ect.Token, use [32]byte) (used, acted bool, err error) {
	status, err := t.policy.Evidence.ActStatus(ctx, token, use)
	if status == evidence.Other && err == nil {
		err = &ect.Error{Code: ect.CodeReplayed}
	}
	return status != evidence.Unused, status == evidence.Acted, err
}

func (t *rollbackTokens) Enter(ctx context.Context, all []*ect.Token, token *ect.Token, use [32]byte) error {
	err := t.policy.Evidence.RecordTokens(ctx, all, []*ect.Token{token}, use)
	if refused := (*ect.Error)(nil); err == nil || errors.As(err, &refused) {
		return err
	}
	for _, failed := range []error{store.ErrFull, store.ErrUnhealthy, store.ErrClosed, store.ErrUnknown} {
		if errors.Is(err, failed) {
			return err // unchanged: the token is valid
		}
	}
	return guard.LedgerFailed(err)
}

// Acted implements rollback.RequestTokens. It is kept as long as the rollback, so that the same token
// finds it and cannot request another.
func (t *rollbackTokens) Acted(ctx context.Context, token *ect.Token, use [32]byte) (store.Write, error) {
	now, err := t.e.calls.Store.Now(ctx)
	if err != nil {
		return store.Write{}, err
	}
	return t.policy.Evidence.ActedWrite(ctx, token, use, now.Add(t.keep))
}

func (t *rollbackTokens) Bind(ctx context.Context, token *ect.Token, use [32]byte, acted bool) error {
	err := t.policy.Evidence.Spend(ctx, []*ect.Token{token}, use)
	if err != nil || !acted {
		return err
	}
	if status, err := t.policy.Evidence.UseStatus(ctx, token, use); err != nil || status == evidence.Acted {
		return err
	}
	w, err := t.Acted(ctx, token, use)
	if err == nil {
		_, err = t.e.calls.Store.Commit(ctx, w)
	}
	return err
}

// recorded returns the entry under an id; found is false if there is none, or if its
// content was pruned.
func (t *rollbackTokens) recorded(ctx context.Context, workflow, id string) (entry ledger.Entry, found, pruned bool, err error) {
	log := t.policy.Evidence.Log()
	entry, err = log.Lookup(ctx, workflow, id)
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return entry, false, false, nil
	case errors.Is(err, ledger.ErrPruned):
		return entry, false, true, nil
	}
	return entry, err == nil, false, err
}

func (t *rollbackTokens) Event(ctx context.Context, workflow, id string) (ect.Event, bool, error) {
	entry, found, pruned, err := t.recorded(ctx, workflow, id)
	if !found || evidence.IsUnproven(&entry) {
		return "", found || pruned, err
	}
	event, _ := ect.ParseEvent(entry.Action)
	return event, true, nil
}

// For implements rollback.RequestTokens. The par of a checkpoint is the action that it was made for
// (cascade 4.2.1). For a call without a token of its own, par has what led to it: the
// checkpoint or node of another call, which does not match.
func (t *rollbackTokens) For(ctx context.Context, workflow, checkpoint string, ids []string) (bool, error) {
	entry, found, _, err := t.recorded(ctx, workflow, checkpoint)
	if errors.Is(err, ledger.ErrTampered) {
		return false, nil // the entry was altered, so what it was for is unknown
	}
	if !found {
		return false, err
	}
	recorded := t.policy.Evidence
	for _, id := range ids {
		if id == recorded.NodeID(checkpoint) || id == recorded.SettledID(checkpoint) {
			return true, nil
		}
		if !slices.Contains(entry.Parents, id) {
			continue
		}
		action, found, _, err := t.recorded(ctx, workflow, id)
		if err != nil {
			return false, err
		}
		if _, event := ect.ParseEvent(action.Action); found && !event && !evidence.IsUnproven(&action) && !t.policy.Events.Own(&action) {
			return true, nil
		}
	}
	return false, nil
}

func (t *rollbackTokens) Mine(ctx context.Context, workflow, id string, who router.Reader) (bool, error) {
	return t.policy.graph(t.e).TakesPart(ctx, workflow, id, who)
}

func (t *rollbackTokens) Raw(ctx context.Context, workflow, id string) (string, error) {
	entry, err := t.policy.Evidence.Log().Lookup(ctx, workflow, id)
	if err != nil {
		return "", err
	}
	token, err := t.policy.Evidence.Log().Token(ctx, &entry)
	return string(token), err
}

func (t *rollbackTokens) Result(ctx context.Context, r *rollback.Rollback, request string, v ect.Vocabulary) (string, error) {
	now, err := t.e.calls.Store.Now(ctx)
	if err != nil {
		return "", err
	}
	token, err := t.policy.Events.RollbackResult(now, r, request, v)
	if err != nil {
		return "", err
	}
	return token.Raw(), nil
}

var _ rollback.RequestTokens = (*rollbackTokens)(nil)

// observedLedger updates metrics, events and the log with recorded rollback events after
// their commit.
type observedLedger struct {
	rollback.Ledger
	e *engine
}

// observe calls landed after the evidence was committed.
func observe(e rollback.Evidence, err error, landed func()) (rollback.Evidence, error) {
	if err != nil {
		return e, err
	}
	if e.Batch == nil {
		e.Batch = new(store.Batch)
	}
	e.OnDone(func(err error) error {
		if err == nil {
			landed()
		}
		return err
	})
	return e, nil
}

func (l *observedLedger) Started(ctx context.Context, r *rollback.Rollback, parents []string) (rollback.Evidence, error) {
	seen := *r
	t, err := l.Ledger.Started(ctx, r, parents)
	return observe(t, err, func() { l.e.rollbackStarted(&seen) })
}

func (l *observedLedger) Stepped(ctx context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Evidence, error) {
	status := string(s.Status)
	if s.Cancelled {
		status = stepCancelled
	}
	t, err := l.Ledger.Stepped(ctx, r, s, way)
	checkpoint := s.Checkpoint
	return observe(t, err, func() {
		l.e.counts.add(rollbackSteps, status, 1)
		l.e.rollbacks.trials.ended(checkpoint)
	})
}

func (l *observedLedger) Completed(ctx context.Context, r *rollback.Rollback) (rollback.Evidence, error) {
	seen := *r
	t, err := l.Ledger.Completed(ctx, r)
	return observe(t, err, func() { l.e.rollbackFinished(&seen) })
}

// by returns the kind of requester.
func (e *engine) by(r *rollback.Rollback) string {
	policy := e.latestPolicy()
	switch {
	case r.Operator != "":
		return "operator"
	case policy != nil && r.Requester == policy.Events.Identity():
		return "gateway" // because of an error
	}
	return "agent"
}

func (e *engine) rollbackStarted(r *rollback.Rollback) {
	e.logger.Info("a rollback has begun", zap.String("rollback", r.ID), zap.String("checkpoint", r.Checkpoint),
		zap.String("workflow", r.Workflow), zap.String("scope", string(r.Scope)), zap.Int("steps", len(r.Steps)),
		zap.String("requester", r.Requester), zap.String("operator", r.Operator), zap.String("reason", r.Reason))
	e.emit(eventRollbackStarted, map[string]any{"scope": string(r.Scope), "by": e.by(r), "steps": len(r.Steps)})
}

func (e *engine) rollbackFinished(r *rollback.Rollback) {
	e.counts.add(rollbacks, string(r.Status), 1)
	log := e.logger.Warn // a person has to act
	if r.Status == rollback.Completed {
		log = e.logger.Info
	}
	log("a rollback is finished", zap.String("rollback", r.ID), zap.String("status", string(r.Status)),
		zap.String("workflow", r.Workflow), zap.Bool("unknown", r.Unknown), zap.Bool("mixed", r.Mixed),
		zap.Bool("timed_out", r.TimedOut), zap.Strings("escalations", r.Escalations))
	e.emit(eventRollbackFinished, map[string]any{
		"scope": string(r.Scope), "by": e.by(r), "status": string(r.Status), "unknown": r.Unknown, "mixed": r.Mixed,
		"timed_out": r.TimedOut, "steps": len(r.Steps), "escalations": len(r.Escalations),
	})
}

// rollbackReport returns the metrics of rollbacks; nil if there are none.
func (e *engine) rollbackReport() *rollbackReport {
	c := e.rollbacks.coordinator()
	if c == nil {
		return nil
	}
	n, oldest := c.Unfinished()
	report := &rollbackReport{Running: n, Waiting: c.Waiting()}
	if n > 0 {
		report.OldestAge = time.Since(oldest)
	}
	return report
}
