//go:build unix

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// star is a gateway before others, which stand before one restLab: the first of them has its
// charges, the second its documents. Each has its own store and trusts the agent and the others.
type star struct {
	t       *testing.T
	a       *agent
	lab     *restLab
	sites   []*procSite
	running []*procGateway
	saga    *saga
}

func starIdentity(n int) string {
	if n == 0 {
		return gatewayIdentity
	}
	return fmt.Sprintf("%s/%d", gatewayIdentity, n)
}

// newStar starts the gateways; options are further ones of the first one's block. The agent issues
// its tokens for all of them. With stages, one for each, they wait there at each commit.
func newStar(t *testing.T, options string, stages ...*procStages) *star {
	t.Helper()
	c := layStar(t)
	for i, stage := range stages {
		c.sites[i].store = "staged " + c.sites[i].path("data") + " " + stage.url
	}
	for i := 1; i < len(c.sites); i++ {
		c.a.also = append(c.a.also, starIdentity(i))
		c.sites[i].app += "rollback {\n coordinators " + gatewayIdentity + "\n }"
	}
	c.sites[0].app += options
	c.before(0, c.behind(1, "/charges /mail"), c.behind(2, "/docs/*"))
	return c.begin()
}

// layStar makes the sites of three gateways, each before the restLab, and starts none. They trust the agents.
func layStar(t *testing.T, agents ...*agent) *star {
	t.Helper()
	const n = 3
	c := &star{t: t, a: newAgent(t, "a"), lab: newRestLab(t)}
	type set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	var all set
	add := func(ring *ect.Ring, owner string) {
		text, err := ring.PublicSet(time.Now(), owner)
		if err != nil {
			t.Fatal(err)
		}
		var one set
		if err := json.Unmarshal(text, &one); err != nil {
			t.Fatal(err)
		}
		all.Keys = append(all.Keys, one.Keys...)
	}
	for _, a := range append(agents, c.a) {
		add(a.ring, a.issuer.Identity())
	}
	for i := range n {
		site := procNewSite(t, c.lab.addr)
		ring, err := ect.CreateRing(site.path("identity"), ect.ES256)
		if err != nil {
			t.Fatal(err)
		}
		add(ring, starIdentity(i))
		c.sites = append(c.sites, site)
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	keys := filepath.Join(c.sites[0].dir, "all.jwks")
	if err := os.WriteFile(keys, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, site := range c.sites {
		site.app = fmt.Sprintf("identity %s {\n key_file %s\n public_url http://%s\n }\n trust {\n jwks_file %s\n allow_partial\n }\n",
			starIdentity(i), site.path("identity"), site.addr, keys)
		site.guard = sagaActions
		site.store = "badger " + site.path("data")
	}
	return c
}

// before makes a gateway stand before others, instead of the restLab.
func (c *star) before(n int, ways ...string) {
	first := c.sites[n]
	first.raw = fmt.Sprintf(`{
	admin %s
	persist_config off
	agent_guard {
		store %s
		%s
	}
}
http://%s {
	bind 127.0.0.1
	agent_guard_endpoints
	%s
}`, first.admin, first.store, first.app, first.addr, strings.Join(ways, "\n\t"))
}

// begin starts the gateways.
func (c *star) begin() *star {
	c.t.Helper()
	c.running = make([]*procGateway, len(c.sites))
	for i := range c.sites {
		c.start(i)
	}
	c.saga = c.sites[0].gateway(c.t).saga(c.a)
	return c
}

// behind is the way to the gateway at a place, for these paths.
func (c *star) behind(n int, paths string) string {
	at, is := c.sites[n].addr, starIdentity(n)
	return fmt.Sprintf("@g%d path %s\n agent_proxy @g%d %s {\n name g%d\n identity %s\n action next {\n match path %s\n delegate http://%s/.well-known/cascade/rollback %s\n }\n }",
		n, paths, n, at, n, is, paths, at, is)
}

// parts are the rollbacks of a gateway.
func (c *star) parts(i int) (all []rollbackDoc) {
	c.t.Helper()
	status, text, err := c.running[i].admin("GET", "/agent_guard/rollbacks", "", "")
	if err != nil || status != http.StatusOK {
		c.t.Fatalf("%d %s, %v", status, text, err)
	}
	var page struct{ Rollbacks []rollbackDoc }
	if err := json.Unmarshal([]byte(text), &page); err != nil {
		c.t.Fatal(err)
	}
	for _, r := range page.Rollbacks {
		status, text, err := c.running[i].admin("GET", "/agent_guard/rollback/"+r.ID, "", "")
		var doc rollbackDoc
		if err = errors.Join(err, json.Unmarshal([]byte(text), &doc)); err != nil || status != http.StatusOK {
			c.t.Fatalf("%d %s, %v", status, text, err)
		}
		all = append(all, doc)
	}
	return all
}

func (c *star) start(i int) { c.running[i] = c.sites[i].start(c.t) }

// Cascade 4.3.2 over three gateways: the first one's rollback is prepared at the others before
// anything is undone, and undone by them, level by level, under the checkpoints that their answers
// have named. It counts as done because they have signed that.
func TestProcessParticipants(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	doc := s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	leaf := s.do(charge(2), doc.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	first := s.prepare(asked, http.StatusOK)
	if first.Status != "prepared" || len(first.Steps) != 3 {
		t.Errorf("%+v", first)
	}
	c.lab.arrived("POST /refunds", 0)
	// The others hold back what would follow there, too.
	behind := *s
	behind.g = c.sites[1].gateway(t)
	late := behind.calling(charge(3), root.checkpoint)
	late.header[ect.FieldName] = s.a.issue(ect.Claims{Workflow: s.wid, Parents: []string{root.checkpoint}}).Raw()
	behind.g.call(late).problem(t, http.StatusConflict, "workflow-paused")

	done := document[rollbackDoc](t, s.g.call(s.executing(asked, first.PlanHash)))
	done.want(t, "completed")
	for i, at := range []int{1, 2, 1} { // what each step says of who has done it
		if done.Steps[i].Via != starIdentity(at) {
			t.Errorf("step %d: %+v", i, done.Steps[i])
		}
	}
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantCharge(leaf.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
	c.lab.arrived("POST /refunds", 2)
	// P6: a participant says only what it has done itself. What the coordinator undoes has no step
	// there, and no token.
	for _, part := range c.parts(1) {
		if part.Status != "completed" || len(part.Steps) != 1 || len(part.Elsewhere) != 1 || part.Steps[0].Via != "" {
			t.Errorf("%+v", part)
		}
		if state := behind.view().state(part.Elsewhere[0]); state == "rolled_back" || state == "none" {
			t.Errorf("what the coordinator undoes is %s", state)
		}
	}
	c.lab.wantEffects("charged "+root.id(t), "changed /docs/x", "charged "+leaf.id(t), "refunded "+leaf.id(t), "changed /docs/x", "refunded "+root.id(t))
	// What each of them has signed is in the coordinator's ledger, and the coordinator's own node of the step follows
	// from it: a third party sees who says that it is undone.
	signed, named := map[string]string{}, map[string]int{}
	var own []*ect.Unverified
	c.sites[0].exported(t, func(token *ect.Unverified) {
		switch {
		case token.Action() != "rollback_complete":
		case token.Issuer() == gatewayIdentity:
			own = append(own, token)
		default:
			signed[token.ID()] = token.Issuer()
		}
	})
	for _, token := range own {
		for _, parent := range token.Parents() {
			if by := signed[parent]; by != "" {
				named[by]++
			}
		}
	}
	if len(signed) != 3 || named[starIdentity(1)] != 2 || named[starIdentity(2)] != 1 {
		t.Errorf("signed: %v, named: %v", signed, named)
	}
}

// A token in `_meta` that is for the first gateway alone stays there, like one in the header; the second
// one would refuse the call because of it (ADR 0086). What both may have goes on in its place, and a
// hash of the message fits at both.
func TestProcessTokensOfMessagesInARow(t *testing.T) {
	t.Parallel() // its gateways are processes
	tools, addr := newToolServer(t)
	c := layStar(t)
	c.before(1, "agent_proxy "+addr+" {\n protocol mcp\n }")
	c.before(0, fmt.Sprintf("agent_proxy %s {\n identity %s\n protocol mcp\n }", c.sites[1].addr, starIdentity(1)))
	s := c.begin().saga
	alone := s.a.issue(ect.Claims{Workflow: s.wid})
	both := s.a.issue(ect.Claims{Workflow: s.wid, Audience: []string{gatewayIdentity, starIdentity(1)}, Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"pay"}}`))})
	header := s.a.issue(ect.Claims{Workflow: s.wid})
	for i, r := range []request{
		message(toolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":%q,"progressToken":7}`, alone.Raw()))),
		message(toolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":[%q]}`, both.Raw()))),
		with(header, message(toolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":%q}`, header.Raw())))),
	} {
		want := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":%d}}`, i+1)
		s.g.call(r).want(t, 200, want, "executed")
		s.g.call(r).want(t, 200, want, "replayed")
	}
	if tools.count("pay") != 3 {
		t.Errorf("%d calls", tools.count("pay"))
	}
	// What changes nothing goes through both as well, by its message and by its method.
	ping := func(meta string) request {
		return message(fmt.Sprintf(`{"jsonrpc":"2.0","id":9,"method":"ping"%s}`, meta))
	}
	fresh := func(audience ...string) *ect.Token {
		return s.a.issue(ect.Claims{Workflow: s.wid, Audience: audience})
	}
	for name, r := range map[string]request{
		"header":         with(fresh(), ping("")),
		"_meta":          ping(fmt.Sprintf(`,"params":{"_meta":{"execution-context":%q,"progressToken":7}}`, fresh().Raw())),
		"_meta for both": ping(fmt.Sprintf(`,"params":{"_meta":{"execution-context":%q}}`, fresh(gatewayIdentity, starIdentity(1)).Raw())),
		"GET":            with(fresh(), request{method: "GET", path: "/"}),
	} {
		if got := s.g.call(r); got.status/100 != 2 || strings.Contains(got.body, `"error"`) {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
}

// P6: what the next gateway refuses before it sends anything has not run. It leaves no doubt at the
// first one, and the caller comes again under the same id: once people have decided there, it runs,
// once. A rollback of the refused attempt has nothing to undo.
func TestProcessRefusedByTheNextGateway(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := layStar(t)
	for i := 1; i < len(c.sites); i++ {
		c.a.also = append(c.a.also, starIdentity(i))
		c.sites[i].app += "rollback {\n coordinators " + gatewayIdentity + "\n }"
	}
	c.sites[1].guard = strings.Replace(sagaActions, "match path /charges", "match path /charges\n approve", 1)
	c.before(0, c.behind(1, "/charges /mail"), c.behind(2, "/docs/*"))
	s := c.begin().saga
	pay := charge(7)
	pay.id = "order-7"
	first := s.try(pay)
	if first.status != http.StatusConflict || first.slug() != "approval-required" || first.header.Get("Execution-Status") != "refused" || first.header.Get("Retry-After") != "30" {
		t.Fatalf("%d %v %s", first.status, first.header, first.body)
	}
	if again := s.try(pay); again.slug() != "approval-required" || again.escalation(t) != first.escalation(t) {
		t.Fatalf("again: %d %s", again.status, again.body)
	}
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: first.checkpoint, Scope: "single"}).want(t, "completed")
	c.lab.wantEffects()

	pay.id = "order-8"
	asked := s.try(pay)
	c.sites[1].decides(t, "approve", asked.escalation(t))
	paid := s.try(pay)
	if paid.status != http.StatusCreated {
		t.Fatalf("approved: %d %s", paid.status, paid.body)
	}
	if again := s.try(pay); again.body != paid.body || again.header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v %s", again.status, again.header, again.body)
	}
	s.back(rollbackBody{ID: rollbackID(2), Checkpoint: paid.checkpoint, Scope: "single"}).want(t, "completed")
	c.lab.wantEffects("charged "+paid.id(t), "refunded "+paid.id(t))
}

// C-4.3.2-h, C-4.3.3-a to -d: who cannot prepare is not asked to execute; the others are undone,
// and the result names the agent. Where it is the call that is asked for, nothing is undone
// without an approval.
func TestProcessParticipantCannotPrepare(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, undoesParts)
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(put("/docs/x", `{"n":2}`))
	charged := s.do(charge(1), root.checkpoint)
	s.do(request{path: "/mail"}, root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc)
	}
	c.lab.arrived("POST /refunds", 0)
	done := s.back(asked)
	done.want(t, "partial", "irreversible")
	if len(done.Failed) == 0 || len(done.Escalations) == 0 {
		t.Errorf("%+v", done)
	}
	c.lab.wantCharge(charged.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":1}`)

	s = c.sites[0].gateway(t).saga(c.a)
	c.lab.write("/docs/y", `{"n":1}`)
	mail := s.do(request{path: "/mail"})
	s.do(put("/docs/y", `{"n":2}`), mail.checkpoint)
	b := rollbackBody{ID: rollbackID(2), Checkpoint: mail.checkpoint, Scope: "sub_dag"}
	c.sites[0].decides(t, "deny", s.waits(b).Waits)
	s.finished(b.ID).want(t, "escalated", "denied", "irreversible")
	c.lab.wantDoc("/docs/y", `{"n":2}`)
}

// By default (`partial never`) nothing is undone where a part cannot be, unless people approve that.
func TestProcessParticipantPartialNever(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(put("/docs/x", `{"n":2}`))
	s.do(request{path: "/mail"}, root.checkpoint)
	b := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	c.sites[0].decides(t, "deny", s.waits(b).Waits)
	s.finished(b.ID).want(t, "escalated", "irreversible", "denied")
	c.lab.wantDoc("/docs/x", `{"n":2}`)
}

// A participant that is dead at prepare cannot prepare: `unreachable`. What the others have
// reserved ends by itself.
func TestProcessParticipantDeadAtPrepare(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, undoesParts)
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	c.running[2].kill()
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.prepare(asked, http.StatusConflict)
	if len(doc.Agents) != 1 || doc.Agents[0].Reason != "unreachable" {
		t.Errorf("%+v", doc)
	}
	c.lab.arrived("POST /refunds", 0)
	s.back(asked).want(t, "partial", "unreachable")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":2}`)
}

// A participant that dies between the phases is asked until it is back; the level above it waits.
func TestProcessParticipantDeadAtExecute(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	hash := s.prepare(asked, http.StatusOK).PlanHash
	c.running[2].kill()
	r := s.executing(asked, hash)
	r.header["Prefer"] = "wait=1"
	if got := s.g.call(r); got.status != http.StatusAccepted {
		t.Fatalf("%d %s", got.status, got.body)
	}
	c.lab.arrived("POST /refunds", 0) // the barrier
	c.start(2)
	s.finished(asked.ID).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
	c.lab.arrived("POST /refunds", 1)
}

// The coordinator, and then the participant, dies while a participant undoes: the rollback goes on
// from the journals, and nothing is undone twice.
func TestProcessParticipantsCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, dies := range []int{0, 1} {
		c := newStar(t, "")
		s := c.saga
		root := s.do(charge(1))
		leaf := s.do(charge(2), root.checkpoint)
		hold := newGate(t)
		c.lab.on("POST /refunds", 1, restWaits(hold))
		asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
		s.begun(asked)
		wait(t, hold.arrived, "the refund")
		c.running[dies].kill()
		hold.open()
		c.start(dies)
		s.finished(asked.ID).want(t, "completed")
		c.lab.wantCharge(root.id(t), "refunded")
		c.lab.wantCharge(leaf.id(t), "refunded")
		c.lab.wantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
	}
}

// C-4.3.1-a: whoever has the store of a coordinator that has died is the coordinator: a process with
// another address, elsewhere. It goes on where that has stopped, its participants take it for the same
// one, and nothing is undone twice.
func TestProcessCoordinatorElsewhere(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	s := c.saga
	root := s.do(charge(1))
	s.do(charge(2), root.checkpoint)
	hold := newGate(t)
	c.lab.on("POST /refunds", 1, restWaits(hold))
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	s.begun(asked)
	wait(t, hold.arrived, "the refund")
	was, now := c.sites[0], procNewSite(t, c.lab.addr)
	c.running[0].kill()
	moved := []string{was.addr, now.addr, was.admin, now.admin}
	for _, name := range []string{"data", "data.key", "identity"} {
		if err := os.Rename(was.path(name), now.path(name)); err != nil {
			t.Fatal(err)
		}
		moved = append(moved, was.path(name), now.path(name))
	}
	now.raw = strings.NewReplacer(moved...).Replace(was.raw)
	c.sites[0] = now
	c.start(0)
	s.g = now.gateway(t)
	hold.open()
	s.finished(asked.ID).want(t, "completed")
	c.lab.wantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
}

// Who has prepared releases it, and the participants are told: what they hold back goes on long
// before their reservations end, the same prepare is judged anew, and the rollback can be carried
// out afterwards.
func TestProcessParticipantsAreReleased(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	s.prepare(asked, http.StatusOK)
	behind := *s
	behind.g = c.sites[1].gateway(t)
	follow := func() reply {
		late := behind.calling(charge(3), root.checkpoint)
		late.header[ect.FieldName] = s.a.issue(ect.Claims{Workflow: s.wid, Parents: []string{root.checkpoint}}).Raw()
		return behind.g.call(late)
	}
	follow().problem(t, http.StatusConflict, "workflow-paused")
	release := asked
	release.Phase = "release"
	for range 2 {
		if got := s.prepare(release, http.StatusOK); got.Status != "released" {
			t.Errorf("%+v", got)
		}
	}
	eventually(t, "the participant releases it", func() bool { return follow().status == http.StatusCreated })
	s.prepare(asked, http.StatusOK)
	s.back(asked).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
}

// Cascade 4.3.4 over gateways: two of them coordinate rollbacks that overlap at one of them. The one
// that was asked for first has what they share; the other one is refused as a whole, with the id of
// the first, holds nothing back, and can be carried out when that is over. Where they come at once,
// nothing waits for ever and nothing is undone twice.
func TestProcessTwoCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "")
	one := c.saga
	two := *one
	two.g = c.sites[1].gateway(t)
	c.lab.write("/docs/x", `{"n":1}`)
	root := one.do(charge(1))
	edit := one.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	leaf := two.do(charge(2), root.checkpoint)
	wide := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	narrow := rollbackBody{ID: rollbackID(2), Checkpoint: leaf.checkpoint, Scope: "sub_dag"}

	hash := two.prepare(narrow, http.StatusOK).PlanHash
	if doc := one.prepare(wide, http.StatusConflict); doc.Status != "cannot_prepare" || doc.Code != "conflict" || doc.Conflicting != narrow.ID {
		t.Errorf("%+v", doc)
	}
	if got := one.ask(wide); got.status != http.StatusConflict || !strings.Contains(got.body, narrow.ID) {
		t.Errorf("%d %s", got.status, got.body)
	}
	three := *one
	three.g = c.sites[2].gateway(t)
	eventually(t, "what another participant has prepared is released", func() bool {
		return three.try(charge(9), edit.checkpoint).status < 300
	})
	c.lab.arrived("POST /refunds", 0)
	document[rollbackDoc](t, two.g.call(two.executing(narrow, hash))).want(t, "completed")
	one.back(wide).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantCharge(leaf.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
	c.lab.arrived("POST /refunds", 3)

	one = c.sites[0].gateway(t).saga(c.a) // another workflow
	two = *one
	two.g = c.sites[1].gateway(t)
	root = one.do(charge(3))
	leaf = two.do(charge(4), root.checkpoint)
	wide.ID, wide.Checkpoint = rollbackID(3), root.checkpoint
	narrow.ID, narrow.Checkpoint = rollbackID(4), leaf.checkpoint
	asking := []request{one.asking(wide), two.asking(narrow)}
	answers := make(chan reply, 2)
	for i, g := range []*gateway{one.g, two.g} {
		go func() { answers <- g.call(asking[i]) }()
	}
	refused := 0
	for range 2 {
		got := <-answers
		switch {
		case got.status == http.StatusConflict:
			refused++
			got.problem(t, http.StatusConflict, "rollback-conflict")
		case got.status >= 300:
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if refused > 1 {
		t.Error("both are refused")
	}
	two.back(narrow).want(t, "completed")
	one.back(wide).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantCharge(leaf.id(t), "refunded")
	c.lab.arrived("POST /refunds", 5)
}
