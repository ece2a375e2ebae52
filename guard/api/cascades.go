package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// Cascade describes a failure that spreads from one agent to others (cascade 3.4). Its members are an API.
type Cascade struct {
	// ID names it here.
	ID string `json:"cascade_id"`
	// State is open, while further failures belong to it, or closed.
	State string `json:"state"`
	// Pattern is depth_first, breadth_first or clustering.
	Pattern string `json:"pattern"`
	// Class is agent, service or infrastructure (cascade 3.1.1).
	Class string `json:"failure_class"`
	// Root is where it began, as far as is known. It is left out for readers of another workflow.
	Root *CascadeRoot `json:"root,omitempty"`
	// Failed and Affected are how many agents have failed, and are in the blast radius.
	Failed   int `json:"failed_agents"`
	Affected int `json:"affected_agents"` // see Failed
	// Workflows are what it has in each workflow that the reader may see.
	Workflows []CascadePart `json:"workflows"`
	// Downstream is what breakers are open on, an agent or a target that several change, and Breakers which ones.
	Downstream string   `json:"downstream_agent,omitempty"`
	Breakers   []string `json:"breakers,omitempty"` // see Downstream
	// OneProbe says that one of the gateway's breakers probes in place of all.
	OneProbe bool `json:"one_probe,omitempty"`
	// Opened are the upstreams whose breakers were opened because of it.
	Opened []string `json:"opened_upstreams,omitempty"`
	// Escalation is the question to people that belongs to no single workflow.
	Escalation string `json:"escalation_id,omitempty"`
	// Into is the cascade of which it has turned out to be a part.
	Into string `json:"merged_into,omitempty"`
	// Began is when its first failure was recorded, Last the newest, and Closed when it ended.
	Began  time.Time `json:"began"`
	Last   time.Time `json:"last_failure"`
	Closed time.Time `json:"closed,omitzero"`
}

// CascadeRoot is the candidate for the root of a cascade.
type CascadeRoot struct {
	// Workflow, Node and Error are ids: of the workflow, of the action's token, and of its error.
	Workflow string `json:"wid,omitempty"`
	Node     string `json:"jti,omitempty"`       // see Workflow
	Error    string `json:"error_ect,omitempty"` // see Workflow
	// Agent is who is suspected: who was called, or whose action it was.
	Agent string `json:"agent,omitempty"`
	// Guard and Upstream are those of a call.
	Guard    string `json:"guard,omitempty"`
	Upstream string `json:"upstream,omitempty"` // see Guard
	// Target is the system that the failed calls change, where that is what they have in common, and LastWrite
	// the token of the last call of this workflow that had changed it before.
	Target    string `json:"target,omitempty"`
	LastWrite string `json:"last_write,omitempty"` // see Target
	// Reasons say why it is the candidate, in fixed words.
	Reasons []string `json:"reasons"`
}

// CascadePart is what a cascade has in one workflow.
type CascadePart struct {
	Workflow string `json:"wid"`
	// Alerts are the ids of its cascade_detected tokens.
	Alerts []string `json:"alert_ects"`
	// Errors are the ids of its first errors.
	Errors []string `json:"errors"`
	// Failed are the agents that failed, BlastRadius all that are affected.
	Failed      []string `json:"failed"`
	BlastRadius []string `json:"blast_radius"` // see Failed
	// Truncated says that lists are not whole.
	Truncated bool `json:"truncated,omitempty"`
	// Escalation is the question to the people of the workflow.
	Escalation string `json:"escalation_id,omitempty"`
}

// CascadeList lists cascades, the newest first. Its members are an API.
type CascadeList struct {
	Cascades []Cascade `json:"cascades"`
}

// Cascades answers who may ask about cascades.
type Cascades struct {
	// List returns those that are kept, the newest first, and Get one, nil if it is unknown.
	List func(ctx context.Context) ([]Cascade, error)
	Get  func(ctx context.Context, id string) (*Cascade, error) // see List
	// Reader says who asks: an operator sees all, others what leads to those upstreams.
	Reader func(r *http.Request) (who router.Reader, operator bool, leads func(upstream string) bool, err error)
}

// cascades answers with the cascades that the reader may see. As with circuits, operators see all, callers
// what is behind their guard, and who asks for a workflow its own part in it (cascade 6.2, P3).
func (g *Gateway) cascades(a router.Responder, to route) error {
	who, operator, leads, err := g.Cascades.Reader(a.R)
	if err != nil {
		return err
	}
	p, err := router.ParseParams(a.R.URL, "wid", "state")
	if err != nil {
		return err
	}
	ctx := a.R.Context()
	if to.endpoint == endpointCascade {
		id, err := router.Segment(to.name, "id")
		if err != nil {
			return err
		}
		c, err := g.Cascades.Get(ctx, id)
		if err != nil {
			return err
		}
		if c != nil && !operator {
			if c, err = g.visible(ctx, c, who, "", leads); err != nil {
				return err
			}
		}
		if c == nil {
			return router.UnknownPart()
		}
		return a.JSON(http.StatusOK, c)
	}
	wid, state := p.Get("wid"), p.Get("state")
	all, err := g.Cascades.List(ctx)
	if err != nil {
		return err
	}
	doc := CascadeList{Cascades: []Cascade{}}
	for i := range all {
		c := &all[i]
		if state != "" && c.State != state || wid != "" && !slices.ContainsFunc(c.Workflows, func(p CascadePart) bool { return evidence.Names(p.Workflow, wid) }) {
			continue
		}
		if !operator {
			if c, err = g.visible(ctx, c, who, wid, leads); err != nil {
				return err
			}
		}
		if c != nil {
			doc.Cascades = append(doc.Cascades, *c)
		}
	}
	return a.JSON(http.StatusOK, doc)
}

// visible is what a reader may see of a cascade: of a list only the parts in the workflow that it names, and
// without one what is behind the reader's guard. It is nil if that is nothing.
func (g *Gateway) visible(ctx context.Context, c *Cascade, who router.Reader, wid string, leads func(string) bool) (*Cascade, error) {
	seen := *c
	seen.Workflows, seen.Root, seen.Escalation = []CascadePart{}, nil, ""
	agents, failed := map[string]bool{}, map[string]bool{}
	whole := true
	for _, p := range c.Workflows {
		may := false
		if g.Ledger != nil && (wid == "" || evidence.Names(p.Workflow, wid)) {
			var err error
			if may, err = g.Ledger.MayReadAll(ctx, p.Workflow, p.Errors, who); err != nil {
				return nil, err
			}
		}
		if whole = whole && may; !may {
			continue
		}
		seen.Workflows = append(seen.Workflows, p)
		for _, name := range p.BlastRadius {
			agents[name] = true
		}
		for _, name := range p.Failed {
			failed[name] = true
		}
		if c.Root != nil && c.Root.Workflow == p.Workflow {
			root := *c.Root
			if root.LastWrite != "" { // a call of somebody else in the workflow
				var err error
				if may, err = g.Ledger.MayReadAll(ctx, p.Workflow, []string{root.LastWrite}, who); err != nil {
					return nil, err
				}
				if !may {
					root.LastWrite = ""
				}
			}
			seen.Root = &root
		}
	}
	behind := slices.ContainsFunc(c.Breakers, leads)
	if !whole {
		seen.Failed, seen.Affected = len(failed), len(agents)
	}
	if !behind {
		seen.Breakers = nil
	}
	if !behind && seen.Root == nil {
		seen.Opened = slices.DeleteFunc(slices.Clone(c.Opened), func(upstream string) bool { return !leads(upstream) })
	}
	if len(seen.Workflows) == 0 && !behind {
		return nil, nil
	}
	return &seen, nil
}
