package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// defaultMaxNodes is how much of a workflow is read for one request.
const defaultMaxNodes = ect.MaxAncestors

// LedgerOptions are the settings of a Ledger.
type LedgerOptions struct {
	// Log is the ledger. Required. Its Links are at least the parents of what Outcomes does
	// not name.
	Log *ledger.Log
	// Outcomes are the ids under which what came of a call is recorded, by an entry of the
	// gateway's. Nil is none.
	Outcomes func(e *ledger.Entry) []string
	// HeadKey is the public key of its heads, as note.NewVerifier reads it.
	HeadKey string
	// Identities are the names under which the gateway issues tokens. What they issue is
	// the gateway's word.
	Identities []string
	// Own reports whether an entry is the gateway's, also under names that it had before;
	// nil goes by Identities alone.
	Own func(e *ledger.Entry) bool
	// Verify verifies tokens of a request, as ect.Verifier.VerifyAll does. Errors are
	// *ect.Error, or what says that nothing is known of them. Required.
	Verify func(r *http.Request, raws []string) ([]*ect.Token, error)
	// Record records tokens durably, all or none, each with its Raw as the payload of
	// an event of its id and workflow. An id that is taken is ledger.ErrDuplicate.
	// Required.
	Record func(ctx context.Context, tokens []*ect.Token) error
	// Verified reports whether a token of the gateway's has a valid signature. Nil leaves
	// that unknown.
	Verified func(ctx context.Context, raw string) error
	// Undos are what is kept for undoing calls; nil where nothing is.
	Undos *checkpoint.Store
	// Execution is the state of a guarded call, and the status of its answer, if there
	// was one. Nil is where nobody knows.
	Execution func(ctx context.Context, key execution.Key) (state string, status int, err error)
	// Called reports whether the gateway has guarded calls of a caller. Nil is where nobody
	// knows, and then it may have.
	Called func(ctx context.Context, caller [16]byte) (bool, error)
	// Waits ends what waits for the ledger: at an exit. Nil is never.
	Waits context.Context
	// MaxNodes is how much of a workflow is read for one request; ect.MaxAncestors if zero.
	MaxNodes int
}

// Ledger answers. It is safe for concurrent use and holds nothing but its settings.
type Ledger struct {
	LedgerOptions
}

// NewLedger makes a Ledger.
func NewLedger(o LedgerOptions) *Ledger {
	if o.MaxNodes == 0 {
		o.MaxNodes = defaultMaxNodes
	}
	if o.Waits == nil {
		o.Waits = context.Background()
	}
	return &Ledger{o}
}

// serve returns the problem that it has not answered with, as a *Problem with its cause, or
// the end of the request's context.
func (s *Ledger) serve(a responder, to route, who evidence.Reader) error {
	if !to.allowed(a.w, a.r) {
		return nil
	}
	q := &ledgerRequest{Ledger: s, responder: a, who: who, route: to}
	return q.problem(q.answer())
}

// ledgerRequest is one request that a Ledger answers.
type ledgerRequest struct {
	*Ledger
	responder
	who evidence.Reader
	route
}

func (q *ledgerRequest) answer() error {
	if q.endpoint == endpointErrors {
		return q.takeErrors()
	}
	if q.who.Anonymous {
		return NewProblem(AuthenticationRequired, "Send the credential that the workflow's calls were made with.")
	}
	if q.who.Credential {
		if err := q.admitCredential(); err != nil {
			return err
		}
	}
	switch q.endpoint {
	case endpointHead:
		return q.head()
	case endpointProof:
		return q.proof()
	case endpointConsistency:
		return q.consistency()
	case endpointEntry:
		return q.entry()
	case endpointEntries:
		return q.entryByID()
	case endpointCheckpoint:
		return q.checkpoint()
	}
	return q.workflow()
}

// admitCredential holds what a credential is good for that is made up at no cost. Nothing
// is read or waited for on behalf of who has made no calls here.
func (q *ledgerRequest) admitCredential() error {
	unknown := unknownPart()
	switch q.endpoint {
	case endpointCheckpoint:
	case endpointWorkflow:
		unknown = unknownWorkflow()
	default:
		return NewProblem(AuthenticationRequired,
			"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
	}
	called, err := q.hasCalled(q.r.Context(), q.who)
	if err == nil && !called {
		err = unknown
	}
	return err
}

// hasCalled reports whether the reader may have a part in anything.
func (s *Ledger) hasCalled(ctx context.Context, who evidence.Reader) (bool, error) {
	if !who.Credential || s.Called == nil {
		return true, nil
	}
	return s.Called(ctx, who.Caller)
}

// problem is an error as a problem, unless the client has gone.
func (q *ledgerRequest) problem(err error) error {
	if err == nil || q.r.Context().Err() != nil {
		return err
	}
	otherwise := NewProblem(StoreUnavailable, "The gateway's ledger does not answer.")
	if errors.Is(err, ect.ErrUnavailable) {
		otherwise = NewProblem(ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.")
	}
	return problemOf(err, otherwise)
}

// headDocument is the newest signed head. Its members are an API.
type headDocument struct {
	Origin string    `json:"origin"`
	Size   int64     `json:"size"`
	Root   tlog.Hash `json:"root"`
	// Key is the public key that the note is verified with.
	Key string `json:"key,omitempty"`
	// Note is the signed note, which says the same and is what counts.
	Note string `json:"note"`
}

// head answers with the newest head: as JSON, or the signed note itself.
func (q *ledgerRequest) head() error {
	head := q.Log.Head()
	q.w.Header().Set("Vary", "Accept")
	if strings.Contains(q.r.Header.Get("Accept"), "text/plain") {
		q.write(http.StatusOK, "text/plain; charset=utf-8", head.Note)
		return nil
	}
	return q.writeJSON(http.StatusOK, headDocument{head.Origin, head.Size, head.Root, q.HeadKey, string(head.Note)})
}

// proofDocument is an inclusion proof. Its members are an API.
type proofDocument struct {
	Log   string           `json:"log"`
	Index int64            `json:"index"`
	Size  int64            `json:"size"`
	Proof tlog.RecordProof `json:"proof"`
}

// proof answers that the tree of a size, the newest if none is given, has the entry at
// an index.
func (q *ledgerRequest) proof() error {
	p, err := parseParams(q.r.URL, "index", "size")
	if err != nil {
		return err
	}
	index, err := p.required("index")
	if err != nil {
		return err
	}
	size, err := q.size(p, "size")
	if err != nil {
		return err
	}
	proof, err := q.Log.Prove(q.r.Context(), index, size)
	if err != nil {
		return q.beyond(err)
	}
	return q.writeJSON(http.StatusOK, proofDocument{q.Log.Origin(), index, size, append(tlog.RecordProof{}, proof...)})
}

// consistencyDocument is a consistency proof. Its members are an API.
type consistencyDocument struct {
	Log   string         `json:"log"`
	Old   int64          `json:"old"`
	New   int64          `json:"new"`
	Proof tlog.TreeProof `json:"proof"`
}

// consistency answers that the tree of size new, the newest if none is given, begins
// with all entries of the tree of size old.
func (q *ledgerRequest) consistency() error {
	p, err := parseParams(q.r.URL, "old", "new")
	if err != nil {
		return err
	}
	older, err := p.required("old")
	if err != nil {
		return err
	}
	newer, err := q.size(p, "new")
	if err != nil {
		return err
	}
	if older > newer {
		return badParameter("old is larger than new.")
	}
	proof, err := q.Log.ProveConsistency(q.r.Context(), older, newer)
	if err != nil {
		return q.beyond(err)
	}
	return q.writeJSON(http.StatusOK, consistencyDocument{q.Log.Origin(), older, newer, append(tlog.TreeProof{}, proof...)})
}

// size reads the size of a tree; the newest head's where there is none.
func (q *ledgerRequest) size(p params, name string) (int64, error) {
	size, there, err := p.number(name)
	if !there {
		size = q.Log.Head().Size
	}
	return size, err
}

// beyond makes the problem of a size that the tree does not have. How large it is
// every reader may know.
func (q *ledgerRequest) beyond(err error) error {
	if errors.Is(err, ledger.ErrNotFound) {
		return NewProblem(entryUnknown, fmt.Sprintf("The tree has %d entries.", q.Log.Head().Size))
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

	// Signed says that Token carries a signature. An event that the gateway could not
	// sign has no token; Leaf says what it was.
	Signed bool   `json:"signed"`
	Level  string `json:"level,omitempty"`
	Token  string `json:"token,omitempty"`
	// Leaf are the exact bytes that Receipt proves.
	Leaf []byte `json:"leaf"`
	// Receipt is missing for an entry of another node's log, which gives it.
	Receipt *ledger.Receipt `json:"receipt,omitempty"`
}

// waitingDocument says that an event is recorded and has no place yet.
type waitingDocument struct {
	State    string `json:"state"` // waiting
	ID       string `json:"jti"`
	Workflow string `json:"wid,omitempty"`
}

func unknownEntry() error {
	return NewProblem(entryUnknown, "Nothing of it is known for the identity that asks.")
}

// notThere makes the problem of an entry that cannot be had.
func notThere(err error) error {
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return unknownEntry()
	case errors.Is(err, ledger.ErrPruned):
		return NewProblem(entryPruned, "Its hash is in the tree.")
	}
	return err
}

// entry answers with the entry at an index of this node's log.
func (q *ledgerRequest) entry() error {
	index, ok := parseNumber(q.name)
	if !ok {
		return badParameter("The index is not a whole number from 0 on, without a sign or leading zeros.")
	}
	ctx := q.r.Context()
	e, err := q.Log.Entry(ctx, index)
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

// entryByID answers with the entry of a token. One that is recorded and has no place
// in the tree yet can be waited for where its workflow is named.
func (q *ledgerRequest) entryByID() error {
	p, err := parseParams(q.r.URL, "jti", "wid", "wait")
	if err != nil {
		return err
	}
	id, there, err := p.name("jti")
	if err != nil {
		return err
	}
	if !there {
		return badParameter("jti is missing.")
	}
	name, there, err := p.name("wid")
	if err != nil {
		return err
	}
	wait, err := p.wait()
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

// entryInWorkflow answers with an entry of a workflow, if the reader may see it. Only
// who takes part in the workflow can wait, so that nobody else learns by the time it
// takes whether something is there.
func (q *ledgerRequest) entryInWorkflow(wid, id string, wait time.Duration) (found bool, err error) {
	ctx := q.r.Context()
	e, err := q.Log.Lookup(ctx, wid, id)
	// Afterwards, so that an entry that has got its place meanwhile is in it.
	part, partErr := q.participationOf(ctx, wid, q.who)
	if partErr != nil {
		return false, partErr
	}
	// One that is not there yet is waited for as well: the reader may have the id of a call
	// that has not come this far.
	if (errors.Is(err, ledger.ErrWaiting) || errors.Is(err, ledger.ErrNotFound)) && wait > 0 && !part.Empty() {
		waits, cancel := until(q.r.Context(), q.Waits, wait)
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
	case errors.Is(err, ledger.ErrWaiting), errors.Is(err, ledger.ErrPruned):
		if part.Empty() {
			return false, nil // nobody knows whose it is
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
	if errors.Is(err, ledger.ErrWaiting) {
		q.w.Header().Set("Retry-After", "1")
		return true, q.writeJSON(http.StatusAccepted, waitingDocument{"waiting", id, wid})
	}
	if err != nil {
		return false, notThere(err)
	}
	return true, q.writeEntry(&e)
}

// entryAnywhere finds the one entry with an id that the reader may see.
func (q *ledgerRequest) entryAnywhere(id string) error {
	ctx := q.r.Context()
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
	return badParameter("The id stands in several workflows: name one of them with wid.")
}

func (q *ledgerRequest) writeEntry(e *ledger.Entry) error {
	doc := entryDocument{
		Log: e.Log, Index: e.Index, Recorded: e.Recorded.UTC(),
		ID: e.ID, Workflow: e.Workflow, Action: e.Action, Issuer: e.Issuer,
		Parents: append([]string{}, e.Parents...), Time: e.Time.UTC(),
		Level: levelOf(e), Leaf: e.Leaf,
	}
	doc.Signed = doc.Level != "" && doc.Level != "L1"
	if !e.Unsigned {
		doc.Token = string(e.Payload)
	}
	if e.Log == q.Log.Origin() {
		receipt, err := q.Log.Receipt(q.r.Context(), e.Index)
		if err != nil {
			return err
		}
		doc.Receipt = &receipt
	}
	return q.writeJSON(http.StatusOK, doc)
}

const (
	// maxBody is the size of a body with errors.
	maxBody = 1 << 20
	// reachTime is how long the answer waits for the tree.
	reachTime = 5 * time.Second
	// maxRounds is how often others may come before a recording with the same tokens.
	maxRounds = 3
)

// recordedDocument says where errors were recorded. Its members are an API.
type recordedDocument struct {
	Recorded []recordedError `json:"recorded"`
}

type recordedError struct {
	ID       string `json:"jti"`
	Workflow string `json:"wid"`
	Log      string `json:"log"`
	Index    int64  `json:"index"`
	// Entry is where the entry and its receipt can be read.
	Entry string `json:"entry"`
}

// takeErrors records the error tokens of agents (cascade 6.2; ATD, "False Error
// Injection"). Who sends them is who has signed them. The same tokens again get the
// same answer, also after they have expired.
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
	if err != nil {
		return err
	}
	var doc recordedDocument
	for _, u := range all {
		e, err := q.reach(q.r.Context(), u.Workflow(), u.ID())
		if err != nil {
			return err
		}
		doc.Recorded = append(doc.Recorded, recordedError{e.ID, e.Workflow, e.Log, e.Index, entryURL(e.Workflow, e.ID)})
	}
	if len(doc.Recorded) == 1 {
		q.w.Header().Set("Location", doc.Recorded[0].Entry)
	}
	return q.writeJSON(status, doc)
}

// errorTokens are the tokens of the body, or of the header where there is no body.
func (q *ledgerRequest) errorTokens() ([]string, error) {
	body, err := io.ReadAll(io.LimitReader(q.r.Body, maxBody+1))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge) || len(body) > maxBody:
		return nil, refused(ect.CodeTooLarge)
	case err != nil:
		return nil, badParameter("The body could not be read to its end.")
	}
	var raws []string
	if len(body) == 0 {
		raws, err = ect.ParseFields(q.r.Header.Values(ect.FieldName))
	} else {
		var ours bool
		if raws, ours, err = ect.ParseBody(q.r.Header.Get("Content-Type"), body); !ours {
			return nil, badParameter("Send tokens in " + ect.FieldName + " without a body, or a body of the type " +
				ect.Draft00.MediaType() + ", or a JSON array of tokens.")
		}
	}
	slices.Sort(raws)
	raws = slices.Compact(raws)
	switch {
	case err != nil:
		return nil, err
	case len(raws) == 0 && q.who.Anonymous:
		return nil, NewProblem(AuthenticationRequired, "Send the error as a signed token.")
	case len(raws) == 0:
		return nil, refused(ect.CodeMissing)
	case len(raws) > ledger.MaxEvents || slices.ContainsFunc(raws, func(raw string) bool { return len(raw) > ledger.MaxPayload }):
		return nil, refused(ect.CodeTooLarge)
	}
	return raws, nil
}

// checkError holds what an error token must say (A-error-signaling-b to -d). No
// checkpoint need be named where there is none, and in the words of the cascade draft, which
// has no form for the error that its figures name, nothing need be said at all.
func checkError(u *ect.Unverified) error {
	severity, _ := u.Ext().Text(ect.MemberSeverity)
	_, said := u.Ext().Raw(ect.MemberSeverity)
	switch {
	case u.Event() != ect.EventError:
		return refused(ect.CodeAction)
	case u.Level() < ect.L2:
		return refused(ect.CodeLevel) // C-6.2-a
	case u.Workflow() == "":
		return refused(ect.CodeWorkflow)
	case len(u.Parents()) == 0:
		return refused(ect.CodeParents)
	case said && !slices.Contains([]string{"info", "warning", "error", "critical"}, severity):
		return refused(ect.CodeExt)
	}
	for _, m := range u.Lacks() {
		if raw, there := u.Ext().Raw(m); m != ect.MemberCheckpointID || there && raw != "null" {
			return &ect.Error{Code: ect.CodeExt, Lacks: u.Vocabulary().Member(m)}
		}
	}
	return nil
}

// keep records those of the tokens that are not recorded yet, all of them or none,
// and says with what status.
func (q *ledgerRequest) keep(raws []string, all []*ect.Unverified) (status int, err error) {
	status = http.StatusOK
	var verified []*ect.Token
	for range maxRounds {
		fresh, taken, err := q.fresh(raws, all)
		if err != nil || len(fresh) == 0 {
			return status, err
		}
		if verified == nil {
			if verified, err = q.Verify(q.r, fresh); err != nil {
				return 0, err
			}
		}
		if taken {
			return 0, refused(ect.CodeReplayed)
		}
		tokens := slices.DeleteFunc(slices.Clone(verified), func(t *ect.Token) bool { return !slices.Contains(fresh, t.Raw()) })
		if len(tokens) != len(fresh) {
			return 0, fmt.Errorf("%d of %d tokens were verified", len(tokens), len(fresh))
		}
		if err := q.checkParents(tokens, all); err != nil {
			return 0, err
		}
		switch err := q.Record(q.r.Context(), tokens); {
		case err == nil:
			return http.StatusCreated, nil
		case !errors.Is(err, ledger.ErrDuplicate):
			return 0, err
		}
	}
	return 0, errors.New("the tokens' ids were taken again and again")
}

// fresh are the tokens that are not recorded. taken says that another one has the id
// of one of them: only who can sign in its name may learn that.
func (q *ledgerRequest) fresh(raws []string, all []*ect.Unverified) (fresh []string, taken bool, err error) {
	for i, raw := range raws {
		e, err := q.reach(q.r.Context(), all[i].Workflow(), all[i].ID())
		switch {
		case errors.Is(err, ledger.ErrNotFound):
			fresh = append(fresh, raw)
		case err != nil && !errors.Is(err, ledger.ErrPruned):
			return nil, false, err
		case err != nil || string(e.Payload) != raw:
			fresh, taken = append(fresh, raw), true
		}
	}
	return fresh, taken, nil
}

// reach finds a recorded token, and waits a moment for its place in the tree.
func (s *Ledger) reach(ctx context.Context, wid, id string) (ledger.Entry, error) {
	e, err := s.Log.Lookup(ctx, wid, id)
	if !errors.Is(err, ledger.ErrWaiting) {
		return e, err
	}
	ctx, cancel := until(ctx, s.Waits, reachTime)
	defer cancel()
	return s.Log.Wait(ctx, wid, id)
}

// checkParents holds that all parents, and the checkpoint where one is named, are known
// in the token's own workflow, and that its issuer has to do with them. Foreign is as
// unknown (P3).
func (q *ledgerRequest) checkParents(tokens []*ect.Token, all []*ect.Unverified) error {
	for _, t := range tokens {
		for _, id := range t.Parents() {
			known, err := q.knows(t.Workflow(), id, all)
			if err != nil {
				return err
			}
			if !known {
				return refused(ect.CodeParentUnknown)
			}
		}
		if checkpoint := evidence.NamedCheckpoint(t.Ext()); checkpoint != "" {
			known, err := q.knows(t.Workflow(), checkpoint, nil)
			if err != nil {
				return err
			}
			if !known {
				return refused(ect.CodeExt)
			}
		}
		if err := q.CheckReport(q.r.Context(), t, tokens); err != nil {
			return err
		}
	}
	return nil
}

// knows reports whether a workflow has a token, be it one that came along.
func (q *ledgerRequest) knows(wid, id string, along []*ect.Unverified) (bool, error) {
	if slices.ContainsFunc(along, func(u *ect.Unverified) bool { return u.Workflow() == wid && u.ID() == id }) {
		return true, nil
	}
	if len(id) > ledger.MaxName {
		return false, nil
	}
	_, err := q.Log.Lookup(q.r.Context(), wid, id)
	switch {
	case err == nil, errors.Is(err, ledger.ErrWaiting), errors.Is(err, ledger.ErrPruned):
		return true, nil
	case errors.Is(err, ledger.ErrNotFound):
		return false, nil
	}
	return false, err
}
