package e2e

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

const recognizes = "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n breaker off\n}"

// equal is a call without a key; all of a path are equal.
func equal(path string, header ...string) request {
	r := request{path: path, header: map[string]string{"Authorization": "Bearer ada"}}
	for i := 0; i < len(header); i += 2 {
		r.header[header[i]] = header[i+1]
	}
	return r
}

// cut makes n calls whose clients wait together, and leave once all have arrived upstream. It
// returns when the gateway knows that.
func (g *gateway) cut(t *testing.T, u *upstream, n int, r request) {
	t.Helper()
	if r.client == nil {
		r.client = g.client
	}
	r.header = maps.Clone(r.header)
	r.header[leaver] = "yes"
	before, known := u.arrivals(r.path), left.Load()
	var all []func()
	for i := range n {
		all = append(all, g.leaving(r))
		eventually(t, "the call has arrived", func() bool { return u.arrivals(r.path) == before+i+1 })
	}
	for _, leave := range all {
		leave()
	}
	eventually(t, "the gateway knows that the clients have left", func() bool { return left.Load() == known+int64(n) })
}

// P6: with on_leave cancel the upstream's request ends when the last client has left; what came of it
// is in doubt, which is no failure of the upstream.
func TestOnLeaveCancel(t *testing.T) {
	u, stopped := newUpstream(t), make(chan struct{})
	u.on("/x", func(_ http.ResponseWriter, a *arrival) {
		<-a.Context().Done()
		close(stopped)
	})
	g := start(t, `e2e_leaves
	agent_proxy %s {
		on_leave cancel
		breaker {
			consecutive 1
			cooldown 10h
		}
	}`, u.addr)
	r := equal("/x", "Idempotency-Key", "k")
	g.cut(t, u, 1, r)
	select {
	case <-stopped:
	case <-time.After(time.Minute):
		t.Fatal("the request was not cancelled")
	}
	idle(t)
	if got := g.call(r); got.status != 409 || !strings.Contains(got.body, "client_left") {
		t.Errorf("%d %s", got.status, got.body)
	}
	u.arrived("/x", 1)
	g.call(request{path: "/y", id: "l"}).want(t, 201, "arrival 1", "executed")
}

// idle waits until nothing runs.
func idle(t *testing.T) {
	t.Helper()
	eventually(t, "the executions are settled", func() bool { return waiting("guard.(*Call).execute") == 0 })
}

// recognized checks that an answer names the execution that its call was recognised as.
func (r reply) recognized(t *testing.T) {
	t.Helper()
	if id := r.header.Get("Execution-Recognized"); id == "" || id != r.header.Get("Execution-Id") {
		t.Errorf("Execution-Recognized is %q, Execution-Id %q", id, r.header.Get("Execution-Id"))
	}
}

// itsOwn checks that an answer is that of a call of its own.
func (r reply) itsOwn(t *testing.T) {
	t.Helper()
	if id := r.header.Get("Execution-Recognized"); id != "" || r.header.Get("Execution-Id") == "" {
		t.Errorf("a call of its own was recognised as %q (%s)", id, r.header.Get("Execution-Id"))
	}
}

// held answers with the number of the arrival once the gate is open.
func held(hold *gate) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, fmt.Sprint("arrival ", a.n))(w, a)
	}
}

// P1 without a key (ADR 0070): a call whose client left while it ran has one effect, whenever its
// retry comes. What is called after that was answered is meant.
func TestRecognizedAfterALeave(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for _, version := range []string{"h1", "h2c"} {
		client := g.newClient(nil)
		if version == "h2c" {
			client = g.h2cClient()
		}
		for _, when := range []string{"while it runs", "when it has ended"} {
			t.Run(version+" "+when, func(t *testing.T) {
				hold := newGate(t)
				r := equal("/" + version + "/" + strings.ReplaceAll(when, " ", "-"))
				r.client = client
				u.on(r.path, held(hold))
				g.cut(t, u, 1, r)
				want := "replayed"
				var got reply
				if when == "while it runs" {
					want = "attached"
					retry := g.begin(r)
					followers(t, 1)
					retry.unanswered("before the execution has ended")
					hold.open()
					got = retry.answer()
				} else {
					hold.open()
					idle(t)
					got = g.call(r)
				}
				got.want(t, 201, "arrival 1", want)
				got.recognized(t)
				u.arrived(r.path, 1)
				again := g.call(r)
				again.want(t, 201, "arrival 2", "executed")
				again.itsOwn(t)
				u.arrived(r.path, 2)
			})
		}
	}
}

// P1 without a key: a client that leaves in the middle of its answer has not been answered.
func TestRecognizedAfterAPart(t *testing.T) {
	u, s := newUpstream(t), newSteps(t)
	g := start(t, recognizes, u.addr)
	r, leaving := equal("/x"), equal("/x", leaver, "yes")
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		if a.n == 1 {
			s.answer(w, a)
			return
		}
		status(201, "another")(w, a)
	})
	known := left.Load()
	owner := g.open(leaving, "executed")
	s.piece("one ", owner.Body)
	_ = owner.Body.Close()
	eventually(t, "the gateway knows that the client has left", func() bool { return left.Load() == known+1 })
	s.piece("two")
	s.end()
	idle(t)
	got := g.call(r)
	got.want(t, 200, "one two", "replayed")
	got.recognized(t)
	u.arrived("/x", 1)
	g.call(r).want(t, 201, "another", "executed")
}

// Equal calls that are answered, or whose clients both wait, are all meant.
func TestNotRecognized(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for i := range 3 {
		got := g.call(equal("/answered"))
		got.want(t, 201, fmt.Sprint("arrival ", i+1), "executed")
		got.itsOwn(t)
	}
	u.arrived("/answered", 3)

	hold := newGate(t)
	u.on("/parallel", held(hold))
	one, two := g.begin(equal("/parallel")), g.begin(equal("/parallel"))
	eventually(t, "both run", func() bool { return u.arrivals("/parallel") == 2 })
	hold.open()
	seen := map[string]bool{}
	for _, p := range []*pending{one, two} {
		got := p.answer()
		got.itsOwn(t)
		got.want(t, 201, got.body, "executed")
		seen[got.body] = true
	}
	if len(seen) != 2 {
		t.Errorf("two calls got %v", seen)
	}
	u.arrived("/parallel", 2)
}

// Three equal calls that all time out and are all retried: three effects, three answers, each
// execution taken by one retry.
func TestThreeRecognized(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for _, when := range []string{"while they run", "when they have ended"} {
		t.Run(when, func(t *testing.T) {
			hold := newGate(t)
			r := equal("/" + strings.ReplaceAll(when, " ", "-"))
			u.on(r.path, held(hold))
			g.cut(t, u, 3, r)
			want := "replayed"
			if when == "while they run" {
				want = "attached"
			} else {
				hold.open()
				idle(t)
			}
			var retries []*pending
			for range 3 {
				retries = append(retries, g.begin(r))
			}
			if want == "attached" {
				followers(t, 3)
				hold.open()
			}
			bodies, ids := map[string]bool{}, map[string]bool{}
			for _, p := range retries {
				got := p.answer()
				got.want(t, 201, got.body, want)
				got.recognized(t)
				bodies[got.body], ids[got.header.Get("Execution-Id")] = true, true
			}
			if len(bodies) != 3 || len(ids) != 3 {
				t.Errorf("three retries got %v of %v", bodies, ids)
			}
			u.arrived(r.path, 3)
			fourth := g.call(r)
			fourth.want(t, 201, "arrival 4", "executed")
			fourth.itsOwn(t)
		})
	}
}

// A retry without a key after an answer that clients retry gets what one with a key gets: what was
// refused runs again, what failed does not.
func TestRecognizedByStatus(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for _, row := range []struct{ status, effects int }{{529, 2}, {429, 2}, {500, 1}, {502, 1}, {503, 1}, {408, 1}} {
		for _, count := range []string{"", "1"} {
			t.Run(fmt.Sprint(row.status, " ", count), func(t *testing.T) {
				var answers [2][2]reply
				for i, kind := range []string{"key", "none"} {
					path := fmt.Sprintf("/%d-%s-%s", row.status, kind, count)
					u.on(path, first(status(row.status, "no")))
					r := equal(path)
					if kind == "key" {
						r.id = "k"
					}
					answers[i][0] = g.call(r)
					if count != "" {
						r.header["X-Stainless-Retry-Count"] = count
					}
					answers[i][1] = g.call(r)
				}
				keyed, keyless := answers[0], answers[1]
				for i, want := range keyed {
					got := keyless[i]
					if got.status != want.status || got.header.Get("Execution-Status") != want.header.Get("Execution-Status") ||
						want.status < 409 && got.body != want.body {
						t.Errorf("attempt %d: got %d %q (%s), with a key %d %q (%s)", i+1, got.status, got.body, got.header.Get("Execution-Status"),
							want.status, want.body, want.header.Get("Execution-Status"))
					}
				}
				effects := u.arrivals(fmt.Sprintf("/%d-none-%s", row.status, count))
				if with := u.arrivals(fmt.Sprintf("/%d-key-%s", row.status, count)); effects != with || effects != row.effects {
					t.Errorf("%d effects, with a key %d, want %d", effects, with, row.effects)
				}
				if effects == 1 {
					keyless[1].recognized(t)
				}
			})
		}
	}
}

// A call that says that it is a retry is one, also after a whole answer.
func TestRecognizedAsStated(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for i, row := range []struct{ name, first, retry string }{
		{"X-Stainless-Retry-Count", "0", "1"},
		{"Amz-Sdk-Request", "attempt=1; max=3", "attempt=2; max=3"},
		{"Grpc-Previous-Rpc-Attempts", "", "1"},
		{"X-Stainless-Retry-Count", "none", "100000000000000000000"}, // more than a number of ours
	} {
		path := fmt.Sprint("/", i)
		one, retry := equal(path, row.name, row.first), equal(path, row.name, row.retry)
		if row.first == "" {
			one = equal(path)
		}
		g.call(one).want(t, 201, "arrival 1", "executed")
		got := g.call(retry)
		got.want(t, 201, "arrival 1", "replayed")
		got.recognized(t)
		g.call(one).want(t, 201, "arrival 2", "executed")
		g.call(retry).want(t, 201, "arrival 2", "replayed")
		u.arrived(path, 2)
	}
}

// A retry whose first attempt never came is none of an equal call whose own retry of that count was answered.
func TestStatedRetryOfAnotherCall(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	one, retry := equal("/pay", "X-Stainless-Retry-Count", "0"), equal("/pay", "X-Stainless-Retry-Count", "1")
	g.call(one).want(t, 201, "arrival 1", "executed")
	g.call(retry).want(t, 201, "arrival 1", "replayed")
	g.call(retry).want(t, 201, "arrival 2", "executed") // that of another call, which never came
	u.arrived("/pay", 2)
}

// P3: nobody gets the answer to another caller's call, whatever is known of that and whatever he
// says of his own.
func TestRecognizedIsTheCallersOwn(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for i, header := range [][]string{
		{"Authorization", "Bearer eve"},
		{"Authorization", "Bearer eve", "X-Stainless-Retry-Count", "1"},
		{"Authorization", "Bearer eve", "Amz-Sdk-Request", "attempt=2"},
		{"Authorization", "", "X-Stainless-Retry-Count", "1"},
	} {
		hold := newGate(t)
		path := fmt.Sprint("/", i)
		u.on(path, held(hold))
		g.cut(t, u, 1, equal(path))
		hold.open()
		idle(t)
		other := equal(path, header...)
		if other.header["Authorization"] == "" {
			delete(other.header, "Authorization")
		}
		got := g.call(other)
		got.want(t, 201, "arrival 2", "executed")
		got.itsOwn(t)
		own := g.call(equal(path))
		own.want(t, 201, "arrival 1", "replayed")
		own.recognized(t)
		u.arrived(path, 2)
	}
}

// Whatever the form of an answer, whoever got all of it means what he calls next, however soon.
func TestNotRecognizedAfterAnyAnswer(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	keeping := &http.Client{Transport: recorded{new(http.Transport)}, Timeout: patience}
	t.Cleanup(keeping.CloseIdleConnections)
	large := strings.Repeat("large ", 100_000)
	for version, client := range map[string]*http.Client{"h1": g.newClient(nil), "h1 kept": keeping, "h2c": g.h2cClient()} {
		for name, answer := range map[string]func(http.ResponseWriter, *arrival){
			"length": status(201, "short"), "large": status(200, large, "Content-Length", fmt.Sprint(len(large))),
			"chunked": func(w http.ResponseWriter, _ *arrival) {
				_ = http.NewResponseController(w).Flush()
				_, _ = io.WriteString(w, "some")
			},
			"chunked large": status(200, large), "204": status(204, ""), "none": status(200, "", "Content-Length", "0"),
			"trailer": func(w http.ResponseWriter, _ *arrival) {
				w.Header().Set("Trailer", "Sum")
				_, _ = io.WriteString(w, "some")
				w.Header().Set("Sum", "1")
			},
			"400": status(400, "no"), "404": status(404, ""),
		} {
			t.Run(version+" "+name, func(t *testing.T) {
				r := equal("/" + strings.ReplaceAll(version+"-"+name, " ", "-"))
				r.client = client
				u.on(r.path, answer)
				const n = 20
				for range n {
					got := g.call(r)
					if got.cut || got.header.Get("Execution-Status") != "executed" {
						t.Errorf("%d %s, cut %v", got.status, got.header.Get("Execution-Status"), got.cut)
					}
					got.itsOwn(t)
				}
				u.arrived(r.path, n)
			})
		}
	}
}

// A reload forgets nothing: a client that left before it has not been answered.
func TestRecognizedAfterAReload(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, recognizes, u.addr)
	r := equal("/x")
	u.on("/x", held(hold))
	g.cut(t, u, 1, r)
	g.reload(fmt.Sprintf(recognizes, u.addr) + "\nheader X-Config two")
	retry := g.begin(r)
	followers(t, 1)
	hold.open()
	got := retry.answer()
	got.want(t, 201, "arrival 1", "attached")
	got.recognized(t)
	g.call(r).want(t, 201, "arrival 2", "executed")
	u.arrived("/x", 2)
}

// A retry that is told that the call still runs has not been answered: the next one is a retry too.
func TestRecognizedAfterARefusal(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n attach_wait 1ms\n}", u.addr)
	r := equal("/x")
	u.on("/x", held(hold))
	g.cut(t, u, 1, r)
	for range 3 {
		got := g.call(r)
		got.retryable(t, 409, "in-progress")
		got.recognized(t)
	}
	hold.open()
	idle(t)
	got := g.call(r)
	got.want(t, 201, "arrival 1", "replayed")
	got.recognized(t)
	g.call(r).want(t, 201, "arrival 2", "executed")
	u.arrived("/x", 2)
}

// A caller that asks for the answer of a call whose client had left has got it then (ADR 0091): what it
// calls afterwards is meant. Another caller's question says nothing, nor does one that nobody waits for.
func TestNotRecognizedAfterTheAnswerWasRead(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n breaker off\n keys advisory\n}", u.addr)
	for name, test := range map[string]struct {
		read func(path string)
		also bool // the retry is answered by the first call
	}{
		"by the caller": {func(path string) {
			g.call(request{method: "GET", path: path, header: map[string]string{"Authorization": "Bearer ada"}}).want(t, 201, "arrival 1", "replayed")
		}, false},
		"by another caller": {func(path string) {
			g.call(request{method: "GET", path: path, header: map[string]string{"Authorization": "Bearer eve"}}).terminal(t, 404, "execution-unknown")
		}, true},
		"only whether it has ended": {func(path string) {
			g.call(request{method: "GET", path: strings.TrimSuffix(path, "/output"), header: map[string]string{"Authorization": "Bearer ada"}})
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			path := "/" + strings.ReplaceAll(name, " ", "-")
			hold := newGate(t)
			u.on(path, held(hold))
			g.cut(t, u, 1, equal(path, "Idempotency-Key", path[1:]))
			hold.open()
			idle(t)
			test.read(executionsPath + path[1:] + "/output")
			got := g.call(equal(path, "Idempotency-Key", "another"+path[1:]))
			if test.also {
				got.want(t, 201, "arrival 1", "replayed")
				got.recognized(t)
				return
			}
			got.want(t, 201, "arrival 2", "executed")
			got.itsOwn(t)
		})
	}
}

// An error that was delivered is evidence for as long as clients retry, and no longer: then an equal call goes to the
// upstream, which may be well again. One with the key of the call gets the record all the same.
func TestErrorsAreEvidenceForAWhile(t *testing.T) {
	u := newUpstream(t)
	u.on("/poll", first(status(500, "ill")))
	g := start(t, "e2e_leaves\nagent_proxy %s {\n breaker off\n missing_id recognize {\n error_window 20ms\n}\n}", u.addr)
	one := g.call(equal("/poll"))
	one.want(t, 500, "ill", "executed")
	eventually(t, "an equal call is a new one", func() bool {
		got := g.call(equal("/poll"))
		return got.status == 201 && got.header.Get("Execution-Status") == "executed"
	})
	g.call(equal("/poll", "Idempotency-Key", one.header.Get("Execution-Id"))).want(t, 500, "ill", "replayed")
}

// A client that has closed its own direction of the connection, and has read its whole answer, was answered: its next
// equal call is meant.
func TestHalfClosedClientIsAnswered(t *testing.T) {
	u := newUpstream(t)
	g := start(t, recognizes, u.addr)
	for name, answer := range map[string]func(http.ResponseWriter, int){
		"length": func(w http.ResponseWriter, n int) { status(201, fmt.Sprint("arrival ", n))(w, nil) },
		"chunked": func(w http.ResponseWriter, n int) {
			w.WriteHeader(201)
			_ = http.NewResponseController(w).Flush()
			fmt.Fprint(w, "arrival ", n)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path, hold := "/"+name, newGate(t)
			u.on(path, func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				answer(w, a.n)
			})
			known := left.Load()
			conn := g.dial()
			write(t, conn, "POST "+path+" HTTP/1.1\r\nHost: "+g.addr+"\r\nAuthorization: Bearer ada\r\n"+leaver+": yes\r\n"+
				"Content-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"amount\":1}")
			eventually(t, "the call has arrived", func() bool { return u.arrivals(path) == 1 })
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the gateway knows of the close", func() bool { return left.Load() == known+1 })
			hold.open()
			got, err := io.ReadAll(conn)
			if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 201 ") || !strings.Contains(string(got), "arrival 1") {
				t.Fatalf("%q, %v", got, err)
			}
			g.call(equal(path)).want(t, 201, "arrival 2", "executed")
			u.arrived(path, 2)
		})
	}
}
