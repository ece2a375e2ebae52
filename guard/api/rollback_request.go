package api

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

const (
	maxRollbackBody = 16 << 10
	maxReason       = 512
	maxUrgency      = 64
)

// body reads the request's body.
func (q *rollbackRequest) body() ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(q.r.Body, maxRollbackBody+1))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge) || len(body) > maxRollbackBody:
		return nil, problem.New(problem.BodyTooLarge, "A request for a rollback has at most 16 KiB.")
	case err != nil:
		return nil, badParameter("The body could not be read to its end.")
	}
	return body, nil
}

// asked is the content of a request, from its body or its token. Empty fields were not
// given.
type asked struct {
	id, checkpoint, scope, reason, urgency string
	cascade, keep                          *bool
	dry                                    bool                // nothing is to be done
	release                                bool                // what is reserved is to be released
	planned                                string              // the hash of the plan, 32 bytes; empty without one
	partOf                                 string              // the rollback at another gateway; empty without
	precedence                             rollback.Precedence // of that; zero without
}

// parseBody parses Figures 9 and 10 of the cascade draft, and AERR's request. It ignores unknown
// members, except for what another path has: the rollback would be carried out.
func parseBody(body []byte, to resource) (*asked, error) {
	members, err := readObject(body)
	if err != nil {
		return nil, err
	}
	executes := to == resource{endpointAskRollback, ect.Cascade}
	for _, name := range []string{"dry_run", "plan_hash"} {
		known := executes || name == "dry_run" && to.endpoint == endpointPrepareRollback
		if _, there := members[name]; there && !known {
			return nil, badParameter(name + " is not known here, and nothing was done. Send it to " + RollbackPath + ".")
		}
	}
	text := func(name string) (value string) {
		if raw, there := members[name]; there && err == nil && json.Unmarshal(raw, &value) != nil {
			err = badParameter(name + " is no string.")
		}
		return value
	}
	phase := text("phase")
	a := &asked{
		id: text("rollback_id"), checkpoint: text("checkpoint_id"), scope: text("scope"),
		reason: text("reason"), urgency: text("urgency"),
	}
	truth := func(name string) (value *bool) {
		if raw, there := members[name]; there && err == nil && json.Unmarshal(raw, &value) != nil {
			err = badParameter(name + " is neither true nor false.")
		}
		return value
	}
	a.release = to.endpoint == endpointPrepareRollback && phase == phaseRelease
	a.cascade, a.keep = truth("cascade"), truth("keep_dependants")
	if dry := truth("dry_run"); dry != nil {
		a.dry = *dry
	}
	hash := text("plan_hash")
	a.partOf = text("part_of")
	if err != nil {
		return nil, err
	}
	switch {
	case a.id == "":
		return nil, badParameter("rollback_id is missing; write urn:uuid: and a UUID, the same for every repetition.")
	case a.checkpoint == "":
		return nil, badParameter("checkpoint_id is missing.")
	case !isName(a.checkpoint):
		return nil, badParameter("checkpoint_id is no id: 1 to 256 bytes without control characters.")
	case executes && phase != "" && phase != "execute":
		return nil, badParameter("phase is not execute; the other one is asked for at " + PreparePath + ".")
	case to.endpoint == endpointPrepareRollback && phase != "" && phase != "prepare" && phase != phaseRelease:
		return nil, badParameter("phase is neither prepare nor release; execute is asked for at " + RollbackPath + ".")
	case len(a.reason) > maxReason:
		return nil, badParameter(fmt.Sprintf("reason is longer than %d bytes.", maxReason))
	case len(a.urgency) > maxUrgency:
		return nil, badParameter(fmt.Sprintf("urgency is longer than %d bytes.", maxUrgency))
	}
	if hash != "" {
		sum, err := hex.DecodeString(hash)
		if err != nil || len(sum) != sha256.Size {
			return nil, badParameter("plan_hash is no SHA-256 in hexadecimal, as the prepared plan has it.")
		}
		a.planned = string(sum)
	}
	if a.precedence, err = parsePrecedence(members["precedence"]); err != nil {
		return nil, err
	}
	if a.partOf != "" {
		if a.partOf, err = ParseID(a.partOf); err != nil {
			return nil, err
		}
	}
	a.checkpoint = evidence.Canonical(a.checkpoint)
	if a.id, err = ParseID(a.id); err != nil {
		return nil, err
	}
	_, err = ParseScope(a.scope, a.cascade)
	return a, err
}

// parsePrecedence parses what decides between the rollback of a part and others; zero without.
func parsePrecedence(raw json.RawMessage) (p rollback.Precedence, err error) {
	if raw == nil {
		return p, nil
	}
	err = json.Unmarshal(raw, &p)
	p.Asked = p.Asked.Round(0).UTC()
	if year := p.Asked.Year(); err != nil || p.Asked.IsZero() || year < 0 || year > 9999 {
		return p, badParameter("precedence has no rollback_id, scope and time (asked, RFC 3339).")
	}
	if p.ID, err = ParseID(p.ID); err != nil {
		return p, err
	}
	if p.Scope == "" {
		return p, badParameter("scope of precedence is missing.")
	}
	_, err = ParseScope(string(p.Scope), nil)
	return p, err
}

// phaseRelease ends a reservation.
const phaseRelease = string(rollback.PhaseRelease)

// ParseScope parses the word for a scope. Without a word, cascade decides; without both,
// the scope is single. Both together must not contradict each other.
func ParseScope(word string, cascade *bool) (rollback.Scope, error) {
	scope := rollback.Scope(word)
	switch scope {
	case rollback.Single, rollback.SubDAG, rollback.FullWorkflow:
	case "":
		if cascade != nil && *cascade {
			return rollback.SubDAG, nil
		}
		return rollback.Single, nil
	default:
		return "", badParameter("scope is none of single, sub_dag and full_workflow.")
	}
	if cascade != nil && *cascade != (scope != rollback.Single) {
		return "", badParameter(fmt.Sprintf("scope and cascade contradict each other: scope is %s, and cascade is %t; leave one of them out.", scope, *cascade))
	}
	return scope, nil
}

// ParseID parses the id of a rollback: a UUID, with or without urn:uuid:.
func ParseID(text string) (string, error) {
	const prefix = "urn:uuid:"
	if plain, err := url.PathUnescape(text); err == nil {
		text = plain
	}
	if len(text) > len(prefix) && strings.EqualFold(text[:len(prefix)], prefix) {
		text = text[len(prefix):]
	}
	id, err := uuid.Parse(text)
	if err != nil || len(text) != len(uuid.Nil.String()) || id == uuid.Nil || id == uuid.Max {
		return "", badParameter("A rollback's id is urn:uuid: and a UUID.")
	}
	return id.String(), nil
}

// readObject parses one JSON object without duplicate members: two readers could read
// different requests from it. A null counts as an absent member.
func readObject(body []byte) (map[string]json.RawMessage, error) {
	var text json.RawMessage
	d := json.NewDecoder(bytes.NewReader(body))
	err := d.Decode(&text)
	object, ok := jsonx.ObjectOf(text)
	switch {
	case !utf8.Valid(body):
		return nil, badParameter("The body is not UTF-8.")
	case err != nil || !ok:
		return nil, badParameter("The body is no JSON object.")
	case !object.Distinct(strings.Clone):
		return nil, badParameter("A member of the body stands twice.")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, badParameter("Something stands behind the body's JSON object.")
	}
	members := map[string]json.RawMessage{}
	for _, m := range object {
		if string(m.Value) != "null" {
			members[m.Name] = m.Value
		}
	}
	return members, nil
}

func isName(id string) bool {
	return id != "" && len(id) <= ledger.MaxName && !strings.ContainsFunc(id, unicode.IsControl)
}

// said returns the request's content apart from its token: that of its body, or nothing in
// ATD.
func (q *rollbackRequest) said(t *ect.Token, body []byte) (*asked, error) {
	if q.dialect != ect.ATD {
		return parseBody(body, q.resource)
	}
	return &asked{id: t.ID(), checkpoint: evidence.Canonical(t.Parents()[0])}, nil
}

// bind completes a request from its token and refuses contradictions between the two (ADR
// 0043 and 0054). The body alone is not signed: whoever stole the token could otherwise
// roll back something else with it.
func bind(a *asked, t *ect.Token, dialect ect.Vocabulary) error {
	in := inToken{t: t}
	id, checkpoint := in.text(ect.MemberRollbackID), in.text(ect.MemberCheckpointID)
	scope, reason := in.text(ect.MemberScope), in.text(ect.MemberReason)
	cascade, keep := in.truth(ect.MemberCascade), in.truth(evidence.MemberKeepDependants)
	partOf := in.text(evidence.MemberPartOf)
	if in.err != nil {
		return in.err
	}
	if id != "" && dialect != ect.ATD { // in ATD the token itself identifies the rollback
		if named, err := ParseID(id); err != nil || named != a.id {
			return in.contradicts(ect.MemberRollbackID, "rollback_id")
		}
	}
	if partOf != "" {
		if whole, err := ParseID(partOf); err != nil || a.partOf != "" && whole != a.partOf {
			return in.contradicts(evidence.MemberPartOf, "part_of")
		}
	}
	if checkpoint != "" && evidence.Canonical(checkpoint) != a.checkpoint {
		return in.contradicts(ect.MemberCheckpointID, "checkpoint_id")
	}
	if reason != "" && a.reason != "" && reason != a.reason {
		return in.contradicts(ect.MemberReason, "reason")
	}
	if a.reason == "" {
		a.reason = reason
	}
	if len(a.reason) > maxReason {
		return refusedFor(ect.CodeExt, fmt.Sprintf("%s is longer than %d bytes.", in.name(ect.MemberReason), maxReason))
	}
	if keep != nil && a.keep != nil && *keep != *a.keep {
		return in.contradicts(evidence.MemberKeepDependants, "keep_dependants")
	}
	if a.keep == nil {
		a.keep = keep
	}
	return in.bindScope(a, scope, cascade)
}

// bindScope checks the scope of the request against the token.
func (in *inToken) bindScope(a *asked, scope string, cascade *bool) error {
	if scope == "" && cascade == nil {
		if rollback.Scope(a.scope) == rollback.FullWorkflow && in.t.InputHash().IsZero() {
			// It ends the workflow, so a stolen token must not allow it unless the token
			// says so.
			return refusedFor(ect.CodeExt, fmt.Sprintf("The scope full_workflow must stand in %s of the token, or inp_hash of the token must be the hash of the body.",
				in.name(ect.MemberScope)))
		}
		return nil
	}
	signed, err := ParseScope(scope, cascade)
	if err != nil {
		return refusedFor(ect.CodeExt, fmt.Sprintf("%s and %s of the token contradict each other, or the first is no scope.",
			in.name(ect.MemberScope), in.name(ect.MemberCascade)))
	}
	if a.scope == "" && a.cascade == nil {
		a.scope = string(signed)
	}
	if wanted, err := ParseScope(a.scope, a.cascade); err != nil || wanted == signed {
		return err
	}
	m := ect.MemberScope
	if scope == "" {
		m = ect.MemberCascade
	}
	return refusedFor(ect.CodeExt, fmt.Sprintf("%s of the token means the scope %s, and the request's is another one; the token must say the same in %s.",
		in.name(m), signed, ect.MemberScope))
}

// inToken reads extension members of a token.
type inToken struct {
	t   *ect.Token
	err error // for the first member of a wrong type
}

// name returns the name of a member in the token's vocabulary.
func (in *inToken) name(m ect.Member) string { return in.t.Vocabulary().Member(m) }

func (in *inToken) text(m ect.Member) string {
	value, ok := in.t.Ext().Text(m)
	if _, there := in.t.Ext().Raw(m); there && !ok && in.err == nil {
		in.err = refusedFor(ect.CodeExt, in.name(m)+" is no string.")
	}
	return value
}

func (in *inToken) truth(m ect.Member) *bool {
	value, ok := in.t.Ext().Bool(m)
	if ok {
		return &value
	}
	if _, there := in.t.Ext().Raw(m); there && in.err == nil {
		in.err = refusedFor(ect.CodeExt, in.name(m)+" is neither true nor false.")
	}
	return nil
}

func (in *inToken) contradicts(m ect.Member, member string) error {
	return refusedFor(ect.CodeExt, fmt.Sprintf("%s of the token is not the request's %s.", in.name(m), member))
}

// patience returns how long the answer may wait: the value of `Prefer` (RFC 7240) or of the
// parameter wait, else byDefault, at most LongestWait.
func (q *rollbackRequest) patience(byDefault time.Duration) (time.Duration, error) {
	wait := byDefault
	for preference := range strings.SplitSeq(strings.Join(q.r.Header.Values("Prefer"), ","), ",") {
		name, value, _ := strings.Cut(preference, "=")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "respond-async":
			wait = 0
		case "wait":
			// RFC 7240: ignore malformed preferences.
			if seconds, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 32); err == nil {
				wait = time.Duration(seconds) * time.Second
			}
		}
	}
	if text := q.r.URL.Query().Get("wait"); text != "" {
		if seconds, err := strconv.ParseUint(text, 10, 32); err == nil {
			text = strconv.FormatUint(seconds, 10) + "s"
		}
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return 0, badParameter("wait is neither a duration, like 30s, nor a number of seconds.")
		}
		wait = d
	}
	return min(wait, LongestWait), nil
}
