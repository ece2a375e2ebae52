package admin

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// params is the query of a request. The first thing that is wrong with it is kept
// until done.
type params struct {
	query url.Values
	seen  []string
	err   error
}

func newParams(r *http.Request) (*params, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "query: %v", err)
	}
	return &params{query: query}, nil
}

func (p *params) fail(name string, err error) {
	if p.err == nil {
		p.err = refuse(http.StatusBadRequest, "%s: %v", name, err)
	}
}

// one is the value of a parameter that may stand once.
func (p *params) one(name string) string {
	p.seen = append(p.seen, name)
	values := p.query[name]
	if len(values) > 1 {
		p.fail(name, fmt.Errorf("it stands %d times; once is enough", len(values)))
	}
	return p.query.Get(name)
}

// list are the values of a parameter that may stand several times, or have commas.
func (p *params) list(name string) (all []string) {
	p.seen = append(p.seen, name)
	for _, value := range p.query[name] {
		for word := range strings.SplitSeq(value, ",") {
			if word != "" {
				all = append(all, word)
			}
		}
	}
	return all
}

// done returns what was wrong, a parameter that nobody has read included: a
// misspelled filter must not look like one that everything passes.
func (p *params) done() error {
	if p.err != nil {
		return p.err
	}
	for name := range p.query {
		if !slices.Contains(p.seen, name) {
			slices.Sort(p.seen)
			return refuse(http.StatusBadRequest, "%q is no parameter here; there are %s", name, strings.Join(p.seen, ", "))
		}
	}
	return nil
}

// age reads a duration like 10m or 2d.
func (p *params) age(name string) time.Duration {
	text := p.one(name)
	if text == "" {
		return 0
	}
	d, err := caddy.ParseDuration(text)
	switch {
	case err != nil:
		p.fail(name, fmt.Errorf("%q is no duration; write one like 10m, 4h or 2d", text))
	case d < 0:
		p.fail(name, fmt.Errorf("%s is negative", text))
	}
	return d
}

func (p *params) time(name string) time.Time {
	text := p.one(name)
	if text == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		p.fail(name, fmt.Errorf("%q is no time; write one like 2026-11-20T14:00:00Z", text))
	}
	return t
}

func (p *params) states() (all []guard.State) {
	for _, word := range p.list("state") {
		state, err := guard.ParseState(word)
		if err != nil {
			p.fail("state", err)
		}
		all = append(all, state)
	}
	return all
}

func (p *params) caller() *guard.CallerHash {
	text := p.one("caller")
	if text == "" {
		return nil
	}
	b, err := hex.DecodeString(text)
	var hash guard.CallerHash
	if err != nil || len(b) != len(hash) {
		p.fail("caller", fmt.Errorf("%q is no caller's hash; a listing shows it, with %d digits", text, 2*len(hash)))
		return nil
	}
	copy(hash[:], b)
	return &hash
}

// checkpoint is the id of a checkpoint; empty is any.
func (p *params) checkpoint() string {
	text := p.one("checkpoint")
	if text == "" {
		return ""
	}
	id, ok := checkpointID(text)
	if !ok {
		p.fail("checkpoint", fmt.Errorf("%q is no UUID; it stands in Execution-Checkpoint", text))
	}
	return id
}

// undos leaves out the executions under which undos are recorded, or all others.
func (p *params) undos(f *guard.Filter) {
	switch text := p.one("undos"); text {
	case "", "with":
	case "without":
		f.NotMethod = undo.Method
	case "only":
		if f.Method == "" {
			f.Method = undo.Method
		}
	default:
		p.fail("undos", fmt.Errorf("%q is none of with, without and only", text))
	}
}

// limit is the size of a page.
func (p *params) limit() int {
	text := p.one("limit")
	if text == "" {
		return defaultPage
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > guard.MaxPage {
		p.fail("limit", fmt.Errorf("%q is not from 1 to %d", text, guard.MaxPage))
	}
	return n
}

// filter reads what to list. Ages are counted back from now.
func (p *params) filter(now time.Time) guard.Filter {
	f := guard.Filter{
		States: p.states(), Guard: p.one("guard"), Action: p.one("action"), Method: p.one("method"),
		Caller: p.caller(), Workflow: p.one("workflow"), From: p.time("from"), To: p.time("to"),
		ID: p.one("id"), Checkpoint: p.checkpoint(),
	}
	p.undos(&f)
	if age := p.age("max_age"); age > 0 {
		if from := now.Add(-age); from.After(f.From) {
			f.From = from
		}
	}
	if age := p.age("min_age"); age > 0 {
		if to := now.Add(-age); f.To.IsZero() || to.Before(f.To) {
			f.To = to
		}
	}
	return f
}
