package guard

import "sync"

// Ending says how a running execution ended, to those that wait for it.
type Ending uint8

// The endings.
const (
	// EndedAnswered: its answer is whole and for everybody who waits, whatever
	// became of the key.
	EndedAnswered Ending = 1 + iota
	// EndedUnsent: proven that nothing was sent. Exactly one of those that wait
	// may claim the key and run; the others follow it.
	EndedUnsent
	// EndedInDoubt: no whole answer, and nobody knows.
	EndedInDoubt
)

func (e Ending) whole() bool { return e == EndedAnswered }

// Flight is an execution that runs in this process.
type Flight struct {
	key         Key
	fingerprint Fingerprint
	caller      CallerHash
	id          string
	checkpoint  string
	recording   *Recording
	done        chan struct{}
	ending      Ending // valid once done is closed
}

// Follow reads the flight's answer from its beginning, or returns nil where the
// answer is too large for newcomers.
func (f *Flight) Follow() *Follower { return f.recording.follow() }

// Checkpoint is the id of the token that announced the execution; empty without one.
func (f *Flight) Checkpoint() string { return f.checkpoint }

// Done is closed when the execution is settled.
func (f *Flight) Done() <-chan struct{} { return f.done }

// Ending is how the execution ended. It is valid once Done is closed.
func (f *Flight) Ending() Ending { return f.ending }

// flights is the table of running executions: the first caller owns a key until
// its final state is readable in the store.
type flights [64]struct {
	sync.Mutex
	m map[Key]*Flight
}

func (t *flights) find(key Key) *Flight {
	shard := &t[key[0]%64]
	shard.Lock()
	defer shard.Unlock()
	return shard.m[key]
}

// of reports whether a caller has a flight.
func (t *flights) of(caller CallerHash) bool {
	for i := range t {
		shard := &t[i]
		shard.Lock()
		for _, f := range shard.m {
			if f.caller == caller {
				shard.Unlock()
				return true
			}
		}
		shard.Unlock()
	}
	return false
}

// start registers a flight, or returns nil where one is registered already.
func (t *flights) start(c *Call, caller CallerHash) *Flight {
	shard := &t[c.Key[0]%64]
	shard.Lock()
	defer shard.Unlock()
	if shard.m[c.Key] != nil {
		return nil
	}
	f := &Flight{
		key: c.Key, fingerprint: c.Fingerprint, caller: caller, id: c.Scope.ID, checkpoint: c.Checkpoint,
		recording: newRecording(c.ResultCap), done: make(chan struct{}),
	}
	if shard.m == nil {
		shard.m = map[Key]*Flight{}
	}
	shard.m[c.Key] = f
	return f
}

func (t *flights) end(f *Flight, e Ending) {
	shard := &t[f.key[0]%64]
	shard.Lock()
	delete(shard.m, f.key)
	shard.Unlock()
	f.ending = e
	close(f.done)
	f.recording.end(e)
}
