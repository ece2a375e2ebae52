package graph_test

import (
	"strings"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-6.2-b: whoever tells of an error has to do with every parent of it, and with the
// checkpoint that it names. A node of one's own beside somebody else's is no bridge.
func TestErrorsOfStrangers(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	root := g.add(mallory, flow, "act", nil)
	own := g.token(mallory, anError(root))
	of := func(checkpoint string, parents ...*ect.Token) reply {
		c := anError(root)
		c.Parents = idsOf(parents)
		c.Ext = ext().Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, checkpoint)
		return g.post(anonymous, g.token(mallory, c).Raw())
	}
	unknown := of("", task)
	unknown.refused(403, "ect-invalid", "parent-unknown")
	same(t, "a bridge", unknown, of("", root, task))
	same(t, "a bridge, the other way round", unknown, of("", task, root))
	same(t, "the gateway's word", unknown, of("", root, ckpt))
	of(ckpt.ID(), root).refused(403, "ect-invalid", "ext")
	of(strings.ToUpper(ckpt.ID()), root).refused(403, "ect-invalid", "ext")
	second := g.token(mallory, anError(root))
	c := anError(root)
	c.Parents = []string{second.ID(), task.ID()}
	same(t, "behind an error of one's own", unknown, g.post(anonymous, second.Raw(), g.token(mallory, c).Raw()))
	if g.recorded != 0 {
		t.Fatalf("recorded %d times", g.recorded)
	}
	g.post(anonymous, own.Raw()).read(201, &struct{}{})

	// Who takes part may tell of all of it.
	next := g.add(mallory, flow, "act", nil, task)
	c = anError(next)
	c.Parents = []string{next.ID(), task.ID(), ckpt.ID()}
	g.post(anonymous, g.token(mallory, c).Raw()).read(201, &struct{}{})
}

// What was recorded before strangers were refused, or without a signature, changes no
// state, and joins nothing.
func TestStrangersTellInVain(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	g.add(gateway, flow, "pay", ofCall("completed", caller), task, ckpt)
	root := g.add(mallory, flow, "act", nil)
	critical := func(checkpoint string) *ect.ExtBuilder {
		return ext().Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, checkpoint)
	}
	bridge := g.add(mallory, flow, "error", critical(""), root, task)
	g.add(mallory, flow, "error", critical(ckpt.ID()), root)
	g.add(mallory, flow, "aerr:error", critical(""), ckpt)
	g.add(mallory, flow, "rollback_start", ext().Text(ect.MemberCheckpointID, ckpt.ID()), ckpt)
	g.add(mallory, flow, "atd:rollback_request", nil, ckpt)
	g.add(mallory, flow, "workflow_complete", ext().Text(ect.MemberTerminalStatus, "failed"), task)

	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	for _, n := range doc.Nodes {
		if n.Iss != mallory && (n.State != "done" && n.State != "" || n.Detail != "" || n.WorstSeverity != "") {
			t.Errorf("%+v", n)
		}
	}
	if doc.Status != "success" || doc.Stated != "" {
		t.Errorf("%s, %s is stated", doc.Status, doc.Stated)
	}
	behind := g.add(mallory, flow, "act", nil, bridge)
	g.add(gateway, flow, "pay", ofCall("completed", asMallory.Caller), bridge)
	for _, who := range []Reader{asMallory, {Issuer: mallory}, {Caller: asMallory.Caller}} {
		g.get("workflows/"+flow, who).read(200, &doc)
		for _, n := range doc.Nodes {
			if n.JTI == task.ID() || n.JTI == ckpt.ID() {
				t.Errorf("%+v sees %+v", who, n)
			}
		}
		for _, path := range []string{"ledger/entries/0", "ledger/entries?jti=" + task.ID() + "&wid=" + flow} {
			g.get(path, who).refused(404, "entry-unknown", "")
		}
	}
	// Who has taken over from an error follows from that, and sees no more.
	g.get("ledger/entries?jti="+behind.ID(), asMallory).read(200, &struct{}{})
}

// An error of what was told a moment ago waits for that.
func TestErrorOfWhatWaits(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	hold(t, g)
	next := g.token(mallory, ect.Claims{Workflow: flow, Action: "act", Parents: []string{task.ID()}})
	if err := g.log.Append(t.Context(), events(next)); err != nil {
		t.Fatal(err)
	}
	g.onRecord = func([]*ect.Token) error { return nil }
	c := anError(next)
	c.Parents = []string{task.ID()}
	go g.release()
	g.post(anonymous, g.token(mallory, c).Raw()).read(201, &struct{}{})
}
