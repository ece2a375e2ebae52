package undo_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// state is what stands at a resource; "-" is nothing.
type state string

const nothing state = "-"

func (s state) hash() [32]byte {
	if s == nothing {
		return [32]byte{}
	}
	return sha256.Sum256([]byte(s))
}

func (u *resource) put(s state) { u.set(s != nothing, string(s)) }

func (u *resource) state() state {
	if !u.there {
		return nothing
	}
	return state(u.body)
}

// restoring is a call that made after of before at u, which now shows now.
func restoring(u *resource, before, after state, spec undo.Spec) undo.Task {
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
			for _, c := range [][2]state{{"old", "new"}, {"old", nothing}, {nothing, "new"}, {"", "new"}, {"old", ""}} {
				t.Run(fmt.Sprint(tags, verify, c), func(t *testing.T) {
					bubble(t, func(t *testing.T, r *rig) {
						u := &resource{tags: tags}
						r.answer = u.serve
						task := restoring(u, c[0], c[1], undo.Spec{Verify: verify})
						tag := u.etag()
						want := undo.Result{Done: true, Status: 204, Attempts: 1, Before: c[1].hash()}
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

// What somebody has changed since is left alone, unless it is to be overwritten.
func TestRestoreOfWhatWasChangedSince(t *testing.T) {
	for _, c := range [][3]state{
		{"old", "new", "newer"}, {"old", "new", nothing}, {"old", nothing, "newer"}, {nothing, "new", "newer"}, {"same", "same", "newer"},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				u := &resource{tags: true}
				r.answer = u.serve
				task := restoring(u, c[0], c[1], undo.Spec{Verify: true})
				u.put(c[2])
				r.wants(task, undo.Result{Reason: undo.ReasonChanged, Before: c[2].hash()})
				if u.writes != 0 || u.state() != c[2] {
					t.Errorf("%q after %d writes", u.state(), u.writes)
				}
				task = restoring(u, c[0], c[1], undo.Spec{Verify: true, OnChanged: undo.Overwrite})
				u.put(c[2])
				r.wants(task, undo.Result{Done: true, Status: 204, Attempts: 1, Before: c[2].hash(), After: c[0].hash()})
				if u.state() != c[0] {
					t.Errorf("%q", u.state())
				}
			})
		})
	}
}

// What stands there as it was is done, and nothing is sent.
func TestRestoreOfWhatIsThereAlready(t *testing.T) {
	for _, c := range [][2]state{{"old", "new"}, {nothing, "new"}, {"old", nothing}, {"same", "same"}} {
		bubble(t, func(t *testing.T, r *rig) {
			u := &resource{tags: true}
			r.answer = u.serve
			task := restoring(u, c[0], c[1], undo.Spec{})
			u.put(c[0])
			r.wants(task, undo.Result{Done: true, Before: c[0].hash(), After: c[0].hash()})
			task.Checkpoint.Result = nil // also where the call is in doubt
			r.wants(task, undo.Result{Done: true, Before: c[0].hash(), After: c[0].hash()})
		})
	}
}

// Where nobody knows what the call left, only overwriting restores.
func TestRestoreWithoutPostImage(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{tags: true}
		r.answer = u.serve
		for _, result := range []*checkpoint.Result{nil, {Status: 200}} {
			task := restoring(u, "old", "new", undo.Spec{})
			task.Checkpoint.Result = result
			r.wants(task, undo.Result{Reason: undo.ReasonNoPostImage, Before: state("new").hash()})
		}
		task := restoring(u, "old", "new", undo.Spec{OnChanged: undo.Overwrite, Verify: true})
		task.Checkpoint.Result = nil
		r.wants(task, undo.Result{Done: true, Status: 204, Attempts: 1, Before: state("new").hash(), After: state("old").hash()})
		task.Checkpoint.Snapshot.Image = nil
		r.wants(task, undo.Result{Reason: undo.ReasonNoPostImage})
	})
}

// A change between the look and the write is not overwritten.
func TestRestoreRacesWithAnother(t *testing.T) {
	for _, c := range [][2]state{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
		for _, other := range []state{"newer", "old"} {
			bubble(t, func(t *testing.T, r *rig) {
				u := &resource{tags: true}
				u.before = func(*undo.Outgoing) (*undo.Answer, error) { u.put(other); return nil, nil }
				r.answer = u.serve
				got := r.undo(restoring(u, c[0], c[1], undo.Spec{}))
				want := undo.Result{Reason: undo.ReasonChanged, Status: 412, Attempts: 1, Before: c[1].hash(), After: other.hash()}
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
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{tags: true}
		r.answer = u.serve
		task := restoring(u, "old", "new", undo.Spec{})
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
	for status, reason := range map[int]undo.Reason{
		401: undo.ReasonUnauthorized, 403: undo.ReasonUnauthorized, 409: undo.ReasonRefused,
		404: undo.ReasonUnexpected, 410: undo.ReasonUnexpected, 405: undo.ReasonUnexpected, 418: undo.ReasonUnexpected, 301: undo.ReasonUnexpected,
	} {
		bubble(t, func(t *testing.T, r *rig) {
			u := &resource{tags: true}
			u.before = func(*undo.Outgoing) (*undo.Answer, error) { return &undo.Answer{Status: status}, nil }
			r.answer = u.serve
			want := undo.Result{Reason: reason, Status: status, Attempts: 1, Before: state("new").hash()}
			if reason == undo.ReasonUnexpected && status != 405 { // P6: it is looked at what came of it
				want.After = want.Before
			}
			task := restoring(u, "old", "new", undo.Spec{Verify: true})
			r.wants(task, want)
			r.restart(-1)
			r.wants(task, want)
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
	for _, status := range []int{404, 410} { // of what was to be deleted
		bubble(t, func(t *testing.T, r *rig) {
			u := &resource{tags: true}
			u.before = func(*undo.Outgoing) (*undo.Answer, error) {
				u.put(nothing)
				return &undo.Answer{Status: status}, nil
			}
			r.answer = u.serve
			r.wants(restoring(u, nothing, "new", undo.Spec{}), undo.Result{Done: true, Status: status, Attempts: 1, Before: state("new").hash()})
		})
	}
}

// P6: a restore that cannot be seen afterwards is not done.
func TestP6Unverified(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{}
		u.after = func(*undo.Outgoing) (*undo.Answer, error) { u.put("something else"); return nil, nil }
		r.answer = u.serve
		want := undo.Result{Reason: undo.ReasonUnverified, Status: 204, Attempts: 1, Before: state("new").hash(), After: state("something else").hash()}
		task := restoring(u, "old", "new", undo.Spec{Verify: true})
		r.wants(task, want)
		r.restart(-1)
		r.wants(task, want)
	})
	bubble(t, func(t *testing.T, r *rig) { // and one that cannot be looked at is unknown
		u := &resource{}
		r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
			if u.writes > 0 {
				return nil, errUnsent
			}
			return u.serve(o)
		}
		r.wants(restoring(u, "old", "new", undo.Spec{Verify: true}),
			undo.Result{Unknown: true, Reason: undo.ReasonTimeout, Status: 204, Attempts: 1, Before: state("new").hash()})
	})
}

// Where the answer is lost the target tells what came of it.
func TestRestoreLostAnswers(t *testing.T) {
	lost := func(*undo.Outgoing) (*undo.Answer, error) { return nil, errLost }
	broken := func(*undo.Outgoing) (*undo.Answer, error) { return &undo.Answer{Status: 502}, nil }
	for i, fault := range []func(*undo.Outgoing) (*undo.Answer, error){lost, broken} {
		for _, c := range [][2]state{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
			t.Run(fmt.Sprint(i, c), func(t *testing.T) {
				status := []int{0, 502}[i]
				bubble(t, func(t *testing.T, r *rig) { // it had its effect
					u := &resource{tags: true, after: fault}
					r.answer = u.serve
					task := restoring(u, c[0], c[1], undo.Spec{})
					want := undo.Result{Done: true, Status: status, Attempts: 1, Before: c[1].hash(), After: c[0].hash()}
					r.wants(task, want)
					r.restart(-1)
					want.After = [32]byte{} // nobody looks once more
					r.wants(task, want)
					if u.writes != 1 {
						t.Errorf("%d writes", u.writes)
					}
				})
				bubble(t, func(t *testing.T, r *rig) { // it had none, twice
					n := 0
					u := &resource{tags: true, before: func(o *undo.Outgoing) (*undo.Answer, error) {
						if n++; n < 3 {
							return fault(o)
						}
						return nil, nil
					}}
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], undo.Spec{Verify: true}),
						undo.Result{Done: true, Status: 204, Attempts: 3, Before: c[1].hash(), After: c[0].hash()})
				})
				bubble(t, func(t *testing.T, r *rig) { // nobody can say any more
					u := &resource{tags: true}
					u.before = func(o *undo.Outgoing) (*undo.Answer, error) { u.put("newer"); return fault(o) }
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], undo.Spec{}),
						undo.Result{Unknown: true, Reason: undo.ReasonChanged, Status: status, Attempts: 1, Before: c[1].hash()})
				})
				bubble(t, func(t *testing.T, r *rig) { // never: sent a bounded number of times
					u := &resource{tags: true, before: fault}
					r.answer = u.serve
					r.wants(restoring(u, c[0], c[1], undo.Spec{}),
						undo.Result{Unknown: true, Reason: undo.ReasonLost, Status: status, Attempts: 10, Before: c[1].hash()})
				})
			})
		}
	}
}

// What stands there cannot be seen.
func TestRestoreIsBlind(t *testing.T) {
	for _, c := range []struct {
		answer any
		want   undo.Result
	}{
		{401, undo.Result{Reason: undo.ReasonUnauthorized}},
		{418, undo.Result{Reason: undo.ReasonUnexpected}},
		{206, undo.Result{Reason: undo.ReasonUnexpected}},
		{503, undo.Result{Reason: undo.ReasonTimeout}},
		{errLost, undo.Result{Reason: undo.ReasonTimeout}},
		{errUnsent, undo.Result{Reason: undo.ReasonUnreachable}},
		{&undo.SendError{Reason: undo.ReasonNoUpstream, Err: errLost}, undo.Result{Reason: undo.ReasonNoUpstream}},
		// Larger than any image: it is another state.
		{&undo.Answer{Status: 200, Cut: true}, undo.Result{Reason: undo.ReasonChanged}},
	} {
		t.Run(fmt.Sprint(c.answer), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(c.answer)
				task := restoring(new(resource), "old", "new", undo.Spec{})
				r.wants(task, c.want)
				if len(r.changing()) > 0 || time.Now().After(task.Due) {
					t.Error("sent, or too late")
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *rig) { // a large state is overwritten if it may be
		u := new(resource)
		large := true
		r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
			if o.Method == http.MethodGet && large {
				large = false
				return &undo.Answer{Status: 200, Cut: true}, nil
			}
			return u.serve(o)
		}
		r.wants(restoring(u, "old", "new", undo.Spec{OnChanged: undo.Overwrite, Verify: true}),
			undo.Result{Done: true, Status: 204, Attempts: 1, After: state("old").hash()})
	})
}

// 202: the target is looked at until it shows the old state.
func TestRestoreAccepted(t *testing.T) {
	for _, arrives := range []bool{true, false} {
		bubble(t, func(t *testing.T, r *rig) {
			u := &resource{tags: true, before: func(*undo.Outgoing) (*undo.Answer, error) { return &undo.Answer{Status: 202}, nil }}
			looks := 0
			r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
				if looks++; looks == 5 && arrives {
					u.put("old")
				}
				return u.serve(o)
			}
			want := undo.Result{Done: true, Status: 202, Attempts: 1, Before: state("new").hash(), After: state("old").hash()}
			if !arrives {
				want.Done, want.Unknown, want.Reason, want.After = false, true, undo.ReasonTimeout, state("new").hash()
			}
			r.wants(restoring(u, "old", "new", undo.Spec{}), want)
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
}

// What the due time leaves: nothing is sent after it, but the truth is looked for.
func TestRestoreAfterItsTime(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{tags: true}
		r.answer = u.serve
		task := restoring(u, "old", "new", undo.Spec{})
		task.Due = time.Now()
		r.wants(task, undo.Result{Reason: undo.ReasonTimeout, Before: state("new").hash()})
		u.put("old")
		r.wants(task, undo.Result{Done: true, Before: state("old").hash(), After: state("old").hash()})
		if len(r.changing()) > 0 {
			t.Error("sent")
		}
	})
}

// What passes is tried again until the due time; what was never executed is not unknown.
func TestRestoreIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		fault any
		want  undo.Result
	}{
		{429, undo.Result{Reason: undo.ReasonTimeout, Status: 429}},
		{errUnsent, undo.Result{Reason: undo.ReasonUnreachable}},
		{&undo.SendError{Reason: undo.ReasonNoUpstream, Err: errLost}, undo.Result{Reason: undo.ReasonNoUpstream}},
	} {
		bubble(t, func(t *testing.T, r *rig) {
			u, n, again := &resource{tags: true}, 0, 3
			u.before = func(*undo.Outgoing) (*undo.Answer, error) {
				if n++; n > again {
					return nil, nil
				}
				if err, ok := c.fault.(error); ok {
					return nil, err
				}
				return &undo.Answer{Status: c.fault.(int)}, nil
			}
			r.answer = u.serve
			if c.want.Reason != undo.ReasonNoUpstream {
				if got := r.undo(restoring(u, "old", "new", undo.Spec{})); !got.Done || n != 4 {
					t.Errorf("%+v after %d", got, n)
				}
			}
			again = 1 << 20
			task := restoring(u, "old", "new", undo.Spec{})
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
		i := undo.ImageOf(&undo.Answer{Status: status, Body: []byte("x")})
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
	if undo.ImageOf(&undo.Answer{Status: 200, Cut: true}) != nil {
		t.Error("half an image")
	}
	look := undo.Look(&checkpoint.Request{Path: "/a%20b", Host: "h", Message: checkpoint.Message{Header: http.Header{"Accept": {"text/a", "text/b"}, "X": {"1"}}}})
	if look.URL != "/a%20b" || look.Host != "h" || !slices.Equal(look.Header["Accept"], []string{"text/a", "text/b"}) || look.Header["X"] != nil {
		t.Errorf("%+v", look)
	}
}
