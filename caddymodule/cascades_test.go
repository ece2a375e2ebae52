package caddymodule

import (
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// exhausts reports whether a resource of the gateway is exhausted by what is read now.
func exhausts(x *cascade.Exhaustion, app *App, name string) bool {
	x.Update(app.held.readings(app))
	return slices.ContainsFunc(x.Exhausted(), func(s cascade.Resource) bool { return s.Name == name && s.Pool == "" })
}

// C-3.4.1-a, C-3.4.1-e: memory above its threshold is a resource that is exhausted.
func TestMemoryIsRead(t *testing.T) {
	app := started(t, t.TempDir(), "")
	limit := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(limit) })
	used := []metrics.Sample{{Name: "/memory/classes/total:bytes"}}
	metrics.Read(used)
	for _, test := range []struct { // at a limit near what is in use, the runtime would give some of that back
		limit int64
		full  bool
	}{{int64(used[0].Value.Uint64()) * 100, false}, {1 << 20, true}, {limit, false}} {
		debug.SetMemoryLimit(test.limit)
		if full := exhausts(new(cascade.Exhaustion), app, "memory"); full != test.full {
			t.Errorf("a limit of %d: %v", test.limit, full)
		}
	}
	// The engine itself looks about every second, and may have seen the limit.
	for deadline := time.Now().Add(time.Minute); ; {
		n, there := app.held.cascadeReport().Exhausted[[2]string{"", "memory"}]
		if n == 0 && there {
			break
		}
		if !there || time.Now().After(deadline) {
			t.Fatalf("without a limit the metric is %v, %v", n, there)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// someDisk opens a memory store whose disk is what a test says.
type someDisk struct {
	storeModule
	at atomic.Pointer[admin.Disk]
}

func (d *someDisk) ReportStore(store.Store) *admin.Report { return &admin.Report{Disk: d.at.Load()} }

// C-3.4.1-e: the disk, and how long commits take, are read where the store is.
func TestStoreSignals(t *testing.T) {
	app, disk := validApp(t, t.TempDir(), ""), new(someDisk)
	app.spec.opener = disk
	t.Cleanup(func() { cleanUp(t, app) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	x := new(cascade.Exhaustion)
	for _, test := range []struct {
		takes   string
		commits time.Duration
		full    bool
	}{{admin.TakesEverything, time.Millisecond, false}, {admin.TakesOutcomes, 600 * time.Millisecond, true}, {admin.TakesEverything, time.Millisecond, false}} {
		exhausts(x, app, "")
		disk.at.Store(&admin.Disk{Takes: test.takes})
		app.held.counts.commits.Add(1000)
		app.held.counts.commitTime.Add(int64(1000 * test.commits))
		x.Update(app.held.readings(app))
		for _, name := range []string{"disk", "store"} {
			full := slices.ContainsFunc(x.Exhausted(), func(s cascade.Resource) bool { return s.Name == name })
			if full != test.full {
				t.Errorf("watermark %s and commits of %s: %s is %v", test.takes, test.commits, name, full)
			}
		}
	}
}

// What is stored of cascades is read by the next process, and sealed anew with the rest of the store.
func TestCascadesOfAnEngine(t *testing.T) {
	dir := t.TempDir()
	t.Run("before", func(t *testing.T) {
		e := started(t, dir, "").held
		key := append([]byte{evidence.SpaceCascade, 'c'}, make([]byte, 16)...)
		value := e.keys.Ring.Seal(nil, store.Encode(nil, map[string]any{"cascade": map[string]any{"cascade_id": "c1", "state": "closed"}}), key)
		if _, err := e.calls.Store.Commit(t.Context(), store.Write{Key: key, Value: value, Expires: time.Now().Add(time.Hour)}); err != nil {
			t.Fatal(err)
		}
	})
	e := started(t, dir, "").held
	if all := e.cascades.List(); len(all) != 1 || all[0].ID != "c1" {
		t.Errorf("%+v", all)
	}
	id := rotateKeys(t, e)
	resealed(t, e, id)
	n := 0
	for entry, err := range e.calls.Store.Scan(t.Context(), store.Prefix([]byte{evidence.SpaceCascade})) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if e.keys.Ring.KeyOf(entry.Value) != id {
			t.Errorf("%q is under the key %d", entry.Key[:2], e.keys.Ring.KeyOf(entry.Value))
		}
	}
	if n == 0 {
		t.Error("nothing is stored")
	}
}
