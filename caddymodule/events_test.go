package caddymodule

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// bound is how long a test waits for what should happen at once.
const bound = 20 * time.Second

// heard is a handler of events that notes them, after what a test lets it do first.
type heard struct {
	mu     sync.Mutex
	events []caddy.Event
	came   chan struct{}
	first  func()
}

func (h *heard) Handle(_ context.Context, e caddy.Event) error {
	if h.first != nil {
		h.first()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
	h.came <- struct{}{}
	return nil
}

func (h *heard) next(t *testing.T) caddy.Event {
	t.Helper()
	select {
	case <-h.came:
	case <-time.After(bound):
		t.Fatal("no event came")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.events[len(h.events)-1]
}

// listening is an app with a handler for the event called name.
func listening(t *testing.T, name string, first func()) (*App, *heard) {
	t.Helper()
	app := validApp(t, t.TempDir(), "")
	t.Cleanup(func() { cleanUp(t, app) })
	h := &heard{came: make(chan struct{}, 10*maxEvents), first: first}
	if err := app.events.On(name, h); err != nil {
		t.Fatal(err)
	}
	return app, h
}

// Emitting waits for no handler: what is too much for one that hangs is dropped and
// counted, and what was queued is told once it goes on.
func TestEmitNeverWaits(t *testing.T) {
	hang := make(chan struct{})
	var entered sync.Once
	inside := make(chan struct{})
	app, h := listening(t, "agent_guard.test", func() {
		entered.Do(func() { close(inside) })
		<-hang
	})
	app.emit("agent_guard.test", map[string]any{"n": 0})
	<-inside
	const more = 50
	for n := range maxEvents + more {
		app.emit("agent_guard.test", map[string]any{"n": n + 1})
	}
	close(hang)
	app.pending.flush(app.ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.events) != maxEvents+1 {
		t.Errorf("%d events were told, want %d", len(h.events), maxEvents+1)
	}
	for n, e := range h.events {
		if e.Data["n"] != n {
			t.Fatalf("event %d is %v", n, e.Data)
		}
	}
	if got := gathered(t, app, "agent_guard_events_dropped_total"); got != more {
		t.Errorf("%v dropped events are counted, want %d", got, more)
	}
}

// gathered is the value of a metric without labels.
func gathered(t *testing.T, app *App, name string) float64 {
	t.Helper()
	families, err := app.ctx.GetMetricsRegistry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue() + f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("%s is not registered", name)
	return 0
}

// A handler that panics takes neither the process nor other events with it.
func TestHandlersMayPanic(t *testing.T) {
	panics := true
	app, h := listening(t, "agent_guard.test", func() {
		if panics {
			panics = false
			panic("the handler's own fault")
		}
	})
	app.emit("agent_guard.test", nil)
	app.emit("agent_guard.test", nil)
	if e := h.next(t); e.Name() != "agent_guard.test" {
		t.Errorf("%v", e.Name())
	}
}

// An engine's events go to the configuration that was loaded last, and back to the one
// before where that is given up.
func TestEventsGoToTheLatestConfiguration(t *testing.T) {
	const name = "agent_guard.test"
	var e engine
	e.emit(name, nil) // to nobody
	first, heardFirst := listening(t, name, nil)
	second, heardSecond := listening(t, name, nil)
	e.activeConfigs.join(first)
	e.activeConfigs.join(second)
	e.emit(name, map[string]any{"n": 1})
	if got := heardSecond.next(t); got.Data["n"] != 1 {
		t.Errorf("%v", got.Data)
	}
	e.activeConfigs.leave(second)
	e.emit(name, map[string]any{"n": 2})
	if got := heardFirst.next(t); got.Data["n"] != 2 {
		t.Errorf("%v", got.Data)
	}
	if len(heardFirst.events) != 1 || len(heardSecond.events) != 1 {
		t.Errorf("%d and %d events", len(heardFirst.events), len(heardSecond.events))
	}
}

// reported is an engine over a store whose state a test sets, and what it tells.
type reported struct {
	storeModule
	*engine
	heard *heard
}

// storeModule opens a memory store and reports what a test says.
type storeModule struct {
	disk *admin.Disk
}

func (*storeModule) StorePath() (string, error) { return "", nil }
func (*storeModule) OpenStore(*zap.Logger) (store.Store, error) {
	return memory.New(memory.Options{}), nil
}
func (m *storeModule) ReportStore(store.Store) *admin.Report { return &admin.Report{Disk: m.disk} }
func (m *storeModule) set(free uint64, takes string)         { m.disk = &admin.Disk{Free: free, Takes: takes} }

func newReported(t *testing.T) *reported {
	t.Helper()
	app, h := listening(t, "", nil) // all events
	w := &reported{heard: h}
	w.engine = &engine{calls: &guard.Engine{Store: memory.New(memory.Options{})}, opener: &w.storeModule}
	w.activeConfigs.join(app)
	return w
}

// The store's state is told when it changes, and only then.
func TestChangesOfTheStoreAreTold(t *testing.T) {
	w := newReported(t)
	was := storeState{healthy: true}
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, ""},
		{func() { w.set(900, admin.TakesEverything) }, ""},
		{func() { w.set(90, admin.TakesOutcomes) }, eventDiskLow},
		{func() { w.set(80, admin.TakesOutcomes) }, ""},
		{func() { w.set(9, admin.TakesNothing) }, eventDiskLow},
		{func() { w.disk = nil }, ""}, // not known for a moment
		{func() { w.set(80, admin.TakesOutcomes) }, ""},
		{func() { w.set(900, admin.TakesEverything) }, eventDiskRecovered},
		{func() { _ = w.calls.Store.Close() }, eventStoreUnhealthy},
		{func() {}, ""},
	} {
		step.do()
		before := len(w.heard.came)
		was = w.reportChanges(was)
		w.flushEvents()
		if got := len(w.heard.came) - before; got != min(len(step.want), 1) {
			t.Fatalf("step %d: %d events", i, got)
		}
		if step.want == "" {
			continue
		}
		e := w.heard.events[len(w.heard.events)-1]
		if e.Name() != step.want {
			t.Errorf("step %d: %s, want %s", i, e.Name(), step.want)
		}
		if w.disk != nil && step.want != eventStoreUnhealthy && e.Data["free_bytes"] != w.disk.Free {
			t.Errorf("step %d: %v", i, e.Data)
		}
	}
}

// What the last process left open is told once, to the configuration that comes first.
func TestRecoveryIsToldOnce(t *testing.T) {
	w := newReported(t)
	w.watch.recovered = execution.Recovery{InDoubt: 3}
	for range 2 {
		w.reportRecovered()
	}
	w.flushEvents()
	if len(w.heard.events) != 1 {
		t.Fatalf("%d events", len(w.heard.events))
	}
	e := w.heard.events[0]
	if e.Name() != eventRecovered || fmt.Sprint(e.Data) != "map[in_doubt:3]" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
}

// Every event has its row in the manual, and every row its event.
func TestEventsAreDocumented(t *testing.T) {
	compare(t, "../docs/observability.md", []string{"app.go", "../guard/handler.go"}, regexp.MustCompile("(?m)^\\| `(agent_guard\\.[a-z_]+)` \\| "),
		regexp.MustCompile(`(?m)^	[Ee]vent[A-Za-z]+ += "(agent_guard\.[a-z_]+)"$`))
}

// Every placeholder has its row in the manual, and every row its placeholder.
func TestPlaceholdersAreDocumented(t *testing.T) {
	compare(t, "../docs/observability.md", []string{"../guard/observe.go"}, regexp.MustCompile("\\{http\\.agent_guard\\.([a-z_]+)\\}`(?:, `[^|]*)? \\| |\\| `\\{http\\.agent_guard\\.([a-z_]+)\\}`, "),
		regexp.MustCompile(`(?m)^	case "([a-z_]+)":$`))
}

// Every attribute of spans has its row in the manual, and every row its attribute.
func TestSpanAttributesAreDocumented(t *testing.T) {
	compare(t, "../docs/observability.md", []string{"host.go"}, regexp.MustCompile("`(agent_guard\\.execution\\.[a-z_]+)`"),
		regexp.MustCompile(`"(agent_guard\.execution\.[a-z_]+)"`))
}

// compare holds the names that a document lists to those of source files.
func compare(t *testing.T, document string, sources []string, listed, named *regexp.Regexp) {
	t.Helper()
	find := func(form *regexp.Regexp, files ...string) []string {
		var names []string
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range form.FindAllStringSubmatch(string(text), -1) {
				names = append(names, strings.Join(m[1:], ""))
			}
		}
		slices.Sort(names)
		return slices.Compact(names)
	}
	in, of := find(listed, document), find(named, sources...)
	if len(of) == 0 || !slices.Equal(in, of) {
		t.Errorf("%s lists %v, and %v have %v", document, in, sources, of)
	}
}

// An execution that has outlived its configuration may tell of its end to nobody: that
// ends nothing else, however many do.
func TestEmitAfterTheConfigurationIsGone(t *testing.T) {
	hang := make(chan struct{})
	var entered sync.Once
	inside := make(chan struct{})
	app, _ := listening(t, "agent_guard.test", func() {
		entered.Do(func() { close(inside) })
		<-hang
	})
	app.emit("agent_guard.test", nil)
	<-inside
	var all sync.WaitGroup
	all.Go(func() {
		for range 2 * maxEvents {
			app.emit("agent_guard.test", nil)
		}
	})
	cleanUp(t, app)
	all.Wait()
	close(hang)
	app.pending.flush(app.ctx)
}
