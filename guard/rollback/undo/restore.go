package undo

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// maxDoubts is how often a state is written of whose writing nobody told what came.
const maxDoubts = 10

// restore puts back what stood there before the call.
func (j *job) restore(ctx context.Context) (Result, error) {
	if j.call.Image == nil {
		return j.result(ReasonNoPostImage), nil
	}
	r, err := j.putBack(ctx)
	if why := (barred{}); errors.As(err, &why) {
		return j.result(why.why), nil
	}
	return r, err
}

func (j *job) putBack(ctx context.Context) (Result, error) {
	pace := j.pace(j.o.First)
	var last note // of the attempt before, in this life
	defer j.unwatch()
	for doubts := 0; ; {
		late := j.overdue()
		if last.reading != "" && last.reading != taken {
			again, err := pace.wait(ctx, last.after)
			if err != nil {
				return Result{}, err
			}
			late = !again // what came of it is looked at all the same
		}
		found, err := j.find(ctx)
		if err != nil {
			return Result{}, err
		}
		switch found.Standing {
		case guard.Free, guard.Doubtful:
			if j.answer != nil {
				return j.restored(ctx, *j.answer)
			}
		case guard.RunningHere, guard.RunningElsewhere:
			return j.result(ReasonTimeout), nil
		default:
			n, err := j.settled(ctx, found, j.readsTarget(j.method()))
			if err != nil {
				return Result{}, err
			}
			if j.anew(n) {
				continue
			}
			return j.restored(ctx, n)
		}
		now, n, err := j.lookAlone(ctx, doubts > 0)
		if err != nil {
			return Result{}, err
		}
		if now == nil {
			return j.blind(n), nil
		}
		if doubts > 0 && j.disturbed() { // whatever stands there: an undo may have been written over somebody's
			return j.result(ReasonChanged), nil
		}
		if r, err := j.judge(ctx, found, now); r != nil || err != nil {
			return orEmpty(r), err
		}
		if late {
			return j.late(last), nil
		}
		if doubts == maxDoubts {
			return j.result(ReasonLost), nil
		}
		if j.disturbed() {
			return j.result(ReasonChanged), nil
		}
		out, err := j.putting(ctx, now)
		if err != nil {
			return Result{}, err
		}
		out.Window = j.window
		if last, err = j.attempt(ctx, found, out, j.readsAlone(out.Method)); err != nil {
			return Result{}, err
		}
		switch {
		case last.reading.final():
			return j.restoredAlone(ctx, last)
		case last.reason != "":
			return j.result(last.reason), nil
		case last.reading.doubtful():
			doubts++
		case doubts == 0: // the next look begins another
			j.unwatch()
		}
	}
}

func (j *job) overwrites() bool { return j.spec.OnChanged == Overwrite }

// post is what stood there after the call; nil where that is not known.
func (j *job) post() *checkpoint.Image {
	if j.task.Checkpoint.Result == nil {
		return nil
	}
	return j.task.Checkpoint.Result.Image
}

// judge decides by what stands there now. Without a result the old state is to be
// written.
func (j *job) judge(ctx context.Context, found guard.Finding, now *sight) (*Result, error) {
	post := j.post()
	switch {
	case !j.doubt:
		j.before = j.hashOf(now.image)
	case post != nil && !j.overwrites():
		j.before = j.hashOf(post) // nothing else was written over
	}
	var r Result
	switch {
	case now.shows(j.call.Image):
		j.after = j.hashOf(now.image)
		if j.doubt { // what stands there is the evidence that it was applied
			if err := j.applied(ctx, found, note{reading: done, status: j.status}); err != nil {
				return nil, err
			}
		}
		r = j.done()
	case j.overwrites():
		return nil, nil
	case post == nil:
		r = j.result(ReasonNoPostImage)
	case !now.shows(post):
		r = j.result(ReasonChanged)
	default:
		return nil, nil
	}
	return &r, nil
}

// method is that of the request that restores.
func (j *job) method() string {
	if j.call.Image.Exists {
		return http.MethodPut
	}
	return http.MethodDelete
}

// putting is the request that restores what stood there before, on the condition that
// nobody changes what stands there now.
func (j *job) putting(ctx context.Context, now *sight) (*Outgoing, error) {
	o := Outgoing{Method: j.method(), URL: target(&j.call.Request), Header: http.Header{}}
	if image := j.call.Image; image.Exists {
		o.Body = slices.Clone(image.Body)
		for name, values := range image.Header {
			if len(values) > 0 {
				o.Header[name] = slices.Clone(values)
			}
		}
		if image.ContentType != "" {
			o.Header.Set("Content-Type", image.ContentType)
		}
	}
	if post := j.post(); post != nil && !j.overwrites() {
		etag := strong(post.ETag)
		if etag == "" {
			etag = strong(now.image.ETag) // of the same state, as it was just seen
		}
		switch {
		case !post.Exists:
			o.Header.Set("If-None-Match", "*")
		case etag != "":
			o.Header.Set("If-Match", etag)
		}
	}
	o.Header.Set("Idempotency-Key", j.idempotencyKey())
	return j.dress(ctx, o)
}

func (j *job) readsTarget(method string) func(*Answer) note {
	return func(a *Answer) note { return byTarget(a, method) }
}

// restored makes the result of a final answer, by another look where that is needed.
func (j *job) restored(ctx context.Context, n note) (Result, error) {
	j.take(n)
	switch {
	case n.reading == done && !j.spec.Verify:
		return j.done(), nil
	case n.reading == done, n.reading == pending, n.reading == changed, n.reading == unexpected && n.unknown:
	default:
		return j.result(reasonOf(n.reading)), nil
	}
	pace := j.pace(j.o.Poll)
	for wait := n.underWay(); ; wait = true {
		again := true
		if wait {
			var err error
			if again, err = pace.wait(ctx, n.after); err != nil {
				return Result{}, err
			}
		}
		now, seen, err := j.look(ctx)
		if err != nil {
			return Result{}, err
		}
		if now == nil {
			j.doubt = true
			return j.blind(seen), nil
		}
		j.after = j.hashOf(now.image)
		switch {
		case now.shows(j.call.Image):
			return j.done(), nil
		case n.reading == changed:
			return j.result(ReasonChanged), nil
		case n.reading == done:
			return j.result(ReasonUnverified), nil
		case n.reading == unexpected:
			if post := j.post(); n.attempts <= 1 && post != nil && now.shows(post) {
				j.doubt = false // it stands there as it did before the answer
			}
			return j.result(ReasonUnexpected), nil
		}
		j.doubt = true // 202: it may come yet
		if !again {
			return j.result(ReasonTimeout), nil
		}
	}
}

// blind is the result where it could not be seen what stands there.
func (j *job) blind(n note) Result {
	if n.reason == "" && n.reading.final() {
		if n.reading == unauthorized {
			return j.result(ReasonUnauthorized)
		}
		return j.result(ReasonUnexpected)
	}
	return j.late(n)
}
