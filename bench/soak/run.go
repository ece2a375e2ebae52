package soak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/ledger"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

const (
	sampleEvery = time.Second
	lineEvery   = 10 * time.Second
	// window is the width of the partitions of results, so that the space of
	// expired ones comes back within the run.
	window = 5 * time.Second
)

// run is a soak under way. All of it but the clients is one goroutine.
type run struct {
	Options
	gateway *gateway.Gateway
	ledger  string
	book    *ledger.Book
	tally   tally
	report  Report
	begun   time.Time
	say     func(string)
}

// Run soaks a gateway. say gets a line every ten seconds. An error says that there is
// no result; a bad one is in the report.
func Run(ctx context.Context, o Options, say func(string)) (_ *Report, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(o.Dir, "agb")
	if err != nil {
		return nil, err
	}
	defer func() {
		if removing := os.RemoveAll(dir); err == nil {
			err = removing
		}
	}()
	r := &run{
		Options: o, ledger: filepath.Join(dir, "ledger"), book: ledger.NewBook(),
		report: Report{Seed: o.Seed}, say: say,
	}
	server, err := proc.Start(proc.Spec{Role: upstream.Role, Args: []string{"-ledger", r.ledger}})
	if err != nil {
		return nil, err
	}
	defer server.Kill()
	if r.gateway, err = gateway.New(filepath.Join(dir, "g"), "", true); err != nil {
		return nil, err
	}
	r.gateway.Window = window
	r.site(server.Word, 0)
	if err := r.gateway.Start(); err != nil {
		return nil, err
	}
	defer func() { r.gateway.Proc().Kill() }() // whichever it is by then
	if err := r.soak(ctx, server.Word); err != nil {
		return nil, err
	}
	return &r.report, r.audit()
}

// site writes the configuration of a generation: Caddy does not reload what is the same.
func (r *run) site(upstream string, generation int) {
	r.gateway.Site = fmt.Sprintf("header Generation %d\n\tagent_proxy %s {\n\t\tretain_key %s\n\t\tretain_result %s\n\t}",
		generation, upstream, r.Keep, r.Keep/2)
}

func (r *run) soak(ctx context.Context, upstream string) (err error) {
	if r.report.Fresh, err = take(ctx, r.gateway); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	load := make(chan struct{})
	var clients sync.WaitGroup
	r.begun = time.Now()
	for n := range r.Clients {
		c := newClient(r.Options, n, r.gateway.Addr, r.book, &r.tally)
		clients.Go(func() { c.run(ctx, load) })
	}
	err = r.disturb(ctx, upstream)
	close(load)
	if err != nil {
		cancel()
	}
	clients.Wait()
	if err != nil {
		return err
	}
	return r.idle(ctx)
}

// disturb carries the plan out, and takes samples meanwhile.
func (r *run) disturb(ctx context.Context, upstream string) error {
	sample, line := time.NewTicker(sampleEvery), time.NewTicker(lineEvery)
	defer sample.Stop()
	defer line.Stop()
	end := time.After(r.For)
	todo := plan(r.Options)
	var next <-chan time.Time
	if len(todo) > 0 {
		next = time.After(todo[0].at)
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.gateway.Proc().Dead:
			return fmt.Errorf("the gateway has died:\n%s", r.gateway.Proc().Tail())
		case <-end:
			return nil
		case <-next:
			if err := r.happen(ctx, todo[0], upstream); err != nil {
				return err
			}
			if todo = todo[1:]; len(todo) > 0 {
				next = time.After(time.Until(r.begun.Add(todo[0].at)))
			}
		case <-sample.C:
			if err := r.sample(ctx); err != nil {
				return err
			}
		case <-line.C:
			r.say(r.line())
		}
	}
}

func (r *run) happen(ctx context.Context, d disturbance, upstream string) error {
	if d.kill {
		r.gateway.Proc().Kill()
		r.report.Kills++
		return r.gateway.Start()
	}
	r.report.Reloads++
	r.site(upstream, r.report.Reloads)
	return r.gateway.Reload(ctx)
}

func (r *run) sample(ctx context.Context) error {
	s, err := take(ctx, r.gateway)
	if err != nil {
		return err
	}
	s.At, s.Life = time.Since(r.begun), r.report.Kills
	r.report.Samples = append(r.report.Samples, s)
	return nil
}

// line tells of the run so far.
func (r *run) line() string {
	last := "no sample yet"
	if n := len(r.report.Samples); n > 0 {
		last = r.report.Samples[n-1].String()
	}
	at := time.Since(r.begun)
	return fmt.Sprintf("%4.0f s: %d calls (%.0f/s), %d replays, %d lost attempts, %d in doubt, %d kills, %d reloads; %s",
		at.Seconds(), r.tally.calls.Load(), float64(r.tally.calls.Load())/at.Seconds(), r.tally.replays.Load(),
		r.tally.losses.Load(), r.tally.doubts.Load(), r.report.Kills, r.report.Reloads, last)
}

// idle waits until the gateway uses no more than a fresh one, and judges its growth.
func (r *run) idle(ctx context.Context) (err error) {
	var life []Sample
	for _, s := range r.report.Samples {
		if s.Life == r.report.Kills {
			life = append(life, s)
		}
	}
	r.report.Judged, r.report.Growth = len(life), growth(life)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(idleWithin); ; {
		if r.report.Idle, err = take(ctx, r.gateway); err != nil {
			return err
		}
		left := leftBehind(r.report.Fresh, r.report.Idle)
		if len(left) == 0 {
			break
		}
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline:
		}
		r.report.Growth = append(r.report.Growth, left...)
		break
	}
	stats, err := r.gateway.Stats(ctx)
	r.report.Segments = int64(stats.Store.Dropped)
	return err
}

// audit asks the oracle.
func (r *run) audit() error {
	f, err := os.Open(r.ledger)
	if err != nil {
		return err
	}
	defer f.Close()
	r.report.Calls, r.report.Replays, r.report.Losses = r.tally.calls.Load(), r.tally.replays.Load(), r.tally.losses.Load()
	if r.report.Audit, err = r.book.Check(f); err != nil {
		return err
	}
	if r.report.Audit.Acknowledged == 0 {
		return errors.New("no call was acknowledged, so nothing was tried")
	}
	return nil
}
