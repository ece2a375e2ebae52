package rollbackapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

const (
	maxBody    = 16 << 10
	maxReason  = 512
	maxUrgency = 64
)

// body reads the request's body.
func (q *question) body() ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(q.r.Body, maxBody+1))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge) || len(body) > maxBody:
		return nil, problem.New(problem.BodyTooLarge, "A request for a rollback has at most 16 KiB.")
	case err != nil:
		return nil, badParameter("The body could not be read to its end.")
	}
	return body, nil
}

// asked is what a request asks for, in its body or in its token. What is empty is not said.
type asked struct {
	id, checkpoint, scope, reason, urgency string
	cascade                                *bool
}

// parseBody reads Figure 10 of the cascade draft, and AERR's request. Members that it does
// not know are ignored, but for one that asks for nothing to be done: operators know it.
func parseBody(body []byte, dialect ect.Vocabulary) (*asked, error) {
	members, err := readObject(body)
	if err != nil {
		return nil, err
	}
	if _, there := members["dry_run"]; there {
		return nil, badParameter("dry_run is not known here, and nothing was done. Operators look ahead: caddy agent-guard rollback --dry-run.")
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
	if raw, there := members["cascade"]; there && err == nil && json.Unmarshal(raw, &a.cascade) != nil {
		err = badParameter("cascade is neither true nor false.")
	}
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
	case dialect == ect.Cascade && phase != "" && phase != "execute":
		return nil, badParameter("phase is not execute.")
	case len(a.reason) > maxReason:
		return nil, badParameter(fmt.Sprintf("reason is longer than %d bytes.", maxReason))
	case len(a.urgency) > maxUrgency:
		return nil, badParameter(fmt.Sprintf("urgency is longer than %d bytes.", maxUrgency))
	}
	a.checkpoint = canonical(a.checkpoint)
	if a.id, err = ParseID(a.id); err != nil {
		return nil, err
	}
	_, err = ParseScope(a.scope, a.cascade)
	return a, err
}

// ParseScope reads the word for a scope. Where there is none, cascade says it; where there
// is neither, it is single. Where both are there they must not contradict each other.
func ParseScope(word string, cascade *bool) (plan.Scope, error) {
	scope := plan.Scope(word)
	switch scope {
	case plan.Single, plan.SubDAG, plan.FullWorkflow:
	case "":
		if cascade != nil && *cascade {
			return plan.SubDAG, nil
		}
		return plan.Single, nil
	default:
		return "", badParameter("scope is none of single, sub_dag and full_workflow.")
	}
	if cascade != nil && *cascade != (scope != plan.Single) {
		return "", badParameter(fmt.Sprintf("scope and cascade contradict each other: scope is %s, and cascade is %t; leave one of them out.", scope, *cascade))
	}
	return scope, nil
}

// ParseID reads the id of a rollback: a UUID, with or without urn:uuid:.
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

// readObject reads one JSON object in which no member stands twice: two readers could take
// it for two requests. A null is as a member that is not there.
func readObject(body []byte) (map[string]json.RawMessage, error) {
	wrong := badParameter("The body is no JSON object.")
	if !utf8.Valid(body) {
		return nil, badParameter("The body is not UTF-8.")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, wrong
	}
	members, seen := map[string]json.RawMessage{}, map[string]bool{}
	for d.More() {
		token, err := d.Token()
		name, ok := token.(string)
		if err != nil || !ok {
			return nil, wrong
		}
		if seen[name] {
			return nil, badParameter("A member of the body stands twice.")
		}
		seen[name] = true
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, wrong
		}
		if string(value) != "null" {
			members[name] = value
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, wrong
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, badParameter("Something stands behind the body's JSON object.")
	}
	return members, nil
}

func isName(id string) bool {
	return id != "" && len(id) <= ledger.MaxName && !strings.ContainsFunc(id, unicode.IsControl)
}

// canonical writes a UUID as the ledger has it.
func canonical(id string) string {
	if u, err := uuid.Parse(id); err == nil && len(id) == len(u.String()) {
		return u.String()
	}
	return id
}
