package cli

import (
	"encoding/json"
	"errors"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// paging is how much of a list is asked for.
type paging struct {
	limit int
	after string
	all   bool
}

// flags adds the flags of a command that lists.
func (p *paging) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVar(&p.limit, "limit", 50, "The most to list; with --all, how many to ask for at a time")
	f.StringVar(&p.after, "after", "", "Where to go on, as an earlier listing says")
	f.BoolVar(&p.all, "all", false, "List all there are")
	for _, flag := range []string{"limit", "after"} {
		complete(cmd, flag)
	}
}

func (p *paging) valid() error {
	if p.limit < 1 {
		return errors.New("--limit must be at least 1")
	}
	return nil
}

// follow asks for pages until as many as were asked for are there, and hands them to
// print. A page with none is not the last one. next is where the list goes on.
func (p *paging) follow(query url.Values, ask func(url.Values) (page []json.RawMessage, next string, err error), print func([]json.RawMessage) error) (next string, err error) {
	for listed, after := 0, p.after; ; {
		want := p.limit
		if !p.all {
			want -= listed
		}
		query.Set("limit", strconv.Itoa(min(want, guard.MaxPage)))
		if after != "" {
			query.Set("after", after)
		}
		page, next, err := ask(query)
		if err != nil {
			return "", err
		}
		if err := print(page); err != nil {
			return "", err
		}
		listed += len(page)
		after = next
		if next == "" || !p.all && listed >= p.limit {
			return next, nil
		}
	}
}
