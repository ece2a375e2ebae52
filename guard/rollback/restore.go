package rollback

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// maxDoubts bounds how often a state is written whose answers are lost.
const maxDoubts = 10

// restore puts back what stood there before the call.
func (j *job) restore(ctx context.Context) (undoResult, error) {
	if j.call.Image == nil {
		return j.result(reasonNoPostImage), nil
	}
	r, err := j.putBack(ctx)
	if why := (requestError{}); errors.As(err, &why) {
		return j.result(why.why), nil
	}
	if err == nil && r.Done {
		r.Version, err = j.version(ctx)
	}
	return r, err
}

// maxTag is the longest entity tag that is recorded, in bytes.
const maxTag = 1024

// version is the restored version. To many upstreams entity tags are versions: the restored state
// gets a new tag. The undo of the call before reads that tag, and must know that no stranger made
// it.
func (j *job) version(ctx context.Context) (v checkpoint.Version, err error) {
	tag := strong(j.call.Image.ETag)
	if tag == "" || j.left == "" || len(j.left) > maxTag {
		return v, nil
	}
	origin, err := j.o.Checkpoints.Origin(ctx, j.call.Resource(), tag)
	if err != nil || origin == j.left {
		return v, err
	}
	return checkpoint.Version{Resource: j.call.Resource(), Tag: j.left, Origin: origin}, nil
}

// sameVersion reports whether two entity tags are of one version, or differ only by undos.
func (j *job) sameVersion(ctx context.Context, a, b string) (bool, error) {
	if a == "" || b == "" || a == b {
		return a == b && a != "", nil
	}
	first, err := j.o.Checkpoints.Origin(ctx, j.call.Resource(), a)
	if err != nil {
		return false, err
	}
	second, err := j.o.Checkpoints.Origin(ctx, j.call.Resource(), b)
	return first == second, err
}

func (j *job) putBack(ctx context.Context) (undoResult, error) {
	pace := j.pace(j.o.First)
	var last note // of the attempt before, in this life
	defer j.unwatch()
	for doubts := 0; ; {
		late := j.overdue()
		if last.Reading != "" && last.Reading != taken {
			again, err := pace.wait(ctx, last.after)
			if err != nil {
				return undoResult{}, err
			}
			late = !again // what came of it is looked at all the same
		}
		found, known, err := j.recorded(ctx, readsTarget(j.method()))
		switch {
		case err != nil:
			return undoResult{}, err
		case known != nil:
			return j.restored(ctx, *known)
		case found.Status == execution.RunningHere, found.Status == execution.RunningElsewhere:
			return j.result(reasonTimeout), nil
		}
		now, n, err := j.readTargetInWindow(ctx, doubts > 0)
		if err != nil {
			return undoResult{}, err
		}
		if now == nil {
			return j.unreadTarget(n), nil
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
			return j.result(reasonLost), nil
		}
		if j.disturbed() {
			return j.result(ReasonChanged), nil
		}
		out, err := j.putting(ctx, now)
		if err != nil {
			return undoResult{}, err
		}
		out.Window = j.window
		if last, err = j.attempt(ctx, found, out, j.readsInWindow(out.Method)); err != nil {
			return undoResult{}, err
		}
		switch {
		case last.Reading.final():
			return j.restoredInWindow(ctx, last)
		case last.reason != "":
			return j.result(last.reason), nil
		case last.Reading.doubtful():
			doubts++
		case doubts == 0: // the next look begins another
			j.unwatch()
		}
	}
}

func (j *job) overwrites() bool { return j.spec.OnChanged == Overwrite }

// post is the state after the call; nil if unknown.
func (j *job) post() *checkpoint.Image {
	if j.task.Checkpoint.Result == nil {
		return nil
	}
	return j.task.Checkpoint.Result.Image
}

// judge decides by the current state. Without a result the old state must be written.
func (j *job) judge(ctx context.Context, found execution.Finding, now *checkpoint.Image) (*undoResult, error) {
	post := j.post()
	switch {
	case !j.Unknown:
		j.Before = j.hashOf(now)
	case post != nil && !j.overwrites():
		j.Before = j.hashOf(post) // nothing else was written over
	}
	var r undoResult
	switch {
	case shows(now, j.call.Image):
		j.After = j.hashOf(now)
		seen := strong(now.ETag)
		if j.Unknown { // what stands there is the evidence that it was applied
			if err := j.applied(ctx, found, note{Reading: done, status: j.Status, Tag: seen}); err != nil {
				return nil, err
			}
			j.left = seen
		} else if post != nil { // the call has changed nothing but the version
			same, err := j.sameVersion(ctx, seen, strong(post.ETag))
			if err != nil {
				return nil, err
			}
			if same {
				j.left = seen
			}
		}
		r = j.done()
	case j.overwrites():
		return nil, nil
	case post == nil:
		r = j.result(reasonNoPostImage)
	case !shows(now, post):
		r = j.result(ReasonChanged)
	default:
		return nil, nil
	}
	return &r, nil
}

// method is the method of the restoring request.
func (j *job) method() string {
	if j.call.Image.Exists {
		return http.MethodPut
	}
	return http.MethodDelete
}

// putting is the request that restores the earlier state, on the condition that nobody changes
// the current one.
func (j *job) putting(ctx context.Context, now *checkpoint.Image) (*Outgoing, error) {
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
		etag, seen := strong(post.ETag), strong(now.ETag)
		same, err := j.sameVersion(ctx, seen, etag)
		if err != nil {
			return nil, err
		}
		if etag == "" || same {
			etag = seen // of the same state, as it was just seen
		}
		switch {
		case !post.Exists:
			o.Header.Set("If-None-Match", "*")
		case etag != "":
			o.Header.Set("If-Match", etag)
		}
	}
	o.Header.Set("Idempotency-Key", j.idempotencyKey())
	return j.completeRequest(ctx, o)
}

func readsTarget(method string) func(*Answer) note {
	return func(a *Answer) note { return byTarget(a, method) }
}

// restored makes the result of a final answer, by another read if needed.
func (j *job) restored(ctx context.Context, n note) (undoResult, error) {
	j.take(n)
	switch {
	case n.Reading == done && !j.spec.Verify:
		j.left = n.Tag
		return j.done(), nil
	case n.Reading == done, n.Reading == pending, n.Reading == changed, n.Reading == unexpected && n.Unknown:
	default:
		return j.result(reasonOf(n.Reading)), nil
	}
	pace := j.pace(j.o.Poll)
	for wait := n.underWay(); ; wait = true {
		again := true
		if wait {
			var err error
			if again, err = pace.wait(ctx, n.after); err != nil {
				return undoResult{}, err
			}
		}
		now, seen, err := j.readTarget(ctx)
		if err != nil {
			return undoResult{}, err
		}
		if now == nil {
			j.Unknown = true
			return j.unreadTarget(seen), nil
		}
		j.After = j.hashOf(now)
		switch {
		case shows(now, j.call.Image):
			if n.Reading != changed || n.Attempts > 1 { // else somebody else has put it back
				j.left = cmp.Or(n.Tag, strong(now.ETag))
			}
			return j.done(), nil
		case n.Reading == changed:
			return j.result(ReasonChanged), nil
		case n.Reading == done:
			return j.result(reasonUnverified), nil
		case n.Reading == unexpected:
			if post := j.post(); n.Attempts <= 1 && post != nil && shows(now, post) {
				j.Unknown = false // it stands there as it did before the answer
			}
			return j.result(reasonUnexpected), nil
		}
		j.Unknown = true // 202: it may come yet
		if !again {
			return j.result(reasonTimeout), nil
		}
	}
}

// unreadTarget is the result for a target that could not be read.
func (j *job) unreadTarget(n note) undoResult {
	if n.reason == "" && n.Reading.final() {
		if n.Reading == unauthorized {
			return j.result(ReasonUnauthorized)
		}
		return j.result(reasonUnexpected)
	}
	return j.late(n)
}

// ImageRequest is the request that reads the state of a call's target: before and after the call
// and for its undo. To be comparable the answers are never compressed, never from a cache, and in
// the representation that the call asked for, if its fields were recorded.
func ImageRequest(r *checkpoint.Request) *Outgoing {
	o := &Outgoing{Method: http.MethodGet, URL: target(r), Host: r.Host, Header: http.Header{
		"Accept-Encoding": {"identity"}, "Cache-Control": {"no-cache"},
	}}
	for _, name := range ImageRequestFields {
		if values := r.Header[name]; len(values) > 0 {
			o.Header[name] = slices.Clone(values)
		}
	}
	return o
}

// ImageRequestFields are the fields of a call's request that ImageRequest needs: to be recorded
// of calls that are restored.
var ImageRequestFields = []string{"Accept", "Accept-Language"}

// imageFields are the fields of an answer that belong to the state, besides its type.
var imageFields = []string{"Content-Encoding", "Content-Language", "Content-Disposition"}

// ImageOf is the image in an answer to ImageRequest; nil if the answer does not show the whole
// state.
func ImageOf(a *Answer) *checkpoint.Image {
	i := &checkpoint.Image{Status: a.Status}
	switch a.Status {
	case http.StatusOK, http.StatusNonAuthoritativeInfo, http.StatusNoContent:
	case http.StatusNotFound, http.StatusGone:
		return i
	default:
		return nil
	}
	if a.Cut {
		return nil
	}
	i.Exists, i.ETag = true, a.Header.Get("ETag")
	i.ContentType, i.Body = a.Header.Get("Content-Type"), a.Body
	for _, name := range imageFields {
		if values := a.Header[name]; len(values) > 0 {
			if i.Header == nil {
				i.Header = map[string][]string{}
			}
			i.Header[name] = slices.Clone(values)
		}
	}
	return i
}

func target(r *checkpoint.Request) string {
	if r.Query == "" {
		return r.Path
	}
	return r.Path + "?" + r.Query
}

// Same reports whether the images show the same state: existence, bytes, and the restored fields.
func Same(a, b *checkpoint.Image) bool {
	if a.Exists != b.Exists {
		return false
	}
	return !a.Exists || bytes.Equal(a.Body, b.Body) && a.ContentType == b.ContentType &&
		maps.EqualFunc(a.Header, b.Header, slices.Equal[[]string])
}

// hashOf is the hash of a state; zero if unknown. An absent target has a state too, other than an
// empty one.
func (j *job) hashOf(i *checkpoint.Image) [32]byte {
	switch {
	case i == nil, i == tooLarge:
		return [32]byte{}
	case !i.Exists:
		return j.hash(j.task.Rollback, nothingThere)
	}
	return j.hash(j.task.Rollback, i.Body)
}

// nothingThere stands for the state of an absent target. No caller can make it a body's hash:
// every hash has the rollback's salt, and this value is random.
var nothingThere = []byte("\x8f\x1d\xc4\x52\x0b\x9e\x77\xe3\xa6\x30\x5c\xd8\x49\xf1\x2a\xbb")

// saltedHash is the SHA-256 of a record of 64 bytes: a salt of the rollback's that only this
// gateway can make, and the SHA-256 of the state (ADR 0041). Equal states are equal within a
// rollback, and readers cannot guess the state from the hash (C-6.3-b).
func (u *undoer) saltedHash(rollback string, state []byte) [32]byte {
	salt := u.o.Guard.Key(execution.Scope{Caller: undoCaller, Method: stateMethod, Path: undoPath, ID: rollback})
	sum := sha256.Sum256(state)
	return sha256.Sum256(append(salt[:], sum[:]...))
}

// strong is the entity tag if it can be a condition (RFC 9110, section 13.1.1).
func strong(etag string) string {
	if len(etag) < 2 || !strings.HasPrefix(etag, `"`) || !strings.HasSuffix(etag, `"`) {
		return ""
	}
	return etag
}

// tooLarge is the state of a target that is larger than any image that was kept.
var tooLarge = new(checkpoint.Image)

// shows reports whether a state that was read is that of an image.
func shows(now, i *checkpoint.Image) bool { return now != tooLarge && Same(now, i) }

// readTarget reads the current state, and tries again until there is an answer or the time is
// over; at least once. Without a state the note says why.
func (j *job) readTarget(ctx context.Context) (*checkpoint.Image, note, error) {
	pace := j.pace(j.o.First)
	for {
		seen, n, err := j.readTargetOnce(ctx)
		switch {
		case err != nil:
			return nil, n, err
		case seen != nil:
			return seen, n, nil
		case n.reason != "", n.Reading.final():
			return nil, n, nil
		}
		again, err := pace.wait(ctx, n.after)
		if err != nil || !again {
			return nil, n, err
		}
	}
}

func (j *job) readTargetOnce(ctx context.Context) (seen *checkpoint.Image, n note, err error) {
	out, err := j.completeRequest(ctx, *ImageRequest(&j.call.Request))
	if err != nil {
		return nil, note{}, err
	}
	n, _ = j.send(ctx, out, func(a *Answer) note {
		if seen = ImageOf(a); seen == nil && a.Cut && a.Status == http.StatusOK {
			seen = tooLarge
		}
		return note{Reading: common(a.Status)}
	})
	if ctx.Err() != nil {
		return nil, n, ctx.Err()
	}
	return seen, n, nil
}

// compare reads the present state of what a call has changed, once, and returns why a restore would leave
// that alone. It is empty if it would not, and if the state cannot be read now.
func (j *job) compare(ctx context.Context) (Reason, error) {
	if j.call.Image == nil || j.overwrites() {
		return "", nil
	}
	now, _, err := j.readTargetOnce(ctx)
	if errors.As(err, new(requestError)) || now == nil || shows(now, j.call.Image) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	post := j.post()
	switch {
	case post == nil:
		return reasonNoPostImage, nil
	case !shows(now, post):
		return ReasonChanged, nil
	}
	left, seen := strong(post.ETag), strong(now.ETag)
	if left == "" || seen == "" {
		return "", nil
	}
	same, err := j.sameVersion(ctx, seen, left)
	if err != nil || same {
		return "", err
	}
	return ReasonChanged, nil
}

// Watcher is a Sender that notices other writers at the target of an undo. Without one, only
// entity tags keep an undo from overwriting later changes.
type Watcher interface {
	// Watch begins to watch the target of a request; nil if it cannot be watched.
	Watch(r *Outgoing) WriteWindow
}

// WriteWindow lasts from the first read of an undo to the last one after its write. Its own
// requests do not disturb it.
type WriteWindow interface {
	// Disturbed reports that somebody else has written there, or has begun to.
	Disturbed() bool
	// Close ends it.
	Close()
}

// watch begins a window, if there is none and others' changes are to be kept.
func (j *job) watch() {
	if w, is := j.o.Sender.(Watcher); is && j.window == nil && !j.overwrites() {
		look := ImageRequest(&j.call.Request)
		look.Guard, look.Action, look.Spec, look.Execution = j.spec.Guard, j.call.Action, j.spec, j.call.Execution
		j.window = w.Watch(look)
	}
}

func (j *job) unwatch() {
	if j.window != nil {
		j.window.Close()
		j.window = nil
	}
}

func (j *job) disturbed() bool { return j.window != nil && j.window.Disturbed() }

// readTargetInWindow reads within a window. If somebody else writes meanwhile it reads once more,
// as that write may have been refused. Once an undo may have had its effect, the window is kept.
func (j *job) readTargetInWindow(ctx context.Context, sent bool) (*checkpoint.Image, note, error) {
	j.watch()
	now, n, err := j.readTarget(ctx)
	if err != nil || now == nil || sent || !j.disturbed() {
		return now, n, err
	}
	j.unwatch()
	j.watch()
	return j.readTarget(ctx)
}

// readsInWindow is readsTarget for requests within the job's window. P6: a concurrent write may
// be lost. That is recorded with the answer, since the window does not outlive the process.
func (j *job) readsInWindow(method string) func(*Answer) note {
	read := readsTarget(method)
	return func(a *Answer) note {
		n := read(a)
		if n.Reading.final() && (n.Reading == done || n.Reading == pending || n.Unknown || j.Unknown) && j.disturbed() {
			n.Reading, n.Unknown = disturbed, true
		}
		return n
	}
}

func (j *job) restoredInWindow(ctx context.Context, n note) (undoResult, error) {
	r, err := j.restored(ctx, n)
	if err == nil && (r.Done || r.Reason == reasonUnverified) && j.disturbed() {
		j.Unknown = true
		return j.result(ReasonChanged), nil
	}
	return r, err
}
