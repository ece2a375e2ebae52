package graph

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

const (
	// maxBody is the size of a body with errors.
	maxBody = 1 << 20
	// reachTime is how long the answer waits for the tree.
	reachTime = 5 * time.Second
	// maxRounds is how often others may come before a recording with the same tokens.
	maxRounds = 3
)

// recordedDocument tells where errors were recorded. Its members are an API.
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

func refused(code ect.Code) error { return &ect.Error{Code: code} }

// takeErrors records the error tokens of agents (cascade 6.2; ATD, "False Error
// Injection"). Who sends them is who has signed them. The same tokens again get the
// same answer, also after they have expired.
func (q *question) takeErrors() error {
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
		e, err := q.reach(u.Workflow(), u.ID())
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
func (q *question) errorTokens() ([]string, error) {
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
		return nil, problem.New(problem.AuthenticationRequired, "Send the error as a signed token.")
	case len(raws) == 0:
		return nil, refused(ect.CodeMissing)
	case len(raws) > ledger.MaxEvents || slices.ContainsFunc(raws, func(raw string) bool { return len(raw) > ledger.MaxPayload }):
		return nil, refused(ect.CodeTooLarge)
	}
	return raws, nil
}

// checkError holds what an error token must say (A-error-signaling-b to -d). No
// checkpoint need be named where there is none.
func checkError(u *ect.Unverified) error {
	switch severity, _ := u.Ext().Text(ect.MemberSeverity); {
	case u.Event() != ect.EventError:
		return refused(ect.CodeAction)
	case u.Level() < ect.L2:
		return refused(ect.CodeLevel) // C-6.2-a
	case u.Workflow() == "":
		return refused(ect.CodeWorkflow)
	case len(u.Parents()) == 0:
		return refused(ect.CodeParents)
	case !slices.Contains([]string{"info", "warning", "error", "critical"}, severity):
		return refused(ect.CodeExt)
	}
	for _, m := range u.Lacks() {
		if raw, there := u.Ext().Raw(m); m != ect.MemberCheckpointID || there && raw != "null" {
			return refused(ect.CodeExt)
		}
	}
	return nil
}

// keep records those of the tokens that are not recorded yet, all of them or none,
// and says with what status.
func (q *question) keep(raws []string, all []*ect.Unverified) (status int, err error) {
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
func (q *question) fresh(raws []string, all []*ect.Unverified) (fresh []string, taken bool, err error) {
	for i, raw := range raws {
		e, err := q.reach(all[i].Workflow(), all[i].ID())
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
func (q *question) reach(wid, id string) (ledger.Entry, error) {
	e, err := q.Log.Lookup(q.r.Context(), wid, id)
	if !errors.Is(err, ledger.ErrWaiting) {
		return e, err
	}
	ctx, cancel := q.wait(reachTime)
	defer cancel()
	return q.Log.Wait(ctx, wid, id)
}

// checkParents holds that all parents, and the checkpoint where one is named, are known
// in the token's own workflow. Foreign is as unknown (P3).
func (q *question) checkParents(tokens []*ect.Token, all []*ect.Unverified) error {
	for _, t := range tokens {
		concerned, err := q.concerned(t, tokens)
		if err != nil {
			return err
		}
		if !concerned {
			return refused(ect.CodeParentUnknown)
		}
		for _, id := range t.Parents() {
			known, err := q.knows(t.Workflow(), id, all)
			if err != nil {
				return err
			}
			if !known {
				return refused(ect.CodeParentUnknown)
			}
		}
		checkpoint, _ := t.Ext().Text(ect.MemberCheckpointID)
		if strings.TrimSpace(checkpoint) == "" {
			continue
		}
		known, err := q.knows(t.Workflow(), canonical(checkpoint), nil)
		if err != nil {
			return err
		}
		if !known {
			return refused(ect.CodeExt)
		}
	}
	return nil
}

// concerned reports whether an error's issuer has to do with what it tells of (ATD,
// "False Error Injection"): a parent is linked to a node of its own, or was made for it,
// as the checkpoint is that an upstream gets with a call.
func (q *question) concerned(t *ect.Token, tokens []*ect.Token) (bool, error) {
	part, err := q.shareOf(q.r.Context(), t.Workflow(), Reader{Issuer: t.Issuer()})
	if err != nil {
		return false, err
	}
	for _, id := range t.Parents() {
		along := slices.ContainsFunc(tokens, func(o *ect.Token) bool { return o.ID() == id && o.Issuer() == t.Issuer() && o != t })
		if along || part.has(id) {
			return true, nil
		}
		e, err := q.reach(t.Workflow(), id)
		switch {
		case errors.Is(err, ledger.ErrNotFound), errors.Is(err, ledger.ErrPruned):
			continue
		case err != nil:
			return false, err
		}
		if e.Issuer == t.Issuer() {
			return true, nil
		}
		if NobodysWord(&e) {
			continue
		}
		if u, err := ect.ParseInsecure(string(e.Payload)); err == nil && slices.Contains(u.Audience(), t.Issuer()) {
			return true, nil
		}
	}
	return false, nil
}

// knows reports whether a workflow has a token, be it one that came along.
func (q *question) knows(wid, id string, along []*ect.Unverified) (bool, error) {
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
