package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

const (
	// maxAnswer is how much of an answer is read, so that its connection can be used again.
	maxAnswer  = 4 << 10
	maxHeaders = 16 << 10
)

// Notifier sends escalations to one receiver. It is safe for concurrent use.
type Notifier struct {
	url     string
	host    string
	keys    [][]byte
	gateway string
	client  *http.Client
}

var _ hitl.Notifier = (*Notifier)(nil)

// New makes a notifier, or says what Config.Check says.
func New(c Config) (*Notifier, error) {
	target, keys, err := c.parse()
	if err != nil {
		return nil, err
	}
	timeout := c.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	return &Notifier{
		url: target.String(), host: target.Host, keys: keys, gateway: c.Gateway,
		client: &http.Client{
			Timeout: timeout,
			// The signature is for this receiver, and a redirect is somebody else's choice.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				Proxy:                  http.ProxyFromEnvironment,
				DialContext:            (&net.Dialer{Timeout: timeout}).DialContext,
				TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: c.Roots},
				TLSHandshakeTimeout:    timeout,
				ResponseHeaderTimeout:  timeout,
				MaxResponseHeaderBytes: maxHeaders,
				MaxIdleConnsPerHost:    4,
				IdleConnTimeout:        30 * time.Second,
				ForceAttemptHTTP2:      true,
			},
		},
	}, nil
}

// Close gives up idle connections. The notifier may still be used.
func (n *Notifier) Close() { n.client.CloseIdleConnections() }

// Notify implements hitl.Notifier: nil after a 2xx, hitl.ErrRefused after 410, a
// *hitl.LaterError after 429 or 503 with Retry-After, and otherwise an error after which
// it is tried again. Errors show the receiver's host and nothing else of it.
func (n *Notifier) Notify(ctx context.Context, e hitl.Escalation) error {
	content, err := body(&e, n.gateway)
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.url, bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("webhook: the request to %s cannot be made", n.host)
	}
	timestamp := strconv.FormatInt(time.Now().Unix(), 10)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "caddy-agent-guard")
	req.Header.Set("webhook-id", e.ID)
	req.Header.Set("webhook-timestamp", timestamp)
	req.Header.Set("webhook-signature", sign(n.keys, e.ID, timestamp, content))

	resp, err := n.client.Do(req)
	if err != nil {
		var shown *url.Error // with the whole URL
		if errors.As(err, &shown) {
			err = shown.Err
		}
		return fmt.Errorf("webhook: %s: %w", n.host, err)
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer) // the status has said it all
	return n.verdict(resp, time.Now())
}

// verdict is what an answer means.
func (n *Notifier) verdict(resp *http.Response, now time.Time) error {
	status := resp.StatusCode
	switch {
	case status >= 200 && status < 300:
		return nil
	case status == http.StatusGone:
		return fmt.Errorf("webhook: %s answers 410, it takes no more messages: %w", n.host, hitl.ErrRefused)
	case status >= 300 && status < 400:
		return fmt.Errorf("webhook: %s answers %d; redirects are not followed, configure the new URL", n.host, status)
	}
	err := fmt.Errorf("webhook: %s answers %d", n.host, status)
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		if after := retryAfter(resp.Header.Get("Retry-After"), now); after > 0 {
			return &hitl.LaterError{After: after, Err: err}
		}
	}
	return err
}

// retryAfter reads both forms of Retry-After; zero is none, or none that is of use.
func retryAfter(value string, now time.Time) time.Duration {
	const most = 24 * time.Hour // far more than anybody waits, and no overflow
	if seconds, err := strconv.ParseUint(value, 10, 64); err == nil {
		return time.Duration(min(seconds, uint64(most/time.Second))) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, min(at.Sub(now), most))
	}
	return 0
}
