package ect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// URLOptions are the settings of a URLSource. Only URL is required.
type URLOptions struct {
	// URL is where a JSON Web Key Set is: https, or http on the loopback interface.
	URL string
	// Owner is whose the keys are that do not say so themselves; those that do must be
	// within it. The zero Owner bounds nothing.
	Owner Owner
	// Client fetches; one with a timeout of five seconds if nil.
	Client *http.Client
	// Refresh is the age at which keys are fetched again; 15 minutes if zero.
	Refresh time.Duration
	// Pause is the least time between two fetches, whatever names of keys are asked
	// for; 30 seconds if zero.
	Pause time.Duration
	// Stale is the age up to which keys are used while the URL does not answer; 24
	// hours if zero.
	Stale time.Duration
	// Fetched is told of every fetch: the set, or why the old one stays in use. It
	// may be nil.
	Fetched func(*Set, error)
}

// URLSource is a URL of public keys. They are fetched at their first use, again in the
// background when they have reached an age, and at once where a token names a key that
// is not among them, nor in another source: but never more often than Pause allows, so that nobody can make
// the guard ask by inventing names. While the URL does not answer, keys are used up to
// the age Stale; then nothing is known any more.
type URLSource struct {
	o URLOptions

	mu      sync.Mutex
	set     *Set // nil before the first answer
	retired *retirees
	fetched time.Time     // when set was
	asked   time.Time     // when the last fetch began
	flight  chan struct{} // closed when the fetch under way has ended
}

// NewURLSource checks the settings. It does not fetch: a gateway starts while those who
// publish keys are down.
func NewURLSource(o URLOptions) (*URLSource, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	if !trusted(u) {
		return nil, errors.New("ect: keys must come over https, or over http from the loopback interface")
	}
	for value, standard := range map[*time.Duration]time.Duration{&o.Refresh: 15 * time.Minute, &o.Pause: 30 * time.Second, &o.Stale: 24 * time.Hour} {
		if *value == 0 {
			*value = standard
		}
	}
	client := http.Client{Timeout: fetchTimeout}
	if o.Client != nil {
		client = *o.Client
	}
	client.CheckRedirect = func(to *http.Request, via []*http.Request) error {
		if len(via) >= 3 || !trusted(to.URL) {
			return errors.New("redirected to where keys are not taken from")
		}
		return nil
	}
	o.Client = &client
	return &URLSource{o: o}, nil
}

const fetchTimeout = 5 * time.Second

// trusted reports whether nobody on the way can put keys of his own into the answer.
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

// Keys implements Source.
func (s *URLSource) Keys(ctx context.Context, kid string) ([]*Key, error) {
	for waited := false; ; waited = true {
		s.mu.Lock()
		now := time.Now()
		if keys := s.cached(now, kid); len(keys) > 0 {
			s.mu.Unlock()
			return keys, nil
		}
		var flight chan struct{}
		if !waited {
			flight = s.begin(now)
		}
		usable := s.usable(now)
		s.mu.Unlock()
		if flight == nil {
			if usable {
				return nil, nil
			}
			return nil, fmt.Errorf("%w: no keys from the URL", ErrUnavailable)
		}
		select {
		case <-flight:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
	}
}

// Cached implements Remote.
func (s *URLSource) Cached(kid string) []*Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cached(time.Now(), kid)
}

// cached has what is used fetched again where it is old. Nobody waits for that. The
// caller holds the mutex.
func (s *URLSource) cached(now time.Time, kid string) []*Key {
	if !s.usable(now) || len(s.set.byID[kid]) == 0 {
		return nil
	}
	keys := s.set.byID[kid]
	s.refresh(now)
	return keys
}

// usable reports that the URL has answered, and not too long ago. The caller holds the
// mutex.
func (s *URLSource) usable(now time.Time) bool {
	return s.set != nil && now.Sub(s.fetched) < s.o.Stale
}

// refresh begins a fetch where keys are old. The caller holds the mutex.
func (s *URLSource) refresh(now time.Time) {
	if now.Sub(s.fetched) >= s.o.Refresh {
		s.begin(now)
	}
}

// Retired implements Archive, for what this process has seen.
func (s *URLSource) Retired(kid string) []*Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := s.retired.retired(kid)
	if len(keys) > 0 {
		s.refresh(time.Now()) // it may have been revoked since
	}
	return keys
}

// begin gives the fetch under way, or begins one, or gives nil where it is too early.
// The caller holds the mutex.
func (s *URLSource) begin(now time.Time) chan struct{} {
	if s.flight != nil {
		return s.flight
	}
	if !s.asked.IsZero() && now.Sub(s.asked) < s.o.Pause {
		return nil
	}
	s.asked = now
	flight := make(chan struct{})
	s.flight = flight
	go func() {
		// Who began it may leave; the others still want the keys.
		ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
		defer cancel()
		set, err := s.fetch(ctx)
		s.mu.Lock()
		if err == nil {
			s.retired = s.retired.replace(s.set, set)
			s.set, s.fetched = set, now
		}
		s.flight = nil
		s.mu.Unlock()
		close(flight)
		if s.o.Fetched != nil {
			s.o.Fetched(set, err)
		}
	}()
	return flight
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
