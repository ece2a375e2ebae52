package evidence_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

type headDoc struct {
	Origin, Root, Key, Note string
	Size                    int64
}

type entryDoc struct {
	Log      string
	Index    int64
	Recorded time.Time
	JTI, WID string
	ExecAct  string `json:"exec_act"`
	Iss      string
	Par      []string
	Time     time.Time
	Signed   bool
	Level    string
	Token    string
	Leaf     []byte
	Receipt  *ledger.Receipt
}

// The newest head, as JSON and as the signed note, which anybody can verify.
func TestHead(t *testing.T) {
	g := newGate(t)
	g.add(alice, flow, "act", nil)
	var doc headDoc
	got := g.get("ledger/head", asMallory)
	got.private()
	got.read(200, &doc)
	head, err := ledger.ParseHead([]byte(doc.Note), origin, g.keys)
	if err != nil || head.Size != doc.Size || doc.Size != 1 || head.Root.String() != doc.Root || doc.Origin != origin || doc.Key == "" {
		t.Errorf("%+v %v", doc, err)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, basePath+"ledger/head", nil)
	r.Header.Set("Accept", "text/plain")
	text := g.do(r, asMallory)
	if text.Body.String() != doc.Note || !strings.HasPrefix(text.Header().Get("Content-Type"), "text/plain") || text.Header().Get("Vary") != "Accept" {
		t.Errorf("%v %q", text.Header(), text.Body)
	}
	text.private()
}

// An entry with what proves it, by index and by id.
func TestEntry(t *testing.T) {
	g := newGate(t)
	g.add(bob, foreign, "act", nil)
	first := g.add(alice, flow, "act", nil)
	token := g.add(bob, flow, "next", nil, first)
	for _, path := range []string{
		"ledger/entries/2", "ledger/entries?jti=" + token.ID(), "ledger/entries?wid=" + flow + "&jti=" + token.ID(),
		"ledger/entries?jti=" + strings.ToUpper(token.ID()) + "&wid=" + strings.ToUpper(flow),
	} {
		var doc entryDoc
		got := g.get(path, asAlice)
		got.private()
		got.read(200, &doc)
		if doc.Log != origin || doc.Index != 2 || doc.JTI != token.ID() || doc.WID != flow || doc.ExecAct != "next" || doc.Iss != bob ||
			fmt.Sprint(doc.Par) != fmt.Sprint(token.Parents()) || !doc.Time.Equal(token.IssuedAt()) || doc.Recorded.IsZero() ||
			!doc.Signed || doc.Level != "L2" || doc.Token != token.Raw() || doc.Receipt == nil {
			t.Fatalf("%s: %+v", path, doc)
		}
		if head, err := doc.Receipt.Check(doc.Leaf, origin, g.keys); err != nil || head.Size != 3 {
			t.Errorf("%s: the receipt: %v", path, err)
		}
	}
	head := g.do(httptest.NewRequestWithContext(t.Context(), http.MethodHead, basePath+"ledger/entries/2", nil), asAlice)
	if head.Code != 200 || head.Body.Len() != 0 || head.Header().Get("Content-Length") == "0" {
		t.Errorf("HEAD: %d %q", head.Code, head.Body)
	}
}

// P3: what others have recorded cannot be distinguished from what is not there, and callers
// without a credential see nothing.
func TestOnlyWhoTakesPartMayRead(t *testing.T) {
	g := newGate(t)
	mine := g.add(alice, flow, "act", nil)
	g.add(gateway, flow, "pay", ofCall("completed", callerKey), mine)
	alone := g.add(alice, "", "act", nil)
	// An agent's word about callers counts for nothing.
	g.add(alice, foreign, "act", ofCall("completed", asMallory.Caller))
	for _, who := range []router.Reader{asAlice, asCaller} {
		for _, path := range []string{"ledger/entries/0", "ledger/entries/1", "ledger/entries?jti=" + mine.ID(), "ledger/entries?wid=" + flow + "&jti=" + mine.ID(), "workflows/" + flow} {
			if got := g.get(path, who); got.Code != 200 {
				t.Errorf("%s for %+v: %d", path, who, got.Code)
			}
		}
	}
	if got := g.get("ledger/entries/2", asAlice); got.Code != 200 {
		t.Errorf("a token without a workflow, for its issuer: %d", got.Code)
	}
	g.get("ledger/entries?jti="+alone.ID(), asCaller).refused(404, "entry-unknown", "")

	nobody := []router.Reader{{}, {Issuer: gateway}, asMallory, {Issuer: bob}}
	for _, who := range nobody {
		unknown := g.get("ledger/entries/999", who)
		unknown.refused(404, "entry-unknown", "")
		for _, path := range []string{
			"ledger/entries/0", "ledger/entries/3", "ledger/entries?jti=" + mine.ID(), "ledger/entries?wid=" + flow + "&jti=" + mine.ID(),
			"ledger/entries?wid=" + flow + "&wait=60s&jti=" + nowhere, "ledger/entries?wid=&wait=1&jti=" + alone.ID(),
		} {
			if strings.Contains(path, "wid=&") {
				g.get(path, who).refused(400, "parameter-invalid", "")
				continue
			}
			same(t, path, unknown, g.get(path, who))
		}
		unknown = g.get("workflows/"+nowhere, who)
		unknown.refused(404, "workflow-unknown", "")
		for _, wid := range []string{flow, foreign} {
			same(t, wid, unknown, g.get("workflows/"+wid, who))
		}
	}
	for _, path := range []string{
		"ledger/head", "ledger/entries/0", "ledger/entries/999", "ledger/entries?jti=" + mine.ID(), "ledger/proof?index=0",
		"ledger/consistency?old=1", "workflows/" + flow, "workflows/" + nowhere,
	} {
		g.get(path, anonymous).refused(401, "authentication-required", "")
	}
}

// The same id in two of the reader's workflows: one must be named.
func TestEntryInSeveralWorkflows(t *testing.T) {
	g := newGate(t)
	for _, wid := range []string{flow, foreign} {
		err := g.log.Append(t.Context(), []ledger.Event{{ID: "x", Workflow: wid, Issuer: alice, Action: "act", Payload: []byte("token")}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.log.Lookup(t.Context(), wid, "x"); err != nil {
			t.Fatal(err)
		}
	}
	g.get("ledger/entries?jti=x", asAlice).refused(400, "parameter-invalid", "")
	var doc entryDoc
	g.get("ledger/entries?jti=x&wid="+foreign, asAlice).read(200, &doc)
	if doc.WID != foreign || doc.Signed {
		t.Errorf("%+v", doc)
	}
}

// What was pruned is gone, and its place is still proved.
func TestPrunedEntry(t *testing.T) {
	g := newGate(t)
	var batch []ledger.Event
	for i := range 300 {
		batch = append(batch, ledger.Event{ID: fmt.Sprint(i), Workflow: flow, Issuer: alice, Action: "act", Payload: []byte("token")})
		if len(batch) == ledger.MaxEvents || i == 299 {
			if err := g.log.Append(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
			batch = nil
		}
	}
	if _, err := g.log.Lookup(t.Context(), flow, "299"); err != nil {
		t.Fatal(err)
	}
	if n, err := g.log.Prune(t.Context(), time.Now().Add(time.Hour)); err != nil || n != 256 {
		t.Fatalf("%d pruned, %v", n, err)
	}
	g.get("ledger/entries/7", asAlice).refused(410, "entry-pruned", "")
	g.get("ledger/entries?jti=7&wid="+flow, asAlice).refused(404, "entry-unknown", "")
	g.get("ledger/proof?index=7", asAlice).read(200, &struct{}{})
}

// Proofs lead from any size to any other, by the public keys alone.
func TestProofs(t *testing.T) {
	g := newGate(t)
	var heads []ledger.Head
	for range 5 {
		g.add(alice, flow, "act", nil)
		heads = append(heads, g.log.Head())
	}
	entry, err := g.log.Entry(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	var proof struct {
		Log         string
		Index, Size int64
		Proof       tlog.RecordProof
	}
	for _, c := range []struct {
		query string
		head  ledger.Head
	}{{"index=1", heads[4]}, {"index=1&size=2", heads[1]}, {"size=4&index=1", heads[3]}} {
		got := g.get("ledger/proof?"+c.query, asMallory)
		got.private()
		got.read(200, &proof)
		if err := ledger.CheckInclusion(proof.Proof, c.head, 1, tlog.RecordHash(entry.Leaf)); err != nil || proof.Size != c.head.Size || proof.Log != origin {
			t.Errorf("%s: %+v %v", c.query, proof, err)
		}
	}
	var consistency struct {
		Log      string
		Old, New int64
		Proof    tlog.TreeProof
	}
	for _, c := range []struct{ query, old, newer int }{{1, 2, 5}, {1, 3, 3}, {0, 4, 5}} {
		query := fmt.Sprintf("old=%d&new=%d", c.old, c.newer)
		if c.query == 0 {
			query = fmt.Sprintf("old=%d", c.old)
		}
		g.get("ledger/consistency?"+query, asMallory).read(200, &consistency)
		if err := ledger.CheckConsistency(consistency.Proof, heads[c.old-1], heads[c.newer-1]); err != nil {
			t.Errorf("%s: %v", query, err)
		}
	}
	for _, path := range []string{"ledger/consistency?old=0", "ledger/proof?index=0&size=1"} {
		if got := g.get(path, asMallory); !strings.Contains(got.Body.String(), `"proof": []`) {
			t.Errorf("%s: an empty proof is no list: %s", path, got.Body)
		}
	}
	for _, path := range []string{"ledger/proof?index=5", "ledger/proof?index=0&size=6", "ledger/proof?index=3&size=3", "ledger/consistency?old=1&new=6"} {
		g.get(path, asMallory).refused(404, "entry-unknown", "")
	}
}

// Every parameter that cannot be read is named, and none is guessed.
func TestParameters(t *testing.T) {
	g := newGate(t)
	g.add(alice, flow, "act", nil)
	long := strings.Repeat("x", 257)
	for _, path := range []string{
		"ledger/entries/-1", "ledger/entries/+1", "ledger/entries/01", "ledger/entries/1e3", "ledger/entries/9999999999999999999",
		"ledger/entries/%31x", "ledger/entries/0x1", "ledger/entries/latest",
		"ledger/entries", "ledger/entries?jti=", "ledger/entries?jti=a&jti=b", "ledger/entries?jti=" + long, "ledger/entries?jti=a%00",
		"ledger/entries?jti=%ff", "ledger/entries?jti=%zz", "ledger/entries?jti=a&wid=", "ledger/entries?jti=a&wid=b&wait=soon",
		"ledger/entries?jti=a&wait=-1s", "ledger/entries?jti=a&x=" + strings.Repeat("y", 4096),
		"ledger/proof", "ledger/proof?size=1", "ledger/proof?index=x", "ledger/proof?index=0&size=-1", "ledger/proof?index=0&index=0",
		"ledger/proof?index=", "ledger/consistency", "ledger/consistency?new=1", "ledger/consistency?old=2&new=1", "ledger/consistency?old=1.0",
		"workflows/" + long, "workflows/%0a", "workflows/%ff",
	} {
		g.get(path, asAlice).refused(400, "parameter-invalid", "")
	}
	for _, path := range []string{"ledger/entries?jti=a&wait=99999999", "ledger/entries?jti=a&wait=1h", "ledger/entries?jti=a&wait=1&b=1&b=2"} {
		g.get(path, asAlice).refused(404, "entry-unknown", "")
	}
}

// P4: a store that cannot be read is 503, and nothing is said to be unknown.
func TestReadsFailClosed(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	raw := g.token(bob, anError(task)).Raw()
	g.store.broken.Store(true)
	defer g.store.broken.Store(false)
	for _, who := range []router.Reader{asAlice, asMallory} {
		for _, path := range []string{
			"ledger/entries/0", "ledger/entries?jti=" + task.ID(), "ledger/entries?jti=" + task.ID() + "&wid=" + flow, "workflows/" + flow,
		} {
			g.get(path, who).refused(503, "store-unavailable", "")
		}
	}
	g.post(anonymous, raw).refused(503, "store-unavailable", "")
}

// The paths, and the methods that they allow.
func TestPathsAndMethods(t *testing.T) {
	g := newGate(t)
	for path, ours := range map[string]bool{
		"ledger/head": true, "ledger/head/": false, "ledger": false, "ledger/": false, "ledger/entries/": false, "ledger/entries/1/2": false,
		"ledger/entries/a%2Fb": true, "workflows/": false, "workflows": false, "workflows/x": true, "workflows/x/y": false, "workflows/x%2Fy": true,
		"errors": true, "errors/1": false, "policy": false, "ledger//head": false,
	} {
		r := httptest.NewRequest(http.MethodGet, basePath+path, nil)
		if g.serve(httptest.NewRecorder(), r, asAlice) != ours {
			t.Errorf("%s: %v", path, !ours)
		}
	}
	for path, allow := range map[string]string{
		"ledger/head": "GET, HEAD", "ledger/entries/1": "GET, HEAD", "ledger/entries": "GET, HEAD", "ledger/proof": "GET, HEAD",
		"ledger/consistency": "GET, HEAD", "workflows/x": "GET, HEAD, PUT", "errors": "POST",
	} {
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"} {
			if strings.Contains(allow, method) {
				continue
			}
			got := g.do(httptest.NewRequestWithContext(t.Context(), method, basePath+path, nil), anonymous)
			if got.Code != 405 || got.Header().Get("Allow") != allow {
				t.Errorf("%s %s: %d %v", method, path, got.Code, got.Header())
			}
		}
	}
}

// What is not there yet can be waited for, by who takes part, until an exit.
func TestWaiting(t *testing.T) {
	exit, end := context.WithCancel(t.Context())
	g := newGate(t, func(o *Ledger) { o.Waits = exit })
	task := g.add(alice, flow, "act", nil)
	g.get("ledger/entries?wid="+flow+"&wait=1ms&jti="+nowhere, asAlice).refused(404, "entry-unknown", "")
	late := "ledger/entries?wid=" + flow + "&wait=60s&jti=late"
	g.get(late, asMallory).refused(404, "entry-unknown", "")
	begun, watched := make(chan reply, 1), make(chan struct{}, 1)
	g.store.onWatch = func() { watched <- struct{}{}; g.store.onWatch = nil }
	go func() { begun <- g.get(late, asAlice) }()
	select {
	case <-watched:
	case got := <-begun:
		t.Fatalf("it does not wait: %d", got.Code)
	}
	g.put(ledger.Event{ID: "late", Workflow: flow, Parents: []string{task.ID()}, Action: "act", Issuer: gateway, Payload: []byte("late")})
	var doc entryDoc
	if (<-begun).read(200, &doc); doc.Index != 1 {
		t.Errorf("%+v", doc)
	}
	end()
	g.get("ledger/entries?wid="+flow+"&wait=60s&jti="+nowhere, asAlice).refused(404, "entry-unknown", "")
}

// A leaf is the base64 of the bytes that were hashed.
func TestLeafBytes(t *testing.T) {
	g := newGate(t)
	g.add(alice, flow, "act", nil)
	e, err := g.log.Entry(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := g.get("ledger/entries/0", asAlice); !strings.Contains(got.Body.String(), `"leaf": "`+base64.StdEncoding.EncodeToString(e.Leaf)+`"`) {
		t.Errorf("%s", got.Body)
	}
}

// A credential that nobody here has verified is good for the workflows and checkpoints of
// its own calls, and made up it is good for nothing: neither a wait nor a read.
func TestWhatACredentialIsGoodFor(t *testing.T) {
	asked := 0
	g := newGate(t, func(o *Ledger) {
		o.Called = func(_ context.Context, who [16]byte) (bool, error) {
			asked++
			return who == callerKey, nil
		}
	})
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(gateway, flow, "pay", ofCall("completed", callerKey), task, ckpt)
	own, made := router.Reader{Caller: callerKey, Credential: true}, router.Reader{Caller: [16]byte{7}, Credential: true}
	for _, who := range []router.Reader{own, made} {
		for _, path := range []string{
			"ledger/head", "ledger/proof?index=0", "ledger/consistency?old=1", "ledger/entries/0", "ledger/entries?wait=60s&jti=" + task.ID() + "&wid=" + flow,
		} {
			g.get(path, who).refused(401, "authentication-required", "")
		}
	}
	g.get("workflows/"+flow, own).read(200, &struct{}{})
	g.get("checkpoints/"+ckpt.ID(), own).read(200, &struct{}{})
	if part, err := g.TakesPart(t.Context(), flow, ckpt.ID(), own); !part || err != nil {
		t.Error(part, err)
	}
	g.store.broken.Store(true) // whatever is read fails
	defer g.store.broken.Store(false)
	asked = 0
	for _, name := range []string{flow, nowhere} {
		g.get("workflows/"+name, made).refused(404, "workflow-unknown", "")
		g.get("checkpoints/"+name+"?wait=60s", made).refused(403, "not-in-workflow", "")
	}
	if part, err := g.TakesPart(t.Context(), flow, ckpt.ID(), made); part || err != nil {
		t.Error(part, err)
	}
	if asked != 5 {
		t.Errorf("asked %d times", asked)
	}
}

type recordedDoc struct {
	Recorded []struct {
		JTI, WID, Log, Entry string
		Index                int64
	}
}

// A-error-signaling: an agent's error of a node in its workflow is recorded, with a
// receipt to be had, and makes that node failed.
func TestErrorIsRecorded(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	failed := g.token(bob, anError(task))
	got := g.post(anonymous, failed.Raw())
	var doc recordedDoc
	got.read(201, &doc)
	got.private()
	if len(doc.Recorded) != 1 || doc.Recorded[0].JTI != failed.ID() || doc.Recorded[0].WID != flow || doc.Recorded[0].Index != 1 ||
		doc.Recorded[0].Log != origin || got.Header().Get("Location") != doc.Recorded[0].Entry {
		t.Fatalf("%+v %v", doc, got.Header())
	}
	var entry entryDoc
	g.get(strings.TrimPrefix(doc.Recorded[0].Entry, basePath), asAlice).read(200, &entry)
	if entry.Token != failed.Raw() || entry.Receipt == nil {
		t.Errorf("%+v", entry)
	}
	var graph workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &graph)
	if graph.Tasks["failed"] != 1 {
		t.Errorf("%+v", graph.Tasks)
	}
	// P5's rule for repeats: the same bytes get the same answer and are recorded once.
	again := g.post(anonymous, failed.Raw())
	if again.Code != 200 || again.Body.String() != got.Body.String() || again.Header().Get("Location") != got.Header().Get("Location") {
		t.Errorf("again: %d %s", again.Code, again.Body)
	}
	if g.recorded != 1 || g.verified != 1 {
		t.Errorf("recorded %d times, verified %d times", g.recorded, g.verified)
	}
}

// The header carries errors where there is no body.
func TestErrorsInTheHeader(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	one, two := g.token(bob, anError(task)), g.token(alice, anError(task))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", http.NoBody)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Add(ect.FieldName, one.Raw())
	r.Header.Add(ect.FieldName, two.Raw()+", "+one.Raw())
	var doc recordedDoc
	got := g.do(r, anonymous)
	got.read(201, &doc)
	if len(doc.Recorded) != 2 || got.Header().Get("Location") != "" || g.recorded != 1 {
		t.Errorf("%+v", doc)
	}
}

// Several errors are recorded all or none, may be each other's parents, and some of
// them may be recorded already.
func TestSeveralErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	first := g.token(bob, anError(task))
	second := g.token(bob, anError(first))
	var doc recordedDoc
	g.post(anonymous, first.Raw(), second.Raw()).read(201, &doc)
	if len(doc.Recorded) != 2 {
		t.Errorf("%+v", doc)
	}
	third := g.token(bob, anError(second))
	g.post(anonymous, first.Raw(), third.Raw(), first.Raw()).read(201, &doc)
	if len(doc.Recorded) != 2 || g.recorded != 2 {
		t.Errorf("%+v", doc)
	}
	bad := g.token(bob, ect.Claims{Workflow: flow, Action: "error", Parents: []string{nowhere}, Ext: anError(task).Ext})
	g.post(anonymous, g.token(bob, anError(task)).Raw(), bad.Raw()).refused(403, "ect-invalid", "parent-unknown")
	var many []string
	for range ledger.MaxEvents + 1 {
		many = append(many, g.token(bob, anError(task)).Raw())
	}
	g.post(anonymous, many...).refused(400, "ect-invalid", "too-large")
	if g.recorded != 2 {
		t.Errorf("recorded %d times", g.recorded)
	}
	g.post(anonymous, many[1:]...).read(201, &doc)
}

// C-6.2-b and A-false-error-injection-a: parents stand in the token's own workflow.
// Unknown and foreign ones get the identical answer (P3).
func TestParentsOfErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	other := g.add(alice, foreign, "act", nil)
	nowid := g.add(alice, "", "act", nil)
	ckpt := g.add(alice, flow, "checkpoint", checkpointToken(), task)
	elsewhere := g.add(alice, foreign, "checkpoint", checkpointToken(), other)
	of := func(checkpoint string, parents ...string) reply {
		c := anError(task)
		c.Parents = parents
		c.Ext = ext().Text(ect.MemberSeverity, "warning").Text(ect.MemberErrorType, "new-word").Text(ect.MemberCheckpointID, checkpoint)
		return g.post(anonymous, g.token(bob, c).Raw())
	}
	unknown := of("", nowhere)
	unknown.refused(403, "ect-invalid", "parent-unknown")
	for _, parents := range [][]string{{other.ID()}, {nowid.ID()}, {task.ID(), other.ID()}, {task.ID(), nowhere}} {
		same(t, fmt.Sprint(parents), unknown, of("", parents...))
	}
	of("").refused(403, "ect-invalid", "par")
	// E-security-considerations-f: so does the checkpoint that is named.
	badCheckpoint := of(nowhere, task.ID())
	badCheckpoint.refused(403, "ect-invalid", "ext")
	same(t, "a foreign checkpoint", badCheckpoint, of(elsewhere.ID(), task.ID()))
	same(t, "a checkpoint with a long name", badCheckpoint, of(strings.Repeat("x", 300), task.ID()))
	if g.recorded != 0 {
		t.Fatalf("recorded %d times", g.recorded)
	}
	for _, good := range []reply{of(ckpt.ID(), task.ID()), of(strings.ToUpper(ckpt.ID()), task.ID()), of("", ckpt.ID()), of("", task.ID(), ckpt.ID())} {
		if good.Code != 201 {
			t.Errorf("%d %s", good.Code, good.Body)
		}
	}
}

// A-error-signaling-b to -e, C-6.2-a: what an error token must be. ADR 0054: of members that
// only this gateway's own words ask for, none.
func TestWhatAnErrorMustSay(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	members := func(b *ect.ExtBuilder) func(*ect.Claims) { return func(c *ect.Claims) { c.Ext = b } }
	severity := func(s string) *ect.ExtBuilder {
		return ext().Text(ect.MemberSeverity, s).Text(ect.MemberErrorType, "timeout")
	}
	for name, c := range map[string]struct {
		change func(*ect.Claims)
		code   string
	}{
		"another event":         {func(c *ect.Claims) { c.Action = "checkpoint" }, "exec_act"},
		"an agent's own action": {func(c *ect.Claims) { c.Action = "act" }, "exec_act"},
		"no workflow":           {func(c *ect.Claims) { c.Workflow = "" }, "wid"},
		"no parents":            {func(c *ect.Claims) { c.Parents = nil }, "par"},
		"no members":            {members(nil), ""}, // the cascade draft has none for errors
		"no severity":           {members(ext().Text(ect.MemberErrorType, "timeout")), ""},
		"no type":               {members(ext().Text(ect.MemberSeverity, "info")), ""},
		"a type by number":      {members(ext().Text(ect.MemberSeverity, "info").Int(ect.MemberErrorType, 4)), "ext"},
		"ATD, no severity":      {func(c *ect.Claims) { c.Vocabulary, c.Ext = ect.ATD, ext().Text(ect.MemberErrorType, "timeout") }, "ext"},
		"AERR, no members":      {func(c *ect.Claims) { c.Vocabulary, c.Ext = ect.AERR, nil }, "ext"},
		"another severity":      {members(severity("fatal")), "ext"},
		"a severity by number":  {members(ext().Int(ect.MemberSeverity, 4).Text(ect.MemberErrorType, "timeout")), "ext"},
		"checkpoint by number":  {members(severity("info").Int(ect.MemberCheckpointID, 1)), "ext"},
		"no checkpoint":         {members(severity("info")), ""},
		"null for a checkpoint": {members(severity("error").JSON(ect.MemberCheckpointID, "null")), ""},
		"ATD":                   {func(c *ect.Claims) { c.Vocabulary = ect.ATD }, ""},
		"AERR":                  {func(c *ect.Claims) { c.Vocabulary = ect.AERR }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			claims := anError(task)
			c.change(&claims)
			got := g.post(anonymous, g.token(bob, claims).Raw())
			if c.code != "" {
				got.refused(403, "ect-invalid", c.code)
				return
			}
			got.read(201, &struct{}{})
		})
	}
}

// What is no token of a trusted agent is refused as ECT says.
func TestForgedErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	good := g.token(bob, anError(task))
	parts := strings.Split(good.Raw(), ".")
	stranger := newGate(t) // has other keys
	for name, c := range map[string]struct {
		raw, code string
		status    int
	}{
		"not a token":    {"x", "malformed", 400},
		"no signature":   {parts[0] + "." + parts[1] + ".AAAA", "signature", 403},
		"payload alone":  {parts[1], "level", 403},
		"other keys":     {stranger.token(bob, anError(task)).Raw(), "kid", 403},
		"over one field": {strings.Repeat("x", 70<<10), "too-large", 400},
	} {
		t.Run(name, func(t *testing.T) {
			g.post(asAlice, c.raw).refused(c.status, "ect-invalid", c.code)
		})
	}
	// Another token with an id that is taken: only its signer learns that.
	g.post(anonymous, good.Raw()).read(201, &struct{}{})
	claims := anError(task)
	claims.ID, claims.Life = good.ID(), 5*time.Minute
	g.post(anonymous, g.token(bob, claims).Raw()).refused(403, "ect-invalid", "replayed")
	claims.ID = task.ID()
	claims.Parents = []string{good.ID()}
	g.post(anonymous, g.token(bob, claims).Raw()).refused(403, "ect-invalid", "replayed")
	g.post(anonymous, stranger.token(bob, claims).Raw()).refused(403, "ect-invalid", "kid")
	if g.recorded != 1 {
		t.Errorf("recorded %d times", g.recorded)
	}
}

// What is posted besides tokens.
func TestBodiesOfErrors(t *testing.T) {
	g := newGate(t)
	send := func(kind, body string, header ...string) reply {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", strings.NewReader(body))
		r.Header.Set("Content-Type", kind)
		for _, h := range header {
			r.Header.Add(ect.FieldName, h)
		}
		return g.do(r, asAlice)
	}
	send("", "").refused(403, "ect-invalid", "missing")
	send("application/json", "[]").refused(403, "ect-invalid", "missing")
	send("application/json", `{"error":1}`).refused(400, "ect-invalid", "malformed")
	send("text/plain", "x").refused(400, "parameter-invalid", "")
	send("application/exec+jwt", strings.Repeat("x", 2<<20)).refused(400, "ect-invalid", "too-large")
	send("", "", strings.Repeat("x", 9<<10)).refused(400, "ect-invalid", "too-large")
	g.do(httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", nil), anonymous).refused(401, "authentication-required", "")

	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", strings.NewReader("too much for the site"))
	r.Body = http.MaxBytesReader(httptest.NewRecorder(), r.Body, 3)
	g.do(r, asAlice).refused(400, "ect-invalid", "too-large")
	r = httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", brokenBody{})
	g.do(r, asAlice).refused(400, "parameter-invalid", "")
}

type brokenBody struct{}

func (brokenBody) Read([]byte) (int, error) { return 0, errors.New("cut") }

// Another request may record the same token between the look and the recording; the
// same bytes are no conflict, others are.
func TestErrorsAtTheSameTime(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	raced := 0
	first := func(what func() *ect.Token) {
		raced = 0
		g.onRecord = func([]*ect.Token) error {
			if raced++; raced > 1 {
				return nil
			}
			return g.log.Append(t.Context(), events(what()))
		}
	}
	one := g.token(bob, anError(task))
	first(func() *ect.Token { return one })
	g.post(anonymous, one.Raw()).read(200, &struct{}{})

	two := g.token(bob, anError(task))
	claims := anError(task)
	claims.ID, claims.Life = two.ID(), 5*time.Minute
	first(func() *ect.Token { return g.token(bob, claims) })
	g.post(anonymous, two.Raw()).refused(403, "ect-invalid", "replayed")

	// One of two: the other is recorded in the next round.
	three, four := g.token(bob, anError(task)), g.token(bob, anError(task))
	first(func() *ect.Token { return three })
	var doc recordedDoc
	g.post(anonymous, three.Raw(), four.Raw()).read(201, &doc)
	if raced != 2 || len(doc.Recorded) != 2 {
		t.Errorf("%d rounds, %+v", raced, doc)
	}
	g.onRecord = func([]*ect.Token) error { return fmt.Errorf("other: %w", ledger.ErrDuplicate) }
	g.post(anonymous, g.token(bob, anError(task)).Raw()).refused(503, "store-unavailable", "")
}

// P4: what nobody knows is 503, and the gateway's own problems go through.
func TestErrorsFailClosed(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	token := g.token(bob, anError(task))
	for err, slug := range map[error]string{
		errors.New("disk"): "store-unavailable",
		ect.ErrUnavailable: "ect-unavailable",
		problem.New(problem.ShuttingDown, "It goes down."): "shutting-down",
	} {
		g.onRecord = func([]*ect.Token) error { return err }
		g.post(anonymous, token.Raw()).refused(503, slug, "")
	}
	g.onRecord = nil
	verify := g.Verify
	g.Verify = func(*http.Request, []string) ([]*ect.Token, error) {
		return nil, fmt.Errorf("%w: the URL hangs", ect.ErrUnavailable)
	}
	g.post(anonymous, token.Raw()).refused(503, "ect-unavailable", "")
	g.Verify = func(*http.Request, []string) ([]*ect.Token, error) { return nil, nil }
	g.post(anonymous, token.Raw()).refused(503, "store-unavailable", "")
	g.Verify = verify
	if g.recorded != 0 {
		t.Errorf("recorded %d times", g.recorded)
	}
	// A client that has left gets no answer.
	gone, leave := context.WithCancel(t.Context())
	leave()
	r := httptest.NewRequestWithContext(gone, http.MethodGet, basePath+"ledger/entries/0", nil)
	w := httptest.NewRecorder()
	if g.serve(w, r, asAlice); w.Body.Len() != 0 || len(w.Header()) != 0 {
		t.Errorf("%v %s", w.Header(), w.Body)
	}
}
