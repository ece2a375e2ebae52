package graph

import (
	"context"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Downstreams are the upstreams whose circuit breakers have told a workflow that they
// opened or rejected a call, by the names that the tokens give them. They are of what the
// reader may see of the workflow, or of all of it. Found is false where that is nothing.
func (s *Server) Downstreams(ctx context.Context, name string, who Reader, all bool) (names map[string]bool, found bool, err error) {
	for _, wid := range workflowIDs(name) {
		p, told := sharing{Server: s, who: who}, map[string]string{} // by the id of the token
		read := 0
		if _, err = s.each(ctx, wid, func(e *ledger.Entry) bool {
			read++
			p.add(e)
			if event, _ := ect.ParseEvent(e.Action); event == ect.EventCircuitOpen && s.own(e) {
				told[e.ID], _ = extOf(e).Text(ect.MemberDownstreamAgent)
			}
			return false
		}); err != nil {
			return nil, false, err
		}
		part := p.share()
		if read == 0 || !all && part.empty() {
			continue
		}
		names = map[string]bool{}
		for id, downstream := range told {
			if all || part.has(id) {
				names[downstream] = true
			}
		}
		return names, true, nil
	}
	return nil, false, nil
}
