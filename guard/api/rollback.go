package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// DefaultWait is how long an answer waits for the end of its rollback by default.
	DefaultWait = 10 * time.Second
	// LongestWait is the longest time that an answer waits.
	LongestWait = 30 * time.Second
	// tokenTime is the longest time that an answer waits for its token.
	tokenTime = 5 * time.Second
	// retryAfter is when a client should ask again for a running rollback, in seconds.
	retryAfter = "2"
)

// Coordinator plans and carries out rollbacks. *rollback.Coordinator implements it.
type Coordinator interface {
	// Execute accepts a rollback durably. The same id with the same content returns the same rollback (P5). Once it is
	// known that a new one may be asked for, admit is called, whose writes are part of the accepting commit; refused
	// says that only an error will be recorded.
	Execute(
		ctx context.Context, r rollback.Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
	) (*rollback.Rollback, error)
	// Prepare says what a rollback would do, and what stands in the way. It changes nothing.
	Prepare(ctx context.Context, r rollback.Request) (*rollback.Prepared, error)
	// Release ends what was reserved for a rollback. The error is rollback.ErrAccepted if it was
	// accepted already.
	Release(ctx context.Context, r rollback.Request, extra ...store.Write) error
	// Reserve reserves what was prepared, for as long as last.
	Reserve(ctx context.Context, p *rollback.Prepared, last time.Duration, extra ...store.Write) (*rollback.Prepared, error)
	// Prepared returns a rollback that is reserved, or was accepted after it was prepared; else
	// rollback.ErrUnknown.
	Prepared(ctx context.Context, id string) (*rollback.Prepared, error)
	// Resolve returns the id under which the rollback of a checkpoint is kept that is asked for under id.
	Resolve(ctx context.Context, id, checkpoint string) (string, error)
	// AskedWith returns the id of the token by which somebody else than the requester has asked for a rollback
	// too; empty where he has not.
	AskedWith(ctx context.Context, id, asker string) (string, error)
	// Get returns a rollback, or rollback.ErrUnknown.
	Get(ctx context.Context, id string) (*rollback.Rollback, error)
	// Wait returns a rollback once it is finished. With the error of ctx it returns the
	// rollback as it is.
	Wait(ctx context.Context, id string) (*rollback.Rollback, error)
}

// Tokens reads and records the tokens of rollback requests.
type Tokens interface {
	// Recorded returns whether a token was used before, and for what.
	Recorded(ctx context.Context, t *ect.Token, use evidence.Use) (evidence.TokenStatus, error)
	// Enter records the tokens of a request that are not recorded yet, in one commit with what the
	// requesting one is bound to, and waits until they are in the tree. The error is an *ect.Error
	// if one is refused.
	Enter(ctx context.Context, all []*ect.Token, t *ect.Token, use evidence.Use) error
	// Bind binds a requesting token by itself, and with acted records that what it asks for was
	// done. The error is an *ect.Error if it is bound to something else.
	Bind(ctx context.Context, t *ect.Token, use evidence.Use, acted bool) error
	// Acted returns the write that what a bound token asks for was done, on the condition that it
	// was not. It is part of the commit that does it.
	Acted(ctx context.Context, t *ect.Token, use evidence.Use) (store.Write, error)
	// Event returns the event recorded under an id of a workflow; it is empty for other
	// actions. found is false if nothing is recorded.
	Event(ctx context.Context, workflow, id string) (event ect.Event, found bool, err error)
	// For reports whether one of the ids is the action that a checkpoint was made for: the
	// caller's own token, or the gateway's node of it. It is false if there is no such
	// checkpoint.
	For(ctx context.Context, workflow, checkpoint string, ids []string) (bool, error)
	// Mine reports whether the event recorded under an id of a workflow is linked to the
	// reader's own part in it.
	Mine(ctx context.Context, workflow, id string, who evidence.Reader) (bool, error)
	// Raw returns the signed token with this id. It waits until the token is signed.
	Raw(ctx context.Context, workflow, id string) (string, error)
	// Result returns the signed token with the result of a finished rollback in a
	// vocabulary other than cascade's. request is the id of the token that requested it.
	Result(ctx context.Context, r *rollback.Rollback, request string, v ect.Vocabulary) (string, error)
}

// RollbackOptions are the settings of Rollbacks. All but the last six are required.
type RollbackOptions struct {
	Coordinator Coordinator
	Tokens      Tokens
	// Ask verifies who requests a rollback. The error is a *problem.Problem or an *ect.Error.
	Ask func(r *http.Request) (*Asker, error)
	// Read identifies who reads a rollback.
	Read func(r *http.Request) (evidence.Reader, error)
	// Limit bounds the rate of new rollbacks.
	Limit *Limit
	// Rate is how many new rollbacks an issuer, and a workflow, may request in a minute.
	Rate int
	// Lineage says which participants of a workflow may request a rollback.
	Lineage rollback.Lineage

	// Whole says that nothing is undone where a part cannot be.
	Whole bool
	// Coordinators are the identities with the authority of a rollback coordinator.
	Coordinators []string
	// Reservation is how long a prepared rollback is reserved; rollback.DefaultReservation if
	// zero.
	Reservation time.Duration
	// PrepareTimeout is how long participants are asked in the first phase;
	// rollback.DefaultPrepareTimeout if zero.
	PrepareTimeout time.Duration
	// Wait is how long an answer waits; DefaultWait if zero.
	Wait time.Duration
	// Waits ends all waiting when the gateway shuts down. Nil is never.
	Waits context.Context
	// Logger gets errors that do not change an answer; nil discards them.
	Logger *slog.Logger
}

// Asker is who requests a rollback, according to the tokens of the request.
type Asker struct {
	// Token is the requesting token. It is verified and of level L2 or L3.
	Token *ect.Token
	// Unseen says that the parents of Token are unknown or cannot be its parents. No answer
	// may reveal that (P3).
	Unseen bool
	// All are all tokens of the request.
	All []*ect.Token
	// Late is the error for expired tokens, or nil. An expired token only finds what it was
	// used for before.
	Late error
}

// Rollbacks answers requests for rollbacks. It is safe for concurrent use.
type Rollbacks struct {
	RollbackOptions
}

// NewRollbacks makes a Rollbacks.
func NewRollbacks(o RollbackOptions) *Rollbacks {
	if o.Wait == 0 {
		o.Wait = DefaultWait
	}
	if o.Reservation == 0 {
		o.Reservation = rollback.DefaultReservation
	}
	if o.PrepareTimeout == 0 {
		o.PrepareTimeout = rollback.DefaultPrepareTimeout
	}
	if o.Waits == nil {
		o.Waits = context.Background()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Rollbacks{o}
}

// serve answers. The error is a *problem.Problem that was not sent yet, or that of the request's
// context.
func (s *Rollbacks) serve(a responder, to route) error {
	q := &rollbackRequest{Rollbacks: s, responder: a, route: to}
	serve := q.ask
	if to.endpoint == endpointRollback {
		serve = q.show
	}
	err := serve()
	if err == nil || a.r.Context().Err() != nil {
		return err
	}
	return problemOf(err, problem.New(problem.StoreUnavailable, "The gateway's store, or its ledger, does not answer. Nothing new was begun."))
}

// rollbackRequest is one request to Rollbacks.
type rollbackRequest struct {
	*Rollbacks
	responder
	route
	counted counted
	dry     bool // nothing is to be done
	release bool // what is reserved is to be released
	use     evidence.Use
}

// coordinator reports whether an identity is a configured rollback coordinator.
func (s *Rollbacks) coordinator(identity string) bool {
	return identity != "" && slices.Contains(s.Coordinators, identity)
}

// show answers GET, for participants of what is rolled back and for coordinators.
func (q *rollbackRequest) show() error {
	id, err := ParseID(q.name)
	if err != nil {
		return err
	}
	if of := q.r.URL.Query().Get("checkpoint_id"); of != "" { // one of several under this id
		if id, err = q.Coordinator.Resolve(q.r.Context(), id, evidence.Canonical(of)); err != nil {
			return err
		}
	}
	patience, err := q.patience(0)
	if err != nil {
		return err
	}
	who, err := q.Read(q.r)
	if err != nil {
		return err
	}
	if who.Anonymous {
		return problem.New(AuthenticationRequired, "Send the credential that the workflow's calls were made with.")
	}
	p, err := q.seen(q.r.Context(), id, who)
	if errors.Is(err, rollback.ErrUnknown) {
		return unknownPart()
	}
	if err != nil {
		return err
	}
	if p.Rollback.State == rollback.Reserved {
		return q.writeJSON(http.StatusOK, describePrepared(p, id))
	}
	return q.await(p.Rollback, id, patience, ect.Cascade, "", who.Issuer)
}

// seen returns a rollback, accepted or prepared, that a reader may see.
func (q *rollbackRequest) seen(ctx context.Context, id string, who evidence.Reader) (*rollback.Prepared, error) {
	p := new(rollback.Prepared)
	var err error
	if p.Rollback, err = q.Coordinator.Get(ctx, id); errors.Is(err, rollback.ErrUnknown) {
		p, err = q.Coordinator.Prepared(ctx, id)
	}
	if err != nil {
		return nil, err
	}
	may, err := q.maySee(p.Rollback, who)
	if err == nil && !may {
		err = unknownPart()
	}
	return p, err
}

// maySee reports whether a reader takes part in what is rolled back.
func (q *rollbackRequest) maySee(r *rollback.Rollback, who evidence.Reader) (bool, error) {
	if who.Issuer != "" && who.Issuer == r.Requester || q.coordinator(who.Issuer) {
		return true, nil
	}
	return q.Tokens.Mine(q.r.Context(), r.Workflow, r.Checkpoint, who)
}

// await answers asker with the rollback once it is finished, or when patience is over.
func (q *rollbackRequest) await(r *rollback.Rollback, id string, patience time.Duration, dialect ect.Vocabulary, request, asker string) error {
	if r.State != rollback.Finished && patience > 0 {
		ctx, cancel := until(q.r.Context(), q.Waits, patience)
		later, err := q.Coordinator.Wait(ctx, id)
		cancel()
		switch {
		case q.r.Context().Err() != nil:
			return q.r.Context().Err() // the rollback goes on without the client
		case err != nil && later == nil:
			// The rollback is accepted, so the answer is not an error.
			q.Logger.Warn("a rollback could not be waited for", slog.String("rollback", id), slog.Any("error", err))
		default:
			r = later
		}
	}
	if r.State != rollback.Finished {
		// P3: with the checkpoint always, or it would say whether somebody else uses the id.
		q.w.Header().Set("Location", RollbackURL(cmp.Or(r.Named, id))+"?"+url.Values{"checkpoint_id": {r.Checkpoint}}.Encode())
		q.w.Header().Set("Retry-After", retryAfter)
		return q.writeRollback(http.StatusAccepted, Describe(r, id))
	}
	ctx, cancel := until(q.r.Context(), q.Waits, tokenTime)
	defer cancel()
	if dialect != ect.Cascade {
		return q.answerIn(ctx, r, id, dialect, request)
	}
	doc := Describe(r, id)
	if r.Complete != "" {
		raw, err := q.signed(ctx, r, id, asker)
		if err != nil && q.r.Context().Err() == nil {
			// The result is valid without the token, which reaches the ledger later.
			q.Logger.Warn("the token of a finished rollback cannot be read", slog.String("rollback", id), slog.Any("error", err))
		}
		doc.ECT = raw
	}
	if doc.ECT != "" {
		q.w.Header().Set(ect.FieldName, doc.ECT)
	}
	return q.writeRollback(http.StatusOK, doc)
}

// signed is the rollback_complete for asker. The recorded one names the token of the requester; who else has
// asked for the same rollback gets one that names his own, and follows from the recorded one.
func (q *rollbackRequest) signed(ctx context.Context, r *rollback.Rollback, id, asker string) (string, error) {
	if asker != "" && asker != r.Requester {
		token, err := q.Coordinator.AskedWith(ctx, id, asker)
		if err != nil {
			return "", err
		}
		if token != "" {
			own := *r
			own.Requester = asker
			return q.Tokens.Result(ctx, &own, token, ect.Cascade)
		}
	}
	return q.Tokens.Raw(ctx, r.Workflow, r.Complete)
}

// acceptTime bounds how long the gateway itself takes to accept a request, which reads its workflow.
const acceptTime = 30 * time.Second

// acceptTime is that, and the time in which participants are asked three times: for what they have,
// whether they can, and to prepare.
func (s *Rollbacks) acceptTime() time.Duration { return acceptTime + 3*s.PrepareTimeout }

func (q *rollbackRequest) ask() error {
	who, err := q.Ask(q.r)
	if err != nil {
		return err
	}
	body, err := q.body()
	if err != nil {
		return err
	}
	patience, err := q.patience(q.Wait)
	if err != nil {
		return err
	}
	if err := q.check(who, body); err != nil {
		return err
	}
	wanted, err := q.request(who, body)
	if err != nil {
		return err
	}
	phase, err := q.phase(who.Token)
	if err != nil {
		return err
	}
	q.use = UseAt(q.dialect.String()+" rollback", string(phase), body)
	if who.Unseen {
		return q.unseen(who.Token, wanted.Checkpoint)
	}
	if q.release {
		return q.endReservation(who, wanted)
	}
	if q.dry || q.endpoint == endpointPrepareRollback {
		return q.prepare(who, wanted)
	}
	r, err := q.accept(who, wanted)
	if err != nil {
		return err
	}
	return q.await(r, r.ID, patience, q.dialect, who.Token.ID(), who.Token.Issuer())
}

// Asks are the events whose tokens request a rollback: with them an agent has signed that
// an action is to be undone, or that it begins to undo it (cascade Figure 11).
var Asks = []ect.Event{ect.EventRollbackRequest, ect.EventRollbackStart}

// check checks the requirements on a requesting token.
func (q *rollbackRequest) check(who *Asker, body []byte) error {
	t := who.Token
	switch {
	case t.Level() < ect.L2:
		return refused(ect.CodeLevel) // C-6.1-a
	case t.Workflow() == "":
		return refused(ect.CodeWorkflow)
	case !slices.Contains(Asks, t.Event()):
		// Otherwise anybody who was shown a token about something else could use it (ADR
		// 0054).
		return refusedFor(ect.CodeAction, "Only a token whose exec_act is rollback_start or rollback_request, or that of an older draft, asks for a rollback.")
	case q.dialect != ect.Cascade && t.Event() != ect.EventRollbackRequest:
		return refusedFor(ect.CodeAction, "On this path only a rollback_request asks for a rollback, as its draft says.")
	case q.dialect == ect.ATD && len(t.Parents()) != 1:
		return refused(ect.CodeParents)
	}
	return t.CheckInput(ect.Sum(body))
}

// phase is what the request asks for. It is held to the phase that its token says, if it says one; such a
// token says the body too, which was compared.
func (q *rollbackRequest) phase(t *ect.Token) (rollback.Phase, error) {
	phase := rollback.PhaseExecute
	switch {
	case q.release:
		phase = rollback.PhaseRelease
	case q.dry:
		phase = rollback.PhaseDry
	case q.endpoint == endpointPrepareRollback:
		phase = rollback.PhasePrepare
	}
	signed, ok := t.Ext().Text(evidence.MemberPhase)
	switch _, there := t.Ext().Raw(evidence.MemberPhase); {
	case !there:
		return phase, nil
	case !ok || signed != string(phase):
		return phase, refusedFor(ect.CodeExt, fmt.Sprintf("%s of the token is another phase than %s.", evidence.MemberPhase, phase))
	case t.InputHash().IsZero():
		return phase, refused(ect.CodeInputHash)
	}
	return phase, nil
}

// request makes the coordinator's request.
func (q *rollbackRequest) request(who *Asker, body []byte) (rollback.Request, error) {
	t := who.Token
	wanted := rollback.Request{
		Token: t.ID(), By: t.Issuer(), Lineage: q.Lineage, Coordinator: q.coordinator(t.Issuer()), Whole: q.Whole,
	}
	said, err := q.said(t, body)
	if err != nil {
		return wanted, err
	}
	if err := bind(said, t, q.dialect); err != nil {
		return wanted, err
	}
	wanted.Checkpoint, wanted.Reason, wanted.Urgency = said.checkpoint, said.reason, said.urgency
	if err := q.resolve(&wanted, said.id); err != nil {
		return wanted, err
	}
	wanted.KeepDependants = said.keep != nil && *said.keep
	wanted.Planned, wanted.PartOf, q.dry, q.release = said.planned, said.partOf, said.dry, said.release
	if wanted.Coordinator && (wanted.PartOf != "" || wanted.Named != "") {
		q.counted = counted{issuer: true, workflow: true} // at the coordinator, as one rollback
	}
	if wanted.Coordinator && wanted.PartOf != "" {
		wanted.Precedence = said.precedence
	}
	if said.scope == "" && said.cascade == nil && q.endpoint == endpointAskRollback {
		// Figure 10 has no scope: it is that of the rollback that was prepared, which the same
		// requester has signed.
		prepared, err := q.Coordinator.Prepared(q.r.Context(), wanted.ID)
		switch {
		case err == nil && prepared.Rollback.Checkpoint == said.checkpoint:
			said.scope = string(prepared.Rollback.Scope)
		case err != nil && !errors.Is(err, rollback.ErrUnknown):
			return wanted, err
		}
	}
	if wanted.Scope, err = ParseScope(said.scope, said.cascade); err != nil {
		return wanted, err
	}
	if wanted.Error, err = q.cause(t, said.checkpoint); err != nil {
		return wanted, err
	}
	if q.dialect == ect.AERR && wanted.Error == "" {
		wanted.Unnamed = true // E-rollback-request-b: only the error that led to the rollback is known
		return wanted, nil
	}
	named, err := q.names(t, said.checkpoint)
	wanted.Unnamed = !named
	return wanted, err
}

// resolve sets the id of a request: an id and a checkpoint together name one rollback (cascade 4.3.4).
func (q *rollbackRequest) resolve(wanted *rollback.Request, id string) (err error) {
	wanted.Named = ""
	if wanted.ID, err = q.Coordinator.Resolve(q.r.Context(), id, wanted.Checkpoint); wanted.ID != id {
		wanted.Named = id
	}
	return err
}

// overtaken reports whether the id of a request has been taken meanwhile for another checkpoint. The
// request then has one of its own.
func (q *rollbackRequest) overtaken(wanted *rollback.Request) (bool, error) {
	before := wanted.ID
	err := q.resolve(wanted, cmp.Or(wanted.Named, wanted.ID))
	return err == nil && wanted.ID != before, err
}

// names reports whether a token itself says which checkpoint is meant: in its extension
// members, which bind has compared; in par, which has the checkpoint or the action that it
// was made for; or by the hash of the body that names it (ADR 0054).
func (q *rollbackRequest) names(t *ect.Token, checkpoint string) (bool, error) {
	if id, _ := t.Ext().Text(ect.MemberCheckpointID); id != "" || !t.InputHash().IsZero() {
		return true, nil
	}
	parents := t.Parents()
	for i := range parents {
		if parents[i] = evidence.Canonical(parents[i]); parents[i] == checkpoint {
			return true, nil
		}
	}
	if len(parents) == 0 {
		return false, nil
	}
	return q.Tokens.For(q.r.Context(), t.Workflow(), checkpoint, parents)
}

// cause returns the error that a token has among its parents; empty if there is none.
func (q *rollbackRequest) cause(t *ect.Token, checkpoint string) (string, error) {
	for _, id := range t.Parents() {
		if evidence.Canonical(id) == checkpoint {
			continue
		}
		event, _, err := q.Tokens.Event(q.r.Context(), t.Workflow(), id)
		if err != nil {
			return "", err
		}
		if event == ect.EventError {
			return id, nil
		}
	}
	return "", nil
}

// prepare answers with what the rollback would do (cascade 4.3.2, phase 1), and reserves it
// unless it is a dry run. Nothing is recorded of a token whose request is refused. Any other one is
// bound to this very request, also where it changes nothing.
func (q *rollbackRequest) prepare(who *Asker, wanted rollback.Request) error {
	return q.untilUndisturbed(who, &wanted, func(ctx context.Context, status evidence.TokenStatus) error {
		if status == evidence.Unused {
			if err := q.limit(&q.counted.issuer, q.Limit.Issuer, who.Token.Issuer()); err != nil {
				return err
			}
		}
		if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
			return err
		}
		p, err := q.Coordinator.Prepare(ctx, wanted)
		switch {
		case err != nil:
			return err
		case p.Rollback.Workflow != "" && p.Rollback.Workflow != who.Token.Workflow():
			return unknownPart()
		case wanted.Unnamed && wanted.Error == "":
			return rollback.ErrUnnamed
		}
		if p.Ready() && p.Rollback.Until.IsZero() && p.Rollback.State == rollback.Reserved && !q.dry {
			p, err = q.reserve(ctx, who, p, status)
		} else {
			err = q.Tokens.Bind(ctx, who.Token, q.use, false)
		}
		if err != nil {
			return err
		}
		code := http.StatusOK
		if !p.Ready() {
			code = http.StatusConflict
		}
		return q.writeJSON(code, describePrepared(p, wanted.ID))
	})
}

// untilUndisturbed does what is wanted with a token. It begins anew where another request has used the token, or the
// id, meanwhile.
func (q *rollbackRequest) untilUndisturbed(
	who *Asker, wanted *rollback.Request, try func(context.Context, evidence.TokenStatus) error,
) error {
	ctx, cancel := until(q.r.Context(), q.Waits, q.acceptTime())
	defer cancel()
	for {
		status, err := q.unused(ctx, who)
		if err == nil {
			err = try(ctx, status)
		}
		switch {
		case errors.As(err, new(*store.Conflict)):
			if store.AwaitGroup(ctx) != nil {
				return err
			}
		case errors.Is(err, rollback.ErrMismatch):
			if again, failed := q.overtaken(wanted); failed != nil {
				return failed
			} else if !again {
				return q.mismatch(ctx, who.Token, wanted.ID, err)
			}
		default:
			return err
		}
	}
}

// reserve reserves what was prepared. A token reserves once: it stands in the ledger, and whoever reads
// it there must not hold calls back with it.
func (q *rollbackRequest) reserve(ctx context.Context, who *Asker, p *rollback.Prepared, status evidence.TokenStatus) (*rollback.Prepared, error) {
	switch {
	case status == evidence.Acted:
		return nil, refusedFor(ect.CodeReplayed, "What this token has reserved is not reserved any more; prepare with a new one.")
	case who.Late != nil:
		return nil, who.Late
	}
	if err := q.limit(&q.counted.workflow, q.Limit.Workflow, who.Token.Workflow()); err != nil {
		return nil, err
	}
	acted, err := q.enter(ctx, who)
	if err != nil {
		return nil, err
	}
	return q.Coordinator.Reserve(ctx, p, q.Reservation, acted)
}

// enter records the tokens of a request and what the requesting one is bound to, in one commit: at no
// time can somebody read it who could use it for something else. It returns the write for what it asks
// for.
func (q *rollbackRequest) enter(ctx context.Context, who *Asker) (store.Write, error) {
	if err := q.Tokens.Enter(ctx, who.All, who.Token, q.use); err != nil {
		return store.Write{}, err
	}
	return q.Tokens.Acted(ctx, who.Token, q.use)
}

// endReservation ends what the same requester has reserved with the same request, and answers the
// same where nothing is reserved any more. A token that has asked for it releases no later reservation.
func (q *rollbackRequest) endReservation(who *Asker, wanted rollback.Request) error {
	return q.untilUndisturbed(who, &wanted, func(ctx context.Context, status evidence.TokenStatus) (err error) {
		if status != evidence.Acted {
			err = q.endOnce(ctx, who, wanted)
		}
		if errors.Is(err, rollback.ErrAccepted) {
			accepted, err := q.Coordinator.Get(ctx, wanted.ID)
			if err != nil {
				return err
			}
			return q.writeJSON(http.StatusConflict, Describe(accepted, wanted.ID))
		}
		if err != nil {
			return err
		}
		return q.writeJSON(http.StatusOK, &releasedDocument{urn(cmp.Or(wanted.Named, wanted.ID)), wanted.Checkpoint, statusReleased})
	})
}

// endOnce ends a reservation with a token that has ended none. A request for what is not reserved counts
// in the rates, and uses its token up as well.
func (q *rollbackRequest) endOnce(ctx context.Context, who *Asker, wanted rollback.Request) error {
	p, err := q.Coordinator.Prepared(ctx, wanted.ID)
	reserved := err == nil && p.Rollback.State == rollback.Reserved
	switch {
	case err == nil:
	case !errors.Is(err, rollback.ErrUnknown):
		return err
	default:
		if err := q.limit(&q.counted.issuer, q.Limit.Issuer, who.Token.Issuer()); err != nil {
			return err
		}
	}
	if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
		return err
	}
	if reserved {
		acted, err := q.enter(ctx, who)
		if err != nil {
			return err
		}
		return q.Coordinator.Release(ctx, wanted, acted)
	}
	if err := q.Coordinator.Release(ctx, wanted); err != nil {
		return err
	}
	return q.Tokens.Bind(ctx, who.Token, q.use, true)
}

// unused returns whether a token was used for the same before. It refuses a token that was used
// for something else, and an expired one that was not used.
func (q *rollbackRequest) unused(ctx context.Context, who *Asker) (evidence.TokenStatus, error) {
	status, err := q.Tokens.Recorded(ctx, who.Token, q.use)
	switch {
	case err != nil:
		return status, err
	case status == evidence.Other:
		return status, refused(ect.CodeReplayed)
	case status == evidence.Unused && who.Late != nil:
		return status, who.Late
	}
	return status, nil
}

// accept returns the requested rollback, an existing or a new one. The same token with the
// same content finds its rollback again, even after it has expired; a token is good for
// only one content (P5, E-idempotency-a).
func (q *rollbackRequest) accept(who *Asker, wanted rollback.Request) (r *rollback.Rollback, err error) {
	err = q.untilUndisturbed(who, &wanted, func(ctx context.Context, status evidence.TokenStatus) error {
		known, err := q.Coordinator.Get(ctx, wanted.ID)
		switch {
		case errors.Is(err, rollback.ErrUnknown):
			known = nil
		case err != nil:
			return err
		}
		foreign := known != nil && known.Workflow != who.Token.Workflow()
		switch {
		case status == evidence.Acted && known != nil:
			r = known
			return nil
		case status == evidence.Acted:
			return refused(ect.CodeReplayed) // its rollback was deleted after its retention
		case known == nil && who.Late != nil:
			return who.Late // it was bound, and nothing came of it
		case known == nil || foreign:
			if err := q.limit(&q.counted.issuer, q.Limit.Issuer, who.Token.Issuer()); err != nil {
				return err
			}
		}
		if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
			return err
		}
		if foreign {
			return unknownPart()
		}
		r, err = q.execute(ctx, who, &wanted)
		return err
	})
	return r, err
}

// execute asks the coordinator. A refusal is not a step of the workflow, so nothing is
// recorded of it. An accepted rollback follows from its token: the token is recorded first, bound to
// this request, and that it has acted in the commit of the acceptance.
func (q *rollbackRequest) execute(ctx context.Context, who *Asker, wanted *rollback.Request) (*rollback.Rollback, error) {
	entered := false
	r, err := q.Coordinator.Execute(ctx, *wanted, func(ctx context.Context, refused bool) ([]store.Write, error) {
		// The rate of the workflow is only for its participants, which the plan has checked.
		if err := q.limit(&q.counted.workflow, q.Limit.Workflow, who.Token.Workflow()); err != nil || refused {
			return nil, err
		}
		entered = true
		acted, err := q.enter(ctx, who)
		return []store.Write{acted}, err
	})
	if err == nil && !entered { // it was accepted before
		if wanted.Unnamed && wanted.Error == "" {
			return nil, rollback.ErrUnnamed
		}
		err = q.Tokens.Enter(ctx, who.All, who.Token, q.use)
	}
	if err != nil {
		return nil, err
	}
	return r, q.Tokens.Bind(ctx, who.Token, q.use, true) // no-op unless it was accepted before
}

// mismatch names another rollback with the same id only to callers who may read it (P3).
func (q *rollbackRequest) mismatch(ctx context.Context, t *ect.Token, id string, mismatch error) error {
	_, err := q.seen(ctx, id, evidence.Reader{Issuer: t.Issuer()})
	if errors.Is(err, rollback.ErrUnknown) {
		return refused(ect.CodeReplayed) // it was the token's id that was used before
	}
	return cmp.Or(err, mismatch)
}

// inWorkflow checks that the checkpoint belongs to the token's own workflow (cascade 6.1).
// It checks nothing else, so that unknown checkpoints and those of others are refused alike
// (P3).
func (q *rollbackRequest) inWorkflow(ctx context.Context, t *ect.Token, checkpoint string) error {
	_, found, err := q.Tokens.Event(ctx, t.Workflow(), checkpoint)
	switch {
	case errors.Is(err, ledger.ErrTampered):
		return nil // in this workflow: the coordinator refuses it, with a reason for those who may roll back
	case err != nil:
		return err
	case !found && q.coordinator(t.Issuer()):
		return problem.New(checkpointUnknown, "The token's workflow has no such checkpoint.")
	case !found:
		return unknownPart()
	}
	return nil
}

// unseen refuses a token because of its parents. It makes the same checks and counts as for
// known parents, so that the answer does not reveal whether they exist (P3).
func (q *rollbackRequest) unseen(t *ect.Token, checkpoint string) error {
	if err := q.limit(&q.counted.issuer, q.Limit.Issuer, t.Issuer()); err != nil {
		return err
	}
	ctx, cancel := until(q.r.Context(), q.Waits, q.acceptTime())
	defer cancel()
	if err := q.inWorkflow(ctx, t, checkpoint); err != nil {
		return err
	}
	return unknownPart()
}

// counted says which rates have counted a request: each counts it once, however often it is
// retried.
type counted struct{ issuer, workflow bool }

// limit counts a new rollback in one of the rates (C-6.1-d).
func (q *rollbackRequest) limit(once *bool, take func(time.Time, int, string) (time.Duration, bool), name string) error {
	if *once {
		return nil
	}
	retry, ok := take(time.Now(), q.Rate, name)
	if ok {
		*once = true
		return nil
	}
	p := problem.New(problem.QuotaExceeded, "Too many rollbacks were asked for by this issuer, or in this workflow.")
	p.RetryAfter = retry
	return p
}

// UseAt returns what a token is used for at an endpoint: its phase, if it has several, and the body.
func UseAt(endpoint, phase string, body []byte) evidence.Use {
	of := ect.Sum(body)
	return sha256.Sum256([]byte("agent_guard " + endpoint + "\x00" + phase + "\x00" + of.String()))
}

// maxBuckets bounds the memory of a Limit; each bucket takes about 200 bytes.
const maxBuckets = 100_000

// DefaultRate is how many new rollbacks an issuer, and a workflow, may request in a minute
// by default.
const DefaultRate = 60

// Limit bounds the rate of new rollbacks with a token bucket for each issuer and each
// workflow (C-6.1-d). The zero Limit is ready for use.
type Limit struct {
	mu      sync.Mutex
	buckets map[bucketOf]*rate.Limiter // each holds the tokens of one minute at most
	swept   time.Time
}

type bucketOf struct {
	workflow bool
	name     string
}

// Issuer counts one new rollback of an issuer. If the rate is exceeded it counts nothing,
// and retry is the time until the next one is allowed.
func (l *Limit) Issuer(now time.Time, perMinute int, issuer string) (retry time.Duration, ok bool) {
	return l.take(now, perMinute, bucketOf{false, issuer})
}

// Workflow counts one new rollback in a workflow, as Issuer does. Call it only for those
// who may roll back there: otherwise anybody who knows the name of a workflow could use up
// its rate.
func (l *Limit) Workflow(now time.Time, perMinute int, workflow string) (retry time.Duration, ok bool) {
	return l.take(now, perMinute, bucketOf{true, workflow})
}

func (l *Limit) take(now time.Time, perMinute int, name bucketOf) (retry time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buckets == nil {
		l.buckets = map[bucketOf]*rate.Limiter{}
	}
	perSecond := rate.Limit(float64(perMinute) / 60)
	b := l.buckets[name]
	if b == nil {
		if len(l.buckets) >= maxBuckets && !l.sweep(now) {
			return time.Minute, false // no room: forgetting a bucket would let it start full again
		}
		b = rate.NewLimiter(perSecond, perMinute)
		l.buckets[name] = b
	}
	b.SetLimitAt(now, perSecond) // also adopts the time of a clock that was set back
	b.SetBurstAt(now, perMinute)
	if b.AllowN(now, 1) {
		return 0, true
	}
	missing := (1 - b.TokensAt(now)) / float64(perMinute)
	return time.Duration(missing * float64(time.Minute)), false
}

// sweep deletes full buckets, at most once a second: they are equal to new ones. It reports
// whether there is room now.
func (l *Limit) sweep(now time.Time) bool {
	if now.Sub(l.swept).Abs() < time.Second {
		return false
	}
	l.swept = now
	for name, b := range l.buckets {
		if b.TokensAt(now) >= float64(b.Burst()) {
			delete(l.buckets, name)
		}
	}
	return len(l.buckets) < maxBuckets
}
