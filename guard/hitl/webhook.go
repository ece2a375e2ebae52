package hitl

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// WebhookConfig says where to send escalations, and how to sign them.
type WebhookConfig struct {
	// URL of the receiver: https, or http if the host is loopback. Errors show only its host, as
	// paths and queries of webhooks are often secret.
	URL string
	// Secrets sign separately: one, or up to 8 while a receiver changes over. The form is
	// `whsec_` and the standard base64 of 24 to 64 random bytes.
	Secrets []string
	// Timeout bounds one attempt, from the dial to the answer; zero is 10 s. The
	// dispatcher's limit of an attempt should not be shorter.
	Timeout time.Duration
	// Gateway names this gateway to the receiver; optional.
	Gateway string
	// Roots are the authorities for the receiver's certificate; nil is the system's.
	Roots *x509.CertPool
}

// MaxSecrets is how many secrets may sign.
const MaxSecrets = 8

const (
	defaultTimeout = 10 * time.Second
	secretPrefix   = "whsec_"
	shortestSecret = 24
	longestSecret  = 64
)

// parse's error shows no secret, and of the URL only scheme and host.
func (c *WebhookConfig) parse() (*url.URL, [][]byte, error) {
	target, err := parseURL(c.URL)
	if err != nil {
		return nil, nil, fmt.Errorf("webhook: url: %w", err)
	}
	if len(c.Secrets) == 0 || len(c.Secrets) > MaxSecrets {
		return nil, nil, fmt.Errorf("webhook: secrets: there are %d; give one, or up to %d while a receiver changes over", len(c.Secrets), MaxSecrets)
	}
	keys := make([][]byte, len(c.Secrets))
	for i, secret := range c.Secrets {
		if keys[i], err = parseSecret(secret); err != nil {
			return nil, nil, fmt.Errorf("webhook: secret %d of %d: %w", i+1, len(c.Secrets), err)
		}
	}
	return target, keys, nil
}

// CheckURL validates WebhookConfig.URL, as NewWebhook does.
func CheckURL(text string) error {
	_, err := parseURL(text)
	return err
}

// CheckSecret validates one of WebhookConfig.Secrets, without showing it.
func CheckSecret(text string) error {
	_, err := parseSecret(text)
	return err
}

func parseURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil: // the error would show it
		return nil, errors.New("it cannot be read as a URL; use https://HOST/PATH")
	case u.Hostname() == "":
		return nil, errors.New("it has no host; use https://HOST/PATH")
	case u.User != nil:
		return nil, errors.New("it holds a user or a password; the signature shows who sends, so leave them out")
	case u.Fragment != "":
		return nil, errors.New("it has a fragment (#), which is never sent; leave it out")
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return nil, fmt.Errorf("plain http to %q can be read on the way; use https (http is for localhost, 127.0.0.0/8 and ::1)", u.Host)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("the scheme is %q; use https", u.Scheme)
	}
	return u, nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}

func parseSecret(text string) ([]byte, error) {
	encoded, ok := strings.CutPrefix(text, secretPrefix)
	if !ok {
		return nil, fmt.Errorf("it does not begin with %s; make one with `echo %s$(openssl rand -base64 32)`", secretPrefix, secretPrefix)
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil { // the error would tell of it
		return nil, fmt.Errorf("what follows %s is not standard base64", secretPrefix)
	}
	if len(key) < shortestSecret || len(key) > longestSecret {
		return nil, fmt.Errorf("it has %d bytes; %d to %d are needed", len(key), shortestSecret, longestSecret)
	}
	return key, nil
}

const (
	// maxAnswer is how much of an answer is read, so that its connection can be reused.
	maxAnswer  = 4 << 10
	maxHeaders = 16 << 10
)

// WebhookNotifier sends escalations to one receiver by a signed POST, as the Standard
// Webhooks specification has it (https://www.standardwebhooks.com/). It is safe for
// concurrent use.
//
// It has a client of its own, and not the sender of the gateway's requests to upstreams: the
// receiver is no upstream and is trusted by its certificate, each attempt is signed, and
// sending twice is harmless.
//
// The headers are `webhook-id`, the escalation's id, by which a receiver tells
// repetitions; `webhook-timestamp`, the seconds since 1970 at which this attempt was
// signed; and `webhook-signature`, for each secret `v1,` and the standard base64 of the
// HMAC-SHA256 of `id.timestamp.body`, with spaces in between. A receiver accepts one
// signature that fits, refuses timestamps that are more than a few minutes off, and
// answers 2xx once it has kept the message. The package's example is such a
// receiver.
//
// The body is JSON:
//
//	{
//	  "type": "escalation.opened",
//	  "timestamp": "2026-11-20T10:00:00Z",      when it was opened
//	  "data": {
//	    "id": "...",                            a UUID
//	    "gateway": "...",                       as configured; absent without
//	    "level": 2, "level_name": "approval",   1 pause, 2 approval, 3 stop
//	    "cause": "irreversible_rollback",       a word; new ones may come
//	    "summary": "...",                       a sentence for people
//	    "workflow": "...", "caller": "...",     absent where there is none
//	    "links": {                              each absent where there is none
//	      "checkpoint": "...", "rollback": "...", "error": "...",
//	      "execution": "...", "upstream": "..."
//	    },
//	    "proposal": "run-call",                 what an approval does; absent where it does nothing
//	    "deadline": "2026-11-21T10:00:00Z",     when it counts as denied; absent where it does not
//	    "page": "https://..."                   where to decide it; absent where none is configured
//	  }
//	}
//
// New members may come; a receiver ignores what it does not know. The body of one
// escalation is the same in every attempt.
type WebhookNotifier struct {
	url     string
	host    string
	keys    [][]byte
	gateway string
	client  *http.Client
}

// NewWebhook makes a notifier. Its error names what is wrong with the configuration, and shows no secret.
func NewWebhook(c WebhookConfig) (*WebhookNotifier, error) {
	target, keys, err := c.parse()
	if err != nil {
		return nil, err
	}
	timeout := c.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	return &WebhookNotifier{
		url: target.String(), host: target.Host, keys: keys, gateway: c.Gateway,
		client: &http.Client{
			Timeout: timeout,
			// The signature is for this receiver only, so redirects are not followed.
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
func (n *WebhookNotifier) Close() { n.client.CloseIdleConnections() }

// Notify is a Delivery.Notify: nil after a 2xx, errRefused after 410, a *laterError
// after 429 or 503 with Retry-After, otherwise an error after which it is tried again. Errors
// show only the receiver's host.
func (n *WebhookNotifier) Notify(ctx context.Context, e Escalation) error {
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
	id := e.ID
	if e.Round > 0 { // another message: another role is asked, or more
		id += "-" + strconv.Itoa(e.Round)
	}
	req.Header.Set("webhook-id", id)
	req.Header.Set("webhook-timestamp", timestamp)
	req.Header.Set("webhook-signature", sign(n.keys, id, timestamp, content))

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

func (n *WebhookNotifier) verdict(resp *http.Response, now time.Time) error {
	status := resp.StatusCode
	switch {
	case status >= 200 && status < 300:
		return nil
	case status == http.StatusGone:
		return fmt.Errorf("webhook: %s answers 410, it takes no more messages: %w", n.host, errRefused)
	case status >= 300 && status < 400:
		return fmt.Errorf("webhook: %s answers %d; redirects are not followed, configure the new URL", n.host, status)
	}
	err := fmt.Errorf("webhook: %s answers %d", n.host, status)
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		if after := retryAfter(resp.Header.Get("Retry-After"), now); after > 0 {
			return &laterError{After: after, Err: err}
		}
	}
	return err
}

// retryAfter reads both forms of Retry-After; zero for none, or an unusable one.
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

// typeOpened is the only type of message so far.
const typeOpened = "escalation.opened"

// message is the body; the comment of WebhookNotifier describes it.
type message struct {
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	Data      data      `json:"data"`
}

type data struct {
	ID        string `json:"id"`
	Gateway   string `json:"gateway,omitempty"`
	Level     Level  `json:"level"`
	LevelName string `json:"level_name"`
	Cause     Cause  `json:"cause"`
	Summary   string `json:"summary"`
	Workflow  string `json:"workflow,omitempty"`
	Caller    string `json:"caller,omitempty"`
	Links     Links  `json:"links"`
	// Proposal is what an approval does.
	Proposal ProposalKind `json:"proposal,omitempty"`
	// Deadline is when it counts as denied. Page needs a sign-in.
	Deadline time.Time `json:"deadline,omitzero"`
	Page     string    `json:"page,omitempty"`
}

func body(e *Escalation, gateway string) ([]byte, error) {
	return json.Marshal(message{
		Type:      typeOpened,
		Timestamp: e.Opened,
		Data: data{
			ID: e.ID, Gateway: gateway, Level: e.Level, LevelName: e.LevelName,
			Cause: e.Cause, Summary: e.Summary, Workflow: e.Workflow, Caller: e.Caller, Links: e.Links,
			Proposal: e.Proposal.Kind, Deadline: e.Deadline, Page: e.Page,
		},
	})
}

// sign is the value of webhook-signature: one signature for each key.
func sign(keys [][]byte, id, timestamp string, body []byte) string {
	all := make([]string, len(keys))
	for i, key := range keys {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(id + "." + timestamp + "."))
		mac.Write(body)
		all[i] = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	return strings.Join(all, " ")
}
