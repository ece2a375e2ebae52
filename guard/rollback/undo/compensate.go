package undo

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// compensate undoes by a request of its own, or by asking the agent.
func (j *job) compensate(ctx context.Context) (Result, error) {
	pace := j.pace(j.o.First)
	var last note // of the attempt before, in this life
	for {
		found, err := j.find(ctx)
		if err != nil {
			return Result{}, err
		}
		switch found.Standing {
		case guard.Free, guard.Doubtful:
			if j.answer != nil {
				return j.conclude(ctx, *j.answer)
			}
			if !j.doubt {
				break
			}
			cleared, err := j.clear(ctx, found, last)
			if cleared != nil || err != nil {
				return orEmpty(cleared), err
			}
		case guard.RunningHere, guard.RunningElsewhere:
			return j.result(ReasonTimeout), nil
		default:
			n, err := j.settled(ctx, found, j.reads(nil))
			if err != nil {
				return Result{}, err
			}
			if j.anew(n) {
				continue
			}
			return j.conclude(ctx, n)
		}
		if last.reading != "" && last.reading != taken {
			again, err := pace.wait(ctx, last.after)
			if err != nil {
				return Result{}, err
			}
			if !again {
				return j.late(last), nil
			}
		}
		if j.overdue() {
			return j.late(last), nil
		}
		out, err := j.undoing(ctx)
		if why := (barred{}); errors.As(err, &why) {
			// P6: with a call that is in doubt its effect is, and no undo takes it back.
			j.doubt = j.doubt || why.why == ReasonUnfilled && j.task.Checkpoint.Result == nil
			return j.result(why.why), nil
		}
		if err != nil {
			return Result{}, err
		}
		if last, err = j.attempt(ctx, found, out, j.reads(out)); err != nil {
			return Result{}, err
		}
		switch {
		case last.reading.final():
			return j.conclude(ctx, last)
		case last.reason != "":
			return j.result(last.reason), nil
		}
	}
}

func orEmpty(r *Result) Result {
	if r == nil {
		return Result{}
	}
	return *r
}

func (j *job) delegated() bool { return j.call.Way == checkpoint.Delegate }

// reads reads answers to out, by the contract.
func (j *job) reads(out *Outgoing) func(*Answer) note {
	var to Outgoing
	if out != nil {
		to = *out // the sender may change its own
	}
	return func(a *Answer) note {
		n := byContract(a, j.delegated())
		if n.reading == pending {
			if n.location = follow(&to, a.Header.Get("Location")); n.location == "" {
				n.reading = accepted
			}
		}
		return n
	}
}

// conclude makes the result of a final answer; what is pending is asked for.
func (j *job) conclude(ctx context.Context, n note) (Result, error) {
	j.take(n)
	switch n.reading {
	case done:
		return j.done(), nil
	case pending:
	default:
		return j.result(reasonOf(n.reading)), nil
	}
	j.doubt = true // until it says how it has ended
	out, err := j.asking(ctx)
	if n.location != "" {
		out, err = j.dress(ctx, Outgoing{Method: http.MethodGet, URL: n.location, Delegated: j.delegated()})
	}
	if why := (barred{}); errors.As(err, &why) {
		return j.result(why.why), nil
	}
	if err != nil {
		return Result{}, err
	}
	if out == nil {
		return j.result(ReasonLost), nil // the store has lost where to ask
	}
	n, err = j.ask(ctx, out, n)
	if err != nil {
		return Result{}, err
	}
	return j.told(n), nil
}

// told is the result of a question's answer.
func (j *job) told(n note) Result {
	switch n.reading {
	case done:
		j.status = n.status
		return j.done()
	case refused, partial, escalated:
		j.doubt, j.status = n.unknown, n.status
		return j.result(reasonOf(n.reading))
	case unauthorized, unexpected, absent:
		return j.result(reasonOf(n.reading))
	}
	return j.late(n)
}

// clear asks what became of an undo that is in doubt. Without a result it may be sent
// again.
func (j *job) clear(ctx context.Context, found guard.Finding, last note) (*Result, error) {
	out, err := j.asking(ctx)
	if why := (barred{}); errors.As(err, &why) {
		r := j.result(why.why)
		return &r, nil
	}
	if err != nil {
		return nil, err
	}
	n := note{reading: absent}
	if out != nil {
		if n, err = j.ask(ctx, out, last); err != nil {
			return nil, err
		}
	}
	switch n.reading {
	case absent:
		if j.spec.OnLost == Escalate {
			r := j.result(ReasonLost) // nobody says that it never arrives
			return &r, nil
		}
		return nil, nil
	case done, refused, escalated:
		if err := j.applied(ctx, found, n); err != nil {
			return nil, err
		}
	}
	r := j.told(n)
	return &r, nil
}

// ask asks until there is an answer that decides, or no more time. It asks once however
// late it is. before is what made it ask.
func (j *job) ask(ctx context.Context, out *Outgoing, before note) (note, error) {
	pace := j.pace(j.o.Poll)
	n := before
	for asked := false; ; asked = true {
		if asked || before.underWay() {
			again, err := pace.wait(ctx, n.after)
			if err != nil || asked && !again {
				return n, err
			}
		}
		one := *out
		one.Header = out.Header.Clone()
		n, _ = j.send(ctx, &one, func(a *Answer) note { return byStatus(a, j.delegated()) })
		switch {
		case ctx.Err() != nil:
			return n, ctx.Err()
		case n.reason != "", n.reading == absent, n.reading.final() && n.reading != pending:
			return n, nil
		}
	}
}

// follow is where the Location of an answer leads, in the form of Outgoing.URL; empty
// where that is another origin.
func follow(to *Outgoing, location string) string {
	at, err := url.Parse(location)
	if location == "" || strings.ContainsFunc(location, notVisible) || err != nil || at.User != nil || at.Opaque != "" {
		return ""
	}
	base, err := url.Parse(to.URL)
	if err != nil {
		return ""
	}
	next := base.ResolveReference(at)
	next.Fragment, next.RawFragment = "", ""
	if base.Host != "" {
		if next.Scheme != base.Scheme || !strings.EqualFold(next.Host, base.Host) {
			return ""
		}
		return next.String()
	}
	// The upstream of the call is known by the call's host only.
	if next.Host != "" && (!strings.EqualFold(next.Host, to.Host) || next.Scheme != "" && next.Scheme != "http" && next.Scheme != "https") {
		return ""
	}
	if next.Host == "" && next.Scheme != "" {
		return ""
	}
	uri := next.RequestURI()
	if !strings.HasPrefix(uri, "/") || strings.HasPrefix(uri, "//") {
		return ""
	}
	return uri
}

// notVisible are what cannot stand in a request line.
func notVisible(r rune) bool { return r <= ' ' || r > '~' }
