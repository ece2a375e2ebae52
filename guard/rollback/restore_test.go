package rollback_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// undoState is what stands at a resource; "-" is nothing.
type undoState string

const nothing undoState = "-"

func (s undoState) hash() [32]byte {
	if s == nothing {
		return sha256.Sum256(rollback.NothingThere)
	}
	return sha256.Sum256([]byte(s))
}

func (u *resource) put(s undoState) { u.set(s != nothing, string(s)) }

func (u *resource) state() undoState {
	if !u.there {
		return nothing
	}
	return undoState(u.body)
}

// restoring is a call that made after of before at u, which now shows now.
func restoring(u *resource, before, after undoState, spec rollback.Spec) rollback.Task {
	t := task(checkpoint.Restore, spec)
	t.Checkpoint.Snapshot.Request.Header = map[string][]string{"Accept": {"application/json"}}
	u.put(before)
	t.Checkpoint.Snapshot.Image = u.image()
	u.put(after)
	t.Checkpoint.Result = &checkpoint.Result{Status: 200, Image: u.image()}
	return t
}

// What stood there is put back: after a PUT or PATCH, a DELETE, and the making of
// something (C-4.1.2-a).
func TestCascade412Restore(t *testing.T) {
	for _, tags := range []bool{true, false} {
		for _, verify := range []bool{true, false} {
			for _, c := range [][2]undoState{{"old", "new"}, {"old", nothing}, {nothing, "new"}, {"", "new"}, {"old", ""}} {
				t.Run(fmt.Sprint(tags, verify, c), func(t *testing.T) {
					bubble(t, func(t *testing.T, r *undoRig) {
						u := &resource{tags: tags}
						r.answer = u.serve
						task := restoring(u, c[0], c[1], rollback.Spec{Verify: verify})
						tag := u.etag()
						want := rollback.Result{Done: true, Status: 204, Attempts: 1, Before: c[1].hash()}
						if verify {
							want.After = c[0].hash()
						}
						r.wants(task, want)
						r.restart(-1)
						r.wants(task, want)
						if u.state() != c[0] || u.writes != 1 {
							t.Errorf("%q after %d writes", u.state(), u.writes)
						}
						o := r.changing()[0]
						if o.URL != "/charges?a=1" || o.Host != "api.example" || o.Header.Get("Idempotency-Key") != key {
							t.Errorf("%+v", o)
						}
						condition, want2 := o.Header.Get("If-Match"), tag
						if c[1] == nothing {
							condition, want2 = o.Header.Get("If-None-Match"), "*"
						}
						if condition != want2 {
							t.Errorf("condition %q, want %q", condition, want2)
						}
						if o.Method == http.MethodPut && (o.Header.Get("Content-Type") != "application/json" || o.Header.Get("Content-Language") != "en") {
							t.Errorf("%v", o.Header)
						}
						look := r.sent[0]
						if look.Header.Get("Accept") != "application/json" || look.Header.Get("Accept-Encoding") != "identity" {
							t.Errorf("%v", look.Header)
						}
					})
				})
			}
		}
	}
}

// C-4.3.2-d: a look before the undo says what the undo would find, and sends nothing that changes anything. It says
// nothing where the target cannot be read now, or is to be overwritten.
func TestCompareIsWhatARestoreFinds(t *testing.T) {
	const old, made, other = "old", "new", "newer"
	for name, c := range map[string]struct {
		now          undoState
		on           string
		unread, lost bool
		want         rollback.Reason
	}{
		"as the call has left it": {now: made},
		"as before the call":      {now: old},
		"changed since":           {now: other, want: rollback.ReasonChanged},
		"removed since":           {now: nothing, want: rollback.ReasonChanged},
		"it cannot be read":       {now: other, unread: true},
		"its answer was lost":     {now: other, lost: true, want: rollback.ReasonNoPostImage},
		"to be overwritten":       {now: other, on: rollback.Overwrite},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{}
				r.answer = u.serve
				task := restoring(u, old, made, rollback.Spec{Verify: true, OnChanged: c.on})
				u.put(c.now)
				if c.unread {
					r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) { return &rollback.Answer{Status: 503}, nil }
				}
				if c.lost {
					task.Checkpoint.Result = nil
				}
				if got, err := r.Prepare(ctx, task); err != nil || got != string(c.want) || len(r.changing()) > 0 {
					t.Errorf("%q, %v", got, err)
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // the same bytes, in another version
		u := &resource{tags: true}
		r.answer = u.serve
		task := restoring(u, old, made, rollback.Spec{Verify: true})
		u.put(other)
		u.put(made)
		if got, err := r.Prepare(ctx, task); err != nil || got != string(rollback.ReasonChanged) {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// What somebody has changed since is left alone, unless it is to be overwritten.
func TestRestoreOfWhatWasChangedSince(t *testing.T) {
	for _, c := range [][3]undoState{
		{"old", "new", "newer"}, {"old", "new", nothing}, {"old", nothing, "newer"}, {nothing, "new", "newer"}, {"same", "same", "newer"},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{tags: true}
				r.answer = u.serve
				task := restoring(u, c[0], c[1], rollback.Spec{Verify: true})
				u.put(c[2])
				r.wants(task, rollback.Result{Reason: rollback.ReasonChanged, Before: c[2].hash()})
				if u.writes != 0 || u.state() != c[2] {
					t.Errorf("%q after %d writes", u.state(), u.writes)
				}
				task = restoring(u, c[0], c[1], rollback.Spec{Verify: true, OnChanged: rollback.Overwrite})
				u.put(c[2])
				r.wants(task, rollback.Result{Done: true, Status: 204, Attempts: 1, Before: c[2].hash(), After: c[0].hash()})
				if u.state() != c[0] {
					t.Errorf("%q", u.state())
				}
			})
		})
	}
}

// What stands there as it was is done, and nothing is sent.
func TestRestoreOfWhatIsThereAlready(t *testing.T) {
	for _, c := range [][2]undoState{{"old", "new"}, {nothing, "new"}, {"old", nothing}, {"same", "same"}} {
		bubble(t, func(t *testing.T, r *undoRig) {
			u := &resource{tags: true}
			r.answer = u.serve
			task := restoring(u, c[0], c[1], rollback.Spec{})
			u.put(c[0])
			r.wants(task, rollback.Result{Done: true, Before: c[0].hash(), After: c[0].hash()})
			task.Checkpoint.Result = nil // also where the call is in doubt
			r.wants(task, rollback.Result{Done: true, Before: c[0].hash(), After: c[0].hash()})
		})
	}
}

// Where nobody knows what the call left, only overwriting restores.
func TestRestoreWithoutPostImage(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		for _, result := range []*checkpoint.Result{nil, {Status: 200}} {
			task := restoring(u, "old", "new", rollback.Spec{})
			task.Checkpoint.Result = result
			r.wants(task, rollback.Result{Reason: rollback.ReasonNoPostImage, Before: undoState("new").hash()})
		}
		task := restoring(u, "old", "new", rollback.Spec{OnChanged: rollback.Overwrite, Verify: true})
		task.Checkpoint.Result = nil
		r.wants(task, rollback.Result{Done: true, Status: 204, Attempts: 1, Before: undoState("new").hash(), After: undoState("old").hash()})
		task.Checkpoint.Snapshot.Image = nil
		r.wants(task, rollback.Result{Reason: rollback.ReasonNoPostImage})
	})
}

// A change between the look and the write is not overwritten.
func TestRestoreRacesWithAnother(t *testing.T) {
	for _, c := range [][2]undoState{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
		for _, other := range []undoState{"newer", "old"} {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{tags: true}
				u.before = func(*rollback.Outgoing) (*rollback.Answer, error) { u.put(other); return nil, nil }
				r.answer = u.serve
				got := r.undo(restoring(u, c[0], c[1], rollback.Spec{}))
				want := rollback.Result{Reason: rollback.ReasonChanged, Status: 412, Attempts: 1, Before: c[1].hash(), After: other.hash()}
				if c[0] == other { // put back by the other
					want.Done, want.Reason = true, ""
				}
				if got != want || u.state() != other || u.writes != 0 {
					t.Errorf("%v: %+v, %q", c, got, u.state())
				}
			})
		}
	}
}

// A weak entity tag makes no condition; the one that was just seen may.
func TestRestoreWithWeakTags(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		task := restoring(u, "old", "new", rollback.Spec{})
		task.Checkpoint.Result.Image.ETag = `W/"v2"`
		tag := u.etag()
		r.undo(task)
		if got := r.changing()[0].Header.Get("If-Match"); got != tag {
			t.Errorf("If-Match: %q", got)
		}
	})
}

// What the answer to the write says; the write that was answered is not sent again.
func TestRestoreAnswers(t *testing.T) {
	for status, reason := range map[int]rollback.Reason{
		401: rollback.ReasonUnauthorized, 403: rollback.ReasonUnauthorized, 409: rollback.ReasonRefused,
		404: rollback.ReasonUnexpected, 410: rollback.ReasonUnexpected, 405: rollback.ReasonUnexpected, 418: rollback.ReasonUnexpected, 301: rollback.ReasonUnexpected,
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			u := &resource{tags: true}
			u.before = func(*rollback.Outgoing) (*rollback.Answer, error) { return &rollback.Answer{Status: status}, nil }
			r.answer = u.serve
			want := rollback.Result{Reason: reason, Status: status, Attempts: 1, Before: undoState("new").hash()}
			if reason == rollback.ReasonUnexpected && status != 405 { // P6: it is looked at what came of it
				want.After = want.Before
			}
			task := restoring(u, "old", "new", rollback.Spec{Verify: true})
			r.wants(task, want)
			r.restart(-1)
			r.wants(task, want)
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
	for _, status := range []int{404, 410} { // of what was to be deleted
		bubble(t, func(t *testing.T, r *undoRig) {
			u := &resource{tags: true}
			u.before = func(*rollback.Outgoing) (*rollback.Answer, error) {
				u.put(nothing)
				return &rollback.Answer{Status: status}, nil
			}
			r.answer = u.serve
			r.wants(restoring(u, nothing, "new", rollback.Spec{}), rollback.Result{Done: true, Status: status, Attempts: 1, Before: undoState("new").hash()})
		})
	}
}

// P6: a restore that cannot be seen afterwards is not done.
func TestP6Unverified(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{}
		u.after = func(*rollback.Outgoing) (*rollback.Answer, error) { u.put("something else"); return nil, nil }
		r.answer = u.serve
		want := rollback.Result{Reason: rollback.ReasonUnverified, Status: 204, Attempts: 1, Before: undoState("new").hash(), After: undoState("something else").hash()}
		task := restoring(u, "old", "new", rollback.Spec{Verify: true})
		r.wants(task, want)
		r.restart(-1)
		r.wants(task, want)
	})
	bubble(t, func(t *testing.T, r *undoRig) { // and one that cannot be looked at is unknown
		u := &resource{}
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			if u.writes > 0 {
				return nil, errUnsent
			}
			return u.serve(o)
		}
		r.wants(restoring(u, "old", "new", rollback.Spec{Verify: true}),
			rollback.Result{Unknown: true, Reason: rollback.ReasonTimeout, Status: 204, Attempts: 1, Before: undoState("new").hash()})
	})
}

// Where the answer is lost the target says what came of it.
func TestRestoreLostAnswers(t *testing.T) {
	lost := func(*rollback.Outgoing) (*rollback.Answer, error) { return nil, errLost }
	broken := func(*rollback.Outgoing) (*rollback.Answer, error) { return &rollback.Answer{Status: 502}, nil }
	for i, fault := range []func(*rollback.Outgoing) (*rollback.Answer, error){lost, broken} {
		for _, c := range [][2]undoState{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
			t.Run(fmt.Sprint(i, c), func(t *testing.T) {
				status := []int{0, 502}[i]
				bubble(t, func(t *testing.T, r *undoRig) { // it had its effect
					u := &resource{tags: true, after: fault}
					r.answer = u.serve
					task := restoring(u, c[0], c[1], rollback.Spec{})
					want := rollback.Result{Done: true, Status: status, Attempts: 1, Before: c[1].hash(), After: c[0].hash()}
					r.wants(task, want)
					r.restart(-1)
					want.After = [32]byte{} // nobody looks once more
					r.wants(task, want)
					if u.writes != 1 {
						t.Errorf("%d writes", u.writes)
					}
				})
				bubble(t, func(t *testing.T, r *undoRig) { // it had none, twice
					n := 0
					u := &resource{tags: true, before: func(o *rollback.Outgoing) (*rollback.Answer, error) {
						if n++; n < 3 {
							return fault(o)
						}
						return nil, nil
					}}
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], rollback.Spec{Verify: true}),
						rollback.Result{Done: true, Status: 204, Attempts: 3, Before: c[1].hash(), After: c[0].hash()})
				})
				bubble(t, func(t *testing.T, r *undoRig) { // nobody can say any more
					u := &resource{tags: true}
					u.before = func(o *rollback.Outgoing) (*rollback.Answer, error) { u.put("newer"); return fault(o) }
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], rollback.Spec{}),
						rollback.Result{Unknown: true, Reason: rollback.ReasonChanged, Status: status, Attempts: 1, Before: c[1].hash()})
				})
				bubble(t, func(t *testing.T, r *undoRig) { // never: sent a bounded number of times
					u := &resource{tags: true, before: fault}
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], rollback.Spec{}),
						rollback.Result{Unknown: true, Reason: rollback.ReasonLost, Status: status, Attempts: 10, Before: c[1].hash()})
				})
			})
		}
	}
}

// What stands there cannot be seen.
func TestRestoreIsBlind(t *testing.T) {
	for _, c := range []struct {
		answer any
		want   rollback.Result
	}{
		{401, rollback.Result{Reason: rollback.ReasonUnauthorized}},
		{418, rollback.Result{Reason: rollback.ReasonUnexpected}},
		{206, rollback.Result{Reason: rollback.ReasonUnexpected}},
		{503, rollback.Result{Reason: rollback.ReasonTimeout}},
		{errLost, rollback.Result{Reason: rollback.ReasonTimeout}},
		{errUnsent, rollback.Result{Reason: rollback.ReasonUnreachable}},
		{&rollback.SendError{Reason: rollback.ReasonNoUpstream, Err: errLost}, rollback.Result{Reason: rollback.ReasonNoUpstream}},
		// Larger than any image: it is another state.
		{&rollback.Answer{Status: 200, Cut: true}, rollback.Result{Reason: rollback.ReasonChanged}},
	} {
		t.Run(fmt.Sprint(c.answer), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(c.answer)
				task := restoring(new(resource), "old", "new", rollback.Spec{})
				r.wants(task, c.want)
				if len(r.changing()) > 0 || time.Now().After(task.Due) {
					t.Error("sent, or too late")
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // a large state is overwritten if it may be
		u := new(resource)
		large := true
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			if o.Method == http.MethodGet && large {
				large = false
				return &rollback.Answer{Status: 200, Cut: true}, nil
			}
			return u.serve(o)
		}
		r.wants(restoring(u, "old", "new", rollback.Spec{OnChanged: rollback.Overwrite, Verify: true}),
			rollback.Result{Done: true, Status: 204, Attempts: 1, After: undoState("old").hash()})
	})
}

// 202: the target is looked at until it shows the old state.
func TestRestoreAccepted(t *testing.T) {
	for _, arrives := range []bool{true, false} {
		bubble(t, func(t *testing.T, r *undoRig) {
			u := &resource{tags: true, before: func(*rollback.Outgoing) (*rollback.Answer, error) { return &rollback.Answer{Status: 202}, nil }}
			looks := 0
			r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
				if looks++; looks == 5 && arrives {
					u.put("old")
				}
				return u.serve(o)
			}
			want := rollback.Result{Done: true, Status: 202, Attempts: 1, Before: undoState("new").hash(), After: undoState("old").hash()}
			if !arrives {
				want.Done, want.Unknown, want.Reason, want.After = false, true, rollback.ReasonTimeout, undoState("new").hash()
			}
			r.wants(restoring(u, "old", "new", rollback.Spec{}), want)
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
}

// What the due time leaves: nothing is sent after it, but the truth is looked for.
func TestRestoreAfterItsTime(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		task := restoring(u, "old", "new", rollback.Spec{})
		task.Due = time.Now()
		r.wants(task, rollback.Result{Reason: rollback.ReasonTimeout, Before: undoState("new").hash()})
		u.put("old")
		r.wants(task, rollback.Result{Done: true, Before: undoState("old").hash(), After: undoState("old").hash()})
		if len(r.changing()) > 0 {
			t.Error("sent")
		}
	})
}

// What passes is tried again until the due time; what was never executed is not unknown.
func TestRestoreIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		fault any
		want  rollback.Result
	}{
		{429, rollback.Result{Reason: rollback.ReasonTimeout, Status: 429}},
		{errUnsent, rollback.Result{Reason: rollback.ReasonUnreachable}},
		{&rollback.SendError{Reason: rollback.ReasonNoUpstream, Err: errLost}, rollback.Result{Reason: rollback.ReasonNoUpstream}},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			u, n, again := &resource{tags: true}, 0, 3
			u.before = func(*rollback.Outgoing) (*rollback.Answer, error) {
				if n++; n > again {
					return nil, nil
				}
				if err, ok := c.fault.(error); ok {
					return nil, err
				}
				return &rollback.Answer{Status: c.fault.(int)}, nil
			}
			r.answer = u.serve
			if c.want.Reason != rollback.ReasonNoUpstream {
				if got := r.undo(restoring(u, "old", "new", rollback.Spec{})); !got.Done || n != 4 {
					t.Errorf("%+v after %d", got, n)
				}
			}
			again = 1 << 20
			task := restoring(u, "old", "new", rollback.Spec{})
			task.Rollback = "another"
			got := r.undo(task)
			got.Attempts, got.Before = 0, [32]byte{}
			if got != c.want || time.Now().After(task.Due) || n > 500 {
				t.Errorf("%+v after %d", got, n)
			}
		})
	}
}

func TestImageOf(t *testing.T) {
	for status, want := range map[int]string{200: "there", 203: "there", 204: "there", 404: "nothing", 410: "nothing", 206: "", 301: "", 304: "", 401: "", 500: ""} {
		i := rollback.ImageOf(&rollback.Answer{Status: status, Body: []byte("x")})
		got := ""
		switch {
		case i != nil && i.Exists && i.Status == status:
			got = "there"
		case i != nil && i.Status == status && i.Body == nil:
			got = "nothing"
		}
		if got != want {
			t.Errorf("%d: %q, want %q", status, got, want)
		}
	}
	if rollback.ImageOf(&rollback.Answer{Status: 200, Cut: true}) != nil {
		t.Error("half an image")
	}
	look := rollback.ImageRequest(&checkpoint.Request{Path: "/a%20b", Host: "h", Message: checkpoint.Message{Header: http.Header{"Accept": {"text/a", "text/b"}, "X": {"1"}}}})
	if look.URL != "/a%20b" || look.Host != "h" || !slices.Equal(look.Header["Accept"], []string{"text/a", "text/b"}) || look.Header["X"] != nil {
		t.Errorf("%+v", look)
	}
}

// calling makes a call that puts a state, as one of several.
func (u *resource) calling(n int, after undoState, spec rollback.Spec) rollback.Task {
	t := task(checkpoint.Restore, spec)
	t.Checkpoint.Snapshot.ID = fmt.Sprint("ckpt-", n)
	t.Rollback = fmt.Sprintf("3f0e8d5a-6d3b-4f5e-9a51-%012d", n)
	t.Checkpoint.Snapshot.Image = u.image()
	u.put(after)
	t.Checkpoint.Result = &checkpoint.Result{Status: 200, Image: u.image()}
	return t
}

// undone undoes a task and records its version, as the coordinator does, over lives that die
// after so many steps each.
func (r *undoRig) undone(t rollback.Task, steps ...int) rollback.Result {
	r.t.Helper()
	for _, n := range append(steps, -1) {
		r.restart(n)
		got, err := r.Undo(r.life, t)
		if err == nil && got.Version != (checkpoint.Version{}) {
			err = r.keeps(got.Version)
		}
		if err == nil && !r.died() {
			return got
		}
		if !r.died() {
			r.t.Fatal(err)
		}
		r.crashes++
	}
	panic("not reached")
}

func (r *undoRig) keeps(v checkpoint.Version) error {
	p := r.checkpoints.PutBack(v, time.Now().Add(due))
	_, err := (&undoMortal{Store: r.mem, step: r.step}).Commit(context.Background(), p.Writes()...)
	return p.Done(err)
}

// Several changes of one resource are undone one
// after the other, though each undo makes another version; in lives that end anywhere.
func TestCrashBetweenUndosOfOneResource(t *testing.T) {
	crashes := 0
	for _, verify := range []bool{true, false} {
		for n := range 16 {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{tags: true}
				if !verify { // then only the answer has the version
					u.after = func(o *rollback.Outgoing) (*rollback.Answer, error) {
						return &rollback.Answer{Status: 200, Header: http.Header{"Etag": {u.etag()}}}, nil
					}
				}
				r.answer = u.serve
				spec := rollback.Spec{Verify: verify}
				// Made anew, deleted, changed, and changed to what it is.
				var calls []rollback.Task
				for i, s := range []undoState{"a", "b", nothing, "c", "c", "d"} {
					calls = append(calls, u.calling(i, s, spec))
				}
				for i := len(calls) - 1; i >= 0; i-- {
					if got := r.undone(calls[i], n); !got.Done {
						t.Errorf("verify %t, step %d: the undo of call %d: %+v", verify, n, i, got)
					}
				}
				if u.state() != nothing {
					t.Errorf("verify %t, step %d: %q", verify, n, u.state())
				}
				crashes += r.crashes
			})
		}
	}
	if crashes < 36 {
		t.Errorf("only %d lives ended early", crashes)
	}
}

// What equals the state before by its bytes, and was written by a stranger, is a stranger's.
func TestUndoOfWhatAStrangerWroteAgain(t *testing.T) {
	for name, c := range map[string]struct{ before, after bool }{
		"nobody": {}, "before the undo of the later call": {before: true}, "after it": {after: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{tags: true}
				r.answer = u.serve
				u.put("a")
				first := u.calling(1, "b", rollback.Spec{Verify: true})
				second := u.calling(2, "c", rollback.Spec{Verify: true})
				if c.before {
					u.put("b")
				}
				if got := r.undone(second); !got.Done {
					t.Errorf("%+v", got)
				}
				if c.after {
					u.put("b")
				}
				got, whole := r.undone(first), !c.before && !c.after
				if got.Done != whole || !whole && (got.Reason != rollback.ReasonChanged || u.state() != "b") {
					t.Errorf("%+v, %q", got, u.state())
				}
			})
		})
	}
}

// A stranger's write between two calls breaks the chain, also where what the second call has
// made was undone, and a version is of one resource only.
func TestUndoOverAStrangersVersion(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		u.put("a")
		first := u.calling(1, "b", rollback.Spec{Verify: true})
		u.put("b") // a stranger's
		second := u.calling(2, "c", rollback.Spec{Verify: true})
		if got := r.undone(second); !got.Done {
			t.Errorf("%+v", got)
		}
		if got := r.undone(first); got.Done || got.Reason != rollback.ReasonChanged {
			t.Errorf("%+v", got)
		}
	})
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		u.put("a")
		first := u.calling(1, "b", rollback.Spec{Verify: true})
		second := u.calling(2, "c", rollback.Spec{Verify: true})
		second.Checkpoint.Snapshot.Request.Query = "a=2"
		if got := r.undone(second); !got.Done {
			t.Errorf("%+v", got)
		}
		if got := r.undone(first); got.Done || got.Reason != rollback.ReasonChanged {
			t.Errorf("%+v", got)
		}
	})
}

// The version is that of the answer to the undo: another one that is seen afterwards is
// somebody else's, whatever stands there. So is what was there although the condition failed.
func TestVersionIsTheUndosOwn(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		u.after = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			tag := u.etag()
			u.put("b") // a stranger, who writes the same
			return &rollback.Answer{Status: 200, Header: http.Header{"Etag": {tag}}}, nil
		}
		r.answer = u.serve
		u.put("a")
		first := u.calling(1, "b", rollback.Spec{Verify: true})
		second := u.calling(2, "c", rollback.Spec{Verify: true})
		if got := r.undone(second); !got.Done || got.Version.Tag != `"v4"` || got.Version.Origin != `"v2"` {
			t.Errorf("%+v", got)
		}
		if got := r.undone(first); got.Done || got.Reason != rollback.ReasonChanged {
			t.Errorf("%+v", got)
		}
	})
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		u.before = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			u.before = nil
			u.put("b") // a stranger puts it back himself
			return nil, nil
		}
		r.answer = u.serve
		u.put("a")
		first := u.calling(1, "b", rollback.Spec{Verify: true})
		second := u.calling(2, "c", rollback.Spec{Verify: true})
		if got := r.undone(second); !got.Done || got.Version != (checkpoint.Version{}) {
			t.Errorf("%+v", got)
		}
		if got := r.undone(first); got.Done || got.Reason != rollback.ReasonChanged {
			t.Errorf("%+v", got)
		}
	})
}

// Nothing is recorded where versions say nothing: hashes as entity tags, weak ones, none.
func TestVersionsThatAreNone(t *testing.T) {
	for _, tag := range []func(u *resource) string{
		func(u *resource) string { return "" },
		func(u *resource) string { return fmt.Sprintf(`W/"%d"`, u.version) },
		func(u *resource) string { return fmt.Sprintf("%q", u.body) },
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			u := &resource{tags: true, tag: tag}
			r.answer = u.serve
			u.put("a")
			first := u.calling(1, "b", rollback.Spec{Verify: true})
			second := u.calling(2, "c", rollback.Spec{Verify: true})
			for _, task := range []rollback.Task{second, first} {
				if got := r.undone(task); !got.Done || got.Version != (checkpoint.Version{}) {
					t.Errorf("%s: %+v", u.etag(), got)
				}
			}
			if u.state() != "a" {
				t.Errorf("%q", u.state())
			}
		})
	}
}

// P4: where the store does not say whose a version is, nothing is written.
func TestP4VersionThatCannotBeRead(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		u.put("a")
		first := u.calling(1, "b", rollback.Spec{Verify: true})
		second := u.calling(2, "c", rollback.Spec{Verify: true})
		r.undone(second)
		writes := u.writes
		o := r.options
		o.Guard, o.Checkpoints, o.Sender = r.guard, checkpoint.New(versionless{r.mem}, r.ring), r
		if _, err := rollback.NewUndoer(o).Undo(context.Background(), first); !errors.Is(err, checkpoint.ErrStore) || u.writes != writes {
			t.Errorf("%v, %d writes", err, u.writes-writes)
		}
	})
}

// versionless is a store that has failed for versions.
type versionless struct{ store.Store }

func (v versionless) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if bytes.HasPrefix(key, []byte("kv")) {
		return store.Entry{}, errUndoDead
	}
	return v.Store.Get(ctx, key)
}

// watcher is a rig that knows who else writes.
type watcher struct {
	*undoRig
	disturbed bool
	open, all int
}

func (w *watcher) Watch(*rollback.Outgoing) rollback.WriteWindow {
	w.open, w.all, w.disturbed = w.open+1, w.all+1, false
	return w
}
func (w *watcher) Disturbed() bool { return w.disturbed }
func (w *watcher) Close()          { w.open-- }

// P6: what others write beside an undo is not written over, or said to be perhaps.
func TestRestoreBesideOthers(t *testing.T) {
	for name, c := range map[string]struct {
		spec   rollback.Spec
		script func(w *watcher, u *resource)
		want   rollback.Result
		looks  int
		stands undoState
	}{
		"alone": {looks: 1, want: rollback.Result{Done: true, Status: 204, Attempts: 1, Before: undoState("new").hash()}, stands: "old"},
		"one write while it looks, that had no effect": {
			script: func(w *watcher, u *resource) {
				w.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
					w.disturbed = w.asked() == 1
					return u.serve(o)
				}
			},
			looks: 2, want: rollback.Result{Done: true, Status: 204, Attempts: 1, Before: undoState("new").hash()}, stands: "old",
		},
		"always somebody": {
			script: func(w *watcher, u *resource) {
				w.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
					w.disturbed = true
					return u.serve(o)
				}
			},
			looks: 2, want: rollback.Result{Reason: rollback.ReasonChanged, Before: undoState("new").hash()}, stands: "new",
		},
		"always somebody, and all is to be written over": {
			spec: rollback.Spec{OnChanged: rollback.Overwrite},
			script: func(w *watcher, u *resource) {
				w.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
					w.disturbed = true
					return u.serve(o)
				}
			},
			looks: 1, want: rollback.Result{Done: true, Status: 204, Attempts: 1, Before: undoState("new").hash()}, stands: "old",
		},
		"while it is written": {
			script: func(w *watcher, u *resource) {
				u.before = func(*rollback.Outgoing) (*rollback.Answer, error) { w.disturbed = true; return nil, nil }
			},
			looks: 1, want: rollback.Result{Unknown: true, Reason: rollback.ReasonChanged, Status: 204, Attempts: 1, Before: undoState("new").hash()}, stands: "old",
		},
		"while it is checked": {
			spec: rollback.Spec{Verify: true},
			script: func(w *watcher, u *resource) {
				w.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
					w.disturbed = u.writes > 0 && o.Method == http.MethodGet
					return u.serve(o)
				}
			},
			looks: 2, want: rollback.Result{Unknown: true, Reason: rollback.ReasonChanged, Status: 204, Attempts: 1, Before: undoState("new").hash(), After: undoState("old").hash()}, stands: "old",
		},
		"after an answer that was lost": {
			script: func(w *watcher, u *resource) {
				u.after = func(*rollback.Outgoing) (*rollback.Answer, error) { w.disturbed = true; return nil, errLost }
			},
			looks: 2, want: rollback.Result{Unknown: true, Reason: rollback.ReasonChanged, Attempts: 1, Before: undoState("new").hash()}, stands: "old",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{}
				r.answer = u.serve
				w := &watcher{undoRig: r}
				undoer := rollback.NewUndoer(rollback.UndoerOptions{Guard: r.guard, Checkpoints: r.checkpoints, Sender: w})
				rollback.HashPlainly(undoer)
				r.Undoer = undoer
				task := restoring(u, "old", "new", c.spec)
				if c.script != nil {
					c.script(w, u)
				}
				r.wants(task, c.want)
				if u.state() != c.stands || w.open != 0 || r.asked() != c.looks {
					t.Errorf("%q, %d windows are open, %d looks", u.state(), w.open, r.asked())
				}
				if name == "while it is written" { // it is recorded with the answer
					r.wants(task, c.want)
				}
			})
		})
	}
}

// C-6.3-b: hashes of a state stand in tokens for the whole workflow, and say only which
// states of one rollback are equal: nobody can try what they may be of.
func TestStateHashesTellNothing(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		o := r.options
		o.Guard, o.Checkpoints, o.Sender = r.guard, r.checkpoints, r
		seen := func(u rollback.Undoer, id, call string, before, after undoState) rollback.Result {
			res := &resource{tags: true}
			r.answer = res.serve
			task := restoring(res, before, after, rollback.Spec{Verify: true})
			task.Rollback, task.Checkpoint.Snapshot.ID = id, call
			got, err := u.Undo(context.Background(), task)
			if err != nil || !got.Done {
				t.Fatalf("%+v, %v", got, err)
			}
			return got
		}
		u := rollback.NewUndoer(o)
		one := seen(u, "first", "c1", "old", "new")
		two := seen(u, "first", "c2", "new", "newer")
		life := seen(rollback.NewUndoer(o), "first", "c3", "old", "new")
		other := seen(u, "second", "c4", "old", "new")
		if one.Before != two.After || one.After != life.After || one.Before != life.Before {
			t.Error("equal states are not equal in one rollback")
		}
		if one.Before == one.After || one.Before == two.Before {
			t.Error("states that differ are equal")
		}
		if one.After == other.After || one.Before == other.Before {
			t.Error("states are equal in two rollbacks")
		}
		for _, sum := range [][32]byte{one.Before, one.After} {
			for _, s := range []undoState{"old", "new"} {
				if sum == sha256.Sum256([]byte(s)) || sum == ([32]byte{}) {
					t.Error("the state can be guessed")
				}
			}
		}
	})
}
