package execution

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What a node knows of the others that use its store (ADR 0131).

// members are the gateways that use the store.
type members struct {
	g      *Guard
	store  *fleet.Fleet // nil where one gateway has the store
	swept  sync.Map     // boots of members that are gone and have left nothing open any more
	stop   func()       // ends what start began
	report func(Recovery)
	mu     sync.Mutex // guards report

	mirrors mirrors
}

// start settles what members leave open from now on.
func (m *members) start() {
	m.stop = func() {}
	if m.store == nil {
		return
	}
	g := m.g
	ctx, cancel := context.WithCancel(context.Background())
	ends := []func(){
		m.store.Follow([]byte{spaceLive, kindInterest}, func(key []byte) { m.interested(ctx, key) }),
		m.store.Follow([]byte{spaceLive, kindAsk}, func(question []byte) { go g.groups.say(ctx, question) }),
		g.quotas.Follow(ctx),
		cancel,
		g.keys.keep(),
		fleet.Job{Fleet: m.store, Every: renewTime, Do: func(ctx context.Context, _ bool) (time.Duration, error) {
			recovered, err := m.recover(ctx, false)
			if recovered != (Recovery{}) {
				m.reports(recovered)
			}
			return 0, err
		}}.Start(),
		fleet.Every(renewTime, g.quotas.Renew).Start(),
	}
	m.stop = func() {
		for _, end := range ends {
			end()
		}
	}
}

// sweep settles what a member that is gone has left open, once. unrecorded says that the store had no room for that.
func (m *members) sweep(ctx context.Context, boot string) (unrecorded int, err error) {
	if _, swept := m.swept.Load(boot); swept {
		return 0, nil
	}
	r, err := m.recover(ctx, false)
	if err == nil && r.Unrecorded == 0 {
		m.swept.Store(boot, nil)
	}
	return r.Unrecorded, err
}

// orphaned reports that an open record has no owner that could record its outcome under it. Whoever asks has
// found no flight of it here.
func (m *members) orphaned(ctx context.Context, r *Record) (bool, error) {
	switch {
	case m.store == nil:
		return r.Node == m.g.node, nil
	case r.Boot == m.g.boot:
		return true, nil
	}
	gone, err := m.store.Gone(ctx, r.Boot)
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return gone, nil
}

// recover settles the open records of earlier processes of this node, and of members that are gone. It runs when
// the store is opened (a reload is not a new process), and when a member has left. Several members may do so at
// once: each record is settled by one of them. With own it settles those of this process that nobody here has an
// outcome of (ADR 0147).
func (m *members) recover(ctx context.Context, own bool) (Recovery, error) {
	done := Recovery{Own: own}
	if own { // a commit whose end was unknown comes before this one, or never
		barrier := store.Write{Key: stateKey(StateSending, time.Unix(0, 0), Key{}), Delete: true}
		if _, err := m.g.store.Commit(ctx, barrier); err != nil {
			return done, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	var keys []Key
	for entry, err := range m.g.store.Scan(ctx, store.Prefix([]byte{spaceState, byte(StateSending)})) {
		if err != nil {
			return done, fmt.Errorf("%w: %w", ErrStore, err)
		}
		keys = append(keys, keyIn(entry.Key)) // also of one that is just being run again here, whose claim may fail
	}
	for _, key := range keys {
		if err := m.recoverOne(ctx, key, &done); err != nil {
			return done, err
		}
	}
	return done, nil
}

func (m *members) reportTo(report func(Recovery)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.report = report
}

func (m *members) reports(r Recovery) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.report != nil {
		m.report(r)
	}
}

func (m *members) recoverOne(ctx context.Context, key Key, done *Recovery) error {
	g := m.g
	record, version, err := g.load(ctx, key)
	switch {
	case done.Own && errors.Is(err, ErrUnreadable):
		return nil
	case err != nil || record == nil || !record.State.open() || (record.Boot == g.boot) != done.Own:
		return err
	case done.Own && (g.flights.find(key) != nil || g.pending.has(record.Claim)):
		return nil
	case done.Own:
		return m.doubt(ctx, key, record, version, CauseUnrecorded, done)
	}
	if orphan, err := m.orphaned(ctx, record); err != nil || !orphan {
		return err
	}
	return m.doubt(ctx, key, record, version, CauseDied, done)
}

// doubt records that an open execution is in doubt.
func (m *members) doubt(ctx context.Context, key Key, record *Record, version store.Version, cause Cause, done *Recovery) error {
	g := m.g
	defer g.writers.Enter()()
	now, err := g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	doubt := *record
	doubt.State, doubt.Cause, doubt.Settled = StateInDoubt, cause, now
	pieces, err := g.piecesOf(ctx, key, record.Claim)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	var held holding
	if done.Own {
		left := record.unrecorded(nil)
		if pieces > 0 {
			left.Result = storedResult{Size: int64(pieces) * pieceSize, Expires: record.piecesUntil()}
		}
		if held, err = g.holdSettled(ctx, left, &doubt, true); err != nil {
			return err
		}
	}
	gone, err := g.discarded(ctx, key, record.Claim, pieces)
	if err == nil {
		_, err = g.store.Commit(ctx, append(g.put(key, record, &doubt, store.VersionIs(version)), gone...)...)
	}
	held.replaced(err, key, &doubt)
	lost := (*store.Conflict)(nil)
	switch {
	case err == nil:
		if done.Own {
			g.quotas.replaced(doubt.Caller, key, &doubt)
			g.groups.recorded(key, &doubt)
		}
		done.InDoubt++
		return nil
	case errors.As(err, &lost) && (m.store != nil || done.Own):
		return nil // another member was first, or it runs again
	case errors.Is(err, store.ErrFull):
		// A record without an owner counts as in doubt (status). A full disk must not stop
		// everything else (P4).
		done.Unrecorded++
		g.groups.recovered(key, record)
		return nil
	}
	return fmt.Errorf("%w: %w", ErrStore, err)
}
