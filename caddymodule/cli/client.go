package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// Timeouts for a connection and for an answer. Counting in a large store takes a while.
const (
	dialTimeout   = 5 * time.Second
	answerTimeout = time.Minute
)

// maxAnswer bounds what is read of an answer: a full page has far less.
const maxAnswer = 16 << 20

// client sends requests to the admin API of one server.
type client struct {
	address string // as given by the user
	origin  string
	unix    bool
	store   string
	http    http.Client
}

// question is a request of the admin API. One with a body is a POST.
type question struct {
	path  string
	query url.Values
	body  any
	slow  bool // without a time limit
	// accept is the form of the answer, JSON if empty; last is the id of the event behind which a stream goes on.
	accept, last string
}

// of is the question with the first argument of a command in its path, in place of {}.
func (q question) of(args []string) question {
	if len(args) > 0 {
		q.path = strings.Replace(q.path, "{}", url.PathEscape(args[0]), 1)
	}
	return q
}

func (o *options) client() (*client, error) {
	if o.connection != nil {
		return o.connection, nil
	}
	address, err := o.findAddress()
	if err != nil {
		return nil, err
	}
	c := &client{address: address, store: o.store}
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || parsed.PortRangeSize() > 1 {
		return nil, fmt.Errorf("%s is no address of an admin endpoint; write one like localhost:2019 or unix//run/caddy/admin.sock", address)
	}
	c.origin = "http://" + parsed.JoinHostPort(0)
	if parsed.IsUnixNetwork() {
		c.origin, c.unix = "http://127.0.0.1", true
		// The address may end with the mode of the socket, which only the server needs.
		parsed.Host, _, _ = strings.Cut(parsed.Host, "|")
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	c.http.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, parsed.Network, parsed.JoinHostPort(0))
		},
	}
	o.connection = c
	return c, nil
}

// findAddress returns the address of the admin endpoint, in the way of `caddy stop`.
func (o *options) findAddress() (string, error) {
	if o.address != "" {
		return o.address, nil
	}
	if o.config == "" && o.adapter == "" {
		return caddy.DefaultAdminListen, nil
	}
	var config struct {
		Admin struct {
			Disabled bool   `json:"disabled"`
			Listen   string `json:"listen"`
		} `json:"admin"`
	}
	if err := readConfig(o.config, o.adapter, &config); err != nil {
		return "", err
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

// readConfig reads a configuration file, in the way of `caddy run`.
func readConfig(file, adapter string, into any) error {
	if file == "" {
		return errors.New("--adapter goes with --config")
	}
	text, _, _, err := caddycmd.LoadConfig(file, adapter)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	return nil
}

// ask asks the server of o, decodes the answer, and also returns it unchanged.
func ask[T any](ctx context.Context, o *options, q question) (*T, json.RawMessage, error) {
	c, err := o.client()
	if err != nil {
		return nil, nil, err
	}
	resp, err := c.open(ctx, q)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, nil, fmt.Errorf("reading the answer of %s: %w", c.address, err)
	}
	if len(text) > maxAnswer {
		return nil, nil, fmt.Errorf("the answer of %s has more than %d bytes", c.address, maxAnswer)
	}
	answer := new(T)
	if err := json.Unmarshal(text, answer); err != nil {
		return nil, nil, c.foreign(err)
	}
	return answer, text, nil
}

// foreign is the error of an answer that is not one of the agent guard.
func (c *client) foreign(err error) error {
	return fmt.Errorf("%s answers something else than the agent guard does: %w", c.address, err)
}

// open sends q, and returns the answer unless it is an error. The caller closes it.
func (c *client) open(ctx context.Context, q question) (*http.Response, error) {
	resp, err := c.send(ctx, q)
	if err != nil {
		return nil, err
	}
	if err := c.check(resp); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// stream sends q, and copies the answer, which may have any length.
func (o *options) stream(ctx context.Context, q question, to io.Writer) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	resp, err := c.open(ctx, q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(to, resp.Body); err != nil {
		return fmt.Errorf("it broke off: %w", err)
	}
	return nil
}

func (c *client) send(ctx context.Context, q question) (*http.Response, error) {
	query := maps.Clone(q.query)
	if query == nil {
		query = url.Values{}
	}
	if c.store != "" {
		query.Set("store", c.store)
	}
	target := c.origin + admin.Prefix + q.path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	method, body := http.MethodGet, []byte(nil)
	if q.body != nil {
		var err error
		if body, err = json.Marshal(q.body); err != nil {
			return nil, err
		}
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.GetBody = nil // Go must not send a decision twice
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if q.accept != "" {
		req.Header.Set("Accept", q.accept)
	}
	if q.last != "" {
		req.Header.Set("Last-Event-ID", q.last)
	}
	if !c.unix { // origins are not enforced on unix sockets
		req.Header.Set("Origin", c.origin)
	}
	c.http.Timeout = answerTimeout
	if q.slow {
		c.http.Timeout = 0
	}
	resp, err := c.http.Do(req)
	if err == nil {
		return resp, nil
	}
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
		return nil, fmt.Errorf("no server is reachable (%w): is caddy running, with its admin endpoint on? "+
			"tried %s; name another with --address", op.Err, c.address)
	}
	return nil, fmt.Errorf("asking %s: %w", c.address, err)
}

// check returns the server's error, or an error if something else than the agent guard
// answers.
func (c *client) check(resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		if resp.Header.Get(admin.Mark) == "" {
			return fmt.Errorf("%s answers something else than the agent guard does; name the admin endpoint with --address", c.address)
		}
		return nil
	}
	var problem struct {
		Error string `json:"error"`
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("reading the answer of %s: %w", c.address, err)
	}
	if json.Unmarshal(text, &problem) == nil && problem.Error != "" {
		return errors.New(printable(problem.Error))
	}
	if resp.StatusCode == http.StatusNotFound {
		return fmt.Errorf("the server at %s knows no agent guard: it was built without the module, or with an older one", c.address)
	}
	return fmt.Errorf("%s answers %s", c.address, resp.Status)
}

// tooLarge is the error of input above the limit.
type tooLarge struct {
	name  string
	limit int64
}

func (e tooLarge) Error() string { return fmt.Sprintf("%s has more than %d bytes", e.name, e.limit) }

// readAtMost reads a file, or the standard input if its name is -, of at most limit bytes.
func readAtMost(stdin io.Reader, file string, limit int64) ([]byte, error) {
	from, err := openInput(stdin, file)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	b, err := io.ReadAll(io.LimitReader(from, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = tooLarge{file, limit}
	}
	return b, err
}

// openInput opens a file, or the standard input if its name is -.
func openInput(stdin io.Reader, file string) (io.ReadCloser, error) {
	if file == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(file)
}

// writeNew writes a new file that nobody else can read. If that fails, no file is left.
func writeNew(flag, file string, write func(io.Writer) error) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s: %s is there; name another file", flag, file)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	if err := errors.Join(write(f), f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	return nil
}
