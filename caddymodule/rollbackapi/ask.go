package rollbackapi

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// acceptTime is how long a request may take to be accepted: its workflow is read.
	acceptTime = 30 * time.Second
	// acceptPause is how long a group of commits may take until it can be read.
	acceptPause = 5 * time.Millisecond
)

// ask answers POST.
func (q *question) ask() error {
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
	if who.Unseen {
		return q.unseen(who.Token, wanted.Checkpoint)
	}
	r, err := q.accept(who, wanted)
	if err != nil {
		return err
	}
	return q.await(r, wanted.ID, patience, q.dialect, who.Token.ID())
}

// check holds what a token that asks must be.
func (q *question) check(who *Asker, body []byte) error {
	t := who.Token
	switch {
	case t.Level() < ect.L2:
		return refused(ect.CodeLevel) // C-6.1-a
	case t.Workflow() == "":
		return refused(ect.CodeWorkflow)
	case t.Event() != ect.EventRollbackRequest:
		// Whoever was shown a token that says something else could ask with it (ADR 0043).
		return refusedFor(ect.CodeAction, "Only a token whose exec_act is rollback_request, or that of an older draft, asks for a rollback.")
	case q.dialect == ect.ATD && len(t.Parents()) != 1:
		return refused(ect.CodeParents)
	}
	return t.CheckInput(ect.Sum(body))
}

// request makes what the coordinator is asked for.
func (q *question) request(who *Asker, body []byte) (rollback.Request, error) {
	t := who.Token
	wanted := rollback.Request{
		Token: t.ID(), By: t.Issuer(), Lineage: q.Lineage, Coordinator: q.coordinator(t.Issuer()),
	}
	said, err := q.said(t, body)
	if err != nil {
		return wanted, err
	}
	if err := bind(said, t, q.dialect); err != nil {
		return wanted, err
	}
	wanted.ID, wanted.Checkpoint, wanted.Reason, wanted.Urgency = said.id, said.checkpoint, said.reason, said.urgency
	if wanted.Scope, err = ParseScope(said.scope, said.cascade); err != nil {
		return wanted, err
	}
	wanted.Error, err = q.cause(t)
	wanted.Unnamed = !names(t, said.checkpoint)
	if q.dialect == ect.AERR && wanted.Error == "" {
		wanted.Unnamed = true // E-rollback-request-b: only the error that led to it will do
	}
	return wanted, err
}

// cause is the error that a token names among its parents; empty without one.
func (q *question) cause(t *ect.Token) (string, error) {
	for _, id := range t.Parents() {
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

// accept returns the rollback that is asked for: the one that there is, or a new one. The
// same token with the same content finds it again, also after its time; a token is good
// for one content (P5, E-idempotency-a).
func (q *question) accept(who *Asker, wanted rollback.Request) (*rollback.Rollback, error) {
	ctx, cancel := q.wait(acceptTime)
	defer cancel()
	use := useOf(&wanted)
	for {
		standing, err := q.Tokens.Recorded(ctx, who.Token, use)
		switch {
		case err != nil:
			return nil, err
		case standing == evidence.Other:
			return nil, refused(ect.CodeReplayed)
		case standing == evidence.Unused && who.Late != nil:
			return nil, who.Late
		}
		known, err := q.Coordinator.Get(ctx, wanted.ID)
		switch {
		case errors.Is(err, rollback.ErrUnknown):
			known = nil
		case err != nil:
			return nil, err
		}
		foreign := known != nil && known.Workflow != who.Token.Workflow()
		switch {
		case standing == evidence.Same && known != nil:
			return known, nil
		case standing == evidence.Same:
			return nil, refused(ect.CodeReplayed) // its rollback is not kept any more
		case known == nil || foreign:
			if err := q.limit(&q.counted.issuer, q.Limit.Issuer, who.Token.Issuer()); err != nil {
				return nil, err
			}
		}
		if err := q.inWorkflow(ctx, who.Token, wanted.Checkpoint); err != nil {
			return nil, err
		}
		if foreign {
			return nil, notInWorkflow()
		}
		r, err := q.execute(ctx, who, &wanted, use, known != nil)
		if err == nil {
			return r, nil
		}
		if errors.Is(err, rollback.ErrMismatch) {
			return nil, q.mismatch(ctx, who.Token, wanted.ID, err)
		}
		var lost *store.Conflict
		if !errors.As(err, &lost) {
			return nil, err
		}
		// Somebody else has brought the token: look again.
		select {
		case <-time.After(acceptPause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// execute asks the coordinator. A refusal is no step of the workflow: nothing is recorded of
// it. What is accepted follows from its token, so that this is recorded first; what the
// token was used for lands with the acceptance.
func (q *question) execute(ctx context.Context, who *Asker, wanted *rollback.Request, use evidence.Use, known bool) (*rollback.Rollback, error) {
	if known {
		r, err := q.Coordinator.Execute(ctx, *wanted)
		if err == nil && wanted.Unnamed && wanted.Error == "" {
			err = rollback.ErrUnnamed
		}
		if err == nil {
			err = q.Tokens.Enter(ctx, who.All)
		}
		if err == nil {
			err = q.Tokens.Bind(ctx, who.Token, use)
		}
		return r, err
	}
	_, err := q.Coordinator.Plan(ctx, *wanted)
	refused := errors.Is(err, checkpoint.ErrTampered) || errors.Is(err, checkpoint.ErrExpired)
	if err != nil && !refused {
		return nil, err
	}
	// The bound of the workflow is for those who take part in it: the plan says so.
	if err := q.limit(&q.counted.workflow, q.Limit.Workflow, who.Token.Workflow()); err != nil {
		return nil, err
	}
	if refused { // Execute refuses it too, and tells the error (cascade 4.2.3).
		if _, err := q.Coordinator.Execute(ctx, *wanted); err != nil {
			return nil, err
		}
	}
	if err := q.Tokens.Enter(ctx, who.All); err != nil {
		return nil, err
	}
	bound, err := q.Tokens.Bound(ctx, who.Token, use)
	if err != nil {
		return nil, err
	}
	r, err := q.Coordinator.Execute(ctx, *wanted, bound)
	if err != nil {
		return nil, err
	}
	return r, q.Tokens.Bind(ctx, who.Token, use) // it has, unless somebody else was first
}

// mismatch tells of another rollback with the same id only whom may look at that (P3).
func (q *question) mismatch(ctx context.Context, t *ect.Token, id string, mismatch error) error {
	r, err := q.Coordinator.Get(ctx, id)
	if errors.Is(err, rollback.ErrUnknown) {
		return refused(ect.CodeReplayed) // it is the token's id that was used before
	}
	if err != nil {
		return err
	}
	may, err := q.maySee(r, graph.Reader{Issuer: t.Issuer()})
	switch {
	case err != nil:
		return err
	case !may:
		return notInWorkflow()
	}
	return mismatch
}

// inWorkflow holds that the checkpoint belongs to the token's own workflow (cascade 6.1).
// It looks at nothing else, so that what is unknown and what is foreign are refused alike
// (P3).
func (q *question) inWorkflow(ctx context.Context, t *ect.Token, checkpoint string) error {
	_, found, err := q.Tokens.Event(ctx, t.Workflow(), checkpoint)
	switch {
	case err != nil:
		return err
	case !found && q.coordinator(t.Issuer()):
		return problem.New(problem.CheckpointUnknown, "The token's workflow has no such checkpoint.")
	case !found:
		return notInWorkflow()
	}
	return nil
}

// unseen refuses a token for its parents, as it would be refused if these were there: after
// the same checks, and counted alike (P3).
func (q *question) unseen(t *ect.Token, checkpoint string) error {
	if err := q.limit(&q.counted.issuer, q.Limit.Issuer, t.Issuer()); err != nil {
		return err
	}
	ctx, cancel := q.wait(acceptTime)
	defer cancel()
	if err := q.inWorkflow(ctx, t, checkpoint); err != nil {
		return err
	}
	return notInWorkflow()
}

// counted says by whose bounds a request was counted: once, however often it is tried.
type counted struct{ issuer, workflow bool }

// limit counts a new rollback by one of the bounds (C-6.1-d).
func (q *question) limit(once *bool, take func(time.Time, int, string) (time.Duration, bool), name string) error {
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

// useOf is what the token of a request is used for: this content, on whatever path.
func useOf(r *rollback.Request) evidence.Use {
	sum := sha256.New()
	for _, part := range []string{"agent_guard rollback", r.ID, r.Checkpoint, string(r.Scope), r.Reason, r.Urgency} {
		// A hash never fails to write.
		_, _ = sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		_, _ = sum.Write([]byte(part))
	}
	return evidence.Use(sum.Sum(nil))
}

func refused(code ect.Code) error { return &ect.Error{Code: code} }
