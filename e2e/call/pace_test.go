package call

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// reading reads an answer in the background.
type reading struct {
	done chan struct{}
	hash interface {
		Sum([]byte) []byte
		io.Writer
	}
	n   int64
	err error
}

func readOn(res *http.Response) *reading {
	r := &reading{done: make(chan struct{}), hash: sha256.New()}
	go func() {
		defer close(r.done)
		r.n, r.err = io.Copy(r.hash, res.Body)
	}()
	return r
}

// whole waits until all of f was read.
func (r *reading) whole(t *testing.T, f *harness.Flood, who string) {
	t.Helper()
	harness.Wait(t, r.done, who+"'s end")
	if got := fmt.Sprintf("%x", r.hash.Sum(nil)); r.err != nil || got != f.Sum() {
		t.Errorf("%s: %d bytes of %d, %v", who, r.n, f.Size, r.err)
	}
}

// longRead bounds calls whose answers are read only after their deadline, of 15 s.
const longRead = 4 * harness.Patience

// inUse is the memory that is in use, without what can be given back.
func inUse() int64 {
	for range 2 { // of which the second empties pools
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// P7: the upstream is read at its own pace. An owner that reads nothing holds up neither
// it nor who is attached, its call is completed, its answer is not in memory, and is all
// there when it reads on. The deadline is the upstream's.
func TestSlowOwner(t *testing.T) {
	for _, version := range []string{"h1", "h2c"} {
		t.Run(version, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 64MiB\n deadline 60s\n}"})
			client := g.NewClient(nil)
			if version == "h2c" {
				client = g.H2cClient()
			}
			client.Timeout = longRead
			f := harness.NewFlood(64 << 20)
			u.On("/x", f.Answer)
			before := inUse()
			owner := g.Open(harness.Request{Path: "/x", Id: "k", Client: client}, "executed")
			r := harness.Request{Path: "/x", Id: "k"}
			quick, second := readOn(g.Open(r, "attached")), readOn(g.Open(r, "attached"))
			harness.Wait(t, f.Taken, "the upstream's end")
			quick.whole(t, f, "a follower")
			second.whole(t, f, "another follower")
			replayed := readOn(g.Open(r, "replayed")) // nobody sees an end before the record
			replayed.whole(t, f, "a retry")
			if more := inUse() - before; more > 16<<20 {
				t.Errorf("an owner that does not read takes %d MiB of memory", more>>20)
			}
			readOn(owner).whole(t, f, "the owner")
			u.Arrived("/x", 1)
		})
	}
}

// P6, P7: owners that read nothing past their calls' `deadline` take nothing from the calls, nor
// from who is attached, nor memory. What became of a call is what its upstream has answered by
// then.
func TestOwnersThatReadNothingPastTheDeadline(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 32MiB\n deadline 15s\n}"})
	g.Client.Timeout = longRead
	before := inUse()
	type call struct {
		harness.Request
		*harness.Flood
		owner    *http.Response
		follower *reading
	}
	begin := func(path string, size int, client *http.Client, answer func(*harness.Flood, http.ResponseWriter, *harness.Arrival)) *call {
		c := &call{Request: harness.Request{Path: path, Id: "k"}, Flood: harness.NewFlood(size)}
		c.Hold = harness.NewGate(t)
		client.Timeout = longRead
		u.On(path, func(w http.ResponseWriter, a *harness.Arrival) { answer(c.Flood, w, a) })
		c.owner = g.Open(harness.Request{Path: path, Id: "k", Client: client}, "executed")
		c.follower = readOn(g.Open(c.Request, "attached"))
		c.Hold.Open()
		return c
	}
	whole := func(f *harness.Flood, w http.ResponseWriter, a *harness.Arrival) { f.Answer(w, a) }
	large := begin("/large", 96<<20, g.NewClient(nil), whole)
	brief := []*call{begin("/h1", 16<<20, g.NewClient(nil), whole), begin("/h2c", 16<<20, g.H2cClient(), whole)}
	hanging := begin("/hanging", 16<<20, g.NewClient(nil), func(f *harness.Flood, w http.ResponseWriter, a *harness.Arrival) {
		f.Answer(lengthless{w}, a)
		<-a.Context().Done()
	})

	// It began after the others, and has no more time than they.
	u.On("/late", func(_ http.ResponseWriter, a *harness.Arrival) { <-a.Context().Done() })
	if got := g.Call(harness.Request{Path: "/late", Id: "k"}); got.Status < 400 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	for _, c := range brief {
		c.follower.whole(t, c.Flood, "the follower of "+c.Path)
		readOn(g.Open(c.Request, "replayed")).whole(t, c.Flood, "a retry of "+c.Path)
	}
	// What is larger than can be read back waits for its owner, as long as the deadline in all.
	// Then that is cut off, and the call goes on without it.
	large.follower.whole(t, large.Flood, "the follower of "+large.Path)
	harness.Eventually(t, "the large call is settled", func() bool { return g.Call(large.Request).Status == 409 })
	if doc := g.Call(large.Request).Terminal(t, 409, "result-unavailable"); doc.State != "completed" {
		t.Errorf("a retry got %+v", doc)
	}
	harness.Wait(t, hanging.follower.done, "the end of the hanging answer")
	g.Call(hanging.Request).Terminal(t, 409, "in-doubt")
	if more := inUse() - before; more > 32<<20 {
		t.Errorf("four owners that read nothing take %d MiB of memory", more>>20)
	}

	for _, c := range brief {
		readOn(c.owner).whole(t, c.Flood, "the owner of "+c.Path)
	}
	late := readOn(hanging.owner)
	for who, got := range map[string]*reading{"owner": late, "follower": hanging.follower} {
		harness.Wait(t, got.done, "its end")
		if got.err == nil || fmt.Sprintf("%x", got.hash.Sum(nil)) != hanging.Sum() {
			t.Errorf("the %s of the hanging answer got %d bytes, %v", who, got.n, got.err)
		}
	}
	cut := readOn(large.owner)
	harness.Wait(t, cut.done, "the end of the large answer's owner")
	if cut.err == nil || cut.n >= int64(large.Size) {
		t.Errorf("it got %d bytes, %v", cut.n, cut.err)
	}
	for _, path := range []string{"/large", "/h1", "/h2c", "/hanging"} {
		u.Arrived(path, 1)
	}
}

// A follower that does not read holds up nobody either.
func TestSlowFollower(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 32MiB\n}"})
	f := harness.NewFlood(32 << 20)
	u.On("/x", f.Answer)
	r := harness.Request{Path: "/x", Id: "k"}
	res := g.Open(r, "executed")
	slow := g.Open(r, "attached")
	readOn(res).whole(t, f, "the owner")
	readOn(g.Open(r, "replayed")).whole(t, f, "a retry")
	readOn(slow).whole(t, f, "the follower")
	u.Arrived("/x", 1)
}

// P7: an owner that leaves while it is behind loses nothing.
func TestSlowOwnerLeaves(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 32MiB\n}"})
	f := harness.NewFlood(32 << 20)
	u.On("/x", f.Answer)
	r := harness.Request{Path: "/x", Id: "k"}
	owner := g.Open(r, "executed")
	harness.Wait(t, f.Taken, "the upstream's end")
	_ = owner.Body.Close()
	harness.Eventually(t, "the call is settled and its owner gone", func() bool { return harness.Waiting("guard.(*Call).execute") == 0 })
	readOn(g.Open(r, "replayed")).whole(t, f, "a retry")
	u.Arrived("/x", 1)
}

// P7: an answer that is larger than `max_result` flows at the pace of its slowest reader,
// once that is 64 MiB behind. Nobody misses a byte, and the call is completed.
func TestSlowReadersOfATooLargeAnswer(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 1MiB\n}"})
	for _, who := range []string{"owner", "follower", "only"} {
		t.Run(who, func(t *testing.T) {
			f := harness.NewFlood(112 << 20)
			f.Hold = harness.NewGate(t)
			path := "/" + who
			u.On(path, f.Answer)
			r := harness.Request{Path: path, Id: "k"}
			slow := g.Open(r, "executed")
			if who == "only" {
				f.Hold.Open()
			} else {
				quick := g.Open(r, "attached")
				f.Hold.Open()
				if who == "follower" {
					quick, slow = slow, quick
				}
				// It gets what its neighbour may be behind, and not all: the rest waits.
				if n, err := io.CopyN(io.Discard, quick.Body, 64<<20); err != nil {
					t.Fatalf("%d bytes, %v", n, err)
				}
				select {
				case <-f.Taken:
					t.Error("all was taken from the upstream, although a reader is far behind")
				default:
				}
				rest := readOn(quick)
				defer func() {
					harness.Wait(t, rest.done, "the end of the quick one")
					if rest.err != nil || rest.n != int64(f.Size)-64<<20 {
						t.Errorf("the quick one got %d bytes more, %v", rest.n, rest.err)
					}
				}()
			}
			readOn(slow).whole(t, f, "the slow one")
			doc := g.Call(r).Terminal(t, 409, "result-unavailable")
			if doc.State != "completed" {
				t.Errorf("a retry got %+v", doc)
			}
			u.Arrived(path, 1)
		})
	}
}

// P6: an answer that breaks off is no whole one to a slow owner: it gets what came, and
// sees the end that is none.
func TestSlowOwnerOfABrokenAnswer(t *testing.T) {
	for _, length := range []string{"announced", "unknown"} {
		t.Run(length, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Start(t, "agent_proxy %s {\n max_result 64MiB\n}", u.Addr)
			f := harness.NewFlood(32 << 20)
			u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
				if length == "unknown" {
					w = lengthless{w}
				}
				f.Answer(w, a)
				if length == "announced" {
					return
				}
				panic(http.ErrAbortHandler)
			})
			if length == "announced" {
				u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
					w.Header().Set("Content-Length", fmt.Sprint(f.Size+1))
					f.Answer(keepLength{w}, a)
					panic(http.ErrAbortHandler)
				})
			}
			r := harness.Request{Path: "/x", Id: "k"}
			owner := g.Open(r, "executed")
			harness.Wait(t, f.Taken, "the upstream's end")
			harness.Eventually(t, "the call is in doubt", func() bool { return g.Call(r).Status == 409 })
			g.Call(r).Terminal(t, 409, "in-doubt")
			got := readOn(owner)
			harness.Wait(t, got.done, "the owner's end")
			if got.err == nil || fmt.Sprintf("%x", got.hash.Sum(nil)) != f.Sum() {
				t.Errorf("the owner got %d bytes of %d, %v", got.n, f.Size, got.err)
			}
		})
	}
}

// keepLength keeps the length that was announced before.
type keepLength struct{ http.ResponseWriter }

func (k keepLength) Header() http.Header         { return http.Header{} }
func (k keepLength) Unwrap() http.ResponseWriter { return k.ResponseWriter }

// lengthless announces no length.
type lengthless struct{ http.ResponseWriter }

func (l lengthless) Header() http.Header         { return http.Header{} }
func (l lengthless) Unwrap() http.ResponseWriter { return l.ResponseWriter }

// P4: where the disk has no room for what an owner is behind, the upstream waits for it,
// and the call is completed without a result.
func TestSlowOwnerWithoutADisk(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()+"/missing")
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Badger: true, Site: "agent_proxy " + u.Addr + " {\n max_result 64MiB\n}"})
	f := harness.NewFlood(32 << 20)
	u.On("/x", f.Answer)
	r := harness.Request{Path: "/x", Id: "k"}
	owner := g.Open(r, "executed")
	harness.Wait(t, f.Begun, "the answer")
	readOn(owner).whole(t, f, "the owner")
	g.Call(r).Terminal(t, 409, "result-unavailable")
	u.Arrived("/x", 1)
}
