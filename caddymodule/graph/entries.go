package graph

import (
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

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
	// sign has no token; Leaf tells what it was.
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
	return problem.New(problem.EntryUnknown, "Nothing of it is known for the identity that asks.")
}

// notThere makes the problem of an entry that cannot be had.
func notThere(err error) error {
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return unknownEntry()
	case errors.Is(err, ledger.ErrPruned):
		return problem.New(problem.EntryPruned, "Its hash is in the tree.")
	}
	return err
}

// entry answers with the entry at an index of this node's log.
func (q *question) entry() error {
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
func (q *question) entryByID() error {
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
// who takes part in the workflow can wait, so that nobody else can tell by the time it
// takes whether something is there.
func (q *question) entryInWorkflow(wid, id string, wait time.Duration) (found bool, err error) {
	ctx := q.r.Context()
	e, err := q.Log.Lookup(ctx, wid, id)
	// Afterwards, so that an entry that has got its place meanwhile is in it.
	part, shareErr := q.shareOf(ctx, wid, q.who)
	if shareErr != nil {
		return false, shareErr
	}
	if errors.Is(err, ledger.ErrWaiting) && wait > 0 && !part.empty() {
		waits, cancel := q.wait(q.r.Context(), wait)
		defer cancel()
		if late, waitErr := q.Log.Wait(waits, wid, id); waitErr == nil {
			e, err = late, nil
			part, err = q.shareOf(ctx, wid, q.who)
		} else if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return false, nil
	case errors.Is(err, ledger.ErrWaiting), errors.Is(err, ledger.ErrPruned):
		if part.empty() {
			return false, nil // nobody knows whose it is
		}
	case err != nil:
		return false, err
	case !part.has(e.ID) && !q.issued(&e, q.who):
		return false, nil
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
func (q *question) entryAnywhere(id string) error {
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

func (q *question) writeEntry(e *ledger.Entry) error {
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

// entryURL is where an entry can be read.
func entryURL(wid, id string) string {
	return entriesPath + "?" + url.Values{"jti": {id}, "wid": {wid}}.Encode()
}
