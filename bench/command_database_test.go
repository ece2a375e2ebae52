//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/database"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

func TestDatabaseCommandLines(t *testing.T) {
	for _, c := range []struct {
		args string
		want int
		says string
	}{
		{"claims -callers many", 2, "is no number"},
		{"claims -callers 0", 1, "callers: 0; from 1"},
		{"claims -rounds 0", 1, "rounds: at least 1"},
		{"claims -round 1ms", 1, "round: at least 50ms"},
		{"claims -json -markdown", 2, "not both"},
		{"gateways -nodes two", 2, "is no number"},
		{"gateways -nodes 0", 1, "nodes: 0; from 1"},
		{"gateways -nodes 4 -conns 3", 1, "at least one for each of 4"},
		{"gateways -nodes 4 -conns 3 -clients -1", 1, "clients: -1; from 0"},
		{"gateways -gateway-cpu 0.09", 1, "gateway-cpu: a share of 0.09 processors; from 0.1"},
		{"gateways -gateway-cpu NaN", 1, "gateway-cpu: a share of NaN"},
		{"gateways -database-cpu -1", 1, "database-cpu: a share of -1"},
		{"gateways -database-cpu 2000", 1, "to 1024"},
		{"gateways -rounds 0", 1, "rounds: at least 1"},
		{"gateways -round 1ms", 1, "round: at least 50ms"},
		{"bloat -executions 0", 1, "executions: at least 1"},
		{"bloat -callers 0", 1, "callers: at least 1"},
		{"bloat -keep 1ms", 1, "keep: at least 1s"},
		{"bloat -answer -1", 1, "answer: from 0"},
		{"bloat -every 1ms", 1, "every: at least 100ms"},
	} {
		status, _, log := bench(t, strings.Fields(c.args)...)
		if status != c.want || !strings.Contains(log, c.says) {
			t.Errorf("%q: exit status %d, want %d, and %q in %q", c.args, status, c.want, c.says, log)
		}
	}
}

// measured runs a command with -json and reads its result; false where PostgreSQL is missing.
func measured(t *testing.T, result any, args ...string) bool {
	t.Helper()
	status, out, log := bench(t, append(args, "-json")...)
	if strings.Contains(log, "NO TEST ON POSTGRESQL RAN") {
		t.Log(log)
		return false
	}
	if status != 0 {
		t.Fatalf("%v: exit status %d: %s", args, status, log)
	}
	if err := json.Unmarshal([]byte(out), result); err != nil {
		t.Fatal(err)
	}
	return true
}

// Both kinds of claims are counted, in pairs.
func TestClaims(t *testing.T) {
	var c database.Claims
	if !measured(t, &c, "claims", "-callers", "1,8", "-rounds", "1", "-round", "50ms") {
		return
	}
	if len(c.Rows) != 2 || c.Rows[1].Callers != 8 || c.Rows[1].Grouped.Median <= 0 || c.Rows[1].Single.Median <= 0 || c.Rows[0].Group != 1 {
		t.Errorf("%+v", c.Rows)
	}
}

// Fleets of both sizes execute calls, and what these cost is known of gateways and database.
func TestGateways(t *testing.T) {
	var g database.Gateways
	if !measured(t, &g, "gateways", "-nodes", "1,2", "-conns", "4", "-rounds", "1", "-round", "200ms") {
		return
	}
	for _, r := range g.Rows {
		if r.Rate.Median <= 0 || proc.Measures && (r.Gateway.Median <= 0 || r.Database.Median <= 0 || r.Busy.Median <= 0) {
			t.Errorf("%+v", r)
		}
	}
	if len(g.Rows) != 2 || g.Rows[0].Ratio.Median != 1 {
		t.Errorf("%+v", g.Rows)
	}
}

// With quotas each fleet has as many clients more, and it is known how much of them was used; no group stays. Where
// quotas cannot be set, the command says so before it begins.
func TestGatewaysWithQuotas(t *testing.T) {
	args := []string{"gateways", "-nodes", "1,2", "-clients", "2", "-gateway-cpu", "1.5", "-database-cpu", "1.5", "-rounds", "1", "-round", "200ms"}
	q, err := proc.NewQuota("try", 1)
	if err != nil {
		status, _, log := bench(t, args...)
		if !errors.Is(err, proc.ErrNoQuota) || status != 1 || !strings.Contains(log, "gateway-cpu: "+proc.ErrNoQuota.Error()) {
			t.Errorf("%v; exit status %d, and %q", err, status, log)
		}
		return
	}
	if err := q.Remove(); err != nil {
		t.Fatal(err)
	}
	var g database.Gateways
	if measured(t, &g, args...) {
		for i, r := range g.Rows {
			if r.Rate.Median <= 0 || r.Clients != 2 || r.GatewayUsed.Median <= 0 || r.DatabaseUsed.Median <= 0 {
				t.Errorf("%+v", r)
			}
			if want := r.Ratio.Median / float64(i+1); math.Abs(r.Linear.Median-want) > 1e-9 {
				t.Errorf("%d gateways call %v times as many, which is %v of linear", r.Nodes, r.Ratio.Median, r.Linear.Median)
			}
		}
	}
	if left := proc.Quotas(); len(left) != 0 {
		t.Errorf("groups stay: %q", left)
	}
}

// The tables are looked at while calls are executed, and afterwards.
func TestBloat(t *testing.T) {
	var b database.Bloat
	if !measured(t, &b, "bloat", "-executions", "300", "-callers", "4", "-keep", "1s", "-every", "100ms", "-after", "150ms") {
		return
	}
	if b.Executed != 300 || len(b.Looks) == 0 || b.Looks[len(b.Looks)-1].Executed != 300 || b.Looks[len(b.Looks)-1].Heap <= 0 {
		t.Errorf("%+v", b)
	}
}
