package execution

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// An execution that runs at another member is followed by what that one stores of its answer while somebody asks
// for it (ADR 0131). Who follows says so under the execution's key. The owner then follows its own flight as a call
// here would, and stores what it gets as numbered parts, of which the others make a flight of their own.

const (
	kindInterest = 'i' // v i key: somebody elsewhere follows
	kindPart     = 'p' // v p key claim number: a part of the answer, sealed
)

const (
	// interestTime is how long an interest lasts that is not renewed.
	interestTime = 30 * time.Second
	// interestEvery is how often it is renewed, and how often the owner looks whether it lasts.
	interestEvery = 10 * time.Second
	// partEvery is the shortest time between two parts. What comes meanwhile goes with the second.
	partEvery = 50 * time.Millisecond
	// partsTime is how long parts are kept beyond the execution's deadline.
	partsTime = 2 * time.Minute
	// endGrace is how long the end of an answer is waited for that is not recorded, once the outcome is.
	endGrace = 2 * time.Second
	// followedMost is the largest answer that more calls can begin to follow here, in bytes.
	followedMost = readAhead
	// readAgain is when parts are read again that could not be read.
	readAgain = time.Second
	// followedPace is how long a slow reader may hold up the others of an answer that is larger than that.
	followedPace = 10 * time.Second
)

func interestKey(key Key) []byte { return append([]byte{spaceLive, kindInterest}, key[:]...) }

func partKey(key Key, claim [16]byte, n uint32) []byte {
	b := append(make([]byte, 0, 2+keySize+len(claim)+4), spaceLive, kindPart)
	return binary.BigEndian.AppendUint32(append(append(b, key[:]...), claim[:]...), n)
}

// part is what the owner stores at a time.
type part struct {
	Head     *Head // nil but in the first with an answer
	Doubtful bool  // it leaves the call in doubt; with Head
	Body     []byte
	End      partEnd
	Trailer  map[string][]string // with endWhole
}

// partEnd says what comes after a part.
type partEnd uint8

const (
	endNone    partEnd = iota
	endWhole           // nothing: the answer is whole
	endUnsent          // nothing: the call was not sent
	endDoubt           // nothing: the outcome is in doubt
	endCut             // bytes are missing from here on
	endTooMuch         // the answer is too large to be followed from its beginning
	endUnasked         // nobody was interested any more; the answer goes on
)

// interested notes that others may follow the execution with this interest, or any where it is nil.
func (m *members) interested(ctx context.Context, interest []byte) {
	if interest != nil {
		if len(interest) == 2+keySize {
			m.export(ctx, keyIn(interest))
		}
		return
	}
	go func() {
		for entry, err := range m.store.Scan(ctx, store.Prefix([]byte{spaceLive, kindInterest})) {
			if err != nil {
				return // an interest is renewed
			}
			m.export(ctx, keyIn(entry.Key))
		}
	}()
}

// export stores the answer of a flight in parts, once, if it is one of this member.
func (m *members) export(ctx context.Context, key Key) {
	if f := m.g.flights.find(key); f != nil && !f.exported.Swap(true) {
		go func() { _ = m.storeParts(ctx, f) }() // without its parts others wait for what is recorded
	}
}

func (m *members) storeParts(ctx context.Context, f *Flight) error {
	n := uint32(0)
	put := func(p part) error {
		name := partKey(f.key, f.owner.record.Claim, n)
		n++
		defer m.g.writers.Enter()()
		now, err := m.store.Now(ctx)
		if err != nil {
			return err
		}
		until := f.owner.record.Deadline
		if until.Before(now) { // a stream has no deadline
			until = now
		}
		w := table[part](m.g).Put(name, &p, store.Condition{}, until.Add(partsTime))
		w.Bulk = true
		_, err = m.store.Commit(ctx, w)
		return err
	}
	follower := f.follow()
	if follower == nil {
		return put(part{End: endTooMuch})
	}
	defer follower.Close()
	asked := time.Now()
	for buf := make([]byte, pieceSize); ; {
		var p part
		if n == 0 {
			head, err := follower.Head(ctx)
			if err == nil {
				p.Head, p.Doubtful = &Head{Status: head.Status, Header: head.Header}, follower.Doubtful()
			} else if p.End = f.ended(); p.End == endNone {
				return err
			}
		} else {
			size, err := follower.Read(ctx, buf)
			p.Body = buf[:size]
			switch {
			case errors.Is(err, io.EOF):
				p.End, p.Trailer = endWhole, follower.Trailer()
			case errors.Is(err, errCut):
				if p.End = f.ended(); p.End == endNone {
					p.End = endCut
				}
			case err != nil:
				return err
			}
		}
		if p.End == endNone && time.Since(asked) > interestEvery {
			if _, err := m.store.Get(ctx, interestKey(f.key)); errors.Is(err, store.ErrNotFound) {
				p = part{End: endUnasked}
			}
			asked = time.Now()
		}
		if err := put(p); err != nil || p.End != endNone {
			return err
		}
		if p.Head == nil {
			select {
			case <-time.After(partEvery):
			case <-f.done:
			case <-ctx.Done():
			}
		}
	}
}

// ended is how a flight without a whole answer has ended; endNone while it has not.
func (f *Flight) ended() partEnd {
	select {
	case <-f.done:
	default:
		return endNone
	}
	if f.ending == endedUnsent {
		return endUnsent
	}
	return endDoubt
}

// mirror is the flight of another member as it is followed here.
type mirror struct {
	*Flight
	m     *members
	claim [16]byte
	users int // who follow; guarded by mirrors
	stop  context.CancelFunc
}

// mirrors are the flights of other members that are followed here.
type mirrors struct {
	sync.Mutex
	of map[Key]*mirror
}

// follow is Guard.Follow for the execution of another member.
func (m *members) follow(key Key, r *Record) (*Flight, *Follower) {
	m.mirrors.Lock()
	defer m.mirrors.Unlock()
	f := m.mirrors.of[key]
	if f == nil || f.claim != r.Claim {
		f = &mirror{m: m, claim: r.Claim, Flight: &Flight{
			key: key, fingerprint: r.Fingerprint, caller: r.Caller, id: r.ID, checkpoint: r.Checkpoint, done: make(chan struct{}),
		}}
		var ctx context.Context
		ctx, f.stop = context.WithCancel(context.Background())
		f.recording.begin(followedMost, m.g.bodies)
		f.recording.SetPace(func(ready <-chan struct{}) bool {
			select {
			case <-ready:
				return true
			case <-time.After(followedPace):
			case <-ctx.Done():
			}
			return false
		})
		if m.mirrors.of == nil {
			m.mirrors.of = map[Key]*mirror{}
		}
		m.mirrors.of[key] = f
		go f.run(ctx)
	}
	follower := f.recording.follow()
	if follower != nil {
		f.users++
		follower.left = f.leave
	}
	return f.Flight, follower
}

// leave ends the mirror that nobody follows any more.
func (f *mirror) leave() {
	f.m.mirrors.Lock()
	defer f.m.mirrors.Unlock()
	if f.users--; f.users == 0 {
		f.forget()
	}
}

// forget has the next one who follows begin anew, with mirrors locked.
func (f *mirror) forget() {
	f.stop()
	if f.m.mirrors.of[f.key] == f {
		delete(f.m.mirrors.of, f.key)
	}
}

// run makes the recording of what the owner stores, until the execution has ended or nobody follows.
func (f *mirror) run(ctx context.Context) {
	ending := f.read(ctx)
	f.m.mirrors.Lock()
	f.forget()
	f.m.mirrors.Unlock()
	f.ending = ending
	close(f.done)
	f.recording.end(ending)
}

func (f *mirror) read(ctx context.Context) Ending {
	st, n := f.m.store, uint32(0)
	var grace <-chan time.Time // once the outcome is recorded, without the answer
	for asked := (time.Time{}); ctx.Err() == nil; {
		if time.Since(asked) >= interestEvery {
			if now, err := st.Now(ctx); err == nil {
				_, err = st.Commit(ctx, store.Write{Key: interestKey(f.key), Expires: now.Add(interestTime)})
				if err == nil {
					asked = time.Now()
				}
			}
		}
		recorded, cancel := st.Watch(recordKey(f.key)) // all before the look, so that nothing is missed
		stored, cancelNext := st.Watch(partKey(f.key, f.claim, n))
		left := st.Left()
		from := n
		ending, err := f.parts(ctx, &n)
		if ending == 0 && err == nil {
			over := grace != nil
			if ending, err = f.recorded(ctx, &over); over && grace == nil {
				grace = time.After(endGrace)
			}
		}
		if ending != 0 {
			cancel()
			cancelNext()
			return ending
		}
		again := interestEvery
		if err != nil {
			again, left = readAgain, nil // which stays closed once this member was removed
		}
		if n == from {
			select {
			case <-recorded:
			case <-stored:
			case <-left:
			case <-grace:
				ending = f.byRecord(ctx)
			case <-time.After(again):
			case <-ctx.Done():
			}
		}
		cancel()
		cancelNext()
		if ending != 0 {
			return ending
		}
	}
	return EndedInDoubt // for nobody
}

// parts reads those that are there from number n on.
func (f *mirror) parts(ctx context.Context, n *uint32) (Ending, error) {
	for {
		row, err := table[part](f.m.g).Get(ctx, partKey(f.key, f.claim, *n))
		if err != nil || row.Record == nil {
			return 0, err
		}
		*n++
		p := row.Record
		if p.Head != nil {
			if p.Doubtful {
				f.recording.Doubt()
			}
			f.recording.Start(p.Head.Status, p.Head.Header)
		}
		f.recording.add(p.Body, false)
		switch p.End {
		case endWhole:
			f.recording.SetTrailer(p.Trailer)
			return endedAnswered, nil
		case endUnsent:
			return endedUnsent, nil
		case endDoubt:
			return EndedInDoubt, nil
		case endCut, endTooMuch:
			f.recording.fail()
		}
	}
}

// recorded looks what is recorded of the execution. An answer that is kept is read from there. over says that
// there is an outcome without one: its end may still be stored.
func (f *mirror) recorded(ctx context.Context, over *bool) (Ending, error) {
	record, _, err := f.m.g.load(ctx, f.key)
	switch {
	case err != nil:
		return 0, err
	case record == nil || record.Claim != f.claim:
		*over = true
		return 0, nil
	case record.State.open():
		orphan, err := f.m.orphaned(ctx, record)
		if err != nil || !orphan {
			return 0, err
		}
		return EndedInDoubt, nil
	case record.State != StateCompleted || !record.Result.Kept:
		*over = true
		return 0, nil
	}
	result, err := f.m.g.Result(ctx, f.key, Finding{Status: Replayable, Record: record})
	if errors.Is(err, ErrResultUnavailable) {
		*over = true
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	f.recording.Start(result.Head.Status, result.Head.Header)
	body := result.Body(ctx)
	if _, err := io.CopyN(io.Discard, body, f.recording.written()); err != nil {
		return EndedInDoubt, nil // it is another answer: followers are cut, and look it up
	}
	if _, err := io.Copy(recordingWriter{&f.recording}, body); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	f.recording.SetTrailer(result.Head.Trailer)
	return endedAnswered, nil
}

// recordingWriter writes to a recording.
type recordingWriter struct{ r *Recording }

func (w recordingWriter) Write(p []byte) (int, error) {
	w.r.add(p, false)
	return len(p), nil
}

// byRecord is how an execution has ended whose answer does not come: whoever follows looks it up.
func (f *mirror) byRecord(ctx context.Context) Ending {
	record, _, err := f.m.g.load(ctx, f.key)
	switch {
	case err != nil:
		return 0
	case record != nil && record.Claim == f.claim && record.State == StateInDoubt:
		return EndedInDoubt
	}
	return endedUnsent
}
