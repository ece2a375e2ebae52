package operate

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

const (
	procInside = "AGENT_GUARD_E2E_INSIDE" // a namespace that may mount
	procDiskMB = 448
	// procMark is above what the store asks for by default, of the disk's free space.
	procMarkMB = 256
)

// procSmallDisk mounts a small file system and reports true. Where this process may
// not, the test runs again in a namespace of its own, which may, and false is
// reported: there is nothing left to do here.
func procSmallDisk(t *testing.T) (dir string, here bool) {
	t.Helper()
	dir, err := os.MkdirTemp("", "agd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	err = unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", procDiskMB))
	if err == nil {
		t.Cleanup(func() {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		return dir, true
	}
	if os.Getenv(procInside) != "" || !errors.Is(err, unix.EPERM) {
		t.Fatalf("no small file system could be mounted: %v", err)
	}
	again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	again.Env = append(os.Environ(), procInside+"=yes")
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := again.CombinedOutput()
	if err != nil {
		t.Fatalf("this test needs a small file system: run it as root with CAP_SYS_ADMIN, or where users may make namespaces: %v\n%s", err, out)
	}
	t.Logf("in a namespace of its own:\n%s", out)
	return dir, false
}

// procFiller takes space from the disk, at the pace of a disk.
type procFiller struct {
	t    *testing.T
	name string
}

// free is the free space in bytes.
func (f *procFiller) free() int64 {
	var s unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(f.name), &s); err != nil {
		f.t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}

// until leaves free bytes to the disk; with none, it ends when the disk takes no more.
func (f *procFiller) until(free int64) {
	f.t.Helper()
	file, err := os.OpenFile(f.name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		f.t.Fatal(err)
	}
	defer file.Close()
	const piece = 4 << 20
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for f.free() > free {
		if _, err := file.Write(make([]byte, min(piece, f.free()-free))); errors.Is(err, unix.ENOSPC) {
			return
		} else if err != nil {
			f.t.Fatal(err)
		}
		<-pace.C
	}
}

// atOnce takes all that is left in one go.
func (f *procFiller) atOnce() {
	f.t.Helper()
	file, err := os.OpenFile(f.name, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		f.t.Fatal(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		f.t.Fatal(err)
	}
	if err := unix.Fallocate(int(file.Fd()), 0, info.Size(), f.free()); err != nil && !errors.Is(err, unix.ENOSPC) {
		f.t.Fatal(err)
	}
	f.until(0) // what it would not give in one piece
}

func (f *procFiller) remove() {
	f.t.Helper()
	if err := os.Remove(f.name); err != nil {
		f.t.Fatal(err)
	}
}

// wantProcFull checks that the gateway forwards nothing that it cannot record, and
// that all else flows.
func wantProcFull(t *testing.T, gateway *harness.ProcGateway, upstream *harness.ProcUpstream, known harness.ProcAnswer, round string) {
	t.Helper()
	n := 0
	harness.EventuallyWithin(t, harness.ProcBound, "a refusal", func() bool {
		n++
		return gateway.Post(t, harness.ProcCall{Id: fmt.Sprintf("%s-%d", round, n)}).Problem() == "store-unavailable"
	})
	before := upstream.Total()
	for i := range 20 {
		a := gateway.Post(t, harness.ProcCall{Id: fmt.Sprintf("%s-refused-%d", round, i)})
		if a.Status != http.StatusServiceUnavailable || a.Problem() != "store-unavailable" {
			t.Errorf("%s: a new call got %v", round, a)
		}
		harness.WantProcReplay(t, known, gateway.Post(t, harness.ProcCall{Id: "known"}))
	}
	if got := upstream.Total(); got != before {
		t.Errorf("P4: %s: %d calls were forwarded that could not be recorded", round, got-before)
	}
	read, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+gateway.Site.Addr+"/read", nil)
	if err != nil {
		t.Fatal(err)
	}
	read.Header.Set("Idempotency-Key", round+"-read")
	resp, err := http.DefaultClient.Do(read)
	if err != nil {
		t.Fatalf("%s: a read: %v", round, err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode >= 300 {
		t.Errorf("%s: a read got %d", round, resp.StatusCode)
	}
	if !gateway.Alive() {
		t.Fatalf("%s: the gateway is dead: %v", round, gateway.Err)
	}
}

// wantProcRoom waits until new calls are taken.
func wantProcRoom(t *testing.T, gateway *harness.ProcGateway, round string) {
	t.Helper()
	n := 0
	harness.EventuallyWithin(t, harness.ProcBound, "a call that is taken", func() bool {
		n++
		return gateway.Post(t, harness.ProcCall{Id: fmt.Sprintf("%s-%d", round, n)}).Executed()
	})
}

// P4: on a disk that is nearly full, or full to the last byte while calls run, nothing
// is forwarded that could not be recorded, everything else flows, the process lives,
// nothing runs twice, and all of it is over once there is space.
func TestProcessFullDisk(t *testing.T) {
	t.Parallel() // its gateways are processes
	disk, here := procSmallDisk(t)
	if !here {
		return
	}
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Store = "badger " + filepath.Join(disk, "data")
	gateway := site.Start(t)
	filler := &procFiller{t: t, name: filepath.Join(disk, "filler")}
	known := gateway.Post(t, harness.ProcCall{Id: "known"})

	filler.until(procMarkMB << 20)
	wantProcFull(t, gateway, upstream, known, "nearly-full")
	filler.remove()
	wantProcRoom(t, gateway, "space-again")
	for _, said := range []string{"disk is nearly full", "disk has space again"} {
		if !gateway.Log.Says(said) {
			t.Errorf("%q is not in the log", said)
		}
	}

	answers := procFillUnderLoad(t, gateway, filler)
	wantProcFull(t, gateway, upstream, known, "full")
	filler.remove()
	wantProcRoom(t, gateway, "recovered")
	wantProcKnown(t, gateway, upstream, answers)
	gateway.End(t)
	harness.WantProcReplay(t, known, site.Start(t).Post(t, harness.ProcCall{Id: "known"}))
}

// wantProcKnown checks what became of calls while the disk became full: what was answered is replayed, what
// was refused has not run, and nothing has run twice.
func wantProcKnown(t *testing.T, gateway *harness.ProcGateway, upstream *harness.ProcUpstream, answers map[string]harness.ProcAnswer) {
	t.Helper()
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	replays, bare, doubts := 0, 0, 0
	for id, first := range answers {
		if first.Problem() == "store-unavailable" {
			if n := upstream.Arrivals(id); n != 0 {
				t.Errorf("P4: %s was refused and executed %d times", id, n)
			}
			continue
		}
		a, err := harness.ProcDefinite(t.Context(), client, gateway.Site.Addr, harness.ProcCall{Id: id})
		switch {
		case err != nil:
			t.Fatal(err)
		case a.Problem() == "in-doubt":
			if doubts++; first.Executed() {
				t.Errorf("P2: %s was answered and is in doubt", id)
			}
		case a.Problem() == "result-unavailable":
			bare++ // settled when there was space for nothing more
		case first.Executed():
			replays++
			harness.WantProcReplay(t, first, a)
		}
		if n := upstream.Arrivals(id); n > 1 {
			t.Errorf("P1: %s was executed %d times", id, n)
		}
	}
	t.Logf("%d calls while the disk became full: %d replayed, %d without their results, %d in doubt", len(answers), replays, bare, doubts)
}

// procFillUnderLoad fills the disk to the last byte while clients call, and keeps it
// full until many of them were refused. It returns the first answer to each call.
func procFillUnderLoad(t *testing.T, gateway *harness.ProcGateway, filler *procFiller) map[string]harness.ProcAnswer {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var mu sync.Mutex
	answers := map[string]harness.ProcAnswer{}
	var taken, refused atomic.Int64
	var clients sync.WaitGroup
	for worker := range 8 {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for n := 0; ctx.Err() == nil; n++ {
				c := harness.ProcCall{Id: fmt.Sprintf("load-%d-%d", worker, n), Header: map[string]string{harness.ProcSize: "2000"}}
				a, err := harness.ProcPost(context.WithoutCancel(ctx), client, gateway.Site.Addr, c)
				if err != nil {
					a = harness.ProcAnswer{} // its end was not seen
				}
				mu.Lock()
				answers[c.Id] = a
				mu.Unlock()
				switch {
				case a.Executed():
					taken.Add(1)
				case a.Problem() == "store-unavailable":
					refused.Add(1)
				}
				if !gateway.Alive() {
					return
				}
			}
		})
	}
	harness.EventuallyWithin(t, harness.ProcBound, "load", func() bool { return taken.Load() > 200 || !gateway.Alive() })
	filler.atOnce()
	full := refused.Load()
	harness.EventuallyWithin(t, harness.ProcBound, "refusals", func() bool {
		filler.until(0) // what compaction has freed
		return refused.Load() > full+500 || !gateway.Alive()
	})
	if !gateway.Alive() {
		t.Fatalf("P4: the gateway died on the full disk: %v\n%s", gateway.Err, gateway.Log.Tail(4000))
	}
	stop()
	clients.Wait()
	return answers
}

// postgresOnSmallDisk is a gateway's site with its store in a database whose tables lie on a small disk, and what fills
// that. false means that there is nothing to do here.
func postgresOnSmallDisk(t *testing.T, upstream *harness.ProcUpstream) (*harness.ProcSite, *procFiller, bool) {
	t.Helper()
	disk, here := procSmallDisk(t)
	if !here {
		return nil, nil, false
	}
	site, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return nil, nil, false
	}
	space := filepath.Join(disk, "space")
	if err := os.Mkdir(space, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(disk, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := pgserver.Give(space); err != nil {
		t.Fatal(err)
	}
	if _, err := server.SQL("create tablespace small location '" + space + "'"); err != nil {
		t.Fatal(err)
	}
	site.Env = append(site.Env, "TEST_DSN="+server.DSN()+" default_tablespace=small")
	return site, &procFiller{t: t, name: filepath.Join(disk, "filler")}, true
}

// P6, P7 on PostgreSQL, ADR 0147: the database's disk is full when calls end. Their clients are told that they are in
// doubt, in an answer of its own where nothing of the call's has left; once there is room each retry gets the call's
// answer, and nothing has run twice.
func TestProcessPostgresFullDiskKeepsAnswers(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, filler, there := postgresOnSmallDisk(t, upstream)
	if !there {
		return
	}
	gateway := site.Start(t)
	var calls []harness.ProcCall
	for i := range 60 {
		c := harness.ProcCall{Id: fmt.Sprint("open-", i)}
		if size := []string{"", "1500", "300000"}[i%3]; size != "" {
			c.Header = map[string]string{harness.ProcSize: size}
		}
		calls = append(calls, c)
	}
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	holds, begun := make([]*harness.Gate, len(calls)), make([]<-chan harness.ProcFuture, len(calls))
	for i, c := range calls {
		holds[i] = upstream.Hold(t, c.Id)
		begun[i] = gateway.Begin(t.Context(), client, c)
		harness.WaitWithin(t, harness.ProcBound, holds[i].Arrived, "the call arrives")
	}
	procFillUnderLoad(t, gateway, filler)
	for _, hold := range holds {
		hold.Open()
	}
	first, doubts := make([]harness.ProcAnswer, len(calls)), 0
	for i, c := range calls {
		came := harness.WaitWithin(t, harness.ProcBound, begun[i], "the end of a call")
		switch first[i] = came.Answer; {
		case came.Err != nil && i%3 == 2: // of a large one the client has most already
		case came.Err != nil:
			t.Errorf("%s: %v", c.Id, came.Err)
		case !first[i].Executed():
			doubts++
			harness.WantProcDoubt(t, first[i])
		}
	}
	if doubts == 0 {
		t.Error("the disk was not full enough")
	}
	filler.remove()
	wantProcRoom(t, gateway, "recovered")
	for i, c := range calls {
		var last harness.ProcAnswer
		harness.EventuallyWithin(t, harness.ProcBound, c.Id+" is settled", func() bool {
			last = gateway.Post(t, c)
			return last.Problem() != "in-doubt" && last.Problem() != "store-unavailable"
		})
		if last.Status != http.StatusCreated || !last.Replayed() && last.Execution() != "attached" || i%3 == 2 && len(last.Body) < 300_000 {
			t.Errorf("%s: %d bytes, %v", c.Id, len(last.Body), last)
		}
		if first[i].Executed() {
			harness.WantProcReplay(t, first[i], last)
		}
		if n := upstream.Arrivals(c.Id); n != 1 {
			t.Errorf("P1: %s was executed %d times", c.Id, n)
		}
	}
	t.Logf("%d of %d calls were in doubt while the disk was full", doubts, len(calls))
}

// P4 on PostgreSQL: while the databases disk is full, nothing is forwarded that could not be recorded,
// nothing runs twice, nothing that was answered is lost, and all of it is over once there is space, without
// a restart of anything.
func TestProcessPostgresFullDisk(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, filler, there := postgresOnSmallDisk(t, upstream)
	if !there {
		return
	}
	gateway := site.Start(t)
	known := gateway.Post(t, harness.ProcCall{Id: "known"})
	if !known.Executed() {
		t.Fatalf("the first call: %v", known)
	}
	answers := procFillUnderLoad(t, gateway, filler)
	wantProcFull(t, gateway, upstream, known, "full")
	filler.remove()
	wantProcRoom(t, gateway, "recovered")
	wantProcKnown(t, gateway, upstream, answers)
	gateway.End(t)
}
