package guard_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

const oneCharge = `{"id":"ch_1"}`

// retried makes a call twice under one id: the first time the service does it and answers 504.
func (b *saga) retried(route, body string, second http.HandlerFunc) (first, last step) {
	b.Helper()
	b.on(route, b.does(http.StatusGatewayTimeout), second)
	token := b.token(b.agents["a"], ect.Claims{Workflow: b.wid})
	first, last = b.attempt(token, route, body), b.attempt(token, route, body)
	if first.checkpoint == "" || last.checkpoint == "" || first.checkpoint == last.checkpoint {
		b.Fatalf("%d %v, then %d %v", first.Code, first.Header(), last.Code, last.Header())
	}
	return first, last
}

// P1: the attempts of one execution are one call, and are undone once, in whatever way and however
// often it is asked for.
func TestRollbackOfARetriedCall(t *testing.T) {
	for name, ask := range map[string]func(b *saga, first, last step){
		"the whole workflow":       func(b *saga, first, _ step) { b.back("completed", first, rollback.FullWorkflow) },
		"the first":                func(b *saga, first, _ step) { b.back("completed", first) },
		"the last":                 func(b *saga, _, last step) { b.back("completed", last) },
		"the last, then the first": func(b *saga, first, last step) { b.back("completed", last); b.back("completed", first) },
		"the first, then the last": func(b *saga, first, last step) { b.back("completed", first); b.back("completed", last) },
		"both at once": func(b *saga, first, last step) {
			one, two := uuid.NewString(), uuid.NewString()
			b.check(b.begun(one, last))
			b.check(b.begun(two, first))
			b.ended(one, "completed")
			b.ended(two, "completed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			retrying(t, func(b *saga) {
				// The upstream knows the call again.
				first, last := b.retried("POST /charges", oneCharge, says(http.StatusOK, oneCharge))
				if last.Code != http.StatusOK {
					b.Fatalf("%d %s", last.Code, last.Body)
				}
				ask(b, first, last)
				b.had("charged ch_1", "refunded ch_1")
			})
		})
	}
}

// P6: a refusal says nothing of an attempt before it.
func TestRollbackOfARefusedRetry(t *testing.T) {
	for of := range 2 {
		retrying(t, func(b *saga) {
			first, last := b.retried("POST /charges", oneCharge, says(http.StatusBadRequest, `{"error":"charged already"}`))
			b.back("completed", []step{first, last}[of])
			b.had("charged ch_1", "refunded ch_1")
		})
	}
}

// What stood there before the first attempt is put back, whichever of them is named.
func TestRollbackOfARetriedChange(t *testing.T) {
	for name, ask := range map[string]func(b *saga, first, last step){
		"first": func(b *saga, first, _ step) { b.back("completed", first) },
		"last":  func(b *saga, _, last step) { b.back("completed", last) },
		"all":   func(b *saga, first, _ step) { b.back("completed", first, rollback.FullWorkflow) },
	} {
		t.Run(name, func(t *testing.T) {
			retrying(t, func(b *saga) {
				b.write("/docs/x", "v0")
				first, last := b.retried("PUT /docs/x", "v1", says(http.StatusOK, "v1"))
				ask(b, first, last)
				b.had("/docs/x is v1", "/docs/x is v0")
			})
		})
	}
}

// P6: what stands there when a doubtful call is run again may be its own work. A rollback goes back
// to what stood there before it was sent first; that an attempt was turned away says nothing of
// the others.
func TestP6RollbackOfARetriedDoubt(t *testing.T) {
	retrying(t, func(b *saga) {
		b.write("/docs/x", "before")
		b.on("PUT /docs/x", b.does(504), b.does(504), says(http.StatusTooManyRequests, ""))
		token := b.token(b.agents["a"], ect.Claims{Workflow: b.wid})
		var last step
		for _, status := range []int{504, 504, 429, 200} {
			if last = b.attempt(token, "PUT /docs/x", "after"); last.Code != status {
				b.Fatalf("%d %s, want %d", last.Code, last.Body, status)
			}
			if doubt := last.Header().Get("Execution-Status") == "in_doubt"; doubt != (status != 200) {
				b.Errorf("%d: %v", status, last.Header())
			}
		}
		b.back("completed", last)
		b.stands("/docs/x", "before")
	})
}

// P6: what another call has written between the attempts is not undone with the last one.
func TestRollbackOfARetryAfterAnother(t *testing.T) {
	does := func(b *saga) http.HandlerFunc { return b.does(504) }
	fails := func(*saga) http.HandlerFunc { return says(504, "") }
	known := func(*saga) http.HandlerFunc { return says(200, "A") }
	usual := func(b *saga) http.HandlerFunc { return b.act }
	for name, c := range map[string]struct {
		first, again func(b *saga) http.HandlerFunc
		between      string
		doubts       int // further attempts that are lost
		undone       bool
		after        string
	}{
		"applied, and known again":   {does, known, "B", 0, false, "B"},
		"not applied":                {fails, usual, "B", 0, false, "A"},
		"applied in the second":      {fails, known, "B", 1, false, "A"},
		"nobody, not applied":        {fails, usual, "", 0, true, "v0"},
		"nobody, applied":            {does, known, "", 0, true, "v0"},
		"the same by somebody else":  {does, known, "A", 0, true, "v0"},
		"what was there once before": {fails, usual, "v0", 0, true, "v0"},
	} {
		t.Run(name, func(t *testing.T) {
			retrying(t, func(b *saga) {
				const put, path = "PUT /plain/x", "/plain/x"
				b.write(path, "v0")
				token := b.token(b.agents["a"], ect.Claims{Workflow: b.wid})
				b.on(put, c.first(b))
				b.attempt(token, put, "A")
				if c.between != "" {
					b.other().do(put, c.between)
				}
				for range c.doubts {
					b.on(put, b.does(504))
					b.attempt(token, put, "A")
				}
				b.on(put, c.again(b))
				last := b.attempt(token, put, "A")
				if last.Code != http.StatusOK {
					b.Fatalf("%d %s", last.Code, last.Body)
				}
				if !c.undone {
					b.disturbed(last, path, c.after)
					return
				}
				b.back("completed", last)
				b.stands(path, c.after)
			})
		})
	}
}

// disturbed compares what stands at the target of a call that is left to a person, because somebody
// else has changed it while it ran. Its rollback touches nothing.
func (b *saga) disturbed(s step, path, stands string) {
	b.Helper()
	b.want(b.reason(s), "changed-meanwhile")
	b.back("escalated changed-since", s)
	b.stands(path, stands)
}

// places have entity tags, and none.
var places = []string{"/docs/x", "/plain/x"}

// P6: the write of another call is not undone with one that ran at the same time.
func TestRollbackOfCallsSideBySide(t *testing.T) {
	for _, path := range places {
		undoing(t, func(b *saga) {
			hold := newGate()
			b.write(path, "v0")
			b.on("PUT "+path, b.late(hold))
			ended := b.pending(hold, "PUT "+path, "A")
			b.do("PUT "+path, "B")
			b.disturbed(ended(), path, "B")
		})
		undoing(t, func(b *saga) { // the read before it is late
			hold := newGate()
			b.write(path, "v0")
			b.on("GET "+path, b.late(hold))
			ended := b.pending(hold, "PUT "+path, "A")
			other := b.do("PUT "+path, "B")
			b.disturbed(ended(), path, "A")
			b.back("escalated changed-since", other)
			b.stands(path, "A")
		})
	}
}

// Calls to other documents, and those that come one after the other, are none of it.
func TestRollbackOfCallsApart(t *testing.T) {
	undoing(t, func(b *saga) {
		hold := newGate()
		b.write("/docs/x", "v0")
		b.on("PUT /docs/x", b.waits(hold))
		ended := b.pending(hold, "PUT /docs/x", "A")
		other := b.do("PUT /docs/y", "B")
		one := ended()
		b.back("completed", other)
		b.back("completed", one)
		b.stands("/docs/x", "v0")
		b.stands("/docs/y", "")
	})
}

// Whoever writes past the guard is found by the entity tag of the answer.
func TestRollbackOfAnotherTag(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/docs/x", "v0")
		b.on("PUT /docs/x", func(w http.ResponseWriter, r *http.Request) {
			answer := httptest.NewRecorder()
			b.act(answer, r)
			b.write("/docs/x", "B")
			play(w, answer)
		})
		b.disturbed(b.do("PUT /docs/x", "A"), "/docs/x", "B")
	})
}

// A rollback that restores a document is another writer too.
func TestCallBesideARollback(t *testing.T) {
	undoing(t, func(b *saga) {
		hold := newGate()
		b.write("/plain/x", "v0")
		first := b.do("PUT /plain/x", "v1")
		b.on("GET /plain/x", b.late(hold))
		ended := b.other().pending(hold, "PUT /plain/x", "v2")
		b.back("completed", first)
		b.stands("/plain/x", "v0")
		if s := ended(); s.Code != http.StatusOK {
			b.Errorf("%d %s", s.Code, s.Body)
		} else {
			b.want(b.reason(s), "changed-meanwhile")
		}
	})
}

// P6: an undo destroys no call that came between its read and its write, nor says that all is well
// where one came beside its write; also where nothing has entity tags.
func TestUndoDisturbed(t *testing.T) {
	for _, path := range places {
		for name, c := range map[string]struct {
			hold    string // the request that is held while the other call comes
			late    func(b *saga, hold *gate) http.HandlerFunc
			other   http.HandlerFunc // answers that call; nil does it
			want    string
			unknown bool
			stands  string
		}{
			"late read":    {"GET ", func(b *saga, hold *gate) http.HandlerFunc { return b.late(hold) }, nil, "escalated changed-since", false, "B"},
			"late write":   {"PUT ", func(b *saga, hold *gate) http.HandlerFunc { return b.waits(hold) }, nil, "escalated changed-since", path == "/plain/x", map[string]string{"/docs/x": "B", "/plain/x": "v0"}[path]},
			"refused call": {"GET ", func(b *saga, hold *gate) http.HandlerFunc { return b.late(hold) }, says(http.StatusForbidden, ""), "completed", false, "v0"},
		} {
			t.Run(name+" "+path, func(t *testing.T) {
				undoing(t, func(b *saga) {
					hold, id := newGate(), uuid.NewString()
					b.write(path, "v0")
					call := b.do("PUT "+path, "A")
					if c.hold == "GET " { // the first read compares, before the undo begins
						b.on("GET "+path, b.act)
					}
					b.on(c.hold+path, c.late(b, hold))
					b.check(b.begun(id, call))
					<-hold.arrived
					if c.other != nil {
						b.on("PUT "+path, c.other)
					}
					b.other().try("PUT "+path, "B")
					close(hold.open)
					if r := b.ended(id, c.want); r.Unknown != c.unknown {
						b.Errorf("unknown: %v", r.Unknown)
					}
					b.stands(path, c.stands)
				})
			})
		}
		undoing(t, func(b *saga) { // after its read, and before its write
			b.write(path, "v0")
			call := b.do("PUT "+path, "A")
			b.sending = func() { b.sending = nil; b.other().do("PUT "+path, "B") }
			b.back("escalated changed-since", call)
			b.stands(path, "B")
		})
		undoing(t, func(b *saga) { // the call runs all the while
			hold := newGate()
			b.write(path, "v0")
			call := b.do("PUT "+path, "A")
			b.on("PUT "+path, b.waits(hold))
			ended := b.other().pending(hold, "PUT "+path, "B")
			b.back("escalated changed-since", call)
			b.stands(path, "A")
			ended()
			b.stands(path, "B")
		})
	}
}

// What stood there is put back, whatever the call did to it.
func TestRollbackRestores(t *testing.T) {
	for _, path := range places {
		for name, c := range map[string]struct{ before, method, body, during string }{
			"changed": {"old", "PUT ", "new", "new"}, "created": {"", "PUT ", "new", "new"},
			"patched": {"old", "PATCH ", "er", "older"}, "deleted": {"old", "DELETE ", "", ""},
		} {
			t.Run(name+path, func(t *testing.T) {
				undoing(t, func(b *saga) {
					b.write(path, c.before)
					call := b.do(c.method+path, c.body)
					b.stands(path, c.during)
					b.back("completed", call)
					b.stands(path, c.before)
				})
			})
		}
	}
}

// Changed between the read and the restoring request: the condition of the request fails.
func TestRollbackChangedMeanwhile(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/docs/x", "v0")
		call := b.do("PUT /docs/x", "v1")
		b.on("PUT /docs/x", func(w http.ResponseWriter, r *http.Request) {
			b.want(r.Header.Get("If-Match"), `"v1"`)
			b.write("/docs/x", "v2")
			b.act(w, r)
		})
		b.back("escalated changed-since", call)
		b.had("/docs/x is v1")
	})
}

// What somebody else has changed since is overwritten where that is configured, and nowhere else.
func TestRollbackOverwrites(t *testing.T) {
	undoing(t, func(b *saga) {
		b.config.Actions[0].Undo.OnChanged = rollback.Overwrite
		b.begin()
		b.write("/docs/x", "v0")
		call := b.do("PUT /docs/x", "v1")
		b.write("/docs/x", "another's")
		b.back("completed", call)
		b.stands("/docs/x", "v0")
	})
}

// P6: the type of what stands there, and the other fields of its image, are part of it.
func TestRollbackRestoresTheType(t *testing.T) {
	for _, field := range []string{"Content-Type", "Content-Language"} {
		undoing(t, func(b *saga) {
			stands := "x/old"
			put := func(w http.ResponseWriter, r *http.Request) { stands = r.Header.Get(field); w.WriteHeader(204) }
			get := func(w http.ResponseWriter, r *http.Request) { says(200, "same", field, stands)(w, r) }
			b.on("PUT /docs/x", put, put)
			b.on("GET /docs/x", get, get, get, get, get)
			token := b.token(b.agents["a"], ect.Claims{Workflow: b.wid})
			b.back("completed", b.attempt(token, "PUT /docs/x", "same", field, "x/new"))
			b.want(stands, "x/old")
		})
	}
}

// RFC 9110, section 9.3.4: a PUT that creates something is answered 201. Where a read says that
// nothing was there, and the answer does not say that it was made, it is not deleted.
func TestRollbackDeletesWhatWasCreated(t *testing.T) {
	for name, c := range map[string]struct {
		none   string // If-None-Match
		answer int
		reason string
	}{
		"201":           {"", http.StatusCreated, ""},
		"200":           {"", http.StatusOK, "not-created"},
		"204":           {"", http.StatusNoContent, "not-created"},
		"200, if none":  {"*", http.StatusOK, ""},
		"200, if other": {`"v7"`, http.StatusOK, "not-created"},
	} {
		t.Run(name, func(t *testing.T) {
			undoing(t, func(b *saga) {
				if c.none == "" && c.answer != http.StatusCreated {
					b.write("/docs/x", "v0") // and a replica that lags
					b.on("GET /docs/x", says(http.StatusNotFound, ""))
				}
				b.on("PUT /docs/x", b.does(c.answer))
				var fields []string
				if c.none != "" {
					fields = []string{"If-None-Match", c.none}
				}
				call := b.attempt(b.token(b.agents["a"], ect.Claims{Workflow: b.wid}), "PUT /docs/x", "v1", fields...)
				b.want(b.reason(call), c.reason)
				if c.reason != "" {
					b.back("escalated irreversible", call)
					b.stands("/docs/x", "v1")
					return
				}
				b.back("completed", call)
				b.stands("/docs/x", "")
			})
		})
	}
}

// P6: what an upstream has only accepted is not there yet, and one that says it has deleted what it
// has never shown hides it. Nobody knows what there was, and a rollback has undone nothing.
func TestP6RollbackOfWhatIsNotShown(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/docs/x", "before")
		b.on("PUT /docs/x", says(http.StatusAccepted, ""))
		b.back("escalated irreversible", b.do("PUT /docs/x", "after"))
	})
	undoing(t, func(b *saga) {
		b.on("DELETE /docs/x", says(http.StatusNoContent, ""))
		b.back("escalated irreversible", b.do("DELETE /docs/x", ""))
		b.had()
	})
}

// What came after a call is not taken for its work.
func TestTheStateIsTakenBeforeTheEnd(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/plain/x", "before")
		b.on("GET /plain/x", b.act, func(w http.ResponseWriter, r *http.Request) { // the state after the call
			<-time.After(2 * time.Second)
			b.act(w, r)
		})
		call := b.do("PUT /plain/x", "first")
		b.write("/plain/x", "another's") // who has seen the end of the answer
		<-time.After(time.Minute)
		b.back("escalated changed-since", call)
		b.stands("/plain/x", "another's")
	})
}

// P6: a doubtful call that runs again and is refused by the guard itself is still in doubt, and no
// new id is safe for it.
func TestP6RefusalOfADoubtfulCall(t *testing.T) {
	retrying(t, func(b *saga) {
		b.config.Checkpoints.Rate = 1
		b.begin()
		b.on("PUT /docs/x", says(504, ""))
		token := b.token(b.agents["a"], ect.Claims{Workflow: b.wid})
		b.sees(b.call(token, "PUT /docs/x", "new"), "504 in_doubt ")
		b.sees(b.call(token, "PUT /docs/x", "new"), "429 refused quota-exceeded in_doubt again")
	})
}
