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
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
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

// filters makes a query of alternating names and values. Empty values are left out.
func filters(pairs ...string) url.Values {
	query := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			query.Set(pairs[i], pairs[i+1])
		}
	}
	return query
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

// ask sends q, decodes the answer, and also returns it unchanged.
func (c *client) ask(ctx context.Context, q question, answer any) (json.RawMessage, error) {
	resp, err := c.send(ctx, q)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("reading the answer of %s: %w", c.address, err)
	}
	if len(text) > maxAnswer {
		return nil, fmt.Errorf("the answer of %s has more than %d bytes", c.address, maxAnswer)
	}
	if err := c.check(resp, text); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return nil, fmt.Errorf("%s answers something else than the agent guard does: %w", c.address, err)
	}
	return text, nil
}

// copy sends q and streams the answer, which may have any length, to w.
func (c *client) copy(ctx context.Context, q question, w io.Writer) error {
	resp, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var text []byte
	if resp.StatusCode != http.StatusOK {
		if text, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer)); err != nil {
			return fmt.Errorf("reading the answer of %s: %w", c.address, err)
		}
	}
	if err := c.check(resp, text); err != nil {
		return err
	}
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("it broke off: %w", err)
	}
	return nil
}

func (c *client) send(ctx context.Context, q question) (*http.Response, error) {
	query := q.query
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
func (c *client) check(resp *http.Response, text []byte) error {
	if resp.StatusCode == http.StatusOK {
		if resp.Header.Get(admin.Mark) == "" {
			return fmt.Errorf("%s answers something else than the agent guard does; name the admin endpoint with --address", c.address)
		}
		return nil
	}
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

// show asks the server and prints the answer: unchanged with --output json, else described.
func show[T any](cmd *cobra.Command, o *options, q question, describe func(*T, time.Time) string) (*T, error) {
	c, err := o.client()
	if err != nil {
		return nil, err
	}
	answer := new(T)
	text, err := c.ask(cmd.Context(), q, answer)
	if err != nil {
		return nil, err
	}
	return answer, o.print(cmd, text, func(now time.Time) string { return describe(answer, now) })
}

// showing returns the RunE of a command without arguments that shows the answer to a
// question.
func showing[T any](o *options, q question, describe func(*T, time.Time) string) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		_, err := show(cmd, o, q, describe)
		return err
	}
}

// print writes the document with --output json, else its description.
func (o *options) print(cmd *cobra.Command, document any, describe func(now time.Time) string) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), document)
	}
	_, err := io.WriteString(cmd.OutOrStdout(), describe(time.Now()))
	return err
}

// encode prints v as JSON. Raw JSON keeps its members and their order.
func encode(out io.Writer, v any) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(v)
}

// paging is the part of a list that is requested.
type paging struct {
	limit int
	after string
	all   bool
}

// flags adds the flags of a command that lists.
func (p *paging) flags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&p.limit, "limit", 50, "The most to list; with --all, how many to ask for at a time")
	complete(cmd, "limit")
	stringFlag(cmd, &p.after, "after", "Continue after this place, as an earlier listing printed it")
	cmd.Flags().BoolVar(&p.all, "all", false, "List all")
}

func (p *paging) valid() error {
	if p.limit < 1 {
		return errors.New("--limit must be at least 1")
	}
	return nil
}

// listPage is a page of any list of the admin API. Its documents stay undecoded.
type listPage struct {
	Executions  []json.RawMessage `json:"executions"`
	Escalations []json.RawMessage `json:"escalations"`
	Unreadable  int               `json:"unreadable"`
	Next        string            `json:"next"`
}

// listPages requests and prints pages until the limit is reached or none is left. An empty page
// is not the last one.
func listPages[T any](o *options, p *paging, query url.Values, out *list, row func(*T, time.Time) []string) (unreadable int, err error) {
	c, err := o.client()
	if err != nil {
		return 0, err
	}
	now := time.Now()
	for after := p.after; ; {
		want := p.limit
		if !p.all {
			want -= out.listed
		}
		query.Set("limit", strconv.Itoa(min(want, execution.MaxPage)))
		if after != "" {
			query.Set("after", after)
		}
		var page listPage
		if _, err := c.ask(out.cmd.Context(), question{path: out.name, query: query}, &page); err != nil {
			return 0, err
		}
		unreadable += page.Unreadable
		documents := append(page.Executions, page.Escalations...)
		if out.json {
			err = out.documents(documents...)
		} else {
			rows := make([][]string, len(documents))
			for i, text := range documents {
				var document T
				if err := json.Unmarshal(text, &document); err != nil {
					return 0, err
				}
				rows[i] = row(&document, now)
			}
			err = out.rows(rows)
		}
		if err != nil {
			return 0, err
		}
		if after = page.Next; after == "" || !p.all && out.listed >= p.limit {
			return unreadable, out.end(after)
		}
	}
}

// list streams what a command lists: as one JSON document, or as a table.
type list struct {
	cmd    *cobra.Command
	name   string // of what is listed
	json   bool
	header []string
	table  table
	listed int
}

func (l *list) documents(all ...json.RawMessage) error {
	for _, text := range all {
		if _, err := fmt.Fprintf(l.cmd.OutOrStdout(), "%s\n  %s", l.separator(), text); err != nil {
			return err
		}
		l.listed++
	}
	return nil
}

// separator returns what goes before the next document: the beginning of the list, or a comma.
func (l *list) separator() string {
	if l.listed > 0 {
		return ","
	}
	return fmt.Sprintf("{%q:[", l.name)
}

// rows writes a page of the table, the first with the header.
func (l *list) rows(rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	if l.listed == 0 {
		l.listed, rows = -1, append([][]string{l.header}, rows...)
	}
	l.listed += len(rows)
	_, err := io.WriteString(l.cmd.OutOrStdout(), l.table.page(rows))
	return err
}

// end ends the list; next, if not empty, is the cursor of the next page.
func (l *list) end(next string) error {
	if l.json {
		begin := ""
		if l.listed == 0 {
			begin = l.separator()
		}
		if next != "" {
			next = fmt.Sprintf(",\n\"next\":%q", next)
		}
		_, err := fmt.Fprintf(l.cmd.OutOrStdout(), "%s]%s}\n", begin, next)
		return err
	}
	if l.listed == 0 {
		fmt.Fprintln(l.cmd.ErrOrStderr(), "no", l.name)
	}
	if next != "" {
		fmt.Fprintf(l.cmd.ErrOrStderr(), "There are more: --after %s goes on, --all lists all.\n", next)
	}
	return nil
}

// table aligns rows page by page. Columns grow and never shrink, so that pages line up.
type table struct{ widths []int }

func (t *table) page(rows [][]string) string {
	var b strings.Builder
	for _, row := range rows {
		for i, cell := range row {
			if i == len(t.widths) {
				t.widths = append(t.widths, 0)
			}
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		last := len(row) - 1
		for i, cell := range row[:last] {
			b.WriteString(cell)
			b.WriteString(strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(cell)+2))
		}
		b.WriteString(row[last] + "\n")
	}
	return b.String()
}

// tableOf is a table of one page.
func tableOf(header []string, rows [][]string) string {
	return new(table).page(append([][]string{header}, rows...))
}

type sheet struct {
	b     strings.Builder
	width int
}

// line adds a name with its value, unless the value is "".
func (s *sheet) line(name string, value any) {
	if value != "" {
		fmt.Fprintf(&s.b, "%-*s  %v\n", s.width, name, value)
	}
}

// printable makes a caller's text safe for a terminal: no control sequences, and nothing that
// looks like something else.
func printable(text string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return text
	}
	return strconv.QuoteToGraphic(text)
}

// short returns the beginning of a key or a hash, as in logs.
func short(hash string, digits int) string {
	if len(hash) > digits {
		return hash[:digits]
	}
	return hash
}

// cut shortens text to at most n characters.
func cut(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

// ago formats seconds in their largest unit.
func ago(seconds int64) string {
	switch d := time.Duration(seconds) * time.Second; {
	case d < time.Minute:
		return fmt.Sprintf("%ds", seconds)
	case d < time.Hour:
		return fmt.Sprintf("%dm", seconds/60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", seconds/3600)
	default:
		return fmt.Sprintf("%dd", seconds/86400)
	}
}

// moment formats a time with its distance from now.
func moment(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	text := t.UTC().Format(time.RFC3339)
	if seconds := int64(now.Sub(t) / time.Second); seconds >= 0 {
		return text + " (" + ago(seconds) + " ago)"
	}
	return text + " (in " + ago(int64(t.Sub(now)/time.Second)) + ")"
}

// size formats bytes in a fitting unit.
func size(bytes uint64) string {
	if bytes < 1<<10 {
		return fmt.Sprintf("%d B", bytes)
	}
	value, unit := float64(bytes), 0
	for value >= 1<<10 && unit < 4 {
		value, unit = value/(1<<10), unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGT"[unit-1])
}

// number formats n; zero is empty.
func number(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// dash replaces empty text in a table.
func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
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
