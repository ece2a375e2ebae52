//go:build unix

package rollback

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Cascade 4.3.2 over three gateways: the first one's rollback is prepared at the others before
// anything is undone, and undone by them, level by level, under the checkpoints that their answers
// have named. It counts as done because they have signed that.
func TestProcessParticipants(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	doc := s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	leaf := s.Do(harness.Charge(2), doc.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	first := s.Prepare(asked, http.StatusOK)
	if first.Status != "prepared" || len(first.Steps) != 3 {
		t.Errorf("%+v", first)
	}
	c.Lab.Arrived("POST /refunds", 0)
	// The others hold back what would follow there, too.
	behind := *s
	behind.G = c.Sites[1].Gateway(t)
	late := behind.Calling(harness.Charge(3), root.Checkpoint)
	late.Header[ect.FieldName] = s.A.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{root.Checkpoint}}).Raw()
	behind.G.Call(late).Problem(t, http.StatusConflict, "workflow-paused")

	done := harness.Document[harness.RollbackDoc](t, s.G.Call(s.Executing(asked, first.PlanHash)))
	done.Want(t, "completed")
	for i, at := range []int{1, 2, 1} { // what each step says of who has done it
		if done.Steps[i].Via != harness.StarIdentity(at) {
			t.Errorf("step %d: %+v", i, done.Steps[i])
		}
	}
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantCharge(leaf.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
	c.Lab.Arrived("POST /refunds", 2)
	// P6: a participant says only what it has done itself. What the coordinator undoes has no step
	// there, and no token.
	for _, part := range c.Parts(1) {
		if part.Status != "completed" || len(part.Steps) != 1 || len(part.Elsewhere) != 1 || part.Steps[0].Via != "" {
			t.Errorf("%+v", part)
		}
		if state := behind.View().State(part.Elsewhere[0]); state == "rolled_back" || state == "none" {
			t.Errorf("what the coordinator undoes is %s", state)
		}
	}
	c.Lab.WantEffects("charged "+root.Id(t), "changed /docs/x", "charged "+leaf.Id(t), "refunded "+leaf.Id(t), "changed /docs/x", "refunded "+root.Id(t))
	// What each of them has signed is in the coordinator's ledger, and the coordinator's own node of the step follows
	// from it: a third party sees who says that it is undone.
	signed, named := map[string]string{}, map[string]int{}
	var own []*ect.Unverified
	c.Sites[0].Exported(t, func(token *ect.Unverified) {
		switch {
		case token.Action() != "rollback_complete":
		case token.Issuer() == harness.GatewayIdentity:
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
	if len(signed) != 3 || named[harness.StarIdentity(1)] != 2 || named[harness.StarIdentity(2)] != 1 {
		t.Errorf("signed: %v, named: %v", signed, named)
	}
}

// A token in `_meta` that is for the first gateway alone stays there, like one in the header; the second
// one would refuse the call because of it (ADR 0086). What both may have goes on in its place, and a
// hash of the message fits at both.
func TestProcessTokensOfMessagesInARow(t *testing.T) {
	t.Parallel() // its gateways are processes
	tools, addr := harness.NewToolServer(t)
	c := harness.LayStar(t)
	c.Before(1, "agent_proxy "+addr+" {\n protocol mcp\n }")
	c.Before(0, fmt.Sprintf("agent_proxy %s {\n identity %s\n protocol mcp\n }", c.Sites[1].Addr, harness.StarIdentity(1)))
	s := c.Begin().Saga
	alone := s.A.Issue(ect.Claims{Workflow: s.Wid})
	both := s.A.Issue(ect.Claims{Workflow: s.Wid, Audience: []string{harness.GatewayIdentity, harness.StarIdentity(1)}, Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"pay"}}`))})
	header := s.A.Issue(ect.Claims{Workflow: s.Wid})
	for i, r := range []harness.Request{
		harness.Message(harness.ToolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":%q,"progressToken":7}`, alone.Raw()))),
		harness.Message(harness.ToolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":[%q]}`, both.Raw()))),
		harness.With(header, harness.Message(harness.ToolCall("1", "pay", fmt.Sprintf(`,"_meta":{"execution-context":%q}`, header.Raw())))),
	} {
		want := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":%d}}`, i+1)
		s.G.Call(r).Want(t, 200, want, "executed")
		s.G.Call(r).Want(t, 200, want, "replayed")
	}
	if tools.Count("pay") != 3 {
		t.Errorf("%d calls", tools.Count("pay"))
	}
	// What changes nothing goes through both as well, by its message and by its method.
	ping := func(meta string) harness.Request {
		return harness.Message(fmt.Sprintf(`{"jsonrpc":"2.0","id":9,"method":"ping"%s}`, meta))
	}
	fresh := func(audience ...string) *ect.Token {
		return s.A.Issue(ect.Claims{Workflow: s.Wid, Audience: audience})
	}
	for name, r := range map[string]harness.Request{
		"header":         harness.With(fresh(), ping("")),
		"_meta":          ping(fmt.Sprintf(`,"params":{"_meta":{"execution-context":%q,"progressToken":7}}`, fresh().Raw())),
		"_meta for both": ping(fmt.Sprintf(`,"params":{"_meta":{"execution-context":%q}}`, fresh(harness.GatewayIdentity, harness.StarIdentity(1)).Raw())),
		"GET":            harness.With(fresh(), harness.Request{Method: "GET", Path: "/"}),
	} {
		if got := s.G.Call(r); got.Status/100 != 2 || strings.Contains(got.Body, `"error"`) {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
	}
}

// P6: what the next gateway refuses before it sends anything has not run. It leaves no doubt at the
// first one, and the caller comes again under the same id: once people have decided there, it runs,
// once. A rollback of the refused attempt has nothing to undo.
func TestProcessRefusedByTheNextGateway(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.LayStar(t)
	for i := 1; i < len(c.Sites); i++ {
		c.A.Also = append(c.A.Also, harness.StarIdentity(i))
		c.Sites[i].App += "rollback {\n coordinators " + harness.GatewayIdentity + "\n }"
	}
	c.Sites[1].Guard = strings.Replace(harness.SagaActions, "match path /charges", "match path /charges\n approve", 1)
	c.Before(0, c.Behind(1, "/charges /mail"), c.Behind(2, "/docs/*"))
	s := c.Begin().Saga
	pay := harness.Charge(7)
	pay.Id = "order-7"
	first := s.Try(pay)
	if first.Status != http.StatusConflict || first.Slug() != "approval-required" || first.Header.Get("Execution-Status") != "refused" || first.Header.Get("Retry-After") != "30" {
		t.Fatalf("%d %v %s", first.Status, first.Header, first.Body)
	}
	if again := s.Try(pay); again.Slug() != "approval-required" || again.Escalation(t) != first.Escalation(t) {
		t.Fatalf("again: %d %s", again.Status, again.Body)
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: first.Checkpoint, Scope: "single"}).Want(t, "completed")
	c.Lab.WantEffects()

	pay.Id = "order-8"
	asked := s.Try(pay)
	c.Sites[1].Decides(t, "approve", asked.Escalation(t))
	paid := s.Try(pay)
	if paid.Status != http.StatusCreated {
		t.Fatalf("approved: %d %s", paid.Status, paid.Body)
	}
	if again := s.Try(pay); again.Body != paid.Body || again.Header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v %s", again.Status, again.Header, again.Body)
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: paid.Checkpoint, Scope: "single"}).Want(t, "completed")
	c.Lab.WantEffects("charged "+paid.Id(t), "refunded "+paid.Id(t))
}

// C-4.3.2-h, C-4.3.3-a to -d: who cannot prepare is not asked to execute; the others are undone,
// and the result names the agent. Where it is the call that is asked for, nothing is undone
// without an approval.
func TestProcessParticipantCannotPrepare(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, harness.UndoesParts)
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	charged := s.Do(harness.Charge(1), root.Checkpoint)
	s.Do(harness.Request{Path: "/mail"}, root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc)
	}
	c.Lab.Arrived("POST /refunds", 0)
	done := s.Back(asked)
	done.Want(t, "partial", "irreversible")
	if len(done.Failed) == 0 || len(done.Escalations) == 0 {
		t.Errorf("%+v", done)
	}
	c.Lab.WantCharge(charged.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)

	s = c.Sites[0].Gateway(t).Saga(c.A)
	c.Lab.Write("/docs/y", `{"n":1}`)
	mail := s.Do(harness.Request{Path: "/mail"})
	s.Do(harness.Put("/docs/y", `{"n":2}`), mail.Checkpoint)
	b := harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: mail.Checkpoint, Scope: "sub_dag"}
	c.Sites[0].Decides(t, "deny", s.Waits(b).Waits)
	s.Finished(b.ID).Want(t, "escalated", "denied", "irreversible")
	c.Lab.WantDoc("/docs/y", `{"n":2}`)
}

// By default (`partial never`) nothing is undone where a part cannot be, unless people approve that.
func TestProcessParticipantPartialNever(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	s.Do(harness.Request{Path: "/mail"}, root.Checkpoint)
	b := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	c.Sites[0].Decides(t, "deny", s.Waits(b).Waits)
	s.Finished(b.ID).Want(t, "escalated", "irreversible", "denied")
	c.Lab.WantDoc("/docs/x", `{"n":2}`)
}

// A participant that is dead at prepare cannot prepare: `unreachable`. What the others have
// reserved ends by itself.
func TestProcessParticipantDeadAtPrepare(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "\nrollback {\n partial allow\n prepare_timeout 5s\n}\n")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	c.Running[2].Kill()
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Prepare(asked, http.StatusConflict)
	if len(doc.Agents) != 1 || doc.Agents[0].Reason != "unreachable" {
		t.Errorf("%+v", doc)
	}
	c.Lab.Arrived("POST /refunds", 0)
	s.Back(asked).Want(t, "partial", "unreachable")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":2}`)
}

// A participant that dies between the phases is asked until it is back; the level above it waits.
func TestProcessParticipantDeadAtExecute(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	hash := s.Prepare(asked, http.StatusOK).PlanHash
	c.Running[2].Kill()
	r := s.Executing(asked, hash)
	r.Header["Prefer"] = "wait=1"
	if got := s.G.Call(r); got.Status != http.StatusAccepted {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	c.Lab.Arrived("POST /refunds", 0) // the barrier
	c.Start(2)
	s.Finished(asked.ID).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
	c.Lab.Arrived("POST /refunds", 1)
}

// The coordinator, and then the participant, dies while a participant undoes: the rollback goes on
// from the journals, and nothing is undone twice.
func TestProcessParticipantsCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, dies := range []int{0, 1} {
		c := harness.NewStar(t, "")
		s := c.Saga
		root := s.Do(harness.Charge(1))
		leaf := s.Do(harness.Charge(2), root.Checkpoint)
		hold := harness.NewGate(t)
		c.Lab.On("POST /refunds", 1, harness.RestWaits(hold))
		asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		s.Begun(asked)
		harness.Wait(t, hold.Arrived, "the refund")
		c.Running[dies].Kill()
		hold.Open()
		c.Start(dies)
		s.Finished(asked.ID).Want(t, "completed")
		c.Lab.WantCharge(root.Id(t), "refunded")
		c.Lab.WantCharge(leaf.Id(t), "refunded")
		c.Lab.WantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
	}
}

// C-4.3.1-a: whoever has the store of a coordinator that has died is the coordinator: a process with
// another address, elsewhere. It goes on where that has stopped, its participants take it for the same
// one, and nothing is undone twice.
func TestProcessCoordinatorElsewhere(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	s := c.Saga
	root := s.Do(harness.Charge(1))
	s.Do(harness.Charge(2), root.Checkpoint)
	hold := harness.NewGate(t)
	c.Lab.On("POST /refunds", 1, harness.RestWaits(hold))
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	s.Begun(asked)
	harness.Wait(t, hold.Arrived, "the refund")
	was, now := c.Sites[0], harness.ProcNewSite(t, c.Lab.Addr)
	c.Running[0].Kill()
	moved := []string{was.Addr, now.Addr, was.Admin, now.Admin}
	for _, name := range []string{"data", "data.key", "identity"} {
		if err := os.Rename(was.Path(name), now.Path(name)); err != nil {
			t.Fatal(err)
		}
		moved = append(moved, was.Path(name), now.Path(name))
	}
	now.Raw = strings.NewReplacer(moved...).Replace(was.Raw)
	c.Sites[0] = now
	c.Start(0)
	s.G = now.Gateway(t)
	hold.Open()
	s.Finished(asked.ID).Want(t, "completed")
	c.Lab.WantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
}

// Who has prepared releases it, and the participants are told: what they hold back goes on long
// before their reservations end, the same prepare is judged anew, and the rollback can be carried
// out afterwards.
func TestProcessParticipantsAreReleased(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	s.Prepare(asked, http.StatusOK)
	behind := *s
	behind.G = c.Sites[1].Gateway(t)
	follow := func() harness.Reply {
		late := behind.Calling(harness.Charge(3), root.Checkpoint)
		late.Header[ect.FieldName] = s.A.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{root.Checkpoint}}).Raw()
		return behind.G.Call(late)
	}
	follow().Problem(t, http.StatusConflict, "workflow-paused")
	release := asked
	release.Phase = "release"
	for range 2 {
		if got := s.Prepare(release, http.StatusOK); got.Status != "released" {
			t.Errorf("%+v", got)
		}
	}
	harness.Eventually(t, "the participant releases it", func() bool { return follow().Status == http.StatusCreated })
	s.Prepare(asked, http.StatusOK)
	s.Back(asked).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
}

// Cascade 4.3.4 over gateways: two of them coordinate rollbacks that overlap at one of them. The one
// that was asked for first has what they share; the other one is refused as a whole, with the id of
// the first, holds nothing back, and can be carried out when that is over. Where they come at once,
// nothing waits for ever and nothing is undone twice.
func TestProcessTwoCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "")
	one := c.Saga
	two := *one
	two.G = c.Sites[1].Gateway(t)
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := one.Do(harness.Charge(1))
	edit := one.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	leaf := two.Do(harness.Charge(2), root.Checkpoint)
	wide := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	narrow := harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: leaf.Checkpoint, Scope: "sub_dag"}

	hash := two.Prepare(narrow, http.StatusOK).PlanHash
	if doc := one.Prepare(wide, http.StatusConflict); doc.Status != "cannot_prepare" || doc.Code != "conflict" || doc.Conflicting != narrow.ID {
		t.Errorf("%+v", doc)
	}
	if got := one.Ask(wide); got.Status != http.StatusConflict || !strings.Contains(got.Body, narrow.ID) {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	three := *one
	three.G = c.Sites[2].Gateway(t)
	harness.Eventually(t, "what another participant has prepared is released", func() bool {
		return three.Try(harness.Charge(9), edit.Checkpoint).Status < 300
	})
	c.Lab.Arrived("POST /refunds", 0)
	harness.Document[harness.RollbackDoc](t, two.G.Call(two.Executing(narrow, hash))).Want(t, "completed")
	one.Back(wide).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantCharge(leaf.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
	c.Lab.Arrived("POST /refunds", 3)

	one = c.Sites[0].Gateway(t).Saga(c.A) // another workflow
	two = *one
	two.G = c.Sites[1].Gateway(t)
	root = one.Do(harness.Charge(3))
	leaf = two.Do(harness.Charge(4), root.Checkpoint)
	wide.ID, wide.Checkpoint = harness.RollbackID(3), root.Checkpoint
	narrow.ID, narrow.Checkpoint = harness.RollbackID(4), leaf.Checkpoint
	asking := []harness.Request{one.Asking(wide), two.Asking(narrow)}
	answers := make(chan harness.Reply, 2)
	for i, g := range []*harness.Gateway{one.G, two.G} {
		go func() { answers <- g.Call(asking[i]) }()
	}
	refused := 0
	for range 2 {
		got := <-answers
		switch {
		case got.Status == http.StatusConflict:
			refused++
			got.Problem(t, http.StatusConflict, "rollback-conflict")
		case got.Status >= 300:
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if refused > 1 {
		t.Error("both are refused")
	}
	two.Back(narrow).Want(t, "completed")
	one.Back(wide).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantCharge(leaf.Id(t), "refunded")
	c.Lab.Arrived("POST /refunds", 5)
}
