package admin

import (
	"context"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Executions know a workflow by its caller's name for it. Tokens, rollbacks and escalations
// know it by a UUID, which is derived from a name that is none. Operators may say either.

// maxNamed is in how many checkpoints of a workflow its name is looked for.
const maxNamed = 20

// names finds callers' names of workflows, each once.
type names struct {
	st    Store
	known map[string]string
}

// of is the caller's name for the workflow with a UUID; empty where there is none, or none
// is recorded any more. checkpoint is one of the workflow, and may be empty.
func (n *names) of(ctx context.Context, workflow, checkpoint string) string {
	if workflow == "" {
		return ""
	}
	name, looked := n.known[workflow]
	if name == "" && checkpoint != "" {
		name = n.by(ctx, workflow, checkpoint)
	}
	if name == "" && !looked {
		name = n.inLedger(ctx, workflow)
	}
	if n.known == nil {
		n.known = map[string]string{}
	}
	n.known[workflow] = name
	return name
}

// by looks at the execution of a checkpoint.
func (n *names) by(ctx context.Context, workflow, checkpoint string) string {
	_, _, record, err := callOf(ctx, n.st, checkpoint)
	if err != nil || record == nil || record.Workflow == workflow {
		return ""
	}
	if named := record.Workflow; evidence.WorkflowID(named) == workflow || evidence.NamedWorkflowID(named) == workflow {
		return named
	}
	return ""
}

// inLedger looks at the checkpoints that the ledger has of the workflow.
func (n *names) inLedger(ctx context.Context, workflow string) string {
	l := n.st.Ledger()
	if l == nil {
		return ""
	}
	page, err := l.Log.List(ctx, workflow, "", ledger.MaxPage)
	if err != nil {
		return "" // only a name is missing
	}
	looked := 0
	for i := range page.Entries {
		e := &page.Entries[i]
		if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint {
			continue
		}
		if name := n.by(ctx, workflow, e.ID); name != "" {
			return name
		}
		if looked++; looked == maxNamed {
			break
		}
	}
	return ""
}

// forms are the forms under which a workflow is recorded that an operator names: the given
// one first.
func (n *names) forms(ctx context.Context, given string) []string {
	if given == "" {
		return nil
	}
	all := []string{given}
	for _, form := range []string{evidence.WorkflowID(given), evidence.NamedWorkflowID(given), n.of(ctx, given, "")} {
		if form != "" && form != all[len(all)-1] && form != given {
			all = append(all, form)
		}
	}
	return all
}
