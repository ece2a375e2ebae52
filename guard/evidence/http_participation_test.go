package evidence_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// C-6.2-b: whoever reports an error has to do with every parent of it, and with the
// checkpoint that it names. A node of one's own beside somebody else's is no bridge.
func TestErrorsOfStrangers(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
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

	// Who takes part may report all of it.
	next := g.add(mallory, flow, "act", nil, task)
	c = anError(next)
	c.Parents = []string{next.ID(), task.ID(), ckpt.ID()}
	g.post(anonymous, g.token(mallory, c).Raw()).read(201, &struct{}{})
}

// What was recorded before strangers were refused, or without a signature, changes no
// state, and joins nothing.
func TestStrangersReportInVain(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(gateway, flow, "pay", ofCall("completed", callerKey), task, ckpt)
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
	for _, who := range []router.Reader{asMallory, {Issuer: mallory}, {Caller: asMallory.Caller}} {
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

// What others record beside somebody's part, however much, keeps nobody from reporting what
// it takes part in, nor from reading it (B2).
func TestManyOthersHideNothing(t *testing.T) {
	g := newGate(t, func(o *Ledger) { o.MaxNodes = 100 })
	hub := g.add(mallory, flow, "act", nil)
	for n := range 150 {
		var parents []string
		if n%2 == 0 {
			parents = []string{hub.ID()}
		}
		g.put(ledger.Event{ID: fmt.Sprint("flood", n), Workflow: flow, Issuer: mallory, Action: "act", Payload: []byte("token"), Parents: parents})
	}
	task := g.add(alice, flow, "act", nil, hub) // the hub's last follower but one
	other := g.token(gateway, ect.Claims{Workflow: flow, Action: "checkpoint", Ext: checkpointToken(), Parents: []string{task.ID()}})
	g.put(events(other)...)
	done := g.outcome(flow, callerKey, other)
	mine := g.token(bob, ect.Claims{Workflow: flow, Action: "act", Parents: []string{done.ID()}})
	g.put(events(mine)...)
	c := anError(mine)
	c.Parents = []string{task.ID(), done.ID()}
	g.post(anonymous, g.token(bob, c).Raw()).read(201, &struct{}{})
	for _, who := range []router.Reader{{Issuer: bob}, asAlice, asCaller} {
		for _, path := range []string{
			"ledger/entries?jti=" + task.ID(), "ledger/entries?jti=" + done.ID() + "&wid=" + flow, "checkpoints/" + other.ID(), "ledger/entries/153",
		} {
			if got := g.get(path, who); got.Code != 200 {
				t.Errorf("%s for %+v: %d %s", path, who, got.Code, got.Body)
			}
		}
		if takes, err := g.TakesPart(t.Context(), flow, other.ID(), who); !takes || err != nil {
			t.Errorf("%+v: %t, %v", who, takes, err)
		}
	}
	// Strangers see no more than before.
	apart := g.add(bob, flow, "act", nil)
	g.post(anonymous, g.token(alice, anError(apart)).Raw()).refused(403, "ect-invalid", "parent-unknown")
	stranger := router.Reader{Issuer: "spiffe://example.com/agent/eve"}
	g.get("ledger/entries?jti="+task.ID(), stranger).refused(404, "entry-unknown", "")
}

// Whoever takes part in a workflow reads of it what the page of the workflow shows, whatever
// the workflow looks like.
func TestPartsAreWhatTheWorkflowShows(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 51))
			g := newGate(t)
			var all []*ect.Token
			some := func() (parents []*ect.Token) {
				for range min(r.IntN(3), len(all)) {
					if p := all[r.IntN(len(all))]; !slices.Contains(parents, p) {
						parents = append(parents, p)
					}
				}
				return parents
			}
			for range 30 {
				who := []string{alice, bob, mallory}[r.IntN(3)]
				switch r.IntN(5) {
				case 0: // what agents report joins nothing
					all = append(all, g.add(who, flow, "error", ext().Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, ""), some()...))
				case 1:
					c := g.add(gateway, flow, "checkpoint", checkpointToken(), some()...)
					all = append(all, c, g.outcome(flow, [][16]byte{callerKey, asMallory.Caller}[r.IntN(2)], c))
				case 2: // a parent that nobody has recorded
					lost := g.token(alice, ect.Claims{Workflow: flow, Action: "act"})
					all = append(all, g.add(who, flow, "act", nil, lost), g.add(bob, flow, "act", nil, lost))
				case 3: // nobody's word
					e := events(g.token(who, ect.Claims{Workflow: flow, Action: "act", Parents: idsOf(some())}))
					e[0].Issuer = ""
					g.put(e...)
				default:
					all = append(all, g.add(who, flow, "act", nil, some()...))
				}
			}
			for _, who := range []router.Reader{asAlice, {Issuer: bob}, {Issuer: mallory}, asMallory, asCaller, {Issuer: "spiffe://example.com/agent/eve"}} {
				var doc workflowDoc
				if got := g.get("workflows/"+flow, who); got.Code == 200 {
					got.read(200, &doc)
				}
				for _, token := range all {
					want := slices.ContainsFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == token.ID() })
					if takes, err := g.TakesPart(t.Context(), flow, token.ID(), who); takes != want || err != nil {
						t.Errorf("%+v and %s of %s: %t %v, want %t", who, token.Action(), token.Issuer(), takes, err, want)
					}
				}
			}
		})
	}
}
