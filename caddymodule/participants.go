package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

const (
	// firstLook and longestLook bound the pauses between two questions to a participant that does not
	// answer.
	firstLook   = 250 * time.Millisecond
	longestLook = time.Second
)

// discover asks the configured participants for what they have of a workflow, all at once, until ctx
// ends, and records what the ledger lacks of it. Of its errors nothing is known.
func (s *undoSender) discover(ctx context.Context, workflow string) (fresh bool, unreached []rollback.Obstacle, err error) {
	app := s.e.activeConfigs.latest()
	if app == nil {
		return false, nil, errNotOpen // between two configurations
	}
	o := app.rollbackOptions()
	if len(o.Participants) == 0 {
		return false, nil, nil
	}
	policy, err := app.tokenPolicy()
	if err != nil || policy == nil || policy.records == nil {
		return false, nil, err // nobody's checkpoints verify
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	asked := map[Participant]bool{}
	for _, p := range o.Participants {
		if asked[p] {
			continue
		}
		asked[p] = true
		wg.Go(func() {
			found, obstacle, failed := s.discoverAt(ctx, policy, &p, evidence.WorkflowID(workflow), time.Duration(o.PrepareTimeout))
			mu.Lock()
			defer mu.Unlock()
			fresh = fresh || found
			if obstacle.Reason != "" {
				obstacle.Agent = p.Identity
				unreached = append(unreached, obstacle)
			}
			err = errors.Join(err, failed)
		})
	}
	wg.Wait()
	slices.SortFunc(unreached, func(a, b rollback.Obstacle) int { return strings.Compare(a.Agent, b.Agent) })
	return fresh, unreached, err
}

// discoverAt asks one participant. Its tokens are taken as they verify under its identity, with their
// places in the graph: nothing else that it says counts. A checkpoint that does not verify is an
// obstacle.
func (s *undoSender) discoverAt(ctx context.Context, policy *tokenPolicy, p *Participant, workflow string, silence time.Duration) (fresh bool, o rollback.Obstacle, err error) {
	verifier, err := policy.records(p.Identity)
	if err != nil {
		return false, o, err
	}
	raws, reason := s.tokensAt(ctx, policy, p, workflow, silence)
	if reason != "" {
		return false, rollback.Obstacle{Reason: string(reason)}, nil
	}
	lacking, err := lackingOf(ctx, policy.Evidence, raws, p.Identity, workflow)
	if err != nil {
		return false, o, err
	}
	for some := range slices.Chunk(lacking, ledger.MaxEvents) { // what one commit takes
		failed, err := recordFound(ctx, policy.Evidence, verifier, some)
		if errors.Is(err, ect.ErrUnavailable) {
			return fresh, rollback.Obstacle{Reason: string(rollback.ReasonUnreachable)}, nil
		}
		if err != nil {
			return fresh, o, err
		}
		fresh = fresh || len(failed) < len(some)
		for _, t := range failed {
			if t.Issuer() == p.Identity && t.Event() == ect.EventCheckpoint && o.Reason == "" {
				o = rollback.Obstacle{Checkpoint: t.ID(), Reason: string(rollback.ReasonForeign)}
			}
		}
	}
	return fresh, o, nil
}

// tokensAt reads the tokens that a participant has of a workflow, until ctx ends or it is silent for too
// long. reason says why it does not tell. One without this path, as an agent that speaks the draft, tells
// of nothing.
func (s *undoSender) tokensAt(ctx context.Context, policy *tokenPolicy, p *Participant, workflow string, silence time.Duration) (raws []string, reason rollback.Reason) {
	at, err := parseWhole(p.URI)
	if err != nil {
		return nil, rollback.ReasonForeign
	}
	said := rollback.ReasonRefused
	raws, reason, status, err := readPages(ctx, silence, func(ctx context.Context, after string) (page evidence.WorkflowTokens, status int, err error) {
		page, status, said, err = s.tokensPage(ctx, policy, p, at, workflow, after)
		return page, status, err
	})
	if reason == rollback.ReasonRefused {
		reason = said
	}
	if reason == rollback.ReasonUnreachable {
		s.e.logger.Warn("a participant does not say what it has of a workflow", zap.String("participant", p.Identity),
			zap.String("workflow", workflow), zap.Int("status", status), zap.Error(err))
	}
	return raws, reason
}

// readPages reads all pages, each again and again until it has come. Each begins the time anew that may
// pass in silence. status and err are those of the last attempt.
func readPages(ctx context.Context, silence time.Duration, read func(ctx context.Context, after string) (evidence.WorkflowTokens, int, error)) (raws []string, reason rollback.Reason, status int, err error) {
	for after, more := "", true; more; more = after != "" {
		page := evidence.WorkflowTokens{}
		waits, cancel := context.WithTimeout(ctx, silence)
		for pause := firstLook; reason == ""; pause = min(2*pause, longestLook) {
			page, status, err = read(waits, after)
			switch {
			case err == nil && status == http.StatusOK:
			case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
				cancel()
				return nil, "", status, err
			case status == http.StatusUnauthorized, status == http.StatusForbidden:
				reason = rollback.ReasonUnauthorized
			case status != 0 && status < 500 && status != http.StatusTooManyRequests:
				reason = rollback.ReasonRefused
			default:
				select {
				case <-waits.Done():
					reason = rollback.ReasonUnreachable
				case <-time.After(pause):
				}
				continue
			}
			break
		}
		cancel()
		if reason != "" {
			return nil, reason, status, err
		}
		if raws = append(raws, page.Tokens...); len(raws) > rollback.MaxNodes || page.Next != "" && page.Next == after {
			return nil, rollback.ReasonRefused, status, err
		}
		after = page.Next
	}
	return raws, "", status, err
}

// tokensPage reads one page. status is 0 without an answer; said is why it is refused, if it is.
func (s *undoSender) tokensPage(ctx context.Context, policy *tokenPolicy, p *Participant, at *url.URL, workflow, after string) (page evidence.WorkflowTokens, status int, said rollback.Reason, err error) {
	said = rollback.ReasonRefused
	raw, err := policy.Events.ReadRequest(ctx, workflow, p.Identity)
	if err != nil {
		return page, 0, said, err
	}
	to := url.URL{Scheme: at.Scheme, Host: at.Host, Path: router.WellKnown + "workflows/" + workflow + "/tokens"}
	if after != "" {
		to.RawQuery = url.Values{"after": {after}}.Encode()
	}
	look := &rollback.Outgoing{Method: http.MethodGet, URL: to.String(), Workflow: workflow}
	header := undoHeader(look, nil)
	header.Set(ect.FieldName, raw)
	answer, err := s.whole(ctx, look, func() (*rollback.Answer, error) { return s.send(ctx, look, header) })
	if err != nil {
		return page, 0, said, err
	}
	if answer.Status != http.StatusOK {
		return page, answer.Status, rollback.PeerReason(answer), nil
	}
	if err := json.Unmarshal(answer.Body, &page); err != nil || answer.Cut {
		return page, http.StatusNotAcceptable, said, errors.New("the answer cannot be read")
	}
	return page, answer.Status, said, nil
}

// shown is a token that a participant shows, with its bytes.
type shown struct {
	*ect.Unverified
	raw string
}

// lackingOf are the checkpoints of an agent in a workflow that the ledger does not have, with those of
// their ancestors that it does not have either, parents first.
func lackingOf(ctx context.Context, ev *evidence.Evidence, raws []string, identity, workflow string) (all []*shown, err error) {
	found := make(map[string]*shown, len(raws))
	var todo []*shown
	for _, raw := range raws {
		u, err := ect.ParseInsecure(raw)
		if err != nil || u.Workflow() != workflow || found[u.ID()] != nil {
			continue
		}
		t := &shown{u, raw}
		found[t.ID()] = t
		if t.Event() == ect.EventCheckpoint && t.Issuer() == identity {
			todo = append(todo, t)
		}
	}
	const open, done = 1, 2
	state := make(map[string]int, len(todo))
	for len(todo) > 0 {
		t := todo[len(todo)-1]
		if state[t.ID()] == 0 {
			known, err := ev.Known(ctx, workflow, []string{t.ID()})
			if err != nil {
				return nil, fmt.Errorf("discover: %w", err)
			}
			if len(known) > 0 {
				state[t.ID()] = done
			}
		}
		if state[t.ID()] == 0 {
			state[t.ID()] = open
			for _, id := range t.Parents() {
				if parent := found[ledger.Canonical(id)]; parent != nil && state[parent.ID()] == 0 {
					todo = append(todo, parent)
				}
			}
			continue // its parents first
		}
		todo = todo[:len(todo)-1]
		if state[t.ID()] == open {
			state[t.ID()] = done
			all = append(all, t)
		}
	}
	return all, nil
}

// recordFound verifies and records some tokens, in one commit; failed are those that do not verify.
// An error means that it is not known whether they do.
func recordFound(ctx context.Context, ev *evidence.Evidence, verifier *ect.Verifier, some []*shown) (failed []*shown, err error) {
	raws := make([]string, len(some))
	for i, t := range some {
		raws[i] = t.raw
	}
	tokens, err := verifier.VerifyAll(ctx, raws, ect.Presentation{DAG: ev.GraphOf, Records: true})
	if err == nil {
		err = ev.RecordTokens(ctx, tokens, nil, evidence.Use{})
	}
	switch refused := (*ect.Error)(nil); {
	case err == nil:
		return nil, nil
	case !errors.As(err, &refused):
		return nil, err
	case len(some) == 1:
		return some, nil
	}
	for i := range some { // so that one does not hold up the others
		one, err := recordFound(ctx, ev, verifier, some[i:i+1])
		if err != nil {
			return nil, err
		}
		failed = append(failed, one...)
	}
	return failed, nil
}

// participants are all that the latest configuration names.
func (e *engine) participants() (all []hitl.Participant, err error) {
	app := e.activeConfigs.latest()
	if app == nil {
		return nil, errNotOpen // between two configurations
	}
	o := app.rollbackOptions()
	for _, p := range o.Participants {
		all = append(all, hitl.NewParticipant(p.Identity, p.URI))
	}
	return all, nil
}

// holdTime bounds one attempt to tell a participant what holds a workflow.
const holdTime = 20 * time.Second

// heldAt says who has not confirmed what holds a workflow, and who has after all.
func (e *engine) heldAt(p hitl.Participant, esc hitl.Escalation) {
	fields := []zap.Field{
		zap.String("participant", p.Agent), zap.String("workflow", esc.Workflow), zap.String("escalation", esc.ID),
		zap.String("hold", string(esc.Hold())),
	}
	switch {
	case p.Refused:
		e.logger.Warn("a participant does not know holds of workflows, and is not asked again", fields...)
	case !p.Since.IsZero():
		e.logger.Warn("a participant has not confirmed what holds a workflow, and is asked again", append(fields, zap.String("reason", p.Reason))...)
	default:
		e.logger.Info("a participant has confirmed what holds a workflow", fields...)
	}
}

// informHold tells a participant what an escalation holds. It is asked again after any error.
func (s *undoSender) informHold(ctx context.Context, p *hitl.Participant, e *hitl.Escalation) error {
	ctx, cancel := context.WithTimeout(ctx, holdTime)
	defer cancel()
	app := s.e.activeConfigs.latest()
	if app == nil {
		return errNotOpen
	}
	policy, err := app.tokenPolicy()
	if err != nil || policy == nil {
		return errors.Join(err, errNotOpen)
	}
	at, err := parseWhole(p.URI)
	if err != nil {
		return err
	}
	body, err := json.Marshal(hitl.HoldMessage{
		EscalationID: e.ID, Opened: e.Opened, State: string(e.Hold()), Level: e.Level.String(), Cause: string(e.Cause), Final: e.Final,
		RollbackID: e.Links.Rollback,
	})
	if err != nil {
		return err
	}
	workflow := evidence.WorkflowID(e.Workflow)
	raw, err := policy.Events.Hold(ctx, workflow, p.Agent, body)
	if err != nil {
		return err
	}
	to := url.URL{Scheme: at.Scheme, Host: at.Host, Path: router.WellKnown + "workflows/" + workflow + "/holds"}
	o := &rollback.Outgoing{
		Method: http.MethodPost, URL: to.String(), Body: body, Workflow: workflow, Rollback: e.Links.Rollback,
		Header: http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {e.ID + " " + string(e.Hold())}},
	}
	header := undoHeader(o, nil)
	header.Set(ect.FieldName, raw)
	answer, err := s.whole(ctx, o, func() (*rollback.Answer, error) { return s.send(ctx, o, header) })
	switch {
	case err != nil:
		return err
	case answer.Status == http.StatusOK:
		return nil
	case answer.Status == http.StatusNotFound, answer.Status == http.StatusMethodNotAllowed, answer.Status == http.StatusNotImplemented:
		return &hitl.RefusedHold{Reason: "unsupported", Final: true} // an agent of the draft, which has no such path
	case answer.Status == http.StatusUnauthorized, answer.Status == http.StatusForbidden:
		return &hitl.RefusedHold{Reason: string(rollback.ReasonUnauthorized)}
	case answer.Status < 500 && answer.Status != http.StatusTooManyRequests:
		return &hitl.RefusedHold{Reason: string(rollback.PeerReason(answer))}
	}
	return fmt.Errorf("status %d", answer.Status)
}

// holder is the rollback coordinator that tells what holds a workflow, and the workflow of its token.
// Nobody else has a name here.
func (h *Handler) holder(policy *tokenPolicy, r *http.Request, body []byte) (identity, workflow string, err error) {
	if policy == nil || policy.Verifier == nil {
		return "", "", problem.New(router.Unauthenticated, "This gateway believes nobody's tokens, since no `trust` is configured.")
	}
	tokens, err := policy.Verify(r, nil)
	if err == nil && tokens.Late != nil {
		err = tokens.Late
	}
	if err != nil {
		if refused := (*ect.Error)(nil); errors.As(err, &refused) {
			return "", "", err
		}
		return "", "", guard.RefusedToken(err)
	}
	if len(tokens.Own) != 1 {
		return "", "", problem.New(router.Unauthenticated, "Only a coordinator of rollbacks can say this, with one signed token.")
	}
	token := tokens.Own[0]
	switch {
	case token.Level() < ect.L2 || !slices.Contains(h.app.rollbackOptions().Coordinators, token.Issuer()):
		return "", "", nil
	case token.InputHash() != ect.Sum(body):
		return "", "", &ect.Error{Code: ect.CodeInputHash}
	}
	return token.Issuer(), token.Workflow(), policy.Bind(r.Context(), tokens.Own, router.UseAt("hold", "", body))
}
