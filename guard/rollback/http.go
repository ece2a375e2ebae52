package rollback

import (
	"cmp"
	"context"
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
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// DefaultWait is how long an answer waits for the end of its rollback by default.
	DefaultWait = 10 * time.Second
	// LongestWait is the longest time that an answer waits.
	LongestWait = 30 * time.Second
	// tokenTime is the longest time that an answer waits for its token.
	tokenTime = 5 * time.Second
	// retrySeconds is when a client should ask again for a running rollback, in seconds.
	retrySeconds = "2"

	// Path is where rollbacks are asked for; one is read at Path + "/" + id. The others are those of the older drafts,
	// and of the first phase.
	Path        = router.WellKnown + "rollback"
	ATDPath     = "/.well-known/atd/rollback" // see Path
	AERRPath    = "/aerr/rollback"            // see Path
	PreparePath = Path + "/prepare"           // see Path
)

// Routes are the paths at which agents ask for rollbacks and read them.
var Routes = []router.Route[router.Endpoint[*Rollbacks]]{
	{Path: Path, Method: http.MethodPost, To: endpoint{dialect: ect.Cascade}.route()},
	{Path: PreparePath, Method: http.MethodPost, To: endpoint{dialect: ect.Cascade, prepares: true}.route()},
	{Path: Path + "/{id}", Method: http.MethodGet, To: endpoint{dialect: ect.Cascade, reads: true}.route()},
	{Path: ATDPath, Method: http.MethodPost, To: endpoint{dialect: ect.ATD}.route()},
	{Path: AERRPath, Method: http.MethodPost, To: endpoint{dialect: ect.AERR}.route()},
	{Path: "/.well-known/aerr/rollback", Method: http.MethodPost, To: endpoint{dialect: ect.AERR}.route()},
}

// endpoint is what one of the paths is for: without prepares and reads, a rollback is carried out.
type endpoint struct {
	dialect         ect.Vocabulary // the draft that defines the form of a request
	prepares, reads bool
}

func (at endpoint) route() router.Endpoint[*Rollbacks] {
	return router.Endpoint[*Rollbacks]{Serve: at.serve, Fits: at.fits}
}

// fits reports whether a token that names its phase may be presented. Which phase of a rollback the body asks for is
// compared later.
func (at endpoint) fits(_, phase string, _ ect.Ext) bool {
	switch {
	case at.prepares:
		return phase != PhaseExecute
	case at.reads:
		return phase == PhaseStatus
	}
	return phase == PhaseExecute || phase == phaseDry
}

// URL returns the path at which a rollback is read.
func URL(id string) string { return Path + "/" + url.PathEscape(id) }

// coordinator is what endpoints need of a *Coordinator; tests have another one.
type coordinator interface {
	Execute(
		ctx context.Context, r Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
	) (*Rollback, error)
	Prepare(ctx context.Context, r Request) (*preparation, error)
	Release(ctx context.Context, r Request, extra ...store.Write) error
	Reserve(ctx context.Context, p *preparation, last time.Duration, extra ...store.Write) (*preparation, error)
	Prepared(ctx context.Context, id string) (*preparation, error)
	Resolve(ctx context.Context, id, checkpoint string) (string, error)
	AskedWith(ctx context.Context, id, asker string) (string, error)
	Get(ctx context.Context, id string) (*Rollback, error)
	Wait(ctx context.Context, id string) (*Rollback, error)
}

// RequestTokens reads and records the tokens of rollback requests.
type RequestTokens interface {
	// Recorded returns whether a token was used before for the same, and whether that was done. The error is an
	// *ect.Error if it was used for something else.
	Recorded(ctx context.Context, t *ect.Token, use [32]byte) (used, acted bool, err error)
	// Enter records the tokens of a request that are not recorded yet, in one commit with what the
	// requesting one is bound to, and waits until they are in the tree. The error is an *ect.Error
	// if one is refused.
	Enter(ctx context.Context, all []*ect.Token, t *ect.Token, use [32]byte) error
	// Bind binds a requesting token by itself, and with acted records that what it asks for was
	// done. The error is an *ect.Error if it is bound to something else.
	Bind(ctx context.Context, t *ect.Token, use [32]byte, acted bool) error
	// Acted returns the write that what a bound token asks for was done, on the condition that it
	// was not. It is part of the commit that does it.
	Acted(ctx context.Context, t *ect.Token, use [32]byte) (store.Write, error)
	// Event returns the event recorded under an id of a workflow; it is empty for other
	// actions. found is false if nothing is recorded.
	Event(ctx context.Context, workflow, id string) (event ect.Event, found bool, err error)
	// For reports whether one of the ids is the action that a checkpoint was made for: the
	// caller's own token, or the gateway's node of it. It is false if there is no such
	// checkpoint.
	For(ctx context.Context, workflow, checkpoint string, ids []string) (bool, error)
	// Mine reports whether the event recorded under an id of a workflow is linked to the
	// reader's own part in it.
	Mine(ctx context.Context, workflow, id string, who router.Reader) (bool, error)
	// Raw returns the signed token with this id. It waits until the token is signed.
	Raw(ctx context.Context, workflow, id string) (string, error)
	// Result returns the signed token with the result of a finished rollback in a
	// vocabulary other than cascade's. request is the id of the token that requested it.
	Result(ctx context.Context, r *Rollback, request string, v ect.Vocabulary) (string, error)
}

// Rollbacks answers requests for rollbacks. All fields but Coordinators are required. It is safe for concurrent use.
type Rollbacks struct {
	Coordinator coordinator
	Tokens      RequestTokens
	// Ask verifies who requests a rollback. The error is a *problem.Problem or an *ect.Error.
	Ask func(r *http.Request) (*Asker, error)
	// Read identifies who reads a rollback.
	Read func(r *http.Request) (router.Reader, error)
	// Limit bounds the rate of new rollbacks.
	Limit *Limit
	// Rate is how many new rollbacks an issuer, and a workflow, may request in a minute.
	Rate int
	// Lineage says which participants of a workflow may request a rollback.
	Lineage Lineage

	// Whole says that nothing is undone where a part cannot be.
	Whole bool
	// Coordinators are the identities with the authority of a rollback coordinator.
	Coordinators []string
	// Reservation is how long a prepared rollback is reserved.
	Reservation time.Duration
	// PrepareTimeout is how long participants are asked in the first phase.
	PrepareTimeout time.Duration
	// Wait is how long an answer waits.
	Wait time.Duration
	// Waits ends all waiting when the gateway shuts down.
	Waits context.Context
	// Logger gets errors that do not change an answer.
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

func (at endpoint) serve(s *Rollbacks, a router.Responder) error {
	q := &rollbackRequest{Rollbacks: s, Responder: a, endpoint: at}
	serve := q.ask
	if at.reads {
		serve = q.show
	}
	err := serve()
	if err == nil || a.R.Context().Err() != nil {
		return err
	}
	return router.ProblemOf(err, problem.New(problem.StoreUnavailable, "The gateway's store, or its ledger, does not answer. Nothing new was begun."), ProblemOf)
}

// rollbackRequest is one request to Rollbacks.
type rollbackRequest struct {
	*Rollbacks
	router.Responder
	endpoint
	counted counted
	dry     bool // nothing is to be done
	release bool // what is reserved is to be released
	use     [32]byte
}

// coordinator reports whether an identity is a configured rollback coordinator.
func (s *Rollbacks) coordinator(identity string) bool {
	return identity != "" && slices.Contains(s.Coordinators, identity)
}

// show answers GET, for participants of what is rolled back and for coordinators.
func (q *rollbackRequest) show() error {
	id, err := router.ParseID(q.Name)
	if err != nil {
		return err
	}
	if of := q.R.URL.Query().Get("checkpoint_id"); of != "" { // one of several under this id
		if id, err = q.Coordinator.Resolve(q.R.Context(), id, ledger.Canonical(of)); err != nil {
			return err
		}
	}
	patience, err := q.patience(0)
	if err != nil {
		return err
	}
	who, err := q.Read(q.R)
	if err != nil {
		return err
	}
	if who.Anonymous {
		return problem.New(router.Unauthenticated, "Send the credential that the workflow's calls were made with.")
	}
	p, err := q.seen(q.R.Context(), id, who)
	if errors.Is(err, ErrUnknown) {
		return router.UnknownPart()
	}
	if err != nil {
		return err
	}
	if p.Rollback.State == reserved {
		return q.JSON(http.StatusOK, describePrepared(p, id))
	}
	return q.await(p.Rollback, id, patience, ect.Cascade, "", who.Issuer)
}

// seen returns a rollback, accepted or prepared, that a reader may see.
func (q *rollbackRequest) seen(ctx context.Context, id string, who router.Reader) (*preparation, error) {
	p := new(preparation)
	var err error
	if p.Rollback, err = q.Coordinator.Get(ctx, id); errors.Is(err, ErrUnknown) {
		p, err = q.Coordinator.Prepared(ctx, id)
	}
	if err != nil {
		return nil, err
	}
	may, err := q.maySee(p.Rollback, who)
	if err == nil && !may {
		err = router.UnknownPart()
	}
	return p, err
}

// maySee reports whether a reader takes part in what is rolled back.
func (q *rollbackRequest) maySee(r *Rollback, who router.Reader) (bool, error) {
	if who.Issuer != "" && who.Issuer == r.Requester || q.coordinator(who.Issuer) {
		return true, nil
	}
	return q.Tokens.Mine(q.R.Context(), r.Workflow, r.Checkpoint, who)
}

// await answers asker with the rollback once it is finished, or when patience is over.
func (q *rollbackRequest) await(r *Rollback, id string, patience time.Duration, dialect ect.Vocabulary, request, asker string) error {
	if r.State != Finished && patience > 0 {
		ctx, cancel := router.Until(q.R.Context(), q.Waits, patience)
		later, err := q.Coordinator.Wait(ctx, id)
		cancel()
		switch {
		case q.R.Context().Err() != nil:
			return q.R.Context().Err() // the rollback goes on without the client
		case err != nil && later == nil:
			// The rollback is accepted, so the answer is not an error.
			q.Logger.Warn("a rollback could not be waited for", slog.String("rollback", id), slog.Any("error", err))
		default:
			r = later
		}
	}
	if r.State != Finished {
		// P3: with the checkpoint always, or it would say whether somebody else uses the id.
		q.W.Header().Set("Location", URL(cmp.Or(r.Named, id))+"?"+url.Values{"checkpoint_id": {r.Checkpoint}}.Encode())
		q.W.Header().Set("Retry-After", retrySeconds)
		return q.writeRollback(http.StatusAccepted, Shown(r, id))
	}
	ctx, cancel := router.Until(q.R.Context(), q.Waits, tokenTime)
	defer cancel()
	if dialect != ect.Cascade {
		return q.answerIn(ctx, r, id, dialect, request)
	}
	doc := Shown(r, id)
	if r.Complete != "" {
		raw, err := q.signed(ctx, r, id, asker)
		if err != nil && q.R.Context().Err() == nil {
			// The result is valid without the token, which reaches the ledger later.
			q.Logger.Warn("the token of a finished rollback cannot be read", slog.String("rollback", id), slog.Any("error", err))
		}
		doc.ECT = raw
	}
	if doc.ECT != "" {
		q.W.Header().Set(ect.FieldName, doc.ECT)
	}
	return q.writeRollback(http.StatusOK, doc)
}

// writeRollback answers with a rollback, also as a picture where a GET prefers that.
func (q *rollbackRequest) writeRollback(status int, doc *Rollback) error {
	form := ""
	if q.R.Method != http.MethodPost {
		form = q.Form()
	}
	return q.Show(status, form, doc, func() *drawing.Drawing { return Drawing(doc) })
}

// signed is the rollback_complete for asker. The recorded one names the token of the requester; who else has
// asked for the same rollback gets one that names his own, and follows from the recorded one.
func (q *rollbackRequest) signed(ctx context.Context, r *Rollback, id, asker string) (string, error) {
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
	who, err := q.Ask(q.R)
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
	q.use = router.UseAt(q.dialect.String()+" rollback", phase, body)
	if who.Unseen {
		return q.unseen(who.Token, wanted.Checkpoint)
	}
	if q.release {
		return q.endReservation(who, wanted)
	}
	if q.dry || q.prepares {
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
		return &ect.Error{Code: ect.CodeLevel} // C-6.1-a
	case t.Workflow() == "":
		return &ect.Error{Code: ect.CodeWorkflow}
	case !slices.Contains(Asks, t.Event()):
		// Otherwise anybody who was shown a token about something else could use it (ADR
		// 0054).
		return router.Refused(ect.CodeAction, "Only a token whose exec_act is rollback_start or rollback_request, or that of an older draft, asks for a rollback.")
	case q.dialect != ect.Cascade && t.Event() != ect.EventRollbackRequest:
		return router.Refused(ect.CodeAction, "On this path only a rollback_request asks for a rollback, as its draft says.")
	case q.dialect == ect.ATD && len(t.Parents()) != 1:
		return &ect.Error{Code: ect.CodeParents}
	}
	return t.CheckInput(ect.Sum(body))
}

// phase is what the request asks for. It is held to the phase that its token says, if it says one; such a
// token says the body too, which was compared.
func (q *rollbackRequest) phase(t *ect.Token) (string, error) {
	phase := PhaseExecute
	switch {
	case q.release:
		phase = phaseRelease
	case q.dry:
		phase = phaseDry
	case q.prepares:
		phase = phasePrepare
	}
	signed, ok := t.Ext().Text(MemberPhase)
	switch _, there := t.Ext().Raw(MemberPhase); {
	case !there:
		return phase, nil
	case !ok || signed != phase:
		return phase, router.Refused(ect.CodeExt, fmt.Sprintf("%s of the token is another phase than %s.", MemberPhase, phase))
	case t.InputHash().IsZero():
		return phase, &ect.Error{Code: ect.CodeInputHash}
	}
	return phase, nil
}

// request makes the coordinator's request.
func (q *rollbackRequest) request(who *Asker, body []byte) (Request, error) {
	t := who.Token
	wanted := Request{
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
	if said.scope == "" && said.cascade == nil && !q.prepares {
		// Figure 10 has no scope: it is that of the rollback that was prepared, which the same
		// requester has signed.
		prepared, err := q.Coordinator.Prepared(q.R.Context(), wanted.ID)
		switch {
		case err == nil && prepared.Rollback.Checkpoint == said.checkpoint:
			said.scope = string(prepared.Rollback.Scope)
		case err != nil && !errors.Is(err, ErrUnknown):
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
func (q *rollbackRequest) resolve(wanted *Request, id string) (err error) {
	wanted.Named = ""
	if wanted.ID, err = q.Coordinator.Resolve(q.R.Context(), id, wanted.Checkpoint); wanted.ID != id {
		wanted.Named = id
	}
	return err
}

// overtaken reports whether the id of a request has been taken meanwhile for another checkpoint. The
// request then has one of its own.
func (q *rollbackRequest) overtaken(wanted *Request) (bool, error) {
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
		if parents[i] = ledger.Canonical(parents[i]); parents[i] == checkpoint {
			return true, nil
		}
	}
	if len(parents) == 0 {
		return false, nil
	}
	return q.Tokens.For(q.R.Context(), t.Workflow(), checkpoint, parents)
}

// cause returns the error that a token has among its parents; empty if there is none.
func (q *rollbackRequest) cause(t *ect.Token, checkpoint string) (string, error) {
	for _, id := range t.Parents() {
		if ledger.Canonical(id) == checkpoint {
			continue
		}
		event, _, err := q.Tokens.Event(q.R.Context(), t.Workflow(), id)
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
func (q *rollbackRequest) prepare(who *Asker, wanted Request) error {
	return q.untilUndisturbed(who, &wanted, func(ctx context.Context, used, acted bool) error {
		if !used {
			if err := q.limit(&q.counted.issuer, q.Limit.issuer, who.Token.Issuer()); err != nil {
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
			return router.UnknownPart()
		case wanted.Unnamed && wanted.Error == "":
			return ErrUnnamed
		}
		if p.Ready() && p.Rollback.Until.IsZero() && p.Rollback.State == reserved && !q.dry {
			p, err = q.reserve(ctx, who, p, acted)
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
		return q.JSON(code, describePrepared(p, wanted.ID))
	})
}

// untilUndisturbed does what is wanted with a token. It begins anew where another request has used the token, or the
// id, meanwhile.
func (q *rollbackRequest) untilUndisturbed(
	who *Asker, wanted *Request, try func(ctx context.Context, used, acted bool) error,
) error {
	ctx, cancel := router.Until(q.R.Context(), q.Waits, q.acceptTime())
	defer cancel()
	for {
		used, acted, err := q.unused(ctx, who)
		if err == nil {
			err = try(ctx, used, acted)
		}
		switch {
		case errors.As(err, new(*store.Conflict)):
			if store.AwaitGroup(ctx) != nil {
				return err
			}
		case errors.Is(err, ErrMismatch):
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
func (q *rollbackRequest) reserve(ctx context.Context, who *Asker, p *preparation, acted bool) (*preparation, error) {
	switch {
	case acted:
		return nil, router.Refused(ect.CodeReplayed, "What this token has reserved is not reserved any more; prepare with a new one.")
	case who.Late != nil:
		return nil, who.Late
	}
	if err := q.limit(&q.counted.workflow, q.Limit.workflow, who.Token.Workflow()); err != nil {
		return nil, err
	}
	w, err := q.enter(ctx, who)
	if err != nil {
		return nil, err
	}
	return q.Coordinator.Reserve(ctx, p, q.Reservation, w)
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
func (q *rollbackRequest) endReservation(who *Asker, wanted Request) error {
	return q.untilUndisturbed(who, &wanted, func(ctx context.Context, used, acted bool) (err error) {
		if !acted {
			err = q.endOnce(ctx, who, wanted)
		}
		if errors.Is(err, errAccepted) {
			accepted, err := q.Coordinator.Get(ctx, wanted.ID)
			if err != nil {
				return err
			}
			return q.JSON(http.StatusConflict, Shown(accepted, wanted.ID))
		}
		if err != nil {
			return err
		}
		return q.JSON(http.StatusOK, &releasedDocument{urn(cmp.Or(wanted.Named, wanted.ID)), wanted.Checkpoint, statusReleased})
	})
}

// endOnce ends a reservation with a token that has ended none. A request for what is not reserved counts
// in the rates, and uses its token up as well.
func (q *rollbackRequest) endOnce(ctx context.Context, who *Asker, wanted Request) error {
	p, err := q.Coordinator.Prepared(ctx, wanted.ID)
	reserved := err == nil && p.Rollback.State == reserved
	switch {
	case err == nil:
	case !errors.Is(err, ErrUnknown):
		return err
	default:
		if err := q.limit(&q.counted.issuer, q.Limit.issuer, who.Token.Issuer()); err != nil {
			return err
		}
	}
	if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
		return err
	}
	if reserved {
		w, err := q.enter(ctx, who)
		if err != nil {
			return err
		}
		return q.Coordinator.Release(ctx, wanted, w)
	}
	if err := q.Coordinator.Release(ctx, wanted); err != nil {
		return err
	}
	return q.Tokens.Bind(ctx, who.Token, q.use, true)
}

// unused returns whether a token was used for the same before. It refuses a token that was used
// for something else, and an expired one that was not used.
func (q *rollbackRequest) unused(ctx context.Context, who *Asker) (used, acted bool, err error) {
	used, acted, err = q.Tokens.Recorded(ctx, who.Token, q.use)
	if err == nil && !used {
		err = who.Late
	}
	return used, acted, err
}

// accept returns the requested rollback, an existing or a new one. The same token with the
// same content finds its rollback again, even after it has expired; a token is good for
// only one content (P5, E-idempotency-a).
func (q *rollbackRequest) accept(who *Asker, wanted Request) (r *Rollback, err error) {
	err = q.untilUndisturbed(who, &wanted, func(ctx context.Context, used, acted bool) error {
		known, err := q.Coordinator.Get(ctx, wanted.ID)
		switch {
		case errors.Is(err, ErrUnknown):
			known = nil
		case err != nil:
			return err
		}
		foreign := known != nil && known.Workflow != who.Token.Workflow()
		switch {
		case acted && known != nil:
			r = known
			return nil
		case acted:
			return &ect.Error{Code: ect.CodeReplayed} // its rollback was deleted after its retention
		case known == nil && who.Late != nil:
			return who.Late // it was bound, and nothing came of it
		case known == nil || foreign:
			if err := q.limit(&q.counted.issuer, q.Limit.issuer, who.Token.Issuer()); err != nil {
				return err
			}
		}
		if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
			return err
		}
		if foreign {
			return router.UnknownPart()
		}
		r, err = q.execute(ctx, who, &wanted)
		return err
	})
	return r, err
}

// execute asks the coordinator. A refusal is not a step of the workflow, so nothing is
// recorded of it. An accepted rollback follows from its token: the token is recorded first, bound to
// this request, and that it has acted in the commit of the acceptance.
func (q *rollbackRequest) execute(ctx context.Context, who *Asker, wanted *Request) (*Rollback, error) {
	entered := false
	r, err := q.Coordinator.Execute(ctx, *wanted, func(ctx context.Context, refused bool) ([]store.Write, error) {
		// The rate of the workflow is only for its participants, which the plan has checked.
		if err := q.limit(&q.counted.workflow, q.Limit.workflow, who.Token.Workflow()); err != nil || refused {
			return nil, err
		}
		entered = true
		w, err := q.enter(ctx, who)
		return []store.Write{w}, err
	})
	if err == nil && !entered { // it was accepted before
		if wanted.Unnamed && wanted.Error == "" {
			return nil, ErrUnnamed
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
	_, err := q.seen(ctx, id, router.Reader{Issuer: t.Issuer()})
	if errors.Is(err, ErrUnknown) {
		return &ect.Error{Code: ect.CodeReplayed} // it was the token's id that was used before
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
		return router.UnknownPart()
	}
	return nil
}

// unseen refuses a token because of its parents. It makes the same checks and counts as for
// known parents, so that the answer does not reveal whether they exist (P3).
func (q *rollbackRequest) unseen(t *ect.Token, checkpoint string) error {
	if err := q.limit(&q.counted.issuer, q.Limit.issuer, t.Issuer()); err != nil {
		return err
	}
	ctx, cancel := router.Until(q.R.Context(), q.Waits, q.acceptTime())
	defer cancel()
	if err := q.inWorkflow(ctx, t, checkpoint); err != nil {
		return err
	}
	return router.UnknownPart()
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

// issuer counts one new rollback of an issuer. If the rate is exceeded it counts nothing,
// and retry is the time until the next one is allowed.
func (l *Limit) issuer(now time.Time, perMinute int, issuer string) (retry time.Duration, ok bool) {
	return l.take(now, perMinute, bucketOf{false, issuer})
}

// workflow counts one new rollback in a workflow, as issuer does. Call it only for those
// who may roll back there: otherwise anybody who knows the name of a workflow could use up
// its rate.
func (l *Limit) workflow(now time.Time, perMinute int, workflow string) (retry time.Duration, ok bool) {
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
