package guard_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// answering makes a bed's guard answer questions about its executions.
func answering(b *bed) *bed {
	e := &api.Endpoints{
		Name: "default", Policy: func(string) any { return nil }, Mount: func(*http.Request) string { return "" },
		Refused: func(*problem.Problem, string) {}, Write: guard.WriteProblem,
		Open: func() (*api.Gateway, error) {
			executions := b.engine.Executions
			return &api.Gateway{Close: func() {}, Executions: executions, Waits: context.Background(),
				Reader: func(r *http.Request) (router.Reader, error) {
					name, err := b.guard.Callers.Of(r, "", executions.Keyed)
					return router.Reader{Caller: executions.Caller(name)}, err
				}}, nil
		},
	}
	b.config.Endpoint = e.Serve
	b.start()
	return b
}

// about is a question of the caller "ann": what follows the path of the executions.
func (b *bed) about(what string) *http.Request {
	r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, problem.ExecutionsPath+what, nil)
	r.Header.Set("Authorization", "Bearer ann")
	return r
}

// asks compares what a question is answered: the status, and of each execution its path, state,
// cause and status; or the problem.
func (b *bed) asks(what, want string) {
	b.Helper()
	w := httptest.NewRecorder()
	b.serve(w, b.about(what))
	var doc struct {
		Type       string
		Executions []struct {
			Path, State, Cause string
			Status             int
		}
	}
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		b.Errorf("%s: %v: %s", what, err, w.Body)
	}
	got := fmt.Sprint(w.Code)
	if doc.Type != "" {
		got += " " + path.Base(doc.Type)
	}
	for _, e := range doc.Executions {
		got += fmt.Sprintf(" %s %s %s%d", e.Path, e.State, e.Cause, e.Status)
	}
	if got != want {
		b.Errorf("%s: got %q, want %q (%s)", what, got, want, w.Body)
	}
}

// took compares how long it has been since a time.
func took(t *testing.T, began time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(began); got != want {
		t.Errorf("after %v, want %v", got, want)
	}
}

// Section "Endpoints": a question that waits is answered when the execution is settled, however
// it ends; one about its output attaches. What does not exist is not waited for.
func TestQuestionsWaitForTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		answer         http.HandlerFunc
		status, output string
		end            time.Duration
		gone           bool // who is attached sees the cut
	}{
		"completed": {says(201, "done"), "200 /charges completed 201", "201 attached done", 10 * time.Second, false},
		"in doubt":  {silent, "200 /charges in_doubt no_answer0", "409 refused", 30 * time.Second, false},
		"released":  {says(429, "later"), "404 execution-unknown", "429 attached later", 10 * time.Second, false},
		"cut":       {pieces(cut, "a", "b"), "200 /charges in_doubt answer_truncated200", "200 attached ab", 20 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := answering(acting(t, guard.Action{Policy: guard.Policy{Deadline: jsontime.Duration(30 * time.Second)}}, c.answer))
				began := time.Now()
				b.asks("k?wait=60s", "404 execution-unknown")
				b.sees(b.about("k/output?wait=60s"), "404 refused execution-unknown  final")
				took(t, began, 0)
				var all sync.WaitGroup
				all.Go(func() { b.serve(httptest.NewRecorder(), b.post("ann")) })
				synctest.Wait()
				for _, what := range []string{"k?wait=60s", "k?wait=60", "k?wait=1m&path=/charges"} {
					all.Go(func() { b.asks(what, c.status); took(t, began, c.end) })
				}
				for range 3 {
					all.Go(func() {
						w, gone := httptest.NewRecorder(), true
						func() {
							defer func() { _ = recover() }()
							b.guard.ServeHTTP(w, b.about("k/output?wait=60s"))
							gone = false
						}()
						if words := strings.Fields(c.output); gone != c.gone || fmt.Sprint(w.Code) != words[0] || w.Header().Get("Execution-Status") != words[1] ||
							w.Code < 400 && w.Body.String() != words[2] {
							t.Errorf("%d %v %s, gone %v", w.Code, w.Header(), w.Body, gone)
						}
						took(t, began, c.end)
					})
				}
				synctest.Wait()
				b.asks("k", "200 /charges running 0")
				b.sees(b.about("k/output"), "409 refused in-progress running again")
				took(t, began, 0)
				all.Wait()
				b.was(1)
			})
		})
	}
}

// When the time is over the answer is the state of then. When the client leaves, its question
// ends, and the execution goes on.
func TestQuestionsThatEndBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := answering(acting(t, guard.Action{}, says(201, "done")))
		began := time.Now()
		var call, all sync.WaitGroup
		call.Go(func() { b.sees(b.post("ann"), "201 executed done") })
		synctest.Wait()
		ctx, leave := context.WithCancel(t.Context())
		for _, what := range []string{"k?wait=60s", "k/output?wait=60s"} {
			all.Go(func() { b.serve(httptest.NewRecorder(), b.about(what).WithContext(ctx)) })
		}
		all.Go(func() { b.asks("k?wait=3s", "200 /charges running 0") })
		all.Go(func() { b.sees(b.about("k/output?wait=3s"), "409 refused in-progress running again") })
		synctest.Wait()
		leave()
		all.Wait()
		took(t, began, 3*time.Second)
		call.Wait()
		b.asks("k?wait=60s", "200 /charges completed 201")
		b.sees(b.about("k/output?wait=60s"), "201 replayed done")
		took(t, began, 10*time.Second)
		b.was(1)
	})
}

// A question about an id that was used more than once is about all its executions, the youngest
// first, unless it is narrowed, and waits for the last of them.
func TestQuestionsAboutOneID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := answering(newBed(t, slowly))
		call := func(method, target string) {
			r := b.post("ann")
			r.Method, r.URL.Path = method, target
			b.serve(httptest.NewRecorder(), r)
		}
		began := time.Now()
		var all sync.WaitGroup
		for _, target := range []string{"/a", "/b"} {
			all.Go(func() { call("POST", target) })
			<-time.After(time.Second)
		}
		all.Go(func() {
			b.asks("k?wait=60s&path=/a", "200 /a completed 200")
			took(t, began, 10*time.Second)
		})
		b.asks("k?wait=60s", "200 /b completed 200 /a completed 200")
		took(t, began, 11*time.Second)
		all.Wait()
		call("PUT", "/a")
		const both, every = "200 /b completed 200 /a completed 200", "200 /a completed 200 /b completed 200 /a completed 200"
		for what, want := range map[string]string{
			"k": every, "k?unknown=1": every, "k?method=POST": both, "k?method=POST&path=%2Fb": "200 /b completed 200", "k?path=/a": "200 /a completed 200 /a completed 200",
			"k/output": "300" + every[3:], "k?method=post": "404 execution-unknown", "k?path=/c": "404 execution-unknown", "k?key=00": "404 execution-unknown",
			"K": "404 execution-unknown", "none?wait=10000h": "404 execution-unknown",
		} {
			b.asks(what, want)
		}
		b.sees(b.about("k/output?method=PUT"), "200 replayed charge 3")
	})
}

// The answer to a HEAD has no body, but the length of one, which is none of a GET's answer.
func TestOutputOfAHead(t *testing.T) {
	b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) { says(200, "", "Content-Length", "100")(w, r) })
	b.config.Consequential = func(r *http.Request) (bool, error) { return r.Method == http.MethodHead, nil }
	answering(b)
	call := b.post("ann")
	call.Method = http.MethodHead
	b.sees(call, "200 executed ")
	if h := b.sees(b.about("k/output"), "200 replayed "); h.Get("Content-Length") == "100" {
		t.Errorf("%v", h)
	}
	b.was(1)
}

// What is wrong with a question is said.
func TestQuestionsThatAreNone(t *testing.T) {
	b := answering(newBed(t, charge))
	for slug, all := range map[string][]string{
		"execution-id-invalid": {"", "a%20b", "%C3%A4", "%22a", strings.Repeat("x", 256), "/output"},
		"parameter-invalid": {"a/", "a/b", "a/output/", "a?wait=soon", "a?wait=", "a?wait", "a?wait=-1s", "a?wait=-1", "a?wait=1e9",
			"a?path=%25zz", "a?wait=1s;2s", "a?wait=99999999999999999999999", "%22a/b%22"},
	} {
		for _, what := range all {
			b.asks(strings.Replace(what, "%25", "%", 1), "400 "+slug)
		}
	}
}

// What runs on another node is shown and waited for as well; its answer can be had once it is
// whole.
func TestQuestionsAboutAnotherNode(t *testing.T) {
	for output, answer := range map[string]http.HandlerFunc{"201 replayed done": says(201, "done"), "409 refused in-doubt in_doubt final": says(502, "bad")} {
		synctest.Test(t, func(t *testing.T) {
			b := answering(acting(t, guard.Action{}, answer))
			began := time.Now()
			var all sync.WaitGroup
			all.Go(func() { b.serve(httptest.NewRecorder(), b.post("ann")) })
			synctest.Wait()
			if _, err := b.disk.Commit(t.Context(), store.Write{Key: []byte("mnode"), Value: []byte("another")}); err != nil {
				t.Fatal(err)
			}
			b.start()
			b.asks("k", "200 /charges running 0")
			b.sees(b.about("k/output"), "409 refused in-progress running again")
			took(t, began, 0)
			b.sees(b.about("k/output?wait=3s"), "409 refused in-progress running again")
			took(t, began, 3*time.Second)
			b.sees(b.about("k/output?wait=60s"), output)
			took(t, began, 10*time.Second)
			all.Wait()
			b.was(1)
		})
	}
}
