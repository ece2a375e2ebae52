package cli

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

func storeCommands(o *options) *cobra.Command {
	return group(&cobra.Command{
		Use:   "store",
		Short: "Shows the state of the store, exports and imports a store",
		Long: `Shows the state of the store of the executions; exports one, and imports it into
another, from Badger to PostgreSQL or back.`,
	}, o.server(&cobra.Command{
		Use:   "stats",
		Short: "Shows the store's health, content and activity",
		Long: `Shows the store's health, how many executions it holds in which state, and
what it did since it was opened. The executions of a state are
counted up to 10,000.`,
		Example: `  caddy agent-guard store stats
  caddy agent-guard store stats --output json`,
		Args: noArgs,
		RunE: showing(o, question{path: "store"}, describeStore),
	}), storeExport(o), storeImport(o))
}

func describeStore(st *admin.StoreStatus, now time.Time) string {
	pairs := []any{"store", st.Path, "health", st.Health, "problem", st.Problem, "node", st.Node, "boot", st.Boot}
	for _, state := range execution.States() {
		if c, ok := st.Executions[state.String()]; ok {
			pairs = append(pairs, state, describeCount(c))
		}
	}
	pairs = append(pairs, "quota", describeQuota(st.Quota))
	r := st.Store
	if r == nil {
		return lines(now, 20, pairs...)
	}
	sizes := describeSize(r.Size)
	if r.MaxSize > 0 {
		sizes += "; at most " + size(uint64(r.MaxSize))
	}
	pairs = append(pairs, "size", sizes)
	commits := []any{"commits", r.Commits, "records per sync", decimal(r.RecordsPerSync), "batches", r.Batches}
	if r.Database != nil {
		return lines(now, 20, slices.Concat(pairs, databaseLines(r.Database, now), commits)...)
	}
	pairs = append(pairs, "dead", size(uint64(max(r.Dead, 0))), "reclaimed", size(r.Reclaimed))
	if r.Disk != nil {
		pairs = append(pairs, "free", size(r.Disk.Free)+", at least "+size(uint64(max(r.Disk.MinFree, 0))), "takes", r.Disk.Takes)
	}
	return lines(now, 20, slices.Concat(pairs, commits, []any{
		"writes", r.Writes, "conflicts", r.Conflicts, "written", size(r.Bytes), "bodies written", size(r.BodyBytes),
		"body syncs", r.BodySyncs, "segments dropped", r.Dropped, "refused, disk full", r.Refused,
	})...)
}

// databaseLines describes a store that is in a database.
func databaseLines(d *admin.Database, now time.Time) (pairs []any) {
	seconds := func(n float64) string { return decimal(n) + "s" }
	if d.Known {
		standbys := strconv.Itoa(d.Standbys)
		if d.Standbys > 0 && d.Lag != nil {
			standbys += ", " + seconds(*d.Lag) + " behind"
		}
		pairs = []any{
			"rows", d.Living, "dead rows", d.Dead, "vacuumed", cmp.Or(moment(d.Vacuumed, now), "not known"),
			"oldest transaction", seconds(d.OldestTransaction), "standbys", standbys,
		}
	}
	n := d.Connections
	return append(pairs, "lease", "ends in "+seconds(d.LeaseLeft)+" unless it is renewed",
		"connections", fmt.Sprintf("%d in use, %d idle, at most %d for reading", n["in_use"], n["idle"], n["max"]),
		"waits", fmt.Sprintf("%d for a connection, %s together", d.Waits, seconds(d.Waited)))
}

func decimal(n float64) string { return strconv.FormatFloat(n, 'f', 1, 64) }

func nodesCommand(o *options) *cobra.Command {
	return o.server(&cobra.Command{
		Use:   "nodes",
		Short: "Lists the gateways that share the store",
		Long: `Lists the gateways that have the store open, as they have described themselves
with their last heartbeat. SEEN is by the store's clock. LOG counts entries of
the node's log in the ledger. DIFFERS has the options that are not as at the
server that is asked (*), of those that must be the same at all. An embedded
store has one node.`,
		Example: "  caddy agent-guard nodes",
		Args:    noArgs,
		RunE:    showing(o, question{path: "nodes"}, describeNodes),
	})
}

func describeNodes(doc *admin.NodeList, now time.Time) string {
	return tableOf(now, doc.Nodes, func(n *admin.Node) []any {
		name := printable(n.Node)
		if n.This {
			name += " *"
		}
		keys := strings.Trim(fmt.Sprint(n.SealingKeys), "[]")
		return []any{
			"NODE", name, "VERSION", blank(n.Version), "SEEN", ago(int64(n.SeenAge)) + " ago", "OPEN", n.Open, "LOG", n.LogSize,
			"KEYS", strings.ReplaceAll(keys, " ", ", "), "DIFFERS", n.Differs,
		}
	})
}

func describeCount(c admin.Count) string {
	text := strconv.Itoa(c.N)
	if c.More {
		text = "at least " + text
	}
	if c.N > 0 {
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
	if q != nil && q.WorkflowStoredBytes > 0 {
		bounds = append(bounds, size(uint64(q.WorkflowStoredBytes))+" stored of a workflow")
	}
	return strings.Join(bounds, ", ")
}

// describeSize shows the sum and its parts.
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

func keyCommands(o *options) *cobra.Command {
	return o.server(group(&cobra.Command{
		Use:   "keys",
		Short: "Lists and rotates the sealing keys",
		Long: `Lists and rotates the keys that seal records. No key is ever shown. The index
key, by which executions are found, is never rotated.`,
	}, &cobra.Command{
		Use:   "list",
		Short: "Lists the sealing keys, and how far re-sealing has come",
		Long: `Lists the sealing keys. A key in use must stay in the key file:
values in the store need it.`,
		Example: "  caddy agent-guard keys list",
		Args:    noArgs,
		RunE:    showing(o, question{path: "keys"}, describeKeys),
	}, &cobra.Command{
		Use:   "rotate",
		Short: "Makes a new sealing key and seals with it from now on",
		Long: `Makes a new sealing key, writes it into the key file, and seals with it from
now on. Records under older keys are sealed anew in the background; answers
under them expire. Calls go on meanwhile, and retries find their executions.

Where several gateways use the store, the new key seals once all of them have
it. The command says which of them lack it: copy the key file to each, and load
its configuration again (caddy reload --force). Until then it makes no other.

A ring that is given as a value is printed with another key in it, and with all
its secrets; nothing is changed.

Make a new copy of the key file afterwards: older copies lack the key.`,
		Example: "  caddy agent-guard keys rotate",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := show(cmd, o, question{path: "keys/rotate", body: struct{}{}}, describeKeys)
			if err == nil {
				fmt.Fprintln(cmd.ErrOrStderr(), adviseRotation(status))
			}
			return err
		},
	}))
}

// adviseRotation says what is to be done after keys rotate.
func adviseRotation(status *gateway.KeyStatus) string {
	switch {
	case status.Ring != "":
		return "The ring is given as a value, and was not changed. This is it with another key, and with all its secrets: put it where the value " +
			"is kept, for every gateway on the store, and load their configurations again."
	case status.Made == 0:
		return "No key was made: the one of before does not seal yet. Copy the key file to the gateways that lack it, and load their configurations again."
	case slices.ContainsFunc(status.Keys, func(k gateway.Key) bool { return len(k.Lacking) > 0 }):
		return "Copy the key file to the gateways that lack the key, and load their configurations again. Copy it to your backup, too: older copies " +
			"cannot open what will be sealed."
	}
	return "Copy the key file anew: older copies cannot open what is sealed from now on."
}

func describeKeys(status *gateway.KeyStatus, now time.Time) string {
	if status.Ring != "" { // of keys rotate, for a file
		return status.Ring
	}
	source := "given as a value"
	if status.Source == "file" {
		source = "in " + printable(status.File)
	}
	lacking := ""
	keys := tableOf(now, status.Keys, func(key *gateway.Key) []any {
		use := "unused"
		switch {
		case key.Newest:
			use = "seals"
		case len(key.Lacking) > 0:
			use = "waits"
			lacking += fmt.Sprintf("Key %d seals once all gateways on the store have it. It is missing at: %s.\n",
				key.ID, shown(key.Lacking, now))
		case key.InUse:
			use = "opens"
		}
		return []any{"KEY", key.ID, "USE", use, "CREATED", key.Created, "NEEDED UNTIL", key.Until}
	})
	text := "The key ring is " + source + ".\n" + keys + lacking
	if status.Resealing != nil {
		text += describeResealing(status.Resealing, now) + "\n"
	}
	return text
}

func describeResealing(r *gateway.Resealing, now time.Time) string {
	state := "running"
	switch {
	case r.Error != "":
		state = "stopped, and will be tried again: " + printable(r.Error)
	case r.Done:
		state = "done, " + moment(r.Finished, now)
	}
	text := fmt.Sprintf("Re-sealing to key %d: %s; %d values seen, %d sealed anew, %d damaged.", r.Key, state, r.Seen, r.Resealed, r.Damaged)
	for _, left := range r.Left {
		text += fmt.Sprintf("\nKey %d still has %d records and %d parts of answers.", left.ID, left.Records, left.Results)
	}
	return text
}

func identityCommands(o *options) *cobra.Command {
	var rotation admin.IdentityRotation
	rotate := &cobra.Command{
		Use:   "rotate",
		Short: "Makes a new signing key and signs with it from now on",
		Long: `Makes a new signing key of the configured algorithm, writes it into the key
file, and signs with it from now on. The old private key is deleted; its public part
is published for a day, in which its last tokens expire.

With --stolen no older key is published any more: others that fetch the server's
keys then refuse tokens under it, also unexpired ones. Whoever copied the keys
must delete it.

Make a new copy of the key file afterwards: without it the server does not
start.`,
		Example: `  caddy agent-guard identity rotate
  caddy agent-guard identity rotate --stolen`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := show(cmd, o, question{path: "identity/rotate", body: &rotation}, describeIdentity)
			if err == nil {
				fmt.Fprintln(cmd.ErrOrStderr(), "Copy the key file anew. Who has copied the public keys needs the new one before the next token.")
			}
			return err
		},
	}
	rotate.Flags().BoolVar(&rotation.Stolen, "stolen", false, "An older key is in the wrong hands: publish older keys no more")
	return o.server(group(&cobra.Command{
		Use:   "identity",
		Short: "Shows the identity in a server's tokens, and rotates its signing key",
		Long: `Shows the identity in a server's tokens, and rotates its signing key. No private
key is ever shown.`,
	}, &cobra.Command{
		Use:   "show",
		Short: "Shows the identity and its keys",
		Long: `Shows the identity and its keys. One signs. Older ones are published until
their last token has expired, and stay in the key file to verify records.`,
		Example: "  caddy agent-guard identity show",
		Args:    noArgs,
		RunE:    showing(o, question{path: "identity"}, describeIdentity),
	}, rotate))
}

func describeIdentity(status *admin.Identity, now time.Time) string {
	keys := tableOf(now, status.Keys, func(key *admin.IdentityKey) []any {
		use := "records"
		switch {
		case key.Revoked:
			use = "revoked"
		case key.Signs:
			use = "signs"
		case key.Until.IsZero() || !now.After(key.Until):
			use = "verifies"
		}
		return []any{"KEY", key.ID, "ALG", key.Algorithm, "USE", use, "CREATED", key.Created, "PUBLISHED UNTIL", key.Until}
	})
	return fmt.Sprintf("The gateway is %s, and makes keys for %s.\nThe keys are in %s.\n",
		printable(status.Name), printable(status.Algorithm), printable(status.File)) + keys
}

// modeWords are the modes that an operator can set.
var modeWords = names([]breaker.Mode{breaker.Auto, breaker.Observe, breaker.ForcedOpen, breaker.ForcedClosed})

func circuitCommands(o *options) *cobra.Command {
	fleet, scope := false, url.Values{}
	list := &cobra.Command{
		Use:   "list",
		Short: "Lists the circuit breakers",
		Long: `Lists the circuit breakers, by upstream. ERRORS and CALLS are of the window;
of a breaker that is open, and of other nodes, of when it opened. --fleet lists
those of all nodes that use the store, with how long ago a node has stored its
state.`,
		Example: `  caddy agent-guard circuits list
  caddy agent-guard circuits list --fleet`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if fleet {
				scope.Set("scope", proxy.ScopeFleet)
			}
			return showing(o, question{path: "circuits", query: scope}, describeCircuits)(cmd, nil)
		},
	}
	list.Flags().BoolVar(&fleet, "fleet", false, "those of all nodes that use the store")
	return o.server(group(&cobra.Command{
		Use:   "circuits",
		Short: "Shows the circuit breakers of a server's upstreams, and sets their modes",
		Long: `Shows the circuit breakers of a server's upstreams, and sets their modes. An
upstream has a breaker from its first call on.`,
	}, list, circuitSet(o)))
}

func circuitSet(o *options) *cobra.Command {
	wanted := admin.CircuitMode{Mode: new(breaker.Mode)}
	cmd := &cobra.Command{
		Use:   "set UPSTREAM MODE",
		Short: "Sets the mode of a circuit breaker",
		Long: `Sets the mode of a circuit breaker. forced_open refuses all calls to the
upstream, forced_closed and observe none; auto lets the breaker decide.
The mode survives reloads and restarts.`,
		Example: `  caddy agent-guard circuits set 10.0.0.7:9001 forced_open
  caddy agent-guard circuits set 10.0.0.7:9001 auto`,
		Args: nArgs(2, "UPSTREAM and MODE; `circuits list` shows the upstreams, and a mode is one of "+strings.Join(modeWords, ", ")),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) != 1 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return modeWords, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(modeWords, args[1]) {
				return fmt.Errorf("%q is no mode; it is one of %s", args[1], strings.Join(modeWords, ", "))
			}
			wanted.Upstream = args[0]
			if err := wanted.Mode.UnmarshalText([]byte(args[1])); err != nil {
				return err
			}
			return showing(o, question{path: "circuits/mode", body: &wanted}, describeCircuits)(cmd, nil)
		},
	}
	cmd.Flags().StringVar(&wanted.Class, "class", "", "undo, for delegates and whole URLs of rollbacks")
	return cmd
}

func describeCircuits(doc *proxy.Document, now time.Time) string {
	if len(doc.Circuits) == 0 {
		return "No upstream has been called yet.\n"
	}
	fleet := slices.ContainsFunc(doc.Circuits, func(c proxy.Circuit) bool { return c.Node != "" })
	return tableOf(now, doc.Circuits, func(c *proxy.Circuit) []any {
		row := []any{
			"UPSTREAM", c.Upstream, "CLASS", c.Class, "STATE", c.State, "MODE", c.Mode,
			"ERRORS", strconv.FormatFloat(math.Round(1000*c.ErrorRate)/10, 'f', -1, 64) + "%", "CALLS", c.Calls,
			"NEXT PROBE", c.NextProbe, "CAUSE", c.Cause,
		}
		if fleet {
			stored := time.Time{}
			if c.Age > 0 {
				stored = now.Add(-time.Duration(c.Age) * time.Second)
			}
			row = slices.Concat([]any{"NODE", c.Node}, row, []any{"STORED", stored})
		}
		return row
	})
}

func cascadeCommands(o *options) *cobra.Command {
	return o.server(group(&cobra.Command{
		Use:   "cascades",
		Short: "Shows failures that spread from one agent to others",
		Long: `Shows failures that spread from one agent to others, with where they began, as
far as is known.`,
	}, &cobra.Command{
		Use:     "list",
		Short:   "Lists the cascades, the newest first",
		Long:    `Lists the cascades, the newest first. FAILED and AFFECTED count agents.`,
		Example: "  caddy agent-guard cascades list",
		Args:    noArgs,
		RunE:    showing(o, question{path: "cascades"}, describeCascades),
	}, &cobra.Command{
		Use:     "show ID",
		Short:   "Shows one cascade",
		Long:    `Shows one cascade, with the agents that it affects in each workflow.`,
		Example: "  caddy agent-guard cascades show 44a2fed48ded0166e0fe086ddc3db15c",
		Args:    nArgs(1, "one ID; `cascades list` shows them"),
		RunE:    showing(o, question{path: "cascades/{}"}, describeCascade),
	}))
}

func describeCascades(doc *api.CascadeList, now time.Time) string {
	if len(doc.Cascades) == 0 {
		return "No failure has spread.\n"
	}
	return tableOf(now, doc.Cascades, func(c *api.Cascade) []any {
		root := ""
		if c.Root != nil {
			root = cmp.Or(c.Root.Target, c.Root.Agent, c.Root.Upstream)
		}
		return []any{
			"CASCADE", c.ID, "STATE", c.State, "PATTERN", c.Pattern, "CLASS", c.Class, "FAILED", c.Failed, "AFFECTED", c.Affected,
			"WORKFLOWS", len(c.Workflows), "LAST FAILURE", c.Last, "ROOT", root,
		}
	})
}

func describeCascade(c *api.Cascade, now time.Time) string {
	pairs := []any{
		"cascade", c.ID, "state", c.State, "pattern", c.Pattern, "class", c.Class,
		"began", cmp.Or(moment(c.Began, now), "-"), "last failure", cmp.Or(moment(c.Last, now), "-"),
	}
	if r := c.Root; r != nil {
		pairs = append(pairs, "root", cmp.Or(r.Target, r.Agent, r.Upstream), "root upstream", r.Upstream,
			"root workflow", r.Workflow, "root error", r.Error, "last write", r.LastWrite, "because", r.Reasons)
	}
	pairs = append(pairs, "downstream", c.Downstream, "breakers", c.Breakers, "opened", c.Opened,
		"escalation", c.Escalation, "failed", c.Failed, "affected", c.Affected)
	for i := range c.Workflows {
		p := &c.Workflows[i]
		pairs = append(pairs, "workflow", p.Workflow, "  alerts", p.Alerts, "  escalation", p.Escalation,
			"  failed", p.Failed, "  blast radius", p.BlastRadius)
	}
	return lines(now, 20, pairs...)
}

func escalationCommands(o *options) *cobra.Command {
	page := paging{query: url.Values{}}
	listing := &cobra.Command{
		Use:   "list",
		Short: "Lists escalations, the newest first",
		Long: `Lists escalations, the newest first. open: not delivered yet. notified: the
receiver has accepted it, or it was logged. undeliverable: the receiver does not
accept it, so that it may be known from this list only. pending ones wait for a
decision.`,
		Example: `  # What waits for a decision?
  caddy agent-guard escalations list --status pending

  # Which escalations may nobody know of?
  caddy agent-guard escalations list --state undeliverable

  # All there are, for a script
  caddy agent-guard escalations list --all --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listPages(cmd, o, &page, "escalations", escalationRow)
		},
	}
	q, levels := page.query, names([]hitl.Level{hitl.Pause, hitl.Approval, hitl.Stop})
	wordFlag(listing, q, "word", "state", "Only those in this state: open, notified or undeliverable", names(hitl.States()))
	wordFlag(listing, q, "word", "status", "Only those with this status: pending, approved, denied, expired or withdrawn", names(hitl.Statuses()))
	wordFlag(listing, q, "word", "level", "Only those of this level: pause, approval or stop", levels)
	filterFlag(listing, q, "workflow", "Only those of this workflow: its UUID, or its caller's name")
	page.flags(listing, true)
	return o.server(group(&cobra.Command{
		Use:   "escalations",
		Short: "Lists and decides what needs a person",
		Long: `Lists what only a person can decide: calls that wait for an approval, calls that
cannot be undone, failed rollbacks, upstreams that do not come back; and records
what was decided.`,
	}, listing, &cobra.Command{
		Use:               "show ID",
		Short:             "Shows an escalation, and what an approval would do",
		Args:              nArgs(1, "one ID"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              showing(o, question{path: "escalations/{}"}, describeEscalation),
	}, o.decisionCommand("approve"), o.decisionCommand("deny"), o.askCommand()))
}

// decisionCommand is the command that approves, or the one that denies.
func (o *options) decisionCommand(word string) *cobra.Command {
	vote := admin.EscalationVote{Decision: word}
	var hash string
	var yes bool
	cmd := &cobra.Command{
		Use:   "approve ID",
		Short: "Approves what an escalation proposes",
		Long: `Shows what an escalation proposes, asks, and approves it and nothing else. A
script gives --hash, that of the request or the plan, as escalations show has it:
if something else is proposed by now, the approval does not count. --yes approves
what is proposed now, whatever it is. An escalation without a hash, such as one
that resumes a workflow, is approved at once. Who asked cannot approve.`,
		Example: `  caddy agent-guard escalations show 2d0f5b1c-52a0-8c1e-9f5d-0d7f9a3c6b11
  caddy agent-guard escalations approve 2d0f5b1c-52a0-8c1e-9f5d-0d7f9a3c6b11 \
      --hash sha-256:4b2f... --reason 'The amount is right'`,
		Args:              nArgs(1, "one ID"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			found, _, err := ask[hitl.Escalation](cmd.Context(), o, question{path: "escalations/{}"}.of(args))
			if err != nil {
				return err
			}
			if p := &found.Proposal; p.Kind != "" {
				asked := p.Hash()
				if hash != "" && hash != asked {
					return fmt.Errorf("--hash: it is not that of what is proposed now; look at that with `escalations show %s`", printable(args[0]))
				}
				if word == "approve" && hash == "" && asked != "" && !yes {
					if err := confirm(cmd, describeEscalation(found, time.Now()), "Approve this?"); err != nil {
						return err
					}
				}
				if vote.RequestHash = p.RequestHash; vote.RequestHash == "" {
					vote.PlanHash = p.PlanHash
				}
			}
			return showing(o, question{path: "escalations/{}/decision", body: &vote}, describeEscalation)(cmd, args)
		},
	}
	if word == "deny" {
		cmd.Use, cmd.Short = "deny ID --reason TEXT", "Denies what an escalation proposes"
		cmd.Long = `Denies what an escalation proposes: everything stays as it is. A workflow that is
paused or stopped stays so, until it is asked for again (escalations ask) and
approved.`
		cmd.Example = `  caddy agent-guard escalations deny 2d0f5b1c-52a0-8c1e-9f5d-0d7f9a3c6b11 \
      --reason 'The account is closed'`
	}
	stringFlag(cmd, &vote.Reason, "reason", "Why, in a sentence for people; a denial needs it")
	stringFlag(cmd, &hash, "hash", "The hash of the request or the plan, as it was shown")
	if word == "approve" {
		cmd.Flags().BoolVar(&yes, "yes", false, "Do not ask")
	}
	operatorFlag(cmd, &vote.Operator, "decides")
	return cmd
}

func (o *options) askCommand() *cobra.Command {
	var q admin.EscalationQuestion
	cmd := &cobra.Command{
		Use:   "ask ID",
		Short: "Asks again whether a workflow may be resumed",
		Long: `Asks again whether a workflow may be resumed that is still paused or stopped,
after that was denied or has expired. Who asks cannot approve.`,
		Args:              nArgs(1, "one ID"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              showing(o, question{path: "escalations/{}/ask", body: &q}, describeEscalation),
	}
	operatorFlag(cmd, &q.Operator, "asks")
	return cmd
}

// describeEscalation shows an escalation line by line, what is proposed, and who has decided.
func describeEscalation(e *hitl.Escalation, now time.Time) string {
	holds, kind, hash := "", "", ""
	text := "\nAn approval changes nothing; it says that somebody has seen to it.\n"
	if e.Held {
		holds = "new calls of the workflow"
	}
	if p := &e.Proposal; p.Kind != "" {
		kind, hash, text = string(p.Kind), p.Hash(), "\nAn approval does this:\n"
		for line := range strings.Lines(p.Text) {
			text += "  " + printable(strings.TrimRight(line, "\r\n")) + "\n"
		}
	}
	for i, d := range e.Decisions {
		if i == 0 {
			text += "\nDecisions:\n"
		}
		text += fmt.Sprintf("  %s  %s  %s  %s\n", moment(d.At, now), printable(d.Decision), printable(d.By), printable(d.Reason))
	}
	return lines(now, 11,
		"escalation", e.ID, "status", string(e.Status), "level", e.LevelName, "cause", string(e.Cause), "summary", e.Summary,
		"workflow", named(e.Workflow, e.WorkflowName), "holds", holds, "caller", e.Caller, "requester", e.Requester,
		"role", e.RequiredRole, "quorum", number(e.Quorum), "opened", e.Opened, "deadline", e.Deadline, "notified", string(e.State),
		"checkpoint", e.Links.Checkpoint, "rollback", e.Links.Rollback, "error", e.Links.Error,
		"execution", e.Links.Execution, "upstream", e.Links.Upstream, "proposal", kind, "hash", hash) + text
}

func escalationRow(e *hitl.Escalation) []any {
	workflow := cut(printable(e.Workflow), 36)
	if e.WorkflowName != "" {
		workflow += " (" + cut(printable(e.WorkflowName), 36) + ")"
	}
	return []any{
		"OPENED", e.Opened, "LEVEL", e.LevelName, "STATUS", string(e.Status), "STATE", string(e.State), "CAUSE", string(e.Cause),
		"WORKFLOW", workflow, "SUMMARY", cut(printable(e.Summary), 100), "ID", e.ID,
	}
}
