package ect

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// retiredKeys has the keys that a source has lost, for the records that they signed. It
// forgets the oldest beyond 1024 names, or 8 keys of one name.
type retiredKeys struct {
	byID  map[string][]*Key
	order []string
}

const maxRetired = 1024

// replace returns what is retired once next takes the place of before, without the keys
// that next revokes.
func (r retiredKeys) replace(before, next *Set) retiredKeys {
	if before == nil {
		return r
	}
	out := retiredKeys{byID: make(map[string][]*Key)}
	keep := func(id string, keys []*Key) {
		gone := slices.DeleteFunc(slices.Clone(keys), func(k *Key) bool { return k.revoked || next.holds(k) })
		if len(gone) == 0 {
			return
		}
		if _, there := out.byID[id]; !there {
			out.order = append(out.order, id)
		}
		all := append(out.byID[id], gone...)
		out.byID[id] = all[max(0, len(all)-maxSameName):]
	}
	for _, id := range r.order {
		keep(id, r.byID[id])
	}
	for id, keys := range before.byID {
		keep(id, keys)
	}
	for len(out.order) > maxRetired {
		delete(out.byID, out.order[0])
		out.order = out.order[1:]
	}
	return out
}

// FileOptions are the settings of a FileSource. Only Path is required.
type FileOptions struct {
	// Path is a file with a JSON Web Key Set.
	Path string
	// Owner owns the keys that name no owner, and bounds those that do. The zero Owner
	// bounds nothing.
	Owner Owner
	// CheckInterval is the least time between two checks for a change; one second if zero.
	CheckInterval time.Duration
	// OnReload is called after every reading but the first with the new set, or with why
	// the old one stays in use. It may be nil.
	OnReload func(*Set, error)
}

// FileSource is a file of public keys. It is read again when it has changed, at the next
// use of a key. If it is gone or broken, the known keys stay in use.
type FileSource struct {
	o       FileOptions
	current atomic.Pointer[fileState]
	reading sync.Mutex // held while the file is checked; others use the current keys
}

// fileState is the immutable result of one reading.
type fileState struct {
	set     *Set
	retired retiredKeys
	sum     [sha256.Size]byte // of the text
	info    os.FileInfo
	checked time.Time
	// unsure: the file was written just before it was read, so that its time may not
	// show a further write.
	unsure bool
}

// NewFileSource reads the file. It is an error if none of its keys can be used.
func NewFileSource(o FileOptions) (*FileSource, error) {
	o.CheckInterval = cmp.Or(o.CheckInterval, time.Second)
	s := &FileSource{o: o}
	next, err := s.read()
	if err != nil {
		return nil, err
	}
	s.current.Store(next)
	return s, nil
}

// Set is what the file held when it was last read.
func (s *FileSource) Set() *Set { return s.current.Load().set }

// Keys implements Source.
func (s *FileSource) Keys(_ context.Context, kid string) ([]*Key, error) {
	s.refresh()
	return s.current.Load().set.byID[kid], nil
}

// replaced returns the keys of that name that the file held in the life of this process
// and holds no longer, but no revoked ones.
func (s *FileSource) replaced(kid string) []*Key { return s.current.Load().retired.byID[kid] }

// refresh reads the file again if it has changed.
func (s *FileSource) refresh() {
	now := time.Now()
	if now.Sub(s.current.Load().checked) < s.o.CheckInterval || !s.reading.TryLock() {
		return
	}
	defer s.reading.Unlock()
	was := s.current.Load()
	if now.Sub(was.checked) < s.o.CheckInterval {
		return
	}
	same := *was
	same.checked = now
	info, err := os.Stat(s.o.Path)
	if err == nil && !was.unsure && os.SameFile(info, was.info) && info.Size() == was.info.Size() && info.ModTime().Equal(was.info.ModTime()) {
		s.current.Store(&same)
		return
	}
	next, err := s.read()
	switch {
	case err != nil:
		s.current.Store(&same)
	case next.sum == was.sum:
		next.set, next.retired = was.set, was.retired
		s.current.Store(next)
		return
	default:
		next.retired = was.retired.replace(was.set, next.set)
		s.current.Store(next)
	}
	if s.o.OnReload == nil {
		return
	}
	if err != nil {
		s.o.OnReload(nil, err)
	} else {
		s.o.OnReload(next.set, nil)
	}
}

func (s *FileSource) read() (*fileState, error) {
	f, err := os.Open(s.o.Path)
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeySet+1))
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	set, err := ParseSet(text, s.o.Owner)
	if err == nil {
		err = set.usable()
	}
	if err != nil {
		return nil, fmt.Errorf("keys in %s: %w", s.o.Path, err)
	}
	now := time.Now()
	return &fileState{set: set, sum: sha256.Sum256(text), info: info, checked: now, unsure: now.Sub(info.ModTime()) < 2*time.Second}, nil
}

// URLOptions are the settings of a URLSource. Only URL is required.
type URLOptions struct {
	// URL is where a JSON Web Key Set is: https, or http on the loopback interface.
	URL string
	// Owner owns the keys that name no owner, and bounds those that do. The zero Owner
	// bounds nothing.
	Owner Owner
	// Client fetches; one with a timeout of five seconds if nil.
	Client *http.Client
	// OnFetch is called after every fetch with the set, or with why the old one stays in
	// use. It may be nil.
	OnFetch func(*Set, error)
}

// URLSource is a URL of public keys. They are fetched at their first use, again in the
// background after 15 minutes, and at once if a token names a key that no source has, but
// at most every 30 seconds: invented names must not make the gateway fetch. While the URL
// does not answer, keys are used for up to 24 hours.
type URLSource struct {
	o URLOptions

	mu       sync.Mutex
	set      *Set // nil before the first answer
	retired  retiredKeys
	fetched  time.Time     // when set was
	asked    time.Time     // when the last fetch began
	fetching chan struct{} // closed when the running fetch ends
}

// NewURLSource checks the settings. It does not fetch: a gateway starts while the
// publishers of keys are down.
func NewURLSource(o URLOptions) (*URLSource, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	if !trusted(u) {
		return nil, errors.New("ect: keys must come over https, or over http from the loopback interface")
	}
	client := http.Client{Timeout: fetchTimeout}
	if o.Client != nil {
		client = *o.Client
	}
	client.CheckRedirect = func(to *http.Request, via []*http.Request) error {
		if len(via) >= 3 || !trusted(to.URL) {
			return errors.New("redirected to an address that keys are not taken from")
		}
		return nil
	}
	o.Client = &client
	return &URLSource{o: o}, nil
}

const (
	fetchTimeout     = 5 * time.Second
	refreshAge       = 15 * time.Minute
	minFetchInterval = 30 * time.Second
	maxStale         = 24 * time.Hour
)

// trusted reports whether nobody on the way can replace the keys.
func trusted(u *url.URL) bool {
	host := u.Hostname()
	switch u.Scheme {
	case "https":
		return host != ""
	case "http":
		ip := net.ParseIP(host)
		return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
	}
	return false
}

// Keys implements Source. The error is ErrUnavailable.
func (s *URLSource) Keys(ctx context.Context, kid string) ([]*Key, error) {
	for waited := false; ; waited = true {
		s.mu.Lock()
		now := time.Now()
		if keys := s.cached(now, kid); len(keys) > 0 {
			s.mu.Unlock()
			return keys, nil
		}
		var fetching chan struct{}
		if !waited {
			fetching = s.begin(now)
		}
		usable := s.usable(now)
		s.mu.Unlock()
		if fetching == nil {
			if usable {
				return nil, nil
			}
			return nil, fmt.Errorf("%w: no keys from the URL", ErrUnavailable)
		}
		select {
		case <-fetching:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
	}
}

// keysAtHand implements slowSource.
func (s *URLSource) keysAtHand(kid string) (keys []*Key, all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys = s.cached(time.Now(), kid)
	return keys, len(keys) > 0
}

// cached returns keys at hand, and refreshes old ones in the background. mu is held.
func (s *URLSource) cached(now time.Time, kid string) []*Key {
	if !s.usable(now) || len(s.set.byID[kid]) == 0 {
		return nil
	}
	keys := s.set.byID[kid]
	s.refresh(now)
	return keys
}

// usable reports whether the URL has answered, and recently enough. mu is held.
func (s *URLSource) usable(now time.Time) bool {
	return s.set != nil && now.Sub(s.fetched) < maxStale
}

// refresh begins a fetch if the keys are old. mu is held.
func (s *URLSource) refresh(now time.Time) {
	if now.Sub(s.fetched) >= refreshAge {
		s.begin(now)
	}
}

// replaced returns the keys of that name that the URL published in the life of this process
// and publishes no longer, but no revoked ones.
func (s *URLSource) replaced(kid string) []*Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := s.retired.byID[kid]
	if len(keys) > 0 {
		s.refresh(time.Now()) // it may be revoked by now
	}
	return keys
}

// begin returns the running fetch, or begins one, or returns nil if it is too early. mu is held.
func (s *URLSource) begin(now time.Time) chan struct{} {
	if s.fetching != nil {
		return s.fetching
	}
	if !s.asked.IsZero() && now.Sub(s.asked) < minFetchInterval {
		return nil
	}
	s.asked = now
	fetching := make(chan struct{})
	s.fetching = fetching
	go func() {
		// The request that began it may end; others still wait for the keys.
		ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
		defer cancel()
		set, err := s.fetch(ctx)
		s.mu.Lock()
		if err == nil {
			s.retired = s.retired.replace(s.set, set)
			s.set, s.fetched = set, now
		}
		s.fetching = nil
		s.mu.Unlock()
		close(fetching)
		if s.o.OnFetch != nil {
			s.o.OnFetch(set, err)
		}
	}()
	return fetching
}

func (s *URLSource) fetch(ctx context.Context) (*Set, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.o.URL, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	res, err := s.o.Client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ect: keys: the URL answers %d", res.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxKeySet+1))
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	set, err := ParseSet(text, s.o.Owner)
	if err != nil {
		return nil, err
	}
	return set, set.usable()
}
