package cli

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

func workflowCommands(o *options) *cobra.Command {
	return group(&cobra.Command{
		Use:   "workflows",
		Short: "Checks plans of workflows, gives them to a server, and compares them with what was recorded",
		Long: `Checks plans of workflows: descriptors of the type
` + plan.MediaType + `. put, list and show ask a running server; the others work
on files.`,
	}, workflowsPut(o), workflowsList(o), workflowsShow(o), workflowsValidate(o), workflowsProgress(o), &cobra.Command{
		Use:   "schema",
		Short: "Prints the JSON schema of plans",
		Long: `Prints the JSON schema of plans, for editors. ` + "`workflows validate`" + ` also finds
what a schema cannot say: equal ids, edges without ends, and cycles.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(plan.Schema())
			return err
		},
	})
}

func workflowsPut(o *options) *cobra.Command {
	var put admin.PlanPut
	cmd := &cobra.Command{
		Use:   "put WORKFLOW FILE",
		Short: "Gives a workflow its plan",
		Long: `Gives a workflow its plan. The plan holds from then on, for calls that were not
made yet; those that were made and do not fit are named. Another plan is replaced
only if --replaces names its version, or is *, and only before the first call
under it: a workflow stays with the plan with which it has begun.

WORKFLOW is the id that tokens have, or the name that Workflow-Id has. FILE may
be -, the standard input.`,
		Example: `  caddy agent-guard workflows put 1f0c9a52-6d3e-4b8a-9c44-0d6a7e5b2f10 trip.json`,
		Args:    nArgs(2, "a workflow and one file with its plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := readPlan(cmd, o, args[1])
			if err != nil {
				return err
			}
			put.Plan = d.Canonical() // not every reader of JSON reads the text as it was checked
			return showing(o, question{path: "plans/{}", body: &put}, describePut)(cmd, args)
		},
	}
	stringFlag(cmd, &put.Replaces, "replaces", "The version that it replaces, or * for any (default: there is none)")
	operatorFlag(cmd, &put.Operator, "puts it")
	return o.server(cmd)
}

func describePut(doc *evidence.PlanDocument, now time.Time) string {
	pairs := []any{
		"workflow", doc.Workflow, "plan", doc.PlanID, "version", doc.Version, "replaced", strings.Join(doc.Earlier, " "),
		"put by", doc.By, "put", doc.Put, "begun", doc.Begun, "expires", doc.Expires,
	}
	for _, w := range doc.Warnings {
		pairs = append(pairs, "warning", w.String())
	}
	for _, m := range doc.Misfits {
		pairs = append(pairs, "no fit", cmp.Or(m.Node, m.Task)+": "+m.Text)
	}
	if doc.Unread {
		pairs = append(pairs, "no fit", "there are more calls than were read")
	}
	return lines(now, 9, pairs...)
}

func workflowsList(o *options) *cobra.Command {
	return o.server(&cobra.Command{
		Use:   "list",
		Short: "Lists the workflows that have a plan, the latest plan first",
		Long: `Lists the workflows that have a plan, the latest plan first. A plan of an agent
without a coordinator's authority is offered until the agent makes the workflow's
first call.`,
		Example: "  caddy agent-guard workflows list",
		Args:    noArgs,
		RunE:    showing(o, question{path: "plans"}, describePlans),
	})
}

func describePlans(doc *admin.Plans, now time.Time) string {
	if len(doc.Plans) == 0 {
		return "No workflow has a plan.\n"
	}
	return tableOf(now, doc.Plans, func(p *evidence.PlanDocument) []any {
		state := "waits for its first call"
		switch {
		case !p.InForce:
			state = "offered"
		case !p.Begun.IsZero():
			state = "begun " + moment(p.Begun, now)
		}
		return []any{
			"WORKFLOW", p.Workflow, "VERSION", p.Version, "STATE", state, "PUT", p.Put, "BY", cut(printable(p.By), 40),
			"EXPIRES", p.Expires,
		}
	})
}

func workflowsValidate(o *options) *cobra.Command {
	var config, adapter string
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Checks a plan, and lists its nodes in their order",
		Long: `Checks a plan whole, and names everything that is wrong with it. With --config,
'reversible' of each node is compared with what undoes the action that is called
like the node's label, or like its id. Differences are warnings.

FILE may be -, the standard input. With --output json, a plan that is refused is
described by a document too. Either way the exit code is 1 then.`,
		Example: `  caddy agent-guard workflows validate failover.json --config Caddyfile`,
		Args:    nArgs(1, "one FILE with a plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := readPlan(cmd, o, args[0])
			if err != nil {
				return err
			}
			warnings := append([]plan.Problem{}, d.Warnings...)
			if config != "" || adapter != "" {
				undo, err := waysToUndo(config, adapter)
				if err != nil {
					return err
				}
				warnings = append(warnings, d.CheckUndo(func(action string) (reversible, known bool) {
					reversible, known = undo[action]
					return reversible, known
				})...)
			}
			return showPlan(cmd, o, d, warnings)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&config, "config", "c", "", "Configuration file with the actions, to compare 'reversible' with")
	f.StringVarP(&adapter, "adapter", "a", "", "Name of the adapter for that file")
	_ = cmd.MarkFlagFilename("config") // the flag is there
	return cmd
}

func readPlan(cmd *cobra.Command, o *options, file string) (*plan.Descriptor, error) {
	text, err := readAtMost(cmd.InOrStdin(), file, plan.MaxSize)
	if err != nil {
		return nil, err
	}
	d, err := plan.Parse(text)
	if wrong := (*plan.Error)(nil); errors.As(err, &wrong) {
		return nil, refusePlan(cmd, o, file, wrong)
	}
	return d, err
}

func refusePlan(cmd *cobra.Command, o *options, file string, wrong *plan.Error) error {
	n := len(wrong.Problems) + wrong.More
	if file == "-" {
		file = "the input"
	}
	if o.json() {
		if err := encode(cmd.OutOrStdout(), map[string]any{"problems": wrong.Problems, "more": wrong.More}); err != nil {
			return err
		}
		return fmt.Errorf("%s is no plan: %d problems", file, n)
	}
	var b strings.Builder
	for _, p := range wrong.Problems {
		b.WriteString("\n  " + printable(p.String()))
	}
	if wrong.More > 0 {
		fmt.Fprintf(&b, "\n  and %d more", wrong.More)
	}
	return fmt.Errorf("%s is no plan:%s", file, b.String())
}

func showPlan(cmd *cobra.Command, o *options, d *plan.Descriptor, warnings []plan.Problem) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), map[string]any{
			"wf_id": d.WorkflowID, "version": d.Version(), "nodes": len(d.Nodes), "edges": d.Edges, "levels": d.Levels(), "warnings": warnings,
		})
	}
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "Warning: "+printable(w.String()))
	}
	yes := map[bool]string{true: "yes", false: "no"}
	table := tableOf(time.Time{}, slices.Concat(d.Levels()...), func(id *string) []any {
		place, _ := d.Find(*id)
		n := &d.Nodes[place]
		after := make([]string, len(n.Before))
		for k, j := range n.Before {
			after[k] = d.Nodes[j].ID
		}
		timeout, reversible := "", ""
		if n.Hints.TimeoutS > 0 {
			timeout = fmt.Sprintf("%ds", n.Hints.TimeoutS)
		}
		if n.Reversible != nil {
			reversible = yes[*n.Reversible]
		}
		return []any{
			"LEVEL", n.Level, "NODE", n.ID, "LABEL", blank(cut(n.Label, 40)), "AFTER", blank(cut(strings.Join(after, " "), 40)),
			"PRIORITY", blank(n.Hints.Priority), "TIMEOUT", blank(timeout), "REVERSIBLE", blank(reversible), "APPROVAL", yes[n.HITLRequired],
		}
	})
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %d nodes, %d edges, %d levels, version %s\n\n%s",
		printable(d.WorkflowID), len(d.Nodes), d.Edges, len(d.Levels()), d.Version(), table)
	return err
}

// waysToUndo finds the actions of a configuration, by name, and whether they can be undone. Of several
// with one name all have to.
func waysToUndo(config, adapter string) (map[string]bool, error) {
	var whole any
	if err := readConfig(config, adapter, &whole); err != nil {
		return nil, err
	}
	found := make(map[string]bool)
	var walk func(any)
	walk = func(part any) {
		switch part := part.(type) {
		case []any:
			for _, one := range part {
				walk(one)
			}
		case map[string]any:
			if actions, _ := part["actions"].([]any); part["handler"] == "agent_guard" {
				for _, one := range actions {
					action, _ := one.(map[string]any)
					name, _ := action["name"].(string)
					delegate, _ := action["delegate"].(string)
					before, twice := found[name]
					found[name] = (before || !twice) && (action["restore"] != nil || action["compensate"] != nil || delegate != "")
				}
			}
			for _, member := range part {
				walk(member)
			}
		}
	}
	walk(whole)
	return found, nil
}

// maxPlanned is how many tokens of one workflow are compared with a plan.
const maxPlanned = 100_000

// progressFlags are the flags of `workflows progress`.
type progressFlags struct {
	*options
	proofFlags
	workflow string
	gateways []string
}

// progressDocument is where a workflow is in its plan.
type progressDocument struct {
	Workflow string `json:"workflow"`
	*plan.Progress
}

func workflowsProgress(o *options) *cobra.Command {
	p := progressFlags{options: o}
	cmd := &cobra.Command{
		Use:   "progress PLAN EXPORT --workflow ID --gateway ISSUER --key KEY",
		Short: "Shows where a recorded workflow is in a plan",
		Long: `Verifies an export as ` + "`ledger verify`" + ` does, and compares what it has of one
workflow with a plan: the state of each node, which nodes could begin, and what
the others wait for.

A call is the node that 'atd.node' in its token names, else the one whose id, or
else whose label, is its action. Calls that are no node, or could be several, are
listed apart, and so is a call under way whose agent sent no token. --gateway
names the issuer of the gateway's own tokens: outcomes are taken from no others.`,
		Example: `  caddy agent-guard workflows progress trip.json ledger.export \
      --workflow 1f0c9a52-6d3e-4b8a-9c44-0d6a7e5b2f10 --gateway spiffe://example.com/gateway \
      --key agent-guard/node-4c1f+8b3c1a7e+AVq0…`,
		Args: nArgs(2, "a file with a plan and one with an export"),
		RunE: func(cmd *cobra.Command, args []string) error { return exitOf(cmd, p.run(cmd, args[0], args[1])) },
	}
	p.flags(cmd)
	stringFlag(cmd, &p.workflow, "workflow", "The workflow: its UUID, or its caller's name")
	stringsFlag(cmd, &p.gateways, "gateway", "Issuer of the gateway's tokens; may stand several times")
	require(cmd, "workflow", "gateway")
	return cmd
}

func (p *progressFlags) run(cmd *cobra.Command, file, export string) error {
	d, err := readPlan(cmd, p.options, file)
	if err != nil {
		return err
	}
	entries, err := p.entries(cmd, export)
	if err != nil {
		return err
	}
	g := workflow.New(evidence.RecordsOf(entries, func(e *ledger.Entry) bool { return slices.Contains(p.gateways, e.Issuer) }))
	found := d.Progress(g)
	doc := progressDocument{entries[0].Workflow, found}
	return p.print(cmd, doc, func(time.Time) string {
		return fmt.Sprintf("%s in %s, version %s: %s\n\n%s", printable(doc.Workflow), printable(doc.PlanID), doc.Version,
			inWords(string(found.Status), ""), progressTable(doc.Progress))
	})
}

// entries reads what a valid export has of the workflow.
func (p *progressFlags) entries(cmd *cobra.Command, file string) ([]ledger.Entry, error) {
	from, err := p.open(cmd, file)
	if err != nil {
		return nil, err
	}
	defer from.file.Close()
	wanted := entryFlags{workflow: p.workflow}
	var entries []ledger.Entry
	_, err = ledger.VerifyExport(from.text, p.origin, note.VerifierList(from.keys...), func(e ledger.Entry) error {
		if !wanted.matches(&e) {
			return nil
		}
		if len(entries) == maxPlanned {
			return fmt.Errorf("the workflow has more than %d tokens", maxPlanned)
		}
		entries = append(entries, ledger.Entry{Event: e.Event, Log: e.Log, Index: e.Index, Recorded: e.Recorded})
		return nil
	}, from.known...)
	switch {
	case err != nil:
		return nil, verifyError(file, err)
	case len(entries) == 0:
		return nil, fmt.Errorf("%s has nothing of the workflow %s", inputName(file), printable(p.workflow))
	}
	return entries, nil
}

// progressTable has a row for each node of a plan, and a line with the calls that are none.
func progressTable(p *plan.Progress) string {
	nodes := slices.Clone(p.Nodes)
	slices.SortStableFunc(nodes, func(a, b plan.Status) int { return a.Level - b.Level })
	text := tableOf(time.Time{}, nodes, func(n *plan.Status) []any {
		waits := ""
		if n.Ready {
			waits = "nothing: it can begin"
		}
		for i, h := range n.Holds {
			if i > 0 {
				waits += ", "
			}
			if waits += h.Node + " (" + inWords(string(h.State), string(h.Detail)) + ")"; h.Final {
				waits += ", for ever"
			}
		}
		return []any{
			"LEVEL", n.Level, "NODE", n.ID, "STATE", inWords(string(n.State), string(n.Detail)), "TASKS", len(n.Tasks),
			"WAITS FOR", cut(waits, 80),
		}
	})
	if n := len(p.Others); n > 0 {
		text += fmt.Sprintf("\n%d no node of the plan: %s\n", n, printable(cut(strings.Join(p.Others, " "), 200)))
	}
	return text
}

func inWords(state, detail string) string {
	if detail != "" {
		state += ", " + detail
	}
	return strings.ReplaceAll(state, "_", " ")
}
