package store

import (
	"context"
	"sync"
	"time"
)

type amount struct {
	n     int
	bytes int64
}

// Usage counts what one holder, such as a caller or a workflow, has in a store, for its quota.
// State belongs to its owner. Lock it to read or change it.
type Usage[S any] struct {
	sync.Mutex
	State S
	// N is how many entries were added and have not expired, Bytes their size.
	N     int
	Bytes int64
	// Counted says that the store was counted. Before, nothing is added.
	Counted bool

	window  time.Duration
	users   int              // who have entered and not left; guarded by Usages.mu
	expiry  map[int64]amount // by the end of the window in which they expire
	soonest int64            // the first of these ends; 0 without one
}

// windows is into how many parts an entry's life is divided to remember its end, which bounds
// their number.
const windows = 64

// Add counts n entries and their bytes until the end of the window in which they expire; the zero
// time is never. If n is not positive, it changes the count of an entry that was added with the
// same times, and does nothing once that has expired.
func (u *Usage[S]) Add(n int, bytes int64, created, expires time.Time) {
	if !u.Counted {
		return
	}
	if !expires.IsZero() {
		end := u.windowEnd(created, expires)
		at, ok := u.expiry[end]
		if !ok && n <= 0 {
			return
		}
		at.n += n
		at.bytes += bytes
		if at.n > 0 {
			u.remember(end, at)
		} else {
			bytes -= at.bytes // what is left over belongs to nothing
			delete(u.expiry, end)
		}
	}
	u.N, u.Bytes = max(u.N+n, 0), max(u.Bytes+bytes, 0)
}

func (u *Usage[S]) remember(end int64, a amount) {
	if u.expiry == nil {
		u.expiry = map[int64]amount{}
	}
	u.expiry[end] = a
	if u.soonest == 0 || end < u.soonest {
		u.soonest = end
	}
}

// windowEnd is the end of the window in which an entry expires; it never changes.
func (u *Usage[S]) windowEnd(created, expires time.Time) int64 {
	window := u.window
	for window < expires.Sub(created)/windows {
		window *= 2
	}
	at := expires.UnixNano()
	return at - at%int64(window) + int64(window)
}

// Expire forgets what has expired and returns when the next entry does; zero if none will.
func (u *Usage[S]) Expire(now time.Time) (next time.Time) {
	if u.soonest != 0 && u.soonest <= now.UnixNano() {
		u.soonest = 0
		for end, a := range u.expiry {
			if end <= now.UnixNano() {
				u.N -= a.n
				u.Bytes -= a.bytes
				delete(u.expiry, end)
			} else if u.soonest == 0 || end < u.soonest {
				u.soonest = end
			}
		}
	}
	if u.soonest == 0 {
		return time.Time{}
	}
	return time.Unix(0, u.soonest)
}

// Count lets add read the entries under a prefix, and add those that count, instead of what was counted before. It
// runs under the lock, so that concurrent callers wait for it. It goes on when ctx ends: otherwise a client
// that leaves could make the next one begin anew. The error is that of the store or of add;
// nothing is then counted.
func (u *Usage[S]) Count(ctx context.Context, st Store, prefix []byte, add func(Entry) error) error {
	u.Counted, u.N, u.Bytes, u.expiry, u.soonest = true, 0, 0, nil, 0
	for entry, err := range st.Scan(context.WithoutCancel(ctx), Prefix(prefix)) {
		if err == nil {
			err = add(entry)
		}
		if err != nil {
			u.Counted, u.N, u.Bytes, u.expiry, u.soonest = false, 0, 0, nil, 0
			return err
		}
	}
	return nil
}

// Usages holds the usages of recently bounded holders. Others are counted from the store, so that
// a crash forgets nothing.
type Usages[K comparable, S any] struct {
	// Window is the longest that an entry counts after its expiry, or a 32nd of its life if that
	// is longer. It must be more than zero.
	Window time.Duration

	mu sync.Mutex
	m  map[K]*Usage[S]
}

// maxUsages is how many holders are remembered; beyond it, idle ones are forgotten.
const maxUsages = 10_000

// Enter returns a holder's usage, which is kept until as many calls of Leave.
func (u *Usages[K, S]) Enter(holder K) *Usage[S] {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.m == nil {
		u.m = map[K]*Usage[S]{}
	}
	found := u.m[holder]
	if found == nil {
		if len(u.m) >= maxUsages {
			u.forget()
		}
		found = &Usage[S]{window: u.Window}
		u.m[holder] = found
	}
	found.users++
	return found
}

// Leave gives back what Enter returned.
func (u *Usages[K, S]) Leave(entered *Usage[S]) {
	u.mu.Lock()
	defer u.mu.Unlock()
	entered.users--
}

// Entered returns the holders that somebody has entered.
func (u *Usages[K, S]) Entered() []K {
	u.mu.Lock()
	defer u.mu.Unlock()
	var all []K
	for holder, found := range u.m {
		if found.users > 0 {
			all = append(all, holder)
		}
	}
	return all
}

// forget drops the holders that nobody has entered, with mu held.
func (u *Usages[K, S]) forget() {
	for holder, found := range u.m {
		if found.users == 0 {
			delete(u.m, holder)
		}
	}
}

// Known returns a holder's usage if it is remembered, or nil.
func (u *Usages[K, S]) Known(holder K) *Usage[S] {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.m[holder]
}
