package caddymodule

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// healthy is an open store of which everything is known.
func healthy() *storeSnapshot {
	lag := 0.25
	return &storeSnapshot{
		Opened: time.Unix(1_700_000_000, 0), Healthy: true,
		Doubts: &doubtReport{N: 3, OldestAge: 90 * time.Second},
		Report: &admin.Report{
			Size: map[string]uint64{"lsm": 10, "bodies": 20}, Refused: 4,
			Database: &admin.Database{
				LeaseLeft: 9, Removed: 6, Connections: map[string]int{"in_use": 3}, Waits: 2, Waited: 1.5,
				Known: true, Living: 8, Dead: 5, OldestTransaction: 4, Standbys: 1, Lag: &lag,
			},
			Disk: &admin.Disk{Free: 1 << 30, Takes: admin.TakesOutcomes},
		},
		Escalations: []escalationReport{
			{Level: "approval", State: "open", Status: "pending", N: 2}, {Level: "stop", State: "notified", Status: "approved"},
		},
		Waiting:     map[string]time.Duration{"approval": time.Minute},
		Unconfirmed: map[string]int{"spiffe://example.com/b": 2},
		Circuits:    []breaker.Status{{Key: breaker.Key{Upstream: "10.0.0.7:9001"}, State: breaker.Open, ErrorRate: 0.5, Openings: 1, Rejected: 7}},
		Rollbacks:   &rollbackReport{Running: 2, OldestAge: 30 * time.Second, Waiting: 5},
		Nodes:       &nodeReport{Name: "a", Members: 3, Differing: 1, SeenAge: 2 * time.Second},
		Ledger:      &ledger.Head{Size: 5},
		Cascades: &cascadeReport{
			Open: 2, Found: map[string]uint64{"clustering": 4}, Dropped: 6, Exhausted: map[[2]string]float64{{"pay", "queue"}: 1},
			Latencies: map[string]proxy.LatencyReport{"10.0.0.7:9001": {P99: time.Second, Baseline: 500 * time.Millisecond}},
		},
	}
}

// registered is a registry of a configuration, pedantic as Caddy's.
func registered(t testing.TB, c prometheus.Collector) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	return r
}

// series gathers all samples as `name{label="value",...}`; histograms by their count.
func series(t testing.TB, r prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName() + "{" + strings.Join(labels, ",") + "}"
			switch {
			case m.GetCounter() != nil:
				all[name] = m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				all[name] = m.GetGauge().GetValue()
			default:
				all[name] = float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return all
}

// What is registered is what Families says: names, types, help and labels.
func TestFamiliesAreRegistered(t *testing.T) {
	set := newStoreCounts()
	c := newCollector(set, "v1", "badger", healthy)
	c.Action("default", "pay")
	c.Guard("default").Token("verified")
	c.Bulkhead("default", bulkhead.Settings{})
	got, err := registered(t, c).Gather()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]*Family{}
	for _, f := range Families() {
		want[f.Name] = f
	}
	for _, f := range got {
		w := want[f.GetName()]
		if w == nil {
			t.Errorf("%s is registered and no family", f.GetName())
			continue
		}
		delete(want, f.GetName())
		if kind := strings.ToLower(f.GetType().String()); kind != w.Type || f.GetHelp() != w.Help {
			t.Errorf("%s: %s %q, want %s %q", w.Name, kind, f.GetHelp(), w.Type, w.Help)
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if sorted := slices.Sorted(slices.Values(w.Labels)); !slices.Equal(labels, sorted) {
				t.Errorf("%s has the labels %v, want %v", w.Name, labels, sorted)
			}
		}
	}
	for name := range want {
		t.Errorf("%s is not registered", name)
	}
}

// The conventions of Prometheus: what counts ends in _total, what has a unit names a
// base unit, and nothing else does.
func TestNamesFollowConventions(t *testing.T) {
	form := regexp.MustCompile(`^agent_guard_[a-z]+(_[a-z]+)*$`)
	for _, f := range Families() {
		if !form.MatchString(f.Name) {
			t.Errorf("%s is no name", f.Name)
		}
		if strings.HasSuffix(f.Name, "_total") != (f.Type == "counter") {
			t.Errorf("%s is a %s", f.Name, f.Type)
		}
		for _, unit := range []string{"_ms", "_milliseconds", "_minutes", "_kb", "_percent"} {
			if strings.Contains(f.Name, unit) {
				t.Errorf("%s is in no base unit", f.Name)
			}
		}
		if !strings.HasSuffix(f.Help, ".") || f.Help == "." {
			t.Errorf("%s: %q is no sentence", f.Name, f.Help)
		}
	}
}

// Each thing that happens is counted where it belongs, and nowhere else.
func TestCounts(t *testing.T) {
	set := newStoreCounts()
	c := newCollector(set, "v1", "badger", healthy)
	a, g := c.Action("g", "pay"), c.Guard("g")
	c.Action("g", "other")
	r := registered(t, c)
	at := func(name, more string) string { return "agent_guard_" + name + `{action="pay",guard="g"` + more + "}" }
	settle := func(v execution.Verdict) func() {
		return func() {
			a.Begun()
			a.Settled(v)
		}
	}
	for _, c := range []struct {
		do   func()
		want string
	}{
		{a.Begun, at("running", "")},
		{settle(execution.Completed), at("executions_total", `,outcome="completed"`)},
		{settle(execution.Released), at("executions_total", `,outcome="released"`)},
		{settle(execution.InDoubt), at("executions_total", `,outcome="in_doubt"`)},
		{a.Replayed, at("replays_total", "")},
		{a.Attached, at("attaches_total", "")},
		{func() { a.Recognized("unanswered") }, `agent_guard_recognized_total{action="pay",evidence="unanswered",guard="g"}`},
		{func() { a.Cancelled(false) }, at("cancellations_total", `,result="kept"`)},
		{func() { a.Cancelled(true) }, at("cancellations_total", `,result="passed_on"`)},
		{a.FailedOpen, at("fail_open_total", "")},
		{func() { a.Probed(guard.ProbeApplied) }, at("probes_total", `,result="applied"`)},
		{func() { a.Probed(guard.ProbeNotApplied) }, at("probes_total", `,result="not_applied"`)},
		{func() { a.Probed(guard.ProbeUnknown) }, at("probes_total", `,result="unknown"`)},
		{func() { g.Unguarded(guard.ReasonSafe) }, `agent_guard_unguarded_total{guard="g",reason="safe"}`},
		{func() { g.Unguarded(guard.ReasonExempt) }, `agent_guard_unguarded_total{guard="g",reason="exempt"}`},
		{func() { g.Unguarded(guard.ReasonUpgrade) }, `agent_guard_unguarded_total{guard="g",reason="upgrade"}`},
		{func() { g.Unguarded(guard.ReasonGRPC) }, `agent_guard_unguarded_total{guard="g",reason="grpc"}`},
		{func() { set.add(recoveredCount, "in_doubt", 1) }, `agent_guard_recovered_total{outcome="in_doubt"}`},
		{func() { set.add(eventsDropped, "", 1) }, `agent_guard_events_dropped_total{}`},
	} {
		before := series(t, r)
		if _, ok := before[c.want]; !ok {
			t.Errorf("%s is not there before it happens, so that the first time would not show as an increase", c.want)
		}
		c.do()
		for name, v := range series(t, r) {
			if v != before[name] && name != c.want || name == c.want && v != before[name]+1 {
				t.Errorf("%s went from %v to %v, want 1 more of %s", name, before[name], v, c.want)
			}
		}
	}
	for _, k := range api.Kinds() {
		name := at("problems_total", `,problem="`+k.Slug+`"`)
		before := series(t, r)
		a.Refused(k.Slug)
		if after := series(t, r); after[name] != before[name]+1 {
			t.Errorf("%s went from %v to %v", name, before[name], after[name])
		}
	}
	before := len(series(t, r))
	a.Refused("no-such-problem")
	if after := len(series(t, r)); after != before {
		t.Errorf("an unknown problem has made %d series of %d", after, before)
	}
	set.Committed(7, 3*time.Millisecond)
	for _, result := range []string{"taken", "failed", "taken"} {
		set.add(deliveries, result, 1)
	}
	after := series(t, r)
	for name, n := range map[string]float64{"taken": 2, "failed": 1} {
		if name = `agent_guard_escalation_deliveries_total{result="` + name + `"}`; after[name] != n {
			t.Errorf("%s is %v", name, after[name])
		}
	}
	for _, name := range []string{"agent_guard_store_commit_duration_seconds{}", "agent_guard_store_commit_batches{}"} {
		if after[name] != 1 {
			t.Errorf("%s has %v observations", name, after[name])
		}
	}
}

// The state of the store is shown as far as it is known: what is not known is absent,
// as a zero would say that all is well.
func TestSnapshots(t *testing.T) {
	store := func(now *storeSnapshot) map[string]float64 {
		c := newCollector(newStoreCounts(), "v1", "badger", func() *storeSnapshot { return now })
		all := series(t, registered(t, c))
		for name := range all {
			if strings.Contains(name, "recovered") || strings.Contains(name, "commit") || strings.Contains(name, "dropped") || strings.HasSuffix(strings.Split(name, "{")[0], "rollbacks_total") || strings.Contains(name, "rollback_steps") || strings.Contains(name, "workflows_") || strings.Contains(name, "deliveries") || strings.HasPrefix(name, "agent_guard_info") {
				delete(all, name)
			}
		}
		return all
	}
	opened := time.UnixMilli(1_700_000_000_500)
	for name, c := range map[string]struct {
		now  *storeSnapshot
		want map[string]float64
	}{
		"all": {healthy(), map[string]float64{
			"agent_guard_in_doubt{}": 3, "agent_guard_in_doubt_oldest_age_seconds{}": 90,
			"agent_guard_store_healthy{}": 1, "agent_guard_body_memory_bytes{}": 0, "agent_guard_store_opened_timestamp_seconds{}": 1.7e9,
			`agent_guard_store_bytes{part="lsm"}`: 10, `agent_guard_store_bytes{part="bodies"}`: 20,
			"agent_guard_store_refused_total{}": 4, "agent_guard_store_free_bytes{}": 1 << 30, "agent_guard_store_watermark{}": 1,
			`agent_guard_circuit_state{class="",upstream="10.0.0.7:9001"}`: 2, `agent_guard_circuit_error_ratio{class="",upstream="10.0.0.7:9001"}`: 0.5,
			`agent_guard_circuit_openings_total{class="",upstream="10.0.0.7:9001"}`: 1, `agent_guard_circuit_rejected_total{class="",upstream="10.0.0.7:9001"}`: 7,
			`agent_guard_escalations{level="approval",state="open",status="pending"}`: 2, `agent_guard_escalations{level="stop",state="notified",status="approved"}`: 0,
			`agent_guard_escalation_oldest_age_seconds{level="approval"}`:         60,
			`agent_guard_holds_unconfirmed{participant="spiffe://example.com/b"}`: 2,
			"agent_guard_rollbacks_running{}":                                     2, "agent_guard_rollbacks_waiting{}": 5, "agent_guard_rollback_oldest_age_seconds{}": 30,
			`agent_guard_cascades_open{}`: 2, `agent_guard_cascades_total{pattern="clustering"}`: 4,
			`agent_guard_exhausted{guard="pay",resource="queue"}`:                  1,
			`agent_guard_upstream_latency_seconds{upstream="10.0.0.7:9001"}`:       1,
			`agent_guard_upstream_latency_usual_seconds{upstream="10.0.0.7:9001"}`: 0.5,
			"agent_guard_ledger_entries{}":                                         5,
			"agent_guard_database_lease_seconds{}":                                 9, `agent_guard_database_connections{state="in_use"}`: 3,
			"agent_guard_database_waits_total{}": 2, "agent_guard_database_wait_seconds_total{}": 1.5,
			`agent_guard_database_rows{state="living"}`: 8, `agent_guard_database_rows{state="dead"}`: 5,
			"agent_guard_database_oldest_transaction_seconds{}": 4, "agent_guard_database_standbys{}": 1,
			"agent_guard_database_standby_lag_seconds{}": 0.25,
			`agent_guard_node_info{node="a"}`:            1, "agent_guard_nodes{}": 3, "agent_guard_nodes_differing{}": 1,
			"agent_guard_nodes_seen_age_seconds{}": 2, "agent_guard_nodes_removed_total{}": 6,
		}},
		"a database that was not asked yet": {&storeSnapshot{
			Opened: opened, Report: &admin.Report{Database: &admin.Database{LeaseLeft: -1, Standbys: 1}},
		}, map[string]float64{
			"agent_guard_store_healthy{}": 0, "agent_guard_body_memory_bytes{}": 0, "agent_guard_store_opened_timestamp_seconds{}": 1_700_000_000.5,
			"agent_guard_store_refused_total{}": 0, "agent_guard_database_lease_seconds{}": -1, "agent_guard_nodes_removed_total{}": 0,
			"agent_guard_database_waits_total{}": 0, "agent_guard_database_wait_seconds_total{}": 0,
		}},
		"not open": {nil, map[string]float64{"agent_guard_store_healthy{}": 0}},
		"closed itself": {&storeSnapshot{Opened: opened}, map[string]float64{
			"agent_guard_store_healthy{}": 0, "agent_guard_body_memory_bytes{}": 0, "agent_guard_store_opened_timestamp_seconds{}": 1_700_000_000.5,
		}},
		"no doubt": {&storeSnapshot{Opened: opened, Healthy: true, Doubts: &doubtReport{}}, map[string]float64{
			"agent_guard_store_healthy{}": 1, "agent_guard_body_memory_bytes{}": 0, "agent_guard_store_opened_timestamp_seconds{}": 1_700_000_000.5,
			"agent_guard_in_doubt{}": 0, "agent_guard_in_doubt_oldest_age_seconds{}": 0,
		}},
	} {
		got := store(c.now)
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// A new configuration goes on with the counts of the one before, shows what it names
// and nothing else, and has no series twice.
func TestCountsGoOnOverConfigurations(t *testing.T) {
	set := newStoreCounts()
	old := newCollector(set, "v1", "badger", healthy)
	old.Action("a", "pay").Replayed()
	old.Action("a", "gone").Replayed()
	next := newCollector(set, "v1", "badger", healthy)
	next.Action("a", "pay").Replayed() // two handlers of one name
	next.Action("a", "pay").Replayed()
	next.Action("b", "pay")
	got := series(t, registered(t, next))
	for name, want := range map[string]float64{
		`agent_guard_replays_total{action="pay",guard="a"}`: 3,
		`agent_guard_replays_total{action="pay",guard="b"}`: 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", name, v, ok, want)
		}
	}
	for name := range got {
		if strings.Contains(name, `"gone"`) {
			t.Errorf("%s is of an action that is not configured any more", name)
		}
	}
	next.Action("a", "gone")
	if v := series(t, registered(t, next))[`agent_guard_replays_total{action="gone",guard="a"}`]; v != 1 {
		t.Errorf("an action that came back has %v replays, want 1", v)
	}
}

// Requests count while a scrape reads; none is lost.
func TestCountsUnderConcurrency(t *testing.T) {
	const workers, each = 8, 2000
	c := newCollector(newStoreCounts(), "v1", "badger", healthy)
	r := registered(t, c)
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for range each {
				a := c.Action("g", "pay")
				a.Begun()
				a.Settled(execution.Completed)
			}
		})
	}
	for range 20 {
		series(t, r)
	}
	all.Wait()
	got := series(t, r)
	if n := got[`agent_guard_executions_total{action="pay",guard="g",outcome="completed"}`]; n != workers*each {
		t.Errorf("%v executions, want %d", n, workers*each)
	}
	if n := got[`agent_guard_running{action="pay",guard="g"}`]; n != 0 {
		t.Errorf("%v are running", n)
	}
}

// The way of a call allocates nothing for its counts.
func TestCountingAllocatesNothing(t *testing.T) {
	set := newStoreCounts()
	c := newCollector(set, "v1", "badger", healthy)
	a, g := c.Action("g", "pay"), c.Guard("g")
	slug := problem.BodyTooLarge.Slug // the last
	if n := testing.AllocsPerRun(100, func() {
		a.Begun()
		a.Settled(execution.InDoubt)
		a.Replayed()
		a.Refused(slug)
		g.Unguarded(guard.ReasonSafe)
		set.Committed(3, time.Millisecond)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkCountExecution(b *testing.B) {
	a := newCollector(newStoreCounts(), "v1", "badger", healthy).Action("g", "pay")
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			a.Begun()
			a.Settled(execution.Completed)
		}
	})
}

func BenchmarkCountRefusal(b *testing.B) {
	a := newCollector(newStoreCounts(), "v1", "badger", healthy).Action("g", "pay")
	b.ReportAllocs()
	for b.Loop() {
		a.Refused(problem.InDoubt.Slug)
	}
}

func BenchmarkScrape(b *testing.B) {
	c := newCollector(newStoreCounts(), "v1", "badger", healthy)
	for i := range 20 {
		c.Action("g", fmt.Sprint("action", i))
	}
	r := registered(b, c)
	for b.Loop() {
		if _, err := r.Gather(); err != nil {
			b.Fatal(err)
		}
	}
}

// Rollbacks and their steps are counted by the words of their statuses, and by no others.
func TestRollbacksAreCounted(t *testing.T) {
	set := newStoreCounts()
	r := registered(t, newCollector(set, "v1", "badger", func() *storeSnapshot { return nil }))
	before := len(series(t, r))
	for _, status := range []string{"completed", "completed", "partial", "another"} {
		set.add(rollbacks, status, 1)
	}
	for _, status := range []string{"failed", stepCancelled, "another"} {
		set.add(rollbackSteps, status, 1)
	}
	after := series(t, r)
	for name, want := range map[string]float64{
		`agent_guard_rollbacks_total{status="completed"}`: 2, `agent_guard_rollbacks_total{status="partial"}`: 1,
		`agent_guard_rollbacks_total{status="failed"}`: 0, `agent_guard_rollback_steps_total{status="failed"}`: 1,
		`agent_guard_rollback_steps_total{status="cancelled"}`: 1, `agent_guard_rollback_steps_total{status="completed"}`: 0,
	} {
		if got, there := after[name]; !there || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if len(after) != before {
		t.Errorf("%d series of %d", len(after), before)
	}
}
