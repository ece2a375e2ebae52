package breaker_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

func Example() {
	rules, err := breaker.NewRules(breaker.Settings{MinVolume: 5})
	if err != nil {
		fmt.Println(err)
		return
	}
	b := breaker.New(breaker.Key{Upstream: "localhost:9001"}, rules, nil)
	for range 6 {
		permit, err := b.Acquire(breaker.Op{Safe: true})
		if err != nil {
			fmt.Println(err)
			break
		}
		permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: "connection refused"})
	}
	var open *breaker.OpenError
	if _, err := b.Acquire(breaker.Op{}); errors.As(err, &open) {
		fmt.Println("wait:", open.RetryAfter() > 0)
	}
	// Output:
	// breaker: localhost:9001 is open: connection refused
	// wait: true
}

// transport guards every call of another transport.
type transport struct {
	next     http.RoundTripper
	registry *breaker.Registry
	rules    *breaker.Rules
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	b := t.registry.Get(breaker.Key{Upstream: r.URL.Host}, t.rules)
	call := &body{}
	var err error
	call.permit, err = b.Acquire(breaker.Op{Safe: r.Method == http.MethodGet || r.Method == http.MethodHead})
	if err != nil {
		return nil, err // nothing was sent
	}
	settled := false
	defer func() {
		if !settled { // a panic, or Goexit
			call.permit.Done(breaker.Outcome{})
		}
	}()
	start := time.Now()
	response, err := t.next.RoundTrip(r)
	settled = true
	switch {
	case r.Context().Err() != nil:
		call.permit.Done(breaker.Outcome{}) // the client left
	case err != nil:
		call.permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: "no answer"})
	case response.StatusCode == http.StatusTooManyRequests:
		call.permit.Done(breaker.Outcome{Class: breaker.RateLimited})
	case response.StatusCode >= 500:
		call.permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: response.Status})
	default:
		call.permit.Answered(time.Since(start))
	}
	if err != nil {
		return nil, err
	}
	call.ReadCloser = response.Body
	response.Body = call
	return response, nil
}

// body settles the permit when it has ended. Where the answer was settled at its
// header, that is all that counts.
type body struct {
	io.ReadCloser
	permit breaker.Permit
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case err == io.EOF:
		b.permit.Done(breaker.Outcome{Class: breaker.Success})
	case err != nil:
		b.permit.Done(breaker.Outcome{Class: breaker.InBand, Cause: "truncated"})
	}
	return n, err
}

func (b *body) Close() error {
	defer b.permit.Done(breaker.Outcome{}) // closed before its end
	return b.ReadCloser.Close()
}

// A breaker for each upstream, in an http.RoundTripper: the permit is settled when the
// body ends.
func ExampleRegistry() {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/broken" {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		io.WriteString(w, "fine")
	}))
	defer upstream.Close()
	rules, err := breaker.NewRules(breaker.Settings{MinVolume: 4})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: &transport{
		next: http.DefaultTransport, registry: breaker.NewRegistry(100, nil), rules: rules,
	}}
	for _, path := range []string{"/", "/broken", "/broken", "/broken", "/"} {
		response, err := client.Get(upstream.URL + path)
		var open *breaker.OpenError
		if errors.As(err, &open) {
			fmt.Println(path, "refused:", open.Cause)
			continue
		}
		if err != nil {
			fmt.Println(err)
			return
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		fmt.Println(path, response.StatusCode)
	}
	// Output:
	// / 200
	// /broken 502
	// /broken 502
	// /broken 502
	// / refused: 502 Bad Gateway
}

func ExampleRegistry_Restore() {
	rules, err := breaker.NewRules(breaker.Settings{MinVolume: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	b := breaker.New(breaker.Key{Upstream: "localhost:9001"}, rules, nil)
	permit, _ := b.Acquire(breaker.Op{})
	permit.Done(breaker.Outcome{Class: breaker.Failure, Evidence: "error-1"})
	stored, err := json.Marshal(b.Snapshot())
	if err != nil {
		fmt.Println(err)
		return
	}

	// After a restart:
	var snapshot breaker.Snapshot
	if err := json.Unmarshal(stored, &snapshot); err != nil {
		fmt.Println(err)
		return
	}
	registry := breaker.NewRegistry(0, nil)
	if err := registry.Restore(snapshot, rules); err != nil {
		fmt.Println(err)
		return
	}
	s := registry.Status()[0]
	fmt.Println(s.State, s.ErrorRate, s.Evidence, s.CooldownRemaining > 0)
	// Output: open 1 error-1 true
}
