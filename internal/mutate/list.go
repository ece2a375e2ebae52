package main

// mutations are the changes that are tried. Each of them once went unnoticed by the tests
// that the requirement's row named, or is of that kind.
var mutations = []mutation{
	{
		id: "C-3.2.4-a", file: "caddymodule/circuit_state.go",
		old:    "	if ev.To == breaker.Open {\n		e.calls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		now:    "	if ev.From == breaker.HalfOpen && ev.To == breaker.Open {\n		return\n	}\n	if ev.To == breaker.Open {\n		e.calls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		breaks: "a probe that fails is not told", tests: []string{"TestCascade324TokensOfABreaker"},
	},
	{
		id: "C-3.2.4-a", file: "caddymodule/circuit_state.go",
		old:    "	if ev.To == breaker.Open {\n		e.calls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		now:    "	if ev.To == breaker.HalfOpen {\n		return\n	}\n	if ev.To == breaker.Open {\n		e.calls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		breaks: "a breaker that probes is not told", tests: []string{"TestCascade324TokensOfABreaker"},
	},
	{
		id: "C-4.2.2-a", file: "guard/checkpoint/prepare.go",
		old: "expires: s.Expires.Add(t.TTL / 2)", now: "expires: s.Created.Add(t.TTL / 2)",
		breaks: "snapshots go after half of their ttl", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "C-4.2.2-a", file: "guard/record.go",
		old: "return now.Add(max(ttl+ttl/2, q.call.KeepResult))", now: "_ = ttl\n	return now.Add(q.call.KeepResult)",
		breaks: "the ledger keeps checkpoints as long as results", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "A-checkpoint-ect-format-e", file: "guard/record.go",
		old: "return now.Add(max(ttl+ttl/2, q.call.KeepResult))", now: "return now.Add(min(ttl/2, q.call.KeepResult))",
		breaks: "the ledger keeps checkpoints for half of their ttl", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "C-4.2.3-a", file: "guard/rollback/step.go",
		old: "case damaged || tampered:", now: "case damaged || tampered && reasonTampered == \"\":",
		breaks: "a step goes on with a token that was altered", tests: []string{"TestCascade423VerifiedAtItsTurn"},
	},
	{
		id: "C-4.2.3-a", file: "guard/rollback/draft.go",
		old: "	case tampered:\n		return nil, &refusal{checkpoint.ErrTampered", now: "	case tampered && cp.ID == \"\":\n		return nil, &refusal{checkpoint.ErrTampered",
		breaks: "a rollback is accepted whose target does not verify", tests: []string{"TestCascade423RevokedKey"},
	},
	{
		id: "C-4.3.3-c", file: "guard/evidence/rollback_events.go",
		old:    "		Text(ect.MemberStatus, string(r.Status))\n	stateHashes(ext, r.Before, r.After)\n	others, failed",
		now:    "		Text(ect.MemberStatus, string(rollback.Completed))\n	stateHashes(ext, r.Before, r.After)\n	others, failed",
		breaks: "the token of a partial rollback says completed", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "C-4.3.3-c", file: "guard/rollback/run.go",
		old: "		return Partial, unknown, true", now: "		return Escalated, unknown, true",
		breaks: "a rollback of which a part is done is called escalated", tests: []string{"TestCascade442StatusWords"},
	},
	{
		id: "C-4.3.3-d", file: "guard/evidence/rollback_events.go",
		old: "	if len(failed) > 0 {\n		ext.Texts(ect.MemberFailedAgents, failed)\n	}", now: "	_ = failed",
		breaks: "the token names no agents that have failed", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "C-4.3.3-d", file: "guard/rollback/http_request.go",
		old: "		if status != Completed {\n			failed = append(failed, agent)", now: "		if status == Failed {\n			failed = append(failed, agent)",
		breaks: "agents that wait for a person are not named", tests: []string{"TestCascade442StatusWords"},
	},
	{
		id: "C-4.4.1-e", file: "guard/evidence/rollback_events.go",
		old: "ext.Text(ect.MemberStateBefore, h.Prefixed())", now: "ext.Text(ect.MemberStateBefore, hashOf(after).Prefixed())",
		breaks: "the state before is that after", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "C-4.4.1-e", file: "guard/evidence/rollback_events.go",
		old: "	ext.Outcomes(ect.MemberCascaded, others)\n	if len(failed)", now: "	ext.Outcomes(ect.MemberCascaded, others[:0])\n	if len(failed)",
		breaks: "cascaded is empty", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "A-checkpoint-placement-policy-c", file: "guard/call.go",
		old: "	if err == nil && x.policy != nil {\n		batch, err", now: "	if err == nil && x.policy != nil && x.r.Method != \"PUT\" && x.r.Method != \"DELETE\" {\n		batch, err",
		breaks: "PUT and DELETE have no checkpoint", tests: []string{"TestGuardedMethodsHaveCheckpoints"},
	},
	{
		id: "A-checkpoint-placement-policy-d", file: "guard/call.go",
		old: "	if err == nil && x.policy != nil {\n		batch, err", now: "	if err == nil && x.policy != nil && x.r.Method != \"PATCH\" {\n		batch, err",
		breaks: "PATCH has no checkpoint", tests: []string{"TestGuardedMethodsHaveCheckpoints"},
	},
	{
		id: "A-false-error-injection-b", file: "ect/verifier.go",
		old: "	case !o.alg.verify(", now: "	case false && !o.alg.verify(",
		breaks: "signatures need not hold", tests: []string{"TestCascade61Tokens"},
	},
	{
		id: "A-false-error-injection-b", file: "guard/rollback/http.go",
		old: "	case t.Level() < ect.L2:", now: "	case t.Level() < ect.L1:",
		breaks: "tokens without a signature ask for rollbacks", tests: []string{"TestCascade61UnsignedTokensAskForNothing"},
	},
	{
		id: "E-idempotency-a", file: "guard/rollback/request.go",
		old: "	if !bytes.Equal(h.Content, r.content()) ||", now: "	if len(h.Content) != len(r.content()) || !bytes.Equal(h.Content, h.Content) ||",
		breaks: "an id that was used gives its result to any request", tests: []string{"TestAERRRequests"},
	},
	{
		id: "E-idempotency-a", file: "guard/rollback/http.go",
		old: "	wanted.Checkpoint, wanted.Reason,", now: "	if q.dialect == ect.AERR {\n		said.id = t.ID()\n	}\n	wanted.Checkpoint, wanted.Reason,",
		breaks: "on AERR's path each token is a rollback of its own", tests: []string{"TestAERRRequests"},
	},
	{
		id: "E-rollback-request-c", file: "guard/rollback/plan.go",
		old: "		d.consequences(starts)", now: "		d.consequences(starts[:0])\n		d.scope = make([]bool, d.Places())\n		for _, i := range d.withGuards(roots) {\n			d.scope[i] = true\n		}\n		d.take(func(i int) bool { return d.scope[i] })",
		breaks: "cascade takes no consequences along", tests: []string{"TestAERRRequests"},
	},
	{
		id: "E-security-considerations-f", file: "guard/evidence/records.go",
		old: "	return ledger.Canonical(id)\n}\n", now: "	return ledger.Canonical(id)[:0]\n}\n",
		breaks: "errors may name any checkpoint", tests: []string{"TestAERRErrorsNameTheirCheckpoints"},
	},
	{
		id: "B-data-model-e", file: "guard/rollback/request.go",
		old: "Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency,", now: "Scope: r.Scope, Reason: r.Reason,",
		breaks: "the urgency is forgotten", tests: []string{"TestBriefRollbackRequest"},
	},
	{
		id: "B-data-model-e", file: "guard/rollback/journal.go",
		old: "string(r.Scope), r.Reason, r.Urgency} {", now: "string(r.Scope), r.Reason} {",
		breaks: "another urgency is the same request", tests: []string{"TestBriefRollbackRequest"},
	},
	{
		id: "A-partial-rollback-and-blast-radius-containment-d", file: "guard/rollback/http_request.go",
		old: "		if agent != own {\n			others", now: "		if agent != own && status != Completed {\n			others",
		breaks: "agents whose part is done are not in the blast radius", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "A-coordinated-circuit-breaking-a", file: "guard/circuits/circuits.go",
		old: "k.o.Sealer.Index(\"circuit\", key.Upstream, key.Class)", now: "k.o.Sealer.Index(\"circuit\", key.Class)",
		breaks: "breakers are recorded in one place", tests: []string{"TestCircuitsAreApartOverARestart"},
	},
	{
		id: "A-coordinated-circuit-breaking-b", file: "guard/circuits/circuits.go",
		old: "name = append(name, node[:lenNode]...)", now: "name = append(name, node[len(node)-lenNode+8:]...)",
		breaks: "nodes overwrite each other's breakers", tests: []string{"TestProcessFleetCircuits"},
	},
	{
		id: "G-three-layer-model-a", file: "guard/execution/recognize.go",
		old: "(!a.given || a.Key == a.own || v.named != nil) {", now: "(!a.given || a.Key == a.own || v.named != nil || a.Evidence != \"\") {",
		breaks: "a new key that was recognised is a new key again", tests: []string{"TestNewKeysThatAreAdvisory"},
	},
	{
		id: "C-3.3.2-c", file: "guard/refusals.go",
		old: "if open == nil {", now: "if true {",
		breaks: "breakers are not asked before the claim", tests: []string{"TestCircuitRefusesBeforeTheClaim"},
	},
	{
		id: "C-3.1.2-c", file: "caddymodule/proxy/answer.go",
		old: "			return \"no JSON\"", now: "			break",
		breaks: "an agent that answers nonsense is believed", tests: []string{"TestProcessContain"},
	},
	{
		id: "C-3.3.3-d", file: "guard/store/quota.go", dir: "guard/execution",
		old: "	h.aside = h.aside.plus(need)\n", now: "",
		breaks: "calls of a workflow that begin at once find the same room", tests: []string{"TestWorkflowRoomIsTakenOnce", "TestWorkflowsStoreNoMoreAtOnce"},
	},
	{
		id: "C-3.4.1-e", file: "breaker/cascade/exhaustion.go", dir: "breaker/cascade",
		old: "r.Refused > before.Refused", now: "r.Refused >= before.Refused",
		breaks: "a queue that nobody found full counts as exhausted", tests: []string{"TestExhaustion"},
	},
	{
		id: "C-3.1.1-b", file: "guard/evidence/cascade.go", dir: "guard/evidence",
		old: "	return *row.Record, nil\n", now: "	return \"\", nil\n",
		breaks: "the next process does not know where calls have failed", tests: []string{"TestFailuresOfBeforeARestart"},
	},
	{
		id: "C-3.3.3-b", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "if p.inUse < p.set.Total && l.inUse < p.set.PerWorkflow {", now: "if p.inUse < p.set.Total {",
		breaks: "a workflow takes the whole pool", tests: []string{"TestPerWorkflow"},
	},
	{
		id: "C-3.3.3-c", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\tcase w.granted:\n\t\tp.drop(l, w.came)\n", now: "\tcase w.granted:\n",
		breaks: "who leaves with its permit takes it along", tests: []string{"TestPermitOfWhoHasLeft"},
	},
	{
		id: "C-3.3.3-c", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\t\treturn p.giveUp(c, w, context.Cause(ctx)) // nobody waits for the answer", now: "\t\t\treturn nil",
		breaks: "a call whose client has left is sent", tests: []string{"TestPermitOfWhoHasLeft"},
	},
	{
		id: "C-3.3.3-d", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\tl.due = due\n\treturn again, nil", now: "\treturn again, nil",
		breaks: "the rate of a workflow has no limit", tests: []string{"TestRate"},
	},
	{
		id: "A-fair-share-scheduling-b", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\tcase l.inUse*p.active < p.set.Total:\n\t\t\tr.stage = 3\n", now: "",
		breaks: "no workflow has a base share", tests: []string{"TestEqualShares", "TestFairness"},
	},
	{
		id: "A-fair-share-scheduling-b", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\tl.used = max(l.used, p.virtual)\n", now: "",
		breaks: "who was away has saved up a claim", tests: []string{"TestWhoWasAwayHasNoClaim"},
	},
	{
		id: "A-fair-share-scheduling-c", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "cmp.Compare(r.stage, best.stage), cmp.Compare(best.class, r.class),", now: "cmp.Compare(r.stage, best.stage),",
		breaks: "what is left does not go to the higher class", tests: []string{"TestWhatIsLeftGoesToTheHigherClass"},
	},
	{
		id: "A-fair-share-scheduling-d", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\tif c.Class == Low {\n\t\twait = max(wait, starve)\n\t}\n", now: "",
		breaks: "low waits no longer than others", tests: []string{"TestWaitsEnd", "TestLowIsServedInTime"},
	},
	{
		id: "A-fair-share-scheduling-d", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\t\tr = rank{stage: 1, came: w.came}", now: "\t\t\tr = rank{stage: 4, came: w.came}",
		breaks: "nobody is served because it starves", tests: []string{"TestLowIsServedInTime"},
	},
	{
		id: "A-unsatisfiable-resource-hints-b", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\t\tr.stage = 2\n", now: "\t\t\tr.stage = 4\n",
		breaks: "critical waits behind others", tests: []string{"TestOrder"},
	},
	{
		id: "A-unsatisfiable-resource-hints-c", file: "breaker/bulkhead/bulkhead.go", dir: "breaker/bulkhead",
		old: "\t\tcase <-unserved.C:\n\t\t\treport()", now: "\t\tcase <-unserved.C:",
		breaks: "nobody hears of a critical call that waits", tests: []string{"TestWaitsEnd"},
	},
	{
		id: "C-3.1.2-d", file: "breaker/bulkhead/retries.go", dir: "breaker/bulkhead",
		old: "\ts.retries[0]++\n\treturn r, 0\n", now: "\treturn r, 0\n",
		breaks: "retries use up no budget", tests: []string{"TestRetryBudget"},
	},
	{
		id: "C-3.1.2-d", file: "breaker/bulkhead/retries.go", dir: "breaker/bulkhead",
		old: "\tif r := p.again[key]; r != nil && r.lot == l {", now: "\tif r := p.again[key]; false && r != nil && r.lot == l {",
		breaks: "retries with one key each take a place", tests: []string{"TestOneKeyIsOneRetry"},
	},
	{
		id: "C-3.4.2-b", file: "breaker/cascade/clusters.go", dir: "breaker/cascade",
		old: "(o.by == \"\" || o.workflow == workflow) {", now: "(o.by == \"\" || workflow != \"\") {",
		breaks: "reports of workflows are added up", tests: []string{"TestReportsStayInTheirWorkflow"},
	},
	{
		id: "C-3.4.2-c", file: "breaker/cascade/links.go", dir: "breaker/cascade",
		old: "\t\t\tlast = cmp.Or(last, y)\n\t\t\td.explain(x, y, false)\n", now: "\t\t\tlast = cmp.Or(last, y)\n\t\t\td.explain(y, x, false)\n",
		breaks: "the caller is blamed for the callee", tests: []string{"TestDepthFirst"},
	},
	{
		id: "C-3.4.2-d", file: "breaker/cascade/links.go", dir: "breaker/cascade",
		old: " && 3*len(same) >= calls {", now: " && calls > 0 {",
		breaks: "failures side by side are never chance", tests: []string{"TestIndependentFailures"},
	},
	{
		id: "C-3.4.2-d", file: "breaker/cascade/links.go", dir: "breaker/cascade",
		old: "range newest(p.calls) {\n\t\t\td.work++\n\t\t\ty := ", now: "range newest(p.children) {\n\t\t\td.work++\n\t\t\ty := ",
		breaks: "what agents add beside calls hides that these fail", tests: []string{"TestFloodAmongSiblings"},
	},
	{
		id: "C-3.4.2-a", file: "breaker/cascade/cascade.go", dir: "breaker/cascade",
		old: "!own && (f.By != v.agent.name || well) {", now: "!own && well {",
		breaks: "agents report failures of others", tests: []string{"TestStrangersAndLiars"},
	},
	{
		id: "C-3.4.2-a", file: "breaker/cascade/graph.go", dir: "breaker/cascade",
		old: "\t\ta := g.payers[0]\n", now: "\t\ta := g.payers[len(g.payers)-1]\n",
		breaks: "whoever has the least loses its nodes", tests: []string{"TestForgetting"},
	},
	{
		id: "C-3.1.2-b", file: "breaker/cascade/links.go", dir: "breaker/cascade",
		old: "\t\tif len(agents.list) > 1 && ", now: "\t\tif ",
		breaks: "one agent makes a target fail for others", tests: []string{"TestTargetsOfOneAgent"},
	},
	{
		id: "C-3.1.2-b", file: "breaker/cascade/findings.go", dir: "breaker/cascade",
		old: "\t\tif others[p] {", now: "\t\tif others[p] && p == nil {",
		breaks: "a target is blamed for services that fail without it", tests: []string{"TestTargetsOfOneAgent"},
	},
	{
		id: "C-3.1.2-b", file: "guard/evidence/cascade.go", dir: "guard/evidence",
		old: "\tif c.Guard == \"\" || c.Guard == c.Target {\n\t\treturn\n\t}\n\ta := &e.about", now: "\tif c.Guard != \"\" {\n\t\treturn\n\t}\n\ta := &e.about",
		breaks: "no answer about a target is counted", tests: []string{"TestAnswersAreCountedByTarget"},
	},
	{
		id: "C-3.4.1-d", file: "breaker/cascade/latency.go", dir: "breaker/cascade",
		old: "\tcase !l.spiking && enough:\n\t\tl.usual += ", now: "\tcase l.usual > 0 && enough:\n\t\tl.usual += ",
		breaks: "a spike raises the baseline", tests: []string{"TestLatencySpike"},
	},
	{
		id: "C-3.4.3-d", file: "guard/cascades/watch.go", dir: "guard/cascades",
		old: "\t\tif asked != \"\" {\n\t\t\tpart.Escalation = asked\n", now: "\t\tif asked != \"\" && part == nil {\n\t\t\tpart.Escalation = asked\n",
		breaks: "a failure that spreads is asked about twice", tests: []string{"TestOneQuestionForAFailureThatSpreads"},
	},
}
