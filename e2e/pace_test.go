package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"

	"io"
	"net/http"
	"runtime"
	"testing"
)

// flood is an answer of many bytes, which differ from block to block.
type flood struct {
	size  int
	begun chan struct{} // closed when the header has left
	taken chan struct{} // closed when all of it was taken from the upstream
	hold  *gate         // after the first block; nil without
}

func newFlood(size int) *flood {
	return &flood{size: size, begun: make(chan struct{}), taken: make(chan struct{})}
}

const floodBlock = 64 << 10

func (f *flood) block(i int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%07d\n", i), floodBlock/8)
}

func (f *flood) answer(w http.ResponseWriter, _ *arrival) {
	w.Header().Set("Content-Length", fmt.Sprint(f.size))
	_ = http.NewResponseController(w).Flush()
	close(f.begun)
	for i := range f.size / floodBlock {
		if i == 1 && f.hold != nil {
			f.hold.pass()
		}
		if _, err := w.Write(f.block(i)); err != nil {
			return
		}
	}
	_ = http.NewResponseController(w).Flush()
	close(f.taken)
}

// sum is what a reader of the whole answer has.
func (f *flood) sum() string {
	h := sha256.New()
	for i := range f.size / floodBlock {
		h.Write(f.block(i))
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

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
func (r *reading) whole(t *testing.T, f *flood, who string) {
	t.Helper()
	wait(t, r.done, who+"'s end")
	if got := fmt.Sprintf("%x", r.hash.Sum(nil)); r.err != nil || got != f.sum() {
		t.Errorf("%s: %d bytes of %d, %v", who, r.n, f.size, r.err)
	}
}

// longRead bounds calls whose answers are read only after their deadline, of 15 s.
const longRead = 4 * patience

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
			u := newUpstream(t)
			g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 64MiB\n deadline 60s\n}"})
			client := g.newClient(nil)
			if version == "h2c" {
				client = g.h2cClient()
			}
			client.Timeout = longRead
			f := newFlood(64 << 20)
			u.on("/x", f.answer)
			before := inUse()
			owner := g.open(request{path: "/x", id: "k", client: client}, "executed")
			r := request{path: "/x", id: "k"}
			quick, second := readOn(g.open(r, "attached")), readOn(g.open(r, "attached"))
			wait(t, f.taken, "the upstream's end")
			quick.whole(t, f, "a follower")
			second.whole(t, f, "another follower")
			replayed := readOn(g.open(r, "replayed")) // nobody sees an end before the record
			replayed.whole(t, f, "a retry")
			if more := inUse() - before; more > 16<<20 {
				t.Errorf("an owner that does not read takes %d MiB of memory", more>>20)
			}
			readOn(owner).whole(t, f, "the owner")
			u.arrived("/x", 1)
		})
	}
}

// P6, P7: owners that read nothing past their calls' `deadline` take nothing from the calls, nor
// from who is attached, nor memory. What became of a call is what its upstream has answered by
// then.
func TestOwnersThatReadNothingPastTheDeadline(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 32MiB\n deadline 15s\n}"})
	g.client.Timeout = longRead
	before := inUse()
	type call struct {
		request
		*flood
		owner    *http.Response
		follower *reading
	}
	begin := func(path string, size int, client *http.Client, answer func(*flood, http.ResponseWriter, *arrival)) *call {
		c := &call{request: request{path: path, id: "k"}, flood: newFlood(size)}
		c.hold = newGate(t)
		client.Timeout = longRead
		u.on(path, func(w http.ResponseWriter, a *arrival) { answer(c.flood, w, a) })
		c.owner = g.open(request{path: path, id: "k", client: client}, "executed")
		c.follower = readOn(g.open(c.request, "attached"))
		c.hold.open()
		return c
	}
	whole := func(f *flood, w http.ResponseWriter, a *arrival) { f.answer(w, a) }
	large := begin("/large", 96<<20, g.newClient(nil), whole)
	brief := []*call{begin("/h1", 16<<20, g.newClient(nil), whole), begin("/h2c", 16<<20, g.h2cClient(), whole)}
	hanging := begin("/hanging", 16<<20, g.newClient(nil), func(f *flood, w http.ResponseWriter, a *arrival) {
		f.answer(lengthless{w}, a)
		<-a.Context().Done()
	})

	// It began after the others, and has no more time than they.
	u.on("/late", func(_ http.ResponseWriter, a *arrival) { <-a.Context().Done() })
	if got := g.call(request{path: "/late", id: "k"}); got.status < 400 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	for _, c := range brief {
		c.follower.whole(t, c.flood, "the follower of "+c.path)
		readOn(g.open(c.request, "replayed")).whole(t, c.flood, "a retry of "+c.path)
	}
	// What is larger than can be read back waits for its owner, as long as the deadline in all.
	// Then that is cut off, and the call goes on without it.
	large.follower.whole(t, large.flood, "the follower of "+large.path)
	eventually(t, "the large call is settled", func() bool { return g.call(large.request).status == 409 })
	if doc := g.call(large.request).terminal(t, 409, "result-unavailable"); doc.State != "completed" {
		t.Errorf("a retry got %+v", doc)
	}
	wait(t, hanging.follower.done, "the end of the hanging answer")
	g.call(hanging.request).terminal(t, 409, "in-doubt")
	if more := inUse() - before; more > 32<<20 {
		t.Errorf("four owners that read nothing take %d MiB of memory", more>>20)
	}

	for _, c := range brief {
		readOn(c.owner).whole(t, c.flood, "the owner of "+c.path)
	}
	late := readOn(hanging.owner)
	for who, got := range map[string]*reading{"owner": late, "follower": hanging.follower} {
		wait(t, got.done, "its end")
		if got.err == nil || fmt.Sprintf("%x", got.hash.Sum(nil)) != hanging.sum() {
			t.Errorf("the %s of the hanging answer got %d bytes, %v", who, got.n, got.err)
		}
	}
	cut := readOn(large.owner)
	wait(t, cut.done, "the end of the large answer's owner")
	if cut.err == nil || cut.n >= int64(large.size) {
		t.Errorf("it got %d bytes, %v", cut.n, cut.err)
	}
	for _, path := range []string{"/large", "/h1", "/h2c", "/hanging"} {
		u.arrived(path, 1)
	}
}

// A follower that does not read holds up nobody either.
func TestSlowFollower(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 32MiB\n}"})
	f := newFlood(32 << 20)
	u.on("/x", f.answer)
	r := request{path: "/x", id: "k"}
	res := g.open(r, "executed")
	slow := g.open(r, "attached")
	readOn(res).whole(t, f, "the owner")
	readOn(g.open(r, "replayed")).whole(t, f, "a retry")
	readOn(slow).whole(t, f, "the follower")
	u.arrived("/x", 1)
}

// P7: an owner that leaves while it is behind loses nothing.
func TestSlowOwnerLeaves(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 32MiB\n}"})
	f := newFlood(32 << 20)
	u.on("/x", f.answer)
	r := request{path: "/x", id: "k"}
	owner := g.open(r, "executed")
	wait(t, f.taken, "the upstream's end")
	_ = owner.Body.Close()
	eventually(t, "the call is settled and its owner gone", func() bool { return waiting("guard.(*Call).execute") == 0 })
	readOn(g.open(r, "replayed")).whole(t, f, "a retry")
	u.arrived("/x", 1)
}

// P7: an answer that is larger than `max_result` flows at the pace of its slowest reader,
// once that is 64 MiB behind. Nobody misses a byte, and the call is completed.
func TestSlowReadersOfATooLargeAnswer(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 1MiB\n}"})
	for _, who := range []string{"owner", "follower", "only"} {
		t.Run(who, func(t *testing.T) {
			f := newFlood(112 << 20)
			f.hold = newGate(t)
			path := "/" + who
			u.on(path, f.answer)
			r := request{path: path, id: "k"}
			slow := g.open(r, "executed")
			if who == "only" {
				f.hold.open()
			} else {
				quick := g.open(r, "attached")
				f.hold.open()
				if who == "follower" {
					quick, slow = slow, quick
				}
				// It gets what its neighbour may be behind, and not all: the rest waits.
				if n, err := io.CopyN(io.Discard, quick.Body, 64<<20); err != nil {
					t.Fatalf("%d bytes, %v", n, err)
				}
				select {
				case <-f.taken:
					t.Error("all was taken from the upstream, although a reader is far behind")
				default:
				}
				rest := readOn(quick)
				defer func() {
					wait(t, rest.done, "the end of the quick one")
					if rest.err != nil || rest.n != int64(f.size)-64<<20 {
						t.Errorf("the quick one got %d bytes more, %v", rest.n, rest.err)
					}
				}()
			}
			readOn(slow).whole(t, f, "the slow one")
			doc := g.call(r).terminal(t, 409, "result-unavailable")
			if doc.State != "completed" {
				t.Errorf("a retry got %+v", doc)
			}
			u.arrived(path, 1)
		})
	}
}

// P6: an answer that breaks off is no whole one to a slow owner: it gets what came, and
// sees the end that is none.
func TestSlowOwnerOfABrokenAnswer(t *testing.T) {
	for _, length := range []string{"announced", "unknown"} {
		t.Run(length, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s {\n max_result 64MiB\n}", u.addr)
			f := newFlood(32 << 20)
			u.on("/x", func(w http.ResponseWriter, a *arrival) {
				if length == "unknown" {
					w = lengthless{w}
				}
				f.answer(w, a)
				if length == "announced" {
					return
				}
				panic(http.ErrAbortHandler)
			})
			if length == "announced" {
				u.on("/x", func(w http.ResponseWriter, a *arrival) {
					w.Header().Set("Content-Length", fmt.Sprint(f.size+1))
					f.answer(keepLength{w}, a)
					panic(http.ErrAbortHandler)
				})
			}
			r := request{path: "/x", id: "k"}
			owner := g.open(r, "executed")
			wait(t, f.taken, "the upstream's end")
			eventually(t, "the call is in doubt", func() bool { return g.call(r).status == 409 })
			g.call(r).terminal(t, 409, "in-doubt")
			got := readOn(owner)
			wait(t, got.done, "the owner's end")
			if got.err == nil || fmt.Sprintf("%x", got.hash.Sum(nil)) != f.sum() {
				t.Errorf("the owner got %d bytes of %d, %v", got.n, f.size, got.err)
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
	u := newUpstream(t)
	g := launch(t, setup{badger: true, site: "agent_proxy " + u.addr + " {\n max_result 64MiB\n}"})
	f := newFlood(32 << 20)
	u.on("/x", f.answer)
	r := request{path: "/x", id: "k"}
	owner := g.open(r, "executed")
	wait(t, f.begun, "the answer")
	readOn(owner).whole(t, f, "the owner")
	g.call(r).terminal(t, 409, "result-unavailable")
	u.arrived("/x", 1)
}
