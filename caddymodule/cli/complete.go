package cli

import (
	"context"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// completePatience is how long the Tab key waits for a server.
const completePatience = time.Second

// completeKey offers the keys of a running server, of the states given or of all, the
// youngest first. Without a server it offers nothing, and says nothing.
func completeKey(o *options, states ...string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 || o.config != "" { // reading a configuration may log
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completePatience)
		defer cancel()
		c, err := o.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var page admin.Page
		if _, err := c.get(ctx, "executions", url.Values{"limit": {"50"}, "state": states}, &page); err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var keys []string
		for i := range page.Executions {
			x := &page.Executions[i]
			key := short(x.Key, 16)
			if !strings.HasPrefix(key, typed) {
				continue
			}
			about := x.State + " " + printable(x.Action) + " " + ago(x.Age)
			keys = append(keys, cobra.CompletionWithDesc(key, about))
		}
		return keys, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}
