package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// How long a server may take: to accept a connection, and to answer. Counting in a
// large store takes a while.
const (
	dialPatience   = 5 * time.Second
	answerPatience = time.Minute
)

// maxAnswer bounds what is read of an answer: a full page has far less.
const maxAnswer = 16 << 20

// client asks the admin API of one server.
type client struct {
	address string // as it was given
	origin  string
	unix    bool
	store   string
	http    http.Client
}

func (o *options) client() (*client, error) {
	address, err := o.findAddress()
	if err != nil {
		return nil, err
	}
	c := &client{address: address, store: o.store, http: http.Client{Timeout: answerPatience}}
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || parsed.PortRangeSize() > 1 {
		return nil, fmt.Errorf("%s is no address of an admin endpoint; write one like localhost:2019 or unix//run/caddy/admin.sock", address)
	}
	c.origin = "http://" + parsed.JoinHostPort(0)
	if parsed.IsUnixNetwork() {
		c.origin, c.unix = "http://127.0.0.1", true
		// The mode of the socket may stand behind its path, for the server.
		parsed.Host, _, _ = strings.Cut(parsed.Host, "|")
	}
	dialer := &net.Dialer{Timeout: dialPatience}
	c.http.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, parsed.Network, parsed.JoinHostPort(0))
		},
	}
	return c, nil
}

// findAddress is the address of the admin endpoint, as `caddy stop` finds it.
func (o *options) findAddress() (string, error) {
	if o.address != "" {
		return o.address, nil
	}
	if o.config == "" {
		if o.adapter != "" {
			return "", errors.New("--adapter goes with --config")
		}
		return caddy.DefaultAdminListen, nil
	}
	text, _, _, err := caddycmd.LoadConfig(o.config, o.adapter)
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", o.config, err)
	}
	var config struct {
		Admin struct {
			Disabled bool   `json:"disabled"`
			Listen   string `json:"listen"`
		} `json:"admin"`
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return "", fmt.Errorf("reading %s: %w", o.config, err)
	}
	if config.Admin.Disabled {
		return "", fmt.Errorf("%s says `admin off`: a server without an admin endpoint cannot be asked; "+
			"give it one, which may be a Unix socket", o.config)
	}
	if config.Admin.Listen == "" {
		return caddy.DefaultAdminListen, nil
	}
	return caddy.NewReplacer().ReplaceOrErr(config.Admin.Listen, true, true)
}

// get reads what stands at path into answer, and returns it as it came.
func (c *client) get(ctx context.Context, path string, query url.Values, answer any) (json.RawMessage, error) {
	return c.ask(ctx, http.MethodGet, path, query, nil, answer)
}

// post sends question to path.
func (c *client) post(ctx context.Context, path string, question, answer any) (json.RawMessage, error) {
	body, err := json.Marshal(question)
	if err != nil {
		return nil, err
	}
	return c.ask(ctx, http.MethodPost, path, url.Values{}, body, answer)
}

func (c *client) ask(ctx context.Context, method, path string, query url.Values, body []byte, answer any) (json.RawMessage, error) {
	resp, err := c.send(ctx, method, path, query, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the answer of %s: %w", c.address, err)
	case len(text) > maxAnswer:
		return nil, fmt.Errorf("the answer of %s has more than %d bytes", c.address, maxAnswer)
	case resp.StatusCode != http.StatusOK:
		return nil, c.refused(resp, text)
	case resp.Header.Get(admin.Mark) == "":
		return nil, c.foreign()
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return nil, fmt.Errorf("%s answers something else than the agent guard does: %w", c.address, err)
	}
	return text, nil
}

// copy writes what stands at path to w as it comes, however long it is.
func (c *client) copy(ctx context.Context, path string, w io.Writer) error {
	resp, err := c.send(ctx, http.MethodGet, path, url.Values{}, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		if err != nil {
			return fmt.Errorf("reading the answer of %s: %w", c.address, err)
		}
		return c.refused(resp, text)
	}
	if resp.Header.Get(admin.Mark) == "" {
		return c.foreign()
	}
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("it broke off: %w", err)
	}
	return nil
}

// patient waits for an answer as long as it takes.
func (c *client) patient() { c.http.Timeout = 0 }

// send makes the request.
func (c *client) send(ctx context.Context, method, path string, query url.Values, body []byte) (*http.Response, error) {
	if c.store != "" {
		query.Set("store", c.store)
	}
	target := c.origin + admin.Prefix + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.GetBody = nil // a decision is not sent twice by itself
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if !c.unix { // where origins are enforced
		req.Header.Set("Origin", c.origin)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(err)
	}
	return resp, nil
}

// foreign says that it was somebody else who has answered.
func (c *client) foreign() error {
	return fmt.Errorf("%s answers something else than the agent guard does; name the admin endpoint with --address", c.address)
}

// unreachable says what to do where there is no answer.
func (c *client) unreachable(err error) error {
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
		return fmt.Errorf("no server is reachable (%w): is caddy running, with its admin endpoint on? "+
			"tried %s; name another with --address", op.Err, c.address)
	}
	return fmt.Errorf("asking %s: %w", c.address, err)
}

// refused is the error that the server tells.
func (c *client) refused(resp *http.Response, text []byte) error {
	var problem struct {
		Error string `json:"error"`
	}
	if json.Unmarshal(text, &problem) == nil && problem.Error != "" {
		return errors.New(printable(problem.Error))
	}
	if resp.StatusCode == http.StatusNotFound {
		return fmt.Errorf("the server at %s knows no agent guard: it was built without the module, or with an older one", c.address)
	}
	return fmt.Errorf("%s answers %s", c.address, resp.Status)
}
