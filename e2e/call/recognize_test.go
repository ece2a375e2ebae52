package call

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

const recognizes = "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n breaker off\n}"

// equal is a call without a key; all of a path are equal.
func equal(path string, header ...string) harness.Request {
	r := harness.Request{Path: path, Header: map[string]string{"Authorization": "Bearer ada"}}
	for i := 0; i < len(header); i += 2 {
		r.Header[header[i]] = header[i+1]
	}
	return r
}

// P6: with on_leave cancel the upstream's request ends when the last client has left; what came of it
// is in doubt, which is no failure of the upstream.
func TestOnLeaveCancel(t *testing.T) {
	u, stopped := harness.NewUpstream(t), make(chan struct{})
	u.On("/x", func(_ http.ResponseWriter, a *harness.Arrival) {
		<-a.Context().Done()
		close(stopped)
	})
	g := harness.Start(t, `e2e_leaves
	agent_proxy %s {
		on_leave cancel
		breaker {
			consecutive 1
			cooldown 10h
		}
	}`, u.Addr)
	r := equal("/x", "Idempotency-Key", "k")
	g.Cut(t, u, 1, r)
	select {
	case <-stopped:
	case <-time.After(time.Minute):
		t.Fatal("the request was not cancelled")
	}
	harness.Idle(t)
	if got := g.Call(r); got.Status != 409 || !strings.Contains(got.Body, "client_left") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	u.Arrived("/x", 1)
	g.Call(harness.Request{Path: "/y", Id: "l"}).Want(t, 201, "arrival 1", "executed")
}

// P1 without a key (ADR 0070): a call whose client left while it ran has one effect, whenever its
// retry comes. What is called after that was answered is meant.
func TestRecognizedAfterALeave(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for _, version := range []string{"h1", "h2c"} {
		client := g.NewClient(nil)
		if version == "h2c" {
			client = g.H2cClient()
		}
		for _, when := range []string{"while it runs", "when it has ended"} {
			t.Run(version+" "+when, func(t *testing.T) {
				hold := harness.NewGate(t)
				r := equal("/" + version + "/" + strings.ReplaceAll(when, " ", "-"))
				r.Client = client
				u.On(r.Path, harness.Held(hold))
				g.Cut(t, u, 1, r)
				want := "replayed"
				var got harness.Reply
				if when == "while it runs" {
					want = "attached"
					retry := g.Begin(r)
					harness.Followers(t, 1)
					retry.Unanswered("before the execution has ended")
					hold.Open()
					got = retry.Answer()
				} else {
					hold.Open()
					harness.Idle(t)
					got = g.Call(r)
				}
				got.Want(t, 201, "arrival 1", want)
				got.Recognized(t)
				u.Arrived(r.Path, 1)
				again := g.Call(r)
				again.Want(t, 201, "arrival 2", "executed")
				again.ItsOwn(t)
				u.Arrived(r.Path, 2)
			})
		}
	}
}

// P1 without a key: a client that leaves in the middle of its answer has not been answered.
func TestRecognizedAfterAPart(t *testing.T) {
	u, s := harness.NewUpstream(t), newSteps(t)
	g := harness.Start(t, recognizes, u.Addr)
	r, leaving := equal("/x"), equal("/x", harness.Leaver, "yes")
	u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
		if a.N == 1 {
			s.answer(w, a)
			return
		}
		harness.Status(201, "another")(w, a)
	})
	known := harness.Left.Load()
	owner := g.Open(leaving, "executed")
	s.piece("one ", owner.Body)
	_ = owner.Body.Close()
	harness.Eventually(t, "the gateway knows that the client has left", func() bool { return harness.Left.Load() == known+1 })
	s.piece("two")
	s.end()
	harness.Idle(t)
	got := g.Call(r)
	got.Want(t, 200, "one two", "replayed")
	got.Recognized(t)
	u.Arrived("/x", 1)
	g.Call(r).Want(t, 201, "another", "executed")
}

// Equal calls that are answered, or whose clients both wait, are all meant.
func TestNotRecognized(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for i := range 3 {
		got := g.Call(equal("/answered"))
		got.Want(t, 201, fmt.Sprint("arrival ", i+1), "executed")
		got.ItsOwn(t)
	}
	u.Arrived("/answered", 3)

	hold := harness.NewGate(t)
	u.On("/parallel", harness.Held(hold))
	one, two := g.Begin(equal("/parallel")), g.Begin(equal("/parallel"))
	harness.Eventually(t, "both run", func() bool { return u.Arrivals("/parallel") == 2 })
	hold.Open()
	seen := map[string]bool{}
	for _, p := range []*harness.Pending{one, two} {
		got := p.Answer()
		got.ItsOwn(t)
		got.Want(t, 201, got.Body, "executed")
		seen[got.Body] = true
	}
	if len(seen) != 2 {
		t.Errorf("two calls got %v", seen)
	}
	u.Arrived("/parallel", 2)
}

// Three equal calls that all time out and are all retried: three effects, three answers, each
// execution taken by one retry.
func TestThreeRecognized(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for _, when := range []string{"while they run", "when they have ended"} {
		t.Run(when, func(t *testing.T) {
			hold := harness.NewGate(t)
			r := equal("/" + strings.ReplaceAll(when, " ", "-"))
			u.On(r.Path, harness.Held(hold))
			g.Cut(t, u, 3, r)
			want := "replayed"
			if when == "while they run" {
				want = "attached"
			} else {
				hold.Open()
				harness.Idle(t)
			}
			var retries []*harness.Pending
			for range 3 {
				retries = append(retries, g.Begin(r))
			}
			if want == "attached" {
				harness.Followers(t, 3)
				hold.Open()
			}
			bodies, ids := map[string]bool{}, map[string]bool{}
			for _, p := range retries {
				got := p.Answer()
				got.Want(t, 201, got.Body, want)
				got.Recognized(t)
				bodies[got.Body], ids[got.Header.Get("Execution-Id")] = true, true
			}
			if len(bodies) != 3 || len(ids) != 3 {
				t.Errorf("three retries got %v of %v", bodies, ids)
			}
			u.Arrived(r.Path, 3)
			fourth := g.Call(r)
			fourth.Want(t, 201, "arrival 4", "executed")
			fourth.ItsOwn(t)
		})
	}
}

// A retry without a key after an answer that clients retry gets what one with a key gets: what was
// refused runs again, what failed does not.
func TestRecognizedByStatus(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for _, row := range []struct{ status, effects int }{{529, 2}, {429, 2}, {500, 1}, {502, 1}, {503, 1}, {408, 1}} {
		for _, count := range []string{"", "1"} {
			t.Run(fmt.Sprint(row.status, " ", count), func(t *testing.T) {
				var answers [2][2]harness.Reply
				for i, kind := range []string{"key", "none"} {
					path := fmt.Sprintf("/%d-%s-%s", row.status, kind, count)
					u.On(path, first(harness.Status(row.status, "no")))
					r := equal(path)
					if kind == "key" {
						r.Id = "k"
					}
					answers[i][0] = g.Call(r)
					if count != "" {
						r.Header["X-Stainless-Retry-Count"] = count
					}
					answers[i][1] = g.Call(r)
				}
				keyed, keyless := answers[0], answers[1]
				for i, want := range keyed {
					got := keyless[i]
					if got.Status != want.Status || got.Header.Get("Execution-Status") != want.Header.Get("Execution-Status") ||
						want.Status < 409 && got.Body != want.Body {
						t.Errorf("attempt %d: got %d %q (%s), with a key %d %q (%s)", i+1, got.Status, got.Body, got.Header.Get("Execution-Status"),
							want.Status, want.Body, want.Header.Get("Execution-Status"))
					}
				}
				effects := u.Arrivals(fmt.Sprintf("/%d-none-%s", row.status, count))
				if with := u.Arrivals(fmt.Sprintf("/%d-key-%s", row.status, count)); effects != with || effects != row.effects {
					t.Errorf("%d effects, with a key %d, want %d", effects, with, row.effects)
				}
				if effects == 1 {
					keyless[1].Recognized(t)
				}
			})
		}
	}
}

// A call that says that it is a retry is one, also after a whole answer.
func TestRecognizedAsStated(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
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
		g.Call(one).Want(t, 201, "arrival 1", "executed")
		got := g.Call(retry)
		got.Want(t, 201, "arrival 1", "replayed")
		got.Recognized(t)
		g.Call(one).Want(t, 201, "arrival 2", "executed")
		g.Call(retry).Want(t, 201, "arrival 2", "replayed")
		u.Arrived(path, 2)
	}
}

// A retry whose first attempt never came is none of an equal call whose own retry of that count was answered.
func TestStatedRetryOfAnotherCall(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	one, retry := equal("/pay", "X-Stainless-Retry-Count", "0"), equal("/pay", "X-Stainless-Retry-Count", "1")
	g.Call(one).Want(t, 201, "arrival 1", "executed")
	g.Call(retry).Want(t, 201, "arrival 1", "replayed")
	g.Call(retry).Want(t, 201, "arrival 2", "executed") // that of another call, which never came
	u.Arrived("/pay", 2)
}

// P3: nobody gets the answer to another caller's call, whatever is known of that and whatever he
// says of his own.
func TestRecognizedIsTheCallersOwn(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for i, header := range [][]string{
		{"Authorization", "Bearer eve"},
		{"Authorization", "Bearer eve", "X-Stainless-Retry-Count", "1"},
		{"Authorization", "Bearer eve", "Amz-Sdk-Request", "attempt=2"},
		{"Authorization", "", "X-Stainless-Retry-Count", "1"},
	} {
		hold := harness.NewGate(t)
		path := fmt.Sprint("/", i)
		u.On(path, harness.Held(hold))
		g.Cut(t, u, 1, equal(path))
		hold.Open()
		harness.Idle(t)
		other := equal(path, header...)
		if other.Header["Authorization"] == "" {
			delete(other.Header, "Authorization")
		}
		got := g.Call(other)
		got.Want(t, 201, "arrival 2", "executed")
		got.ItsOwn(t)
		own := g.Call(equal(path))
		own.Want(t, 201, "arrival 1", "replayed")
		own.Recognized(t)
		u.Arrived(path, 2)
	}
}

// Whatever the form of an answer, whoever got all of it means what he calls next, however soon.
func TestNotRecognizedAfterAnyAnswer(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	keeping := &http.Client{Transport: harness.Recorded{Transport: new(http.Transport)}, Timeout: harness.Patience}
	t.Cleanup(keeping.CloseIdleConnections)
	large := strings.Repeat("large ", 100_000)
	for version, client := range map[string]*http.Client{"h1": g.NewClient(nil), "h1 kept": keeping, "h2c": g.H2cClient()} {
		for name, answer := range map[string]func(http.ResponseWriter, *harness.Arrival){
			"length": harness.Status(201, "short"), "large": harness.Status(200, large, "Content-Length", fmt.Sprint(len(large))),
			"chunked": func(w http.ResponseWriter, _ *harness.Arrival) {
				_ = http.NewResponseController(w).Flush()
				_, _ = io.WriteString(w, "some")
			},
			"chunked large": harness.Status(200, large), "204": harness.Status(204, ""), "none": harness.Status(200, "", "Content-Length", "0"),
			"trailer": func(w http.ResponseWriter, _ *harness.Arrival) {
				w.Header().Set("Trailer", "Sum")
				_, _ = io.WriteString(w, "some")
				w.Header().Set("Sum", "1")
			},
			"400": harness.Status(400, "no"), "404": harness.Status(404, ""),
		} {
			t.Run(version+" "+name, func(t *testing.T) {
				r := equal("/" + strings.ReplaceAll(version+"-"+name, " ", "-"))
				r.Client = client
				u.On(r.Path, answer)
				const n = 20
				for range n {
					got := g.Call(r)
					if got.Cut || got.Header.Get("Execution-Status") != "executed" {
						t.Errorf("%d %s, cut %v", got.Status, got.Header.Get("Execution-Status"), got.Cut)
					}
					got.ItsOwn(t)
				}
				u.Arrived(r.Path, n)
			})
		}
	}
}

// A reload forgets nothing: a client that left before it has not been answered.
func TestRecognizedAfterAReload(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, recognizes, u.Addr)
	r := equal("/x")
	u.On("/x", harness.Held(hold))
	g.Cut(t, u, 1, r)
	g.Reload(fmt.Sprintf(recognizes, u.Addr) + "\nheader X-Config two")
	retry := g.Begin(r)
	harness.Followers(t, 1)
	hold.Open()
	got := retry.Answer()
	got.Want(t, 201, "arrival 1", "attached")
	got.Recognized(t)
	g.Call(r).Want(t, 201, "arrival 2", "executed")
	u.Arrived("/x", 2)
}

// A retry that is told that the call still runs has not been answered: the next one is a retry too.
func TestRecognizedAfterARefusal(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n attach_wait 1ms\n}", u.Addr)
	r := equal("/x")
	u.On("/x", harness.Held(hold))
	g.Cut(t, u, 1, r)
	for range 3 {
		got := g.Call(r)
		got.Retryable(t, 409, "in-progress")
		got.Recognized(t)
	}
	hold.Open()
	harness.Idle(t)
	got := g.Call(r)
	got.Want(t, 201, "arrival 1", "replayed")
	got.Recognized(t)
	g.Call(r).Want(t, 201, "arrival 2", "executed")
	u.Arrived("/x", 2)
}

// A caller that asks for the answer of a call whose client had left has got it then (ADR 0091): what it
// calls afterwards is meant. Another caller's question says nothing, nor does one that nobody waits for.
func TestNotRecognizedAfterTheAnswerWasRead(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n breaker off\n keys advisory\n}", u.Addr)
	for name, test := range map[string]struct {
		read func(path string)
		also bool // the retry is answered by the first call
	}{
		"by the caller": {func(path string) {
			g.Call(harness.Request{Method: "GET", Path: path, Header: map[string]string{"Authorization": "Bearer ada"}}).Want(t, 201, "arrival 1", "replayed")
		}, false},
		"by another caller": {func(path string) {
			g.Call(harness.Request{Method: "GET", Path: path, Header: map[string]string{"Authorization": "Bearer eve"}}).Terminal(t, 404, "execution-unknown")
		}, true},
		"only whether it has ended": {func(path string) {
			g.Call(harness.Request{Method: "GET", Path: strings.TrimSuffix(path, "/output"), Header: map[string]string{"Authorization": "Bearer ada"}})
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			path := "/" + strings.ReplaceAll(name, " ", "-")
			hold := harness.NewGate(t)
			u.On(path, harness.Held(hold))
			g.Cut(t, u, 1, equal(path, "Idempotency-Key", path[1:]))
			hold.Open()
			harness.Idle(t)
			test.read(harness.ExecutionsPath + path[1:] + "/output")
			got := g.Call(equal(path, "Idempotency-Key", "another"+path[1:]))
			if test.also {
				got.Want(t, 201, "arrival 1", "replayed")
				got.Recognized(t)
				return
			}
			got.Want(t, 201, "arrival 2", "executed")
			got.ItsOwn(t)
		})
	}
}

// An error that was delivered is evidence for as long as clients retry, and no longer: then an equal call goes to the
// upstream, which may be well again. One with the key of the call gets the record all the same.
func TestErrorsAreEvidenceForAWhile(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/poll", first(harness.Status(500, "ill")))
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n breaker off\n missing_id recognize {\n error_window 20ms\n}\n}", u.Addr)
	one := g.Call(equal("/poll"))
	one.Want(t, 500, "ill", "executed")
	harness.Eventually(t, "an equal call is a new one", func() bool {
		got := g.Call(equal("/poll"))
		return got.Status == 201 && got.Header.Get("Execution-Status") == "executed"
	})
	g.Call(equal("/poll", "Idempotency-Key", one.Header.Get("Execution-Id"))).Want(t, 500, "ill", "replayed")
}

// A client that has closed its own direction of the connection, and has read its whole answer, was answered: its next
// equal call is meant.
func TestHalfClosedClientIsAnswered(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, recognizes, u.Addr)
	for name, answer := range map[string]func(http.ResponseWriter, int){
		"length": func(w http.ResponseWriter, n int) { harness.Status(201, fmt.Sprint("arrival ", n))(w, nil) },
		"chunked": func(w http.ResponseWriter, n int) {
			w.WriteHeader(201)
			_ = http.NewResponseController(w).Flush()
			fmt.Fprint(w, "arrival ", n)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path, hold := "/"+name, harness.NewGate(t)
			u.On(path, func(w http.ResponseWriter, a *harness.Arrival) {
				hold.Pass()
				answer(w, a.N)
			})
			known := harness.Left.Load()
			conn := g.Dial()
			harness.Write(t, conn, "POST "+path+" HTTP/1.1\r\nHost: "+g.Addr+"\r\nAuthorization: Bearer ada\r\n"+harness.Leaver+": yes\r\n"+
				"Content-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"amount\":1}")
			harness.Eventually(t, "the call has arrived", func() bool { return u.Arrivals(path) == 1 })
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, "the gateway knows of the close", func() bool { return harness.Left.Load() == known+1 })
			hold.Open()
			got, err := io.ReadAll(conn)
			if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 201 ") || !strings.Contains(string(got), "arrival 1") {
				t.Fatalf("%q, %v", got, err)
			}
			g.Call(equal(path)).Want(t, 201, "arrival 2", "executed")
			u.Arrived(path, 2)
		})
	}
}
