package webhook

import (
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// Config says where to send escalations, and how to sign them.
type Config struct {
	// URL of the receiver. It is https, or http where the host is loopback. It is not
	// shown in errors beyond its host: paths and queries of webhooks are often secret.
	URL string
	// Secrets sign, each on its own: one, or up to 8 while a receiver changes over. The
	// form is `whsec_` and the standard base64 of 24 to 64 random bytes.
	Secrets []string
	// Timeout bounds one attempt, from the dial to the answer; zero is 10 s, at most
	// 60 s. The limit of the courier's attempt should not be shorter.
	Timeout time.Duration
	// Gateway names this gateway to the receiver; optional.
	Gateway string
	// Roots are the authorities that may vouch for the receiver; nil is the system's.
	Roots *x509.CertPool
}

const (
	defaultTimeout = 10 * time.Second
	longestTimeout = time.Minute
	mostSecrets    = 8
	secretPrefix   = "whsec_"
	shortestSecret = 24
	longestSecret  = 64
)

// Check says what is wrong with the configuration, and shows no secret and nothing of
// the URL but its scheme and host.
func (c *Config) Check() error {
	_, _, err := c.parse()
	return err
}

func (c *Config) parse() (*url.URL, [][]byte, error) {
	target, err := parseURL(c.URL)
	if err != nil {
		return nil, nil, err
	}
	if len(c.Secrets) == 0 || len(c.Secrets) > mostSecrets {
		return nil, nil, fmt.Errorf("webhook: secrets: there are %d; give one, or up to %d while a receiver changes over", len(c.Secrets), mostSecrets)
	}
	keys := make([][]byte, len(c.Secrets))
	for i, secret := range c.Secrets {
		if keys[i], err = parseSecret(secret); err != nil {
			return nil, nil, fmt.Errorf("webhook: secret %d of %d: %w", i+1, len(c.Secrets), err)
		}
	}
	if c.Timeout < 0 || c.Timeout > longestTimeout {
		return nil, nil, fmt.Errorf("webhook: timeout is %s; use up to %s, or nothing for %s", c.Timeout, longestTimeout, defaultTimeout)
	}
	return target, keys, nil
}

func parseURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil: // the error would show it
		return nil, errors.New("webhook: url: it cannot be read as a URL; use https://HOST/PATH")
	case u.Hostname() == "":
		return nil, errors.New("webhook: url: it has no host; use https://HOST/PATH")
	case u.User != nil:
		return nil, errors.New("webhook: url: it holds a user or a password; the signature shows who sends, so leave them out")
	case u.Fragment != "":
		return nil, errors.New("webhook: url: it has a fragment (#), which is never sent; leave it out")
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return nil, fmt.Errorf("webhook: url: plain http to %q can be read on the way; use https (http is for localhost, 127.0.0.0/8 and ::1)", u.Host)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("webhook: url: the scheme is %q; use https", u.Scheme)
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
