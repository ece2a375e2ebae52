package main

// mutations are the changes that are tried. Each of them once went unnoticed by the tests
// that the requirement's row named, or is of that kind.
var mutations = []mutation{
	{
		id: "C-3.2.4-a", file: "caddymodule/circuit_state.go",
		old:    "	if ev.To == breaker.Open {\n		e.forCalls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		now:    "	if ev.From == breaker.HalfOpen && ev.To == breaker.Open {\n		return\n	}\n	if ev.To == breaker.Open {\n		e.forCalls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		breaks: "a probe that fails is not told", tests: []string{"TestCascade324TokensOfABreaker"},
	},
	{
		id: "C-3.2.4-a", file: "caddymodule/circuit_state.go",
		old:    "	if ev.To == breaker.Open {\n		e.forCalls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		now:    "	if ev.To == breaker.HalfOpen {\n		return\n	}\n	if ev.To == breaker.Open {\n		e.forCalls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)",
		breaks: "a breaker that probes is not told", tests: []string{"TestCascade324TokensOfABreaker"},
	},
	{
		id: "C-4.2.2-a", file: "guard/checkpoint/prepare.go",
		old: "expires: s.Expires.Add(t.TTL / 2)", now: "expires: s.Created.Add(t.TTL / 2)",
		breaks: "snapshots go after half of their ttl", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "C-4.2.2-a", file: "guard/record.go",
		old: "return now.Add(max(ttl+ttl/2, x.call.KeepResult))", now: "_ = ttl\n	return now.Add(x.call.KeepResult)",
		breaks: "the ledger keeps checkpoints as long as results", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "A-checkpoint-ect-format-e", file: "guard/record.go",
		old: "return now.Add(max(ttl+ttl/2, x.call.KeepResult))", now: "return now.Add(min(ttl/2, x.call.KeepResult))",
		breaks: "the ledger keeps checkpoints for half of their ttl", tests: []string{"TestCascade422KeptForItsTTL"},
	},
	{
		id: "C-4.2.3-a", file: "guard/rollback/step.go",
		old: "case damaged || tampered:", now: "case damaged || tampered && reasonTampered == \"\":",
		breaks: "a step goes on with a token that was altered", tests: []string{"TestCascade423VerifiedAtItsTurn"},
	},
	{
		id: "C-4.2.3-a", file: "guard/rollback/accept.go",
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
		id: "C-4.3.3-d", file: "guard/evidence/rollback_events.go",
		old: "		if status != rollback.Completed {\n			failed = append(failed, agent)", now: "		if status == rollback.Failed {\n			failed = append(failed, agent)",
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
		id: "A-checkpoint-placement-policy-c", file: "guard/record.go",
		old: "	x.call.Checkpoint = \"\"\n	if s.policy == nil {", now: "	x.call.Checkpoint = \"\"\n	if s.policy == nil || x.r.Method == \"PUT\" || x.r.Method == \"DELETE\" {",
		breaks: "PUT and DELETE have no checkpoint", tests: []string{"TestGuardedMethodsHaveCheckpoints"},
	},
	{
		id: "A-checkpoint-placement-policy-d", file: "guard/record.go",
		old: "	x.call.Checkpoint = \"\"\n	if s.policy == nil {", now: "	x.call.Checkpoint = \"\"\n	if s.policy == nil || x.r.Method == \"PATCH\" {",
		breaks: "PATCH has no checkpoint", tests: []string{"TestGuardedMethodsHaveCheckpoints"},
	},
	{
		id: "A-false-error-injection-b", file: "ect/verifier.go",
		old: "	case !o.alg.verify(", now: "	case false && !o.alg.verify(",
		breaks: "signatures need not hold", tests: []string{"TestCascade61Tokens"},
	},
	{
		id: "A-false-error-injection-b", file: "guard/api/rollback.go",
		old: "	case t.Level() < ect.L2:", now: "	case t.Level() < ect.L1:",
		breaks: "tokens without a signature ask for rollbacks", tests: []string{"TestCascade61UnsignedTokensAskForNothing"},
	},
	{
		id: "E-idempotency-a", file: "guard/rollback/accept.go",
		old: "	if !bytes.Equal(h.Content, r.content()) ||", now: "	if len(h.Content) != len(r.content()) || !bytes.Equal(h.Content, h.Content) ||",
		breaks: "an id that was used gives its result to any request", tests: []string{"TestAERRRequests"},
	},
	{
		id: "E-idempotency-a", file: "guard/api/rollback.go",
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
		old: "	return Canonical(id)\n}\n", now: "	return Canonical(id)[:0]\n}\n",
		breaks: "errors may name any checkpoint", tests: []string{"TestAERRErrorsNameTheirCheckpoints"},
	},
	{
		id: "B-data-model-e", file: "guard/rollback/journal.go",
		old: "Scope: h.Scope, Reason: h.Reason, Urgency: h.Urgency,", now: "Scope: h.Scope, Reason: h.Reason,",
		breaks: "the urgency is forgotten", tests: []string{"TestBriefRollbackRequest"},
	},
	{
		id: "B-data-model-e", file: "guard/rollback/journal.go",
		old: "string(r.Scope), r.Reason, r.Urgency, r.By, r.Operator}", now: "string(r.Scope), r.Reason, r.By, r.Operator}",
		breaks: "another urgency is the same request", tests: []string{"TestBriefRollbackRequest"},
	},
	{
		id: "A-partial-rollback-and-blast-radius-containment-d", file: "guard/evidence/rollback_events.go",
		old: "		if agent != own {\n			others", now: "		if agent != own && status != rollback.Completed {\n			others",
		breaks: "agents whose part is done are not in the blast radius", tests: []string{"TestCascade441TokensOfARollback"},
	},
	{
		id: "A-coordinated-circuit-breaking-a", file: "caddymodule/circuit_state.go",
		old: "e.ring.Index(\"circuit\", key.Upstream, key.Class)", now: "e.ring.Index(\"circuit\", key.Class)",
		breaks: "breakers are recorded in one place", tests: []string{"TestCircuitsAreApartOverARestart"},
	},
	{
		id: "G-three-layer-model-a", file: "guard/execution/recognize.go",
		old: "!a.given || a.Key == a.own || v.named != nil {", now: "!a.given || a.Key == a.own || v.named != nil || a.Evidence != \"\" {",
		breaks: "a new key that was recognised is a new key again", tests: []string{"TestNewKeysThatAreAdvisory"},
	},
	{
		id: "C-3.3.2-c", file: "guard/refusals.go",
		old: "if open == nil && x.action.Dependency != nil {", now: "if false {",
		breaks: "breakers behind the upstream are not asked for", tests: []string{"TestProcessDependsOn"},
	},
	{
		id: "C-3.1.2-c", file: "caddymodule/proxy/answer.go",
		old: "			return \"no JSON\"", now: "			break",
		breaks: "an agent that answers nonsense is believed", tests: []string{"TestProcessContain"},
	},
	{
		id: "C-3.3.3-d", file: "guard/execution/quota.go", dir: "guard/execution",
		old: "	u.State.reserved += need\n", now: "	_ = need\n",
		breaks: "calls of a workflow that begin at once find the same room", tests: []string{"TestWorkflowRoomIsTakenOnce", "TestWorkflowsStoreNoMoreAtOnce"},
	},
	{
		id: "C-3.4.1-e", file: "breaker/cascade/exhaustion.go", dir: "breaker/cascade",
		old: "r.Refused > before.Refused", now: "r.Refused >= before.Refused",
		breaks: "a queue that nobody found full counts as exhausted", tests: []string{"TestExhaustion"},
	},
	{
		id: "C-3.1.1-b", file: "guard/evidence/cascade.go", dir: "guard/evidence",
		old: "	return string(upstream), nil\n", now: "	_ = upstream\n	return \"\", nil\n",
		breaks: "the next process does not know where calls have failed", tests: []string{"TestFailuresOfBeforeARestart"},
	},
}
