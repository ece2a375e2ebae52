// Package undo measures rollbacks: of many calls that one gateway undoes itself, and of as many
// that two others undo for it.
package undo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

// Options say what to measure, and where.
type Options struct {
	// Checkpoints of the workflow that is rolled back, at least 2.
	Checkpoints int
	// Dir is a directory on the file system to measure.
	Dir string
	// GOGC and GOMEMLIMIT are those of every process.
	GOGC, GOMEMLIMIT string
}

// Default is what docs/performance.md has.
var Default = Options{Checkpoints: 1_000, GOGC: "100", GOMEMLIMIT: "off"}

// callers is how many calls of the workflow are under way at a time.
const callers = 16

// bound is how long a rollback may take.
const bound = 10 * time.Minute

// run is one measurement.
type run struct {
	Options
	dir      string
	env      []string
	upstream *proc.Proc
	report   *table.Report
}

// Measure makes workflows and rolls them back, each with gateways of its own. progress is told what
// is under way.
func Measure(ctx context.Context, o Options, progress func(string)) (_ *table.Report, err error) {
	if o.Checkpoints < 2 {
		return nil, errors.New("checkpoints: at least 2")
	}
	r := &run{Options: o, env: []string{"GOGC=" + o.GOGC, "GOMEMLIMIT=" + o.GOMEMLIMIT}, report: &table.Report{
		Settings: table.Settings{Go: runtime.Version(), GOGC: o.GOGC, GOMEMLIMIT: o.GOMEMLIMIT},
	}}
	if r.report.Machine, err = table.Look(o.Dir); err != nil {
		return nil, err
	}
	if r.dir, err = os.MkdirTemp(o.Dir, "agb"); err != nil {
		return nil, err
	}
	defer func() {
		if removing := os.RemoveAll(r.dir); err == nil {
			err = removing
		}
	}()
	if r.upstream, err = proc.Start(proc.Spec{Role: upstream.Role, Env: r.env}); err != nil {
		return nil, err
	}
	defer r.upstream.Kill()
	for _, c := range []struct {
		name   string
		others int
		chain  bool
	}{
		{"one gateway, side by side", 0, false}, {"one gateway, one after another", 0, true},
		{"three gateways, side by side", 2, false}, {"three gateways, one after another", 2, true},
	} {
		progress(fmt.Sprintf("%s: %d calls, and their rollback", c.name, o.Checkpoints))
		if err := r.measure(ctx, c.name, c.others, c.chain); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return r.report, nil
}

func (r *run) figure(name string, value float64, unit string) {
	r.report.Figures = append(r.report.Figures, table.Figure{Name: name, Value: value, Unit: unit})
}

const identity = "spiffe://example.com/gateway"

// gateways makes the gateways: the first one undoes itself, or asks the others.
func (r *run) gateways(others int) (all []*gateway.Gateway, err error) {
	dir, err := os.MkdirTemp(r.dir, "")
	if err != nil {
		return nil, err
	}
	for i := range 1 + others {
		g, err := gateway.New(filepath.Join(dir, fmt.Sprint(i)), "", true)
		if err != nil {
			return nil, err
		}
		g.Env = r.env
		all = append(all, g)
	}
	first := all[0]
	own := func(i int) string { return fmt.Sprintf("%s/%d", identity, i) }
	for i, g := range all {
		g.Options = fmt.Sprintf("identity %s {\n public_url http://%s\n }\n quota {\n checkpoint_rate off\n checkpoints workflow off\n }\n", own(i), g.Addr)
		g.Site = "agent_proxy " + r.upstream.Word + " {\n action charge {\n compensate POST /refunds {\n json charge {response.json./id}\n }\n }\n }"
		if i > 0 {
			g.Options += fmt.Sprintf("trust {\n jwks_url http://%s/.well-known/cascade/jwks\n allow_partial\n }\n rollback {\n coordinators %s\n }\n", first.Addr, own(0))
		}
	}
	if others > 0 {
		first.Site, first.Options = "agent_guard_endpoints\n", first.Options+"trust {\n allow_partial\n"
		for i, g := range all[1:] {
			first.Options += fmt.Sprintf("jwks_url http://%s/.well-known/cascade/jwks\n", g.Addr)
			first.Site += fmt.Sprintf("@g%d path /%[1]d/*\n agent_proxy @g%[1]d %[2]s {\n name g%[1]d\n identity %[3]s\n action next {\n delegate http://%[2]s/.well-known/cascade/rollback %[3]s\n }\n }\n",
				i+1, g.Addr, own(i+1))
		}
		first.Options += "}\nrollback {\n prepare_timeout 1m\n }\n"
	}
	for _, g := range all {
		if err := g.Start(); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (r *run) measure(ctx context.Context, name string, others int, chain bool) error {
	all, err := r.gateways(others)
	defer func() {
		for _, g := range all {
			if p := g.Proc(); p != nil {
				p.Kill()
			}
		}
	}()
	if err != nil {
		return err
	}
	target, err := r.workflow(ctx, all[0], others, chain)
	if err != nil {
		return err
	}
	before := make([]gateway.Stats, len(all))
	for i, g := range all {
		if before[i], err = g.Stats(ctx); err != nil {
			return err
		}
	}
	took, err := r.undo(ctx, all[0], target)
	if err != nil {
		return err
	}
	steps := float64(r.Checkpoints)
	r.figure(name+": undone", steps/took.whole.Seconds(), "steps/s")
	r.figure(name+": first phase", took.prepare.Seconds(), "s")
	r.figure(name+": the whole rollback", took.whole.Seconds(), "s")
	for i, g := range all {
		after, err := g.Stats(ctx)
		if err != nil {
			return err
		}
		at, steps := name+": coordinator", steps
		if i > 0 {
			at = fmt.Sprintf("%s: participant %d", name, i)
			steps = float64((r.Checkpoints + others - i) / others) // its own
		}
		if others == 0 {
			at = name
		}
		r.figure(at+", its journal at work", 100*(after.Committing-before[i].Committing).Seconds()/took.whole.Seconds(), "% of the time")
		r.figure(at+", batches committed", float64(after.Store.Batches-before[i].Store.Batches)/steps, "a step")
		r.figure(at+", syncs", float64(after.Store.Commits-before[i].Store.Commits)/steps, "a step")
		if proc.Measures {
			r.figure(at+", processor time", (after.Work-before[i].Work).Seconds()*1e3/steps, "ms a step")
		}
	}
	return nil
}

// workflow makes the calls: each follows from the one before, or all from the first. It returns the
// checkpoint of the first.
func (r *run) workflow(ctx context.Context, g *gateway.Gateway, others int, chain bool) (string, error) {
	workflow := uuid.NewString()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	call := func(i int, parent string) (execution, checkpoint string, err error) {
		path := "/charges"
		if others > 0 {
			path = fmt.Sprintf("/%d/charges", 1+i%others)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.Addr+path, bytes.NewReader([]byte(`{"amount":1999}`)))
		if err != nil {
			return "", "", err
		}
		for field, value := range map[string]string{
			"Content-Type": "application/json", "Idempotency-Key": fmt.Sprintf("%s-%d", workflow, i),
			"Workflow-Id": workflow, "Execution-Parent": parent,
		} {
			if value != "" {
				req.Header.Set(field, value)
			}
		}
		res, err := client.Do(req)
		if err != nil {
			return "", "", err
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		if checkpoint = res.Header.Get("Execution-Checkpoint"); err == nil && (res.StatusCode != http.StatusOK || checkpoint == "") {
			err = fmt.Errorf("a call: status %d, %s", res.StatusCode, text)
		}
		return res.Header.Get("Execution-Id"), checkpoint, err
	}
	parent, target, err := call(0, "")
	if err != nil {
		return "", err
	}
	if chain {
		for i := 1; i < r.Checkpoints; i++ {
			if parent, _, err = call(i, parent); err != nil {
				return "", err
			}
		}
		return target, nil
	}
	var all sync.WaitGroup
	failed := make(chan error, callers)
	next := make(chan int)
	for range callers {
		all.Go(func() {
			for i := range next {
				if _, _, err := call(i, parent); err != nil {
					select {
					case failed <- err:
					default:
					}
				}
			}
		})
	}
	for i := 1; i < r.Checkpoints; i++ {
		next <- i
	}
	close(next)
	all.Wait()
	select {
	case err = <-failed:
	default:
	}
	return target, err
}

// times are how long a rollback took: until it was accepted, and the participants were prepared,
// and until its end.
type times struct{ prepare, whole time.Duration }

// undo rolls back, as an operator.
func (r *run) undo(ctx context.Context, g *gateway.Gateway, target string) (took times, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("the rollback does not end within %s", bound))
	defer cancel()
	id := uuid.NewString()
	asked, err := json.Marshal(map[string]any{
		"checkpoint_id": target, "operator": "bench", "reason": "a benchmark", "rollback_id": "urn:uuid:" + id, "cascade": true,
	})
	if err != nil {
		return took, err
	}
	begin := time.Now()
	text, err := g.Admin(ctx, http.MethodPost, "/agent_guard/rollback", string(asked))
	took.prepare = time.Since(begin)
	var doc struct {
		State, Status string
		Steps         []struct{ Status, Reason string }
	}
	for err == nil {
		if err = json.Unmarshal(text, &doc); err != nil || doc.State == "finished" {
			break
		}
		text, err = g.Admin(ctx, http.MethodGet, "/agent_guard/rollback/"+id+"?wait=20s", "")
	}
	took.whole = time.Since(begin)
	if err == nil && (doc.Status != "completed" || len(doc.Steps) != r.Checkpoints) {
		reasons := map[string]int{}
		for _, s := range doc.Steps {
			reasons[s.Status+" "+s.Reason]++
		}
		err = fmt.Errorf("after %v, of which %v was the first phase, the rollback is %q, with these steps: %v", took.whole, took.prepare, doc.Status, reasons)
	}
	return took, err
}
