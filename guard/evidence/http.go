package evidence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Ledger answers requests about the ledger and its workflows. It is safe for concurrent use
// and has no state but its settings.
type Ledger struct {
	// Log is the ledger. Required. Its Links must include the parents of every entry for
	// which Outcomes returns nothing.
	Log *ledger.Log
	// Outcomes returns the ids of the outcomes of a call for an entry of the gateway. Nil
	// is none.
	Outcomes func(e *ledger.Entry) []string
	// HeadKey is the public key of the heads of a log of the store, by its origin, in the format of
	// note.NewVerifier; empty where it is unknown. If nil, none is known.
	HeadKey func(origin string) string
	// Identities are the issuers of the gateway's own tokens.
	Identities []string
	// Own reports whether the gateway issued an entry, under an earlier identity too; if
	// nil, only Identities count.
	Own func(e *ledger.Entry) bool
	// Verify verifies the tokens of a request, as ect.Verifier.VerifyAll does. The error is
	// an *ect.Error, or any other if the verification itself failed. Required.
	Verify func(r *http.Request, raws []string) ([]*ect.Token, error)
	// Record records tokens durably, all or none. Each is an event with the token's id and
	// workflow, and its Raw as payload. The error is ledger.ErrDuplicate if an id is taken.
	// Required.
	Record func(ctx context.Context, tokens []*ect.Token) error
	// Bind binds the token of who puts a plan to that, durably. The error is a *Problem. Nil does nothing.
	Bind func(ctx context.Context, t *ect.Token, use Use) error
	// Refused takes the tokens of a request that was refused since what they name is not known here,
	// or not to their issuer. It must behave the same whatever they name (P3). Nil does nothing.
	Refused func(r *http.Request, raws []string) error
	// Verified checks the signature of one of the gateway's tokens. If nil, documents say
	// that it is unknown.
	Verified func(ctx context.Context, raw string) error
	// Undos is the store of checkpoints; nil if there is none.
	Undos *checkpoint.Store
	// Execution returns the state of a guarded call, and the status of its answer or 0. If
	// nil, states are unknown.
	Execution func(ctx context.Context, key execution.Key) (state string, status int, err error)
	// Called reports whether the gateway has guarded calls of a caller. If nil, every
	// caller may have made calls.
	Called func(ctx context.Context, caller [16]byte) (bool, error)
	// Coordinators are the identities with the authority of a rollback coordinator: they may read
	// the tokens of all workflows, to find out what a rollback has to undo.
	Coordinators []string
	// Reaching are the escalations of a workflow that participants are told of. Nil is none.
	Reaching func(ctx context.Context, workflow string) ([]hitl.Escalation, error)
	// Complete records the end of a workflow, with the token in which an agent states it, or nil, and
	// returns the id of the gateway's token. The error is ErrEndedMeanwhile if something was recorded in
	// the workflow since, or ledger.ErrDuplicate if the agent's token is recorded. Required.
	Complete func(ctx context.Context, end *End, stated *ect.Token) (id string, err error)
	// OpenSince is the version of the note that the end of a workflow is awaited, zero without one.
	// Required for Complete.
	OpenSince func(ctx context.Context, workflow string) (store.Version, error)
	// AwaitEnd notes that the end of a workflow is awaited, since it has a plan. Nil does nothing.
	AwaitEnd func(ctx context.Context, workflow string) error
	// Plans are those of the configuration, by their wf_id.
	Plans map[string]*plan.Descriptor
	// Assigned are the plans of workflows; nil takes none. MayPut identifies who wants to put one, or only
	// asks, by the header of the request: who puts one has a token with the hash of a body, which the caller
	// compares, or none. The error is a *problem.Problem or an *ect.Error. CanUndo says whether an action can be undone, and whether there is such an action; nil
	// knows none.
	Assigned *plan.Store
	MayPut   func(r *http.Request, puts bool) (*MayPut, error) // see Assigned
	CanUndo  func(action string) (reversible, known bool)      // see Assigned
	// Followers wakes who follows workflows; without it nobody can. Ends ends their streams with the
	// configuration; nil is never.
	Followers *Followers
	Ends      context.Context // see Followers
	// Waits ends all waiting for the ledger when the gateway shuts down. Nil is never.
	Waits context.Context
	// MaxNodes is the largest number of entries of a workflow that one request reads;
	// ect.MaxAncestors if zero.
	MaxNodes int
	// MaxPlanned is the same for a workflow with a plan, of which a document still has MaxNodes tokens at
	// most; 100,000 if zero.
	MaxPlanned int
}

// NewLedger returns a Ledger with defaults.
func NewLedger(s Ledger) *Ledger {
	s.MaxNodes, s.MaxPlanned = cmp.Or(s.MaxNodes, ect.MaxAncestors), cmp.Or(s.MaxPlanned, maxEnding)
	if s.Waits == nil {
		s.Waits = context.Background()
	}
	return &s
}

// Asked is a request to a Ledger by somebody whom the gateway has identified.
type Asked struct {
	*Ledger
	Who router.Reader
}

// Routes are the paths of the ledger, of workflows and of agents' errors.
var Routes = []router.Route[router.Endpoint[Asked]]{
	{Path: router.WellKnown + "ledger/head", Method: http.MethodGet, To: reads((*ledgerRequest).head, nil)},
	{Path: router.WellKnown + "ledger/proof", Method: http.MethodGet, To: reads((*ledgerRequest).proof, nil)},
	{Path: router.WellKnown + "ledger/consistency", Method: http.MethodGet, To: reads((*ledgerRequest).consistency, nil)},
	{Path: entriesPath, Method: http.MethodGet, To: reads((*ledgerRequest).entryByID, nil)},
	{Path: entriesPath + "/{index}", Method: http.MethodGet, To: reads((*ledgerRequest).entry, nil)},
	{Path: workflowPath, Method: http.MethodGet + ", " + http.MethodPut, To: at((*ledgerRequest).workflowOrPlan)},
	{Path: workflowPath + "/tokens", Method: http.MethodGet, To: router.Endpoint[Asked]{
		Serve: reads((*ledgerRequest).workflowTokens, nil).Serve, Fits: router.PhaseIs(PhaseRead),
	}},
	{Path: workflowPath + "/complete", Method: http.MethodPost, To: at((*ledgerRequest).complete)},
	{Path: router.WellKnown + "checkpoints/{id}", Method: http.MethodGet, To: router.Endpoint[Asked]{
		Serve: reads((*ledgerRequest).checkpoint, router.UnknownPart).Serve,
		Fits: func(name, phase string, ext ect.Ext) bool {
			id, err := router.Segment(name, "checkpoint")
			return err == nil && phase == PhaseCheckpoint && id == NamedCheckpoint(ext)
		},
	}},
	{Path: router.WellKnown + "errors", Method: http.MethodPost, To: at((*ledgerRequest).takeErrors)},
}

const (
	entriesPath  = router.WellKnown + "ledger/entries"
	workflowPath = router.WellKnown + "workflows/{id}"
)

// at answers with serve.
func at(serve func(*ledgerRequest) error) router.Endpoint[Asked] {
	return router.Endpoint[Asked]{Serve: func(s Asked, a router.Responder) error {
		q := &ledgerRequest{Ledger: s.Ledger, Responder: a, who: s.Who}
		return q.problem(serve(q))
	}}
}

// reads answers with serve those who may read. Those with an unknown credential are among them only where unknown is
// what they get if they have made no calls.
func reads(serve func(*ledgerRequest) error, unknown func() *problem.Problem) router.Endpoint[Asked] {
	return at(func(q *ledgerRequest) error { return q.reading(serve, unknown) })
}

// ledgerRequest is one request to a Ledger.
type ledgerRequest struct {
	*Ledger
	router.Responder
	who router.Reader
}

func (q *ledgerRequest) workflowOrPlan() error {
	if q.R.Method == http.MethodPut {
		return q.putPlan()
	}
	return q.reading((*ledgerRequest).workflow, unknownWorkflow)
}

func (q *ledgerRequest) reading(serve func(*ledgerRequest) error, unknown func() *problem.Problem) error {
	switch {
	case q.who.Anonymous:
		return problem.New(router.Unauthenticated, "Send the credential that the workflow's calls were made with.")
	case !q.who.Credential:
	case unknown == nil:
		return problem.New(router.Unauthenticated,
			"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
	default:
		// Reads and waits nothing for who has made no calls here, since anybody can make up a credential.
		if called, err := q.hasCalled(q.R.Context(), q.who); err != nil || !called {
			return cmp.Or(err, error(unknown()))
		}
	}
	return serve(q)
}

// hasCalled reports whether the reader may have taken part in anything.
func (s *Ledger) hasCalled(ctx context.Context, who router.Reader) (bool, error) {
	if !who.Credential || s.Called == nil {
		return true, nil
	}
	return s.Called(ctx, who.Caller)
}

// problem maps an error to a problem, unless the client has disconnected.
func (q *ledgerRequest) problem(err error) error {
	if err == nil || q.R.Context().Err() != nil {
		return err
	}
	otherwise := problem.New(problem.StoreUnavailable, "The gateway's ledger does not answer.")
	if errors.Is(err, ect.ErrUnavailable) {
		otherwise = problem.New(problem.ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.")
	}
	return router.ProblemOf(err, otherwise, plan.ProblemOf, rollback.ProblemOf)
}

// LedgerHead is the newest signed head of a log. Its members are an API.
type LedgerHead struct {
	Origin string    `json:"origin"`
	Size   int64     `json:"size"`
	Root   tlog.Hash `json:"root"`
	// Key is the public key that verifies the note.
	Key string `json:"key,omitempty"`
	// Note is the signed note, which is authoritative for the other members.
	Note string `json:"note"`
	// Altered says that no head of this log verifies: it has no other members then.
	Altered bool `json:"altered,omitempty"`
	// Logs are the heads of the other logs of the store: each node of a fleet has one. It is empty for a log
	// that the request names.
	Logs []LedgerHead `json:"logs,omitempty"`
}

// head answers with the newest head, as JSON or as the signed note itself: that of this node's log, with
// those of the others, or that of the log that the request names.
func (q *ledgerRequest) head() error {
	p, err := router.ParseParams(q.R.URL, "log")
	if err != nil {
		return err
	}
	log, named, err := q.log(p)
	if err != nil {
		return err
	}
	head := log.Head()
	q.W.Header().Set("Vary", "Accept")
	if router.Preferred(q.R, "application/json", "text/plain") == "text/plain" {
		q.Write(http.StatusOK, "text/plain; charset=utf-8", head.Note)
		return nil
	}
	doc := q.headDocument(&head)
	if named {
		return q.JSON(http.StatusOK, doc)
	}
	origins, err := log.Logs(q.R.Context())
	if err != nil {
		return err
	}
	for _, origin := range origins {
		if origin == head.Origin {
			continue
		}
		other, err := log.In(q.R.Context(), origin)
		if errors.Is(err, ledger.ErrNotFound) {
			continue // nothing of it can be verified here
		}
		if errors.Is(err, ledger.ErrTampered) {
			doc.Logs = append(doc.Logs, LedgerHead{Origin: origin, Altered: true})
			continue
		}
		if err != nil {
			return err
		}
		theirs := other.Head()
		doc.Logs = append(doc.Logs, q.headDocument(&theirs))
	}
	return q.JSON(http.StatusOK, doc)
}

func (s *Ledger) headDocument(head *ledger.Head) LedgerHead {
	doc := LedgerHead{Origin: head.Origin, Size: head.Size, Root: head.Root, Note: string(head.Note)}
	if s.HeadKey != nil {
		doc.Key = s.HeadKey(head.Origin)
	}
	return doc
}

// log is the log that a request names by the parameter log, or else this node's.
func (q *ledgerRequest) log(p router.Params) (log *ledger.Log, named bool, err error) {
	origin, named, err := p.Name("log")
	if err != nil || !named {
		return q.Log, false, err
	}
	log, err = q.Log.In(q.R.Context(), origin)
	if errors.Is(err, ledger.ErrNotFound) {
		err = router.Invalid("There is no such log: ledger/head lists all.")
	}
	return log, true, err
}

// proofDocument is an inclusion proof. Its members are an API.
type proofDocument struct {
	Log   string           `json:"log"`
	Index int64            `json:"index"`
	Size  int64            `json:"size"`
	Proof tlog.RecordProof `json:"proof"`
}

// proof answers with the inclusion proof of the entry at an index, in the tree of a size or
// the newest.
func (q *ledgerRequest) proof() error {
	p, err := router.ParseParams(q.R.URL, "index", "size", "log")
	if err != nil {
		return err
	}
	log, _, err := q.log(p)
	if err != nil {
		return err
	}
	index, err := p.Required("index")
	if err != nil {
		return err
	}
	size, err := sizeOf(log, p, "size")
	if err != nil {
		return err
	}
	proof, err := log.Prove(q.R.Context(), index, size)
	if err != nil {
		return beyond(log, err)
	}
	return q.JSON(http.StatusOK, proofDocument{log.Origin(), index, size, append(tlog.RecordProof{}, proof...)})
}

// consistencyDocument is a consistency proof. Its members are an API.
type consistencyDocument struct {
	Log   string         `json:"log"`
	Old   int64          `json:"old"`
	New   int64          `json:"new"`
	Proof tlog.TreeProof `json:"proof"`
}

// consistency answers with the proof that the tree of size new, by default the newest,
// extends the tree of size old.
func (q *ledgerRequest) consistency() error {
	p, err := router.ParseParams(q.R.URL, "old", "new", "log")
	if err != nil {
		return err
	}
	log, _, err := q.log(p)
	if err != nil {
		return err
	}
	older, err := p.Required("old")
	if err != nil {
		return err
	}
	newer, err := sizeOf(log, p, "new")
	if err != nil {
		return err
	}
	if older > newer {
		return router.Invalid("old is larger than new.")
	}
	proof, err := log.ProveConsistency(q.R.Context(), older, newer)
	if err != nil {
		return beyond(log, err)
	}
	return q.JSON(http.StatusOK, consistencyDocument{log.Origin(), older, newer, append(tlog.TreeProof{}, proof...)})
}

// sizeOf reads the size of a log's tree from a parameter; by default that of the newest head.
func sizeOf(log *ledger.Log, p router.Params, name string) (int64, error) {
	size, there, err := p.Number(name)
	if !there {
		size = log.Head().Size
	}
	return size, err
}

// beyond makes the problem for a size that the tree does not have. Every reader may know
// the tree's size.
func beyond(log *ledger.Log, err error) error {
	if errors.Is(err, ledger.ErrNotFound) {
		return problem.New(entryUnknown, fmt.Sprintf("The tree has %d entries.", log.Head().Size))
	}
	return err
}

// entryDocument is an entry with its proof. Its members are an API.
type entryDocument struct {
	Log      string    `json:"log"`
	Index    int64     `json:"index"`
	Recorded time.Time `json:"recorded"`

	ID       string    `json:"jti"`
	Workflow string    `json:"wid,omitempty"`
	Action   string    `json:"exec_act"`
	Issuer   string    `json:"iss,omitempty"`
	Parents  []string  `json:"par"`
	Time     time.Time `json:"time,omitzero"`

	// Signed says that Token has a signature. If the gateway could not sign the event,
	// there is no token and only Leaf describes it.
	Signed bool   `json:"signed"`
	Level  string `json:"level,omitempty"`
	Token  string `json:"token,omitempty"`
	// Leaf has the exact bytes that Receipt proves.
	Leaf []byte `json:"leaf"`
	// Receipt is under the newest head of Log. It is empty for a log whose key is not known here.
	Receipt *ledger.Receipt `json:"receipt,omitempty"`
}

func unknownEntry() error {
	return problem.New(entryUnknown, "Nothing of it is known for the identity that asks.")
}

// notThere makes the problem for an entry that cannot be returned.
func notThere(err error) error {
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return unknownEntry()
	case errors.Is(err, ledger.ErrPruned):
		return problem.New(entryPruned, "Its hash is in the tree.")
	}
	return err
}

// entry answers with the entry at an index of this node's log, or of the one that the request names.
func (q *ledgerRequest) entry() error {
	p, err := router.ParseParams(q.R.URL, "log")
	if err != nil {
		return err
	}
	log, _, err := q.log(p)
	if err != nil {
		return err
	}
	index, ok := router.ParseNumber(q.Name)
	if !ok {
		return router.Invalid("The index is not a whole number from 0 on, without a sign or leading zeros.")
	}
	ctx := q.R.Context()
	e, err := log.Entry(ctx, index)
	if err != nil {
		return notThere(err)
	}
	switch may, err := q.mayRead(ctx, &e, q.who); {
	case err != nil:
		return err
	case !may:
		return unknownEntry()
	}
	return q.writeEntry(&e)
}

// entryByID answers with the entry of a token. With the workflow's name, the request can
// wait for an entry that is not in the tree yet.
func (q *ledgerRequest) entryByID() error {
	p, err := router.ParseParams(q.R.URL, "jti", "wid", "wait")
	if err != nil {
		return err
	}
	id, there, err := p.Name("jti")
	if err != nil {
		return err
	}
	if !there {
		return router.Invalid("jti is missing.")
	}
	name, there, err := p.Name("wid")
	if err != nil {
		return err
	}
	wait, err := p.Wait()
	if err != nil {
		return err
	}
	if !there {
		return q.entryAnywhere(id)
	}
	for _, wid := range workflowIDs(name) {
		found, err := q.entryInWorkflow(wid, id, wait)
		if found || err != nil {
			return err
		}
	}
	return unknownEntry()
}

// entryInWorkflow answers with an entry of a workflow if the reader may see it. Only
// participants of the workflow can wait: the duration must not reveal to others whether
// there is an entry.
func (q *ledgerRequest) entryInWorkflow(wid, id string, wait time.Duration) (found bool, err error) {
	ctx := q.R.Context()
	e, err := q.Log.Lookup(ctx, wid, id)
	// After the lookup, so that it includes an entry that was recorded meanwhile.
	part, partErr := q.participationOf(ctx, wid, q.who)
	if partErr != nil {
		return false, partErr
	}
	// Wait for unknown entries too: the reader may have the id of a call that is not
	// recorded yet.
	if errors.Is(err, ledger.ErrNotFound) && wait > 0 && !part.Empty() {
		waits, cancel := router.Until(q.R.Context(), q.Waits, wait)
		defer cancel()
		if late, waitErr := q.Log.Await(waits, wid, id); waitErr == nil {
			e, err = late, nil
			part, err = q.participationOf(ctx, wid, q.who)
		} else if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return false, nil
	case errors.Is(err, ledger.ErrPruned):
		if part.Empty() {
			return false, nil // its owner is unknown
		}
	case err != nil:
		return false, err
	case !part.Has(e.ID):
		may := q.issued(&e, q.who)
		if !may && part.Truncated {
			may, err = q.mayRead(ctx, &e, q.who)
		}
		if !may || err != nil {
			return false, err
		}
	}
	if err != nil {
		return false, notThere(err)
	}
	return true, q.writeEntry(&e)
}

// entryAnywhere finds the one entry with an id that the reader may see, in any workflow.
func (q *ledgerRequest) entryAnywhere(id string) error {
	ctx := q.R.Context()
	all, err := q.Log.Find(ctx, id)
	if err != nil {
		return err
	}
	var seen []*ledger.Entry
	for i := range all {
		may, err := q.mayRead(ctx, &all[i], q.who)
		if err != nil {
			return err
		}
		if may {
			seen = append(seen, &all[i])
		}
	}
	switch len(seen) {
	case 0:
		return unknownEntry()
	case 1:
		return q.writeEntry(seen[0])
	}
	return router.Invalid("The id stands in several workflows: name one of them with wid.")
}

// token is the token of an entry; empty if it has none, or if the key is gone that would sign
// it.
func (s *Ledger) token(ctx context.Context, e *ledger.Entry) (string, error) {
	token, err := s.Log.Token(ctx, e)
	if errors.Is(err, ledger.ErrNoToken) {
		return "", nil
	}
	return string(token), err
}

func (q *ledgerRequest) writeEntry(e *ledger.Entry) error {
	token, err := q.token(q.R.Context(), e)
	if err != nil {
		return err
	}
	doc := entryDocument{
		Log: e.Log, Index: e.Index, Recorded: e.Recorded.UTC(),
		ID: e.ID, Workflow: e.Workflow, Action: e.Action, Issuer: e.Issuer,
		Parents: append([]string{}, e.Parents...), Time: e.Time.UTC(),
		Level: levelOf(token), Leaf: e.Leaf, Token: token,
	}
	doc.Signed = doc.Level != "" && doc.Level != "L1"
	log, err := q.Log.In(q.R.Context(), e.Log)
	if err == nil {
		var receipt ledger.Receipt
		receipt, err = log.Receipt(q.R.Context(), e.Index)
		doc.Receipt = &receipt
	}
	if err != nil && !errors.Is(err, ledger.ErrNotFound) {
		return err
	}
	return q.JSON(http.StatusOK, doc)
}

const (
	// maxBody is the largest body with errors, in bytes.
	maxBody = 1 << 20
	// catchUpTime is how long an answer waits for what other gateways know.
	catchUpTime = 5 * time.Second
	// maxRounds is how often recording is attempted if others record the same tokens
	// concurrently.
	maxRounds = 3
)

// recordedDocument lists the recorded errors. Its members are an API.
type recordedDocument struct {
	Recorded []recordedError `json:"recorded"`
}

type recordedError struct {
	ID       string `json:"jti"`
	Workflow string `json:"wid"`
	Log      string `json:"log"`
	Index    int64  `json:"index"`
	// Entry is the path of the entry and its receipt.
	Entry string `json:"entry"`
}

// takeErrors records the error tokens of agents (cascade 6.2; ATD, "False Error
// Injection"). The sender is the signer of the tokens. Repeating a request gives the same
// answer, even after the tokens have expired.
func (q *ledgerRequest) takeErrors() error {
	raws, err := q.errorTokens()
	if err != nil {
		return err
	}
	all := make([]*ect.Unverified, len(raws))
	for i, raw := range raws {
		if all[i], err = ect.ParseInsecure(raw); err != nil {
			return err
		}
		if err := checkError(all[i]); err != nil {
			return err
		}
	}
	status, err := q.keep(raws, all)
	if code := (*ect.Error)(nil); q.Refused != nil && errors.As(err, &code) && (code.Code == ect.CodeParentUnknown || code.Code == ect.CodeExt) {
		if failed := q.Refused(q.R, raws); failed != nil {
			return failed
		}
	}
	if err != nil {
		return err
	}
	var doc recordedDocument
	for _, u := range all {
		e, err := q.Log.Lookup(q.R.Context(), u.Workflow(), u.ID())
		if err != nil {
			return err
		}
		doc.Recorded = append(doc.Recorded, recordedError{e.ID, e.Workflow, e.Log, e.Index, entryURL(e.Workflow, e.ID)})
	}
	if len(doc.Recorded) == 1 {
		q.W.Header().Set("Location", doc.Recorded[0].Entry)
	}
	return q.JSON(status, doc)
}

// errorTokens returns the tokens of the body, or of the header if there is no body.
func (q *ledgerRequest) errorTokens() ([]string, error) {
	body, err := io.ReadAll(io.LimitReader(q.R.Body, maxBody+1))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge) || len(body) > maxBody:
		return nil, &ect.Error{Code: ect.CodeTooLarge}
	case err != nil:
		return nil, router.Invalid("The body could not be read to its end.")
	}
	var raws []string
	if len(body) == 0 {
		raws, err = ect.ParseFields(q.R.Header.Values(ect.FieldName))
	} else {
		var ours bool
		if raws, ours, err = ect.ParseBody(q.R.Header.Get("Content-Type"), body); !ours {
			return nil, router.Invalid("Send tokens in " + ect.FieldName + " without a body, or a body of the type " +
				ect.MediaType + ", or a JSON array of tokens.")
		}
	}
	slices.Sort(raws)
	raws = slices.Compact(raws)
	switch {
	case err != nil:
		return nil, err
	case len(raws) == 0 && q.who.Anonymous:
		return nil, problem.New(router.Unauthenticated, "Send the error as a signed token.")
	case len(raws) == 0:
		return nil, &ect.Error{Code: ect.CodeMissing}
	case len(raws) > ledger.MaxEvents || slices.ContainsFunc(raws, func(raw string) bool { return len(raw) > ledger.MaxPayload }):
		return nil, &ect.Error{Code: ect.CodeTooLarge}
	}
	return raws, nil
}

// checkError checks the claims of an error token (A-error-signaling-b to -d). A checkpoint
// is required only if the token has one to name. Tokens of the cascade vocabulary need no
// extension: that draft does not define the form of the errors in its figures.
func checkError(u *ect.Unverified) error {
	severity, _ := u.Ext().Text(ect.MemberSeverity)
	_, said := u.Ext().Raw(ect.MemberSeverity)
	switch {
	case u.Event() != ect.EventError:
		return &ect.Error{Code: ect.CodeAction}
	case u.Level() < ect.L2:
		return &ect.Error{Code: ect.CodeLevel} // C-6.2-a
	case u.Workflow() == "":
		return &ect.Error{Code: ect.CodeWorkflow}
	case len(u.Parents()) == 0:
		return &ect.Error{Code: ect.CodeParents}
	case said && !slices.Contains([]string{"info", "warning", "error", "critical"}, severity):
		return &ect.Error{Code: ect.CodeExt}
	}
	for _, m := range u.Lacks() {
		if raw, there := u.Ext().Raw(m); m != ect.MemberCheckpointID || there && raw != "null" {
			return &ect.Error{Code: ect.CodeExt, Lacks: u.Vocabulary().Member(m)}
		}
	}
	return nil
}

// keep records the tokens that are not recorded yet, all or none, and returns the HTTP
// status.
func (q *ledgerRequest) keep(raws []string, all []*ect.Unverified) (status int, err error) {
	status = http.StatusOK
	var verified []*ect.Token
	for range maxRounds {
		fresh, taken, err := q.fresh(raws, all)
		if err != nil || len(fresh) == 0 {
			return status, err
		}
		if verified == nil {
			if verified, err = q.Verify(q.R, fresh); err != nil {
				return 0, err
			}
		}
		if taken {
			return 0, &ect.Error{Code: ect.CodeReplayed}
		}
		tokens := slices.DeleteFunc(slices.Clone(verified), func(t *ect.Token) bool { return !slices.Contains(fresh, t.Raw()) })
		if len(tokens) != len(fresh) {
			return 0, fmt.Errorf("%d of %d tokens were verified", len(tokens), len(fresh))
		}
		if err := q.checkParents(tokens, all); err != nil {
			return 0, err
		}
		switch err := q.Record(q.R.Context(), tokens); {
		case err == nil:
			return http.StatusCreated, nil
		case !errors.Is(err, ledger.ErrDuplicate):
			return 0, err
		}
	}
	return 0, errors.New("the tokens' ids were taken again and again")
}

// fresh returns the tokens that are not recorded yet. taken says that another token has one
// of the ids; only somebody who can sign as the issuer may learn that.
func (q *ledgerRequest) fresh(raws []string, all []*ect.Unverified) (fresh []string, taken bool, err error) {
	for i, raw := range raws {
		e, err := q.Log.Lookup(q.R.Context(), all[i].Workflow(), all[i].ID())
		switch {
		case errors.Is(err, ledger.ErrNotFound):
			fresh = append(fresh, raw)
		case err != nil && !errors.Is(err, ledger.ErrPruned):
			return nil, false, err
		default:
			token := ""
			if err == nil {
				if token, err = q.token(q.R.Context(), &e); err != nil {
					return nil, false, err
				}
			}
			if token != raw {
				fresh, taken = append(fresh, raw), true
			}
		}
	}
	return fresh, taken, nil
}

// checkParents checks that all parents, and the checkpoint if one is named, are in the
// token's own workflow, and that its issuer took part in them. Those of others count as
// unknown (P3).
func (q *ledgerRequest) checkParents(tokens []*ect.Token, all []*ect.Unverified) error {
	for _, t := range tokens {
		for _, id := range t.Parents() {
			known, err := q.knows(t.Workflow(), id, all)
			if err != nil {
				return err
			}
			if !known {
				return &ect.Error{Code: ect.CodeParentUnknown}
			}
		}
		if checkpoint := NamedCheckpoint(t.Ext()); checkpoint != "" {
			known, err := q.knows(t.Workflow(), checkpoint, nil)
			if err != nil {
				return err
			}
			if !known {
				return &ect.Error{Code: ect.CodeExt}
			}
		}
		if err := q.CheckReport(q.R.Context(), t, tokens); err != nil {
			return err
		}
	}
	return nil
}

// knows reports whether a workflow has a token, or the same request brings it.
func (q *ledgerRequest) knows(wid, id string, along []*ect.Unverified) (bool, error) {
	if slices.ContainsFunc(along, func(u *ect.Unverified) bool { return u.Workflow() == wid && u.ID() == id }) {
		return true, nil
	}
	return q.Log.Has(q.R.Context(), wid, id)
}

// entryURL returns the path at which an entry is read.
func entryURL(wid, id string) string {
	return entriesPath + "?" + url.Values{"jti": {id}, "wid": {wid}}.Encode()
}

// Kinds are the problems of the ledger, in the order in which they are documented.
var Kinds = []problem.Kind{entryUnknown, entryPruned, WorkflowUnknown, workflowRunning, initiatorRequired}

var (
	entryUnknown = problem.Kind{
		Slug: "entry-unknown", Status: http.StatusNotFound,
		Title:    "The ledger has no such entry for this reader",
		Meaning:  "Nothing stands there, or it belongs to a workflow in which the identity that asks has no part. The two are not told apart.",
		Caller:   "Ask with the identity that took part in the workflow. An entry reaches the ledger a moment after its request.",
		Operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	entryPruned = problem.Kind{
		Slug: "entry-pruned", Status: http.StatusGone,
		Title:    "The content of the entry is no longer kept",
		Meaning:  "The entry was recorded and its content was pruned after the retention. Its hash is still in the tree, and proofs over it still hold.",
		Caller:   "Use a copy of the entry that was made before, if there is one; its receipt and the inclusion proof still prove it.",
		Operator: "`retain` in the `identity` is how long the ledger keeps contents.",
	}
	// WorkflowUnknown is for a workflow of which nothing is known to the reader.
	WorkflowUnknown = problem.Kind{
		Slug: "workflow-unknown", Status: http.StatusNotFound,
		Title:    "No workflow of this reader has this id",
		Meaning:  "Nothing is recorded under this workflow id, or the identity that asks has no part in it. The two are not told apart.",
		Caller:   "Ask with the identity that took part in the workflow.",
		Operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	workflowRunning = problem.Kind{
		Slug: "workflow-running", Status: http.StatusConflict, RetryAfter: 2 * time.Second,
		Title:    "The workflow has not ended",
		Meaning:  "The end of a workflow is recorded when nothing of it runs, is in doubt, or is being undone. Nothing was recorded.",
		Caller:   "Wait for the workflow's calls, and ask again after Retry-After. The workflow's page shows what is open.",
		Operator: "A call in doubt is settled with `caddy agent-guard executions resolve`.",
	}
	initiatorRequired = problem.Kind{
		Slug: "initiator-required", Status: http.StatusForbidden,
		Title:    "Only who has begun the workflow says that it has ended",
		Meaning:  "The end of a workflow is said by who made its first call or sent its workflow_start, or by a coordinator. The identity that asks takes part in the workflow, and is neither. Nothing was recorded.",
		Caller:   "Let the initiator ask.",
		Operator: "`coordinators` in the `rollback` block names who may for all workflows.",
	}
)
