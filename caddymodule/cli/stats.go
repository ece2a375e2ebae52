package cli

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

func stats(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "stats",
		Short: "Shows the store's health, what it holds and what it did",
		Long: `Shows the store's health, how many executions it holds in which state, and
what it did since it was opened. Above 10,000 the executions of a state are
not counted on.`,
		Example: `  caddy agent-guard store stats
  caddy agent-guard store stats --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			var st admin.StoreStatus
			text, err := c.get(cmd.Context(), "store", url.Values{}, &st)
			if err != nil {
				return err
			}
			if o.json() {
				return encode(cmd.OutOrStdout(), text)
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), describeStore(&st))
			return err
		},
	}
}

func describeStore(st *admin.StoreStatus) string {
	s := sheet{width: 20}
	s.line("store", printable(st.Path))
	s.line("health", st.Health)
	s.line("problem", printable(st.Problem))
	s.line("node", st.Node)
	s.line("boot", st.Boot)
	for _, state := range guard.States() {
		if c, ok := st.Executions[state.String()]; ok {
			s.line(state.String(), describeCount(c))
		}
	}
	s.line("quota", describeQuota(st.Quota))
	if r := st.Store; r != nil {
		describeReport(&s, r)
	}
	return s.b.String()
}

func describeCount(c admin.Count) string {
	text := strconv.Itoa(c.Count)
	if c.AtLeast {
		text = "at least " + text
	}
	if c.Count > 0 {
		text += ", the oldest " + ago(c.OldestAge) + " old"
	}
	return text
}

func describeQuota(q *admin.Quota) string {
	var bounds []string
	if q != nil && q.OpenExecutions > 0 {
		bounds = append(bounds, strconv.Itoa(q.OpenExecutions)+" open executions")
	}
	if q != nil && q.StoredBytes > 0 {
		bounds = append(bounds, size(uint64(q.StoredBytes))+" stored")
	}
	return strings.Join(bounds, ", ")
}

// describeSize is the sum with its parts.
func describeSize(parts map[string]uint64) string {
	var sum uint64
	var all []string
	for _, part := range slices.Sorted(maps.Keys(parts)) {
		sum += parts[part]
		all = append(all, printable(part)+" "+size(parts[part]))
	}
	if all == nil {
		return ""
	}
	return size(sum) + ": " + strings.Join(all, ", ")
}

func describeReport(s *sheet, r *admin.Report) {
	sizes := describeSize(r.Size)
	if r.MaxSize > 0 {
		sizes += "; at most " + size(uint64(r.MaxSize))
	}
	s.line("size", sizes)
	s.line("dead", size(uint64(max(r.Dead, 0))))
	s.line("reclaimed", size(r.Reclaimed))
	if r.Disk != nil {
		s.line("free", size(r.Disk.Free)+", at least "+size(uint64(max(r.Disk.MinFree, 0))))
		s.line("takes", printable(r.Disk.Takes))
	}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	s.line("commits", number(r.Commits))
	s.line("records per sync", strconv.FormatFloat(r.RecordsPerSync, 'f', 1, 64))
	s.line("batches", number(r.Batches))
	s.line("writes", number(r.Writes))
	s.line("conflicts", number(r.Conflicts))
	s.line("written", size(r.Bytes))
	s.line("bodies written", size(r.BodyBytes))
	s.line("body syncs", number(r.BodySyncs))
	s.line("segments dropped", number(r.Dropped))
	s.line("refused, disk full", number(r.Refused))
}
