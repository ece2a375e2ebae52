package graph_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
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

// An event of which no token could be made says so.
func TestUnsignedEntry(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	err := g.log.Append(t.Context(), []ledger.Event{{ID: "x", Workflow: flow, Parents: []string{task.ID()}, Action: "checkpoint", Issuer: gateway, Payload: []byte("no draft"), Unsigned: true}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.log.Wait(t.Context(), flow, "x"); err != nil {
		t.Fatal(err)
	}
	var doc entryDoc
	g.get("ledger/entries?jti=x&wid="+flow, asAlice).read(200, &doc)
	if doc.Signed || doc.Token != "" || doc.Level != "" || len(doc.Leaf) == 0 {
		t.Errorf("%+v", doc)
	}
	g.get("workflows/"+flow, asAlice).read(200, &struct{}{})
}

// P3: what others have recorded cannot be told from what is not there, and callers
// without a credential are told nothing.
func TestOnlyWhoTakesPartMayRead(t *testing.T) {
	g := newGate(t)
	mine := g.add(alice, flow, "act", nil)
	g.add(gateway, flow, "pay", ofCall("completed", caller), mine)
	alone := g.add(alice, "", "act", nil)
	// An agent's word about callers counts for nothing.
	g.add(alice, foreign, "act", ofCall("completed", asMallory.Caller))
	for _, who := range []Reader{asAlice, asCaller} {
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

	nobody := []Reader{{}, {Issuer: gateway}, asMallory, {Issuer: bob}}
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
		if _, err := g.log.Wait(t.Context(), wid, "x"); err != nil {
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
	if _, err := g.log.Wait(t.Context(), flow, "299"); err != nil {
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
	for _, who := range []Reader{asAlice, asMallory} {
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
		if Handles(r) != ours {
			t.Errorf("%s: %v", path, !ours)
		}
		if err := g.Serve(httptest.NewRecorder(), r, asAlice); err == nil && !ours {
			t.Errorf("%s was answered", path)
		}
	}
	for path, allow := range map[string]string{
		"ledger/head": "GET, HEAD", "ledger/entries/1": "GET, HEAD", "ledger/entries": "GET, HEAD", "ledger/proof": "GET, HEAD",
		"ledger/consistency": "GET, HEAD", "workflows/x": "GET, HEAD", "errors": "POST",
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

// What is recorded and has no place yet can be waited for, by who takes part.
func TestWaiting(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	held := ledger.Event{ID: "held", Workflow: flow, Parents: []string{task.ID()}, Action: "act", Issuer: gateway, Payload: []byte("held"), Unsigned: true}
	if err := g.log.Append(t.Context(), []ledger.Event{held}); err != nil {
		t.Fatal(err)
	}
	path := "ledger/entries?wid=" + flow + "&jti=held"
	waiting := func(path string) {
		t.Helper()
		var doc struct{ State, JTI, WID string }
		got := g.get(path, asAlice)
		got.read(202, &doc)
		got.private()
		if doc.State != "waiting" || doc.JTI != "held" || doc.WID != flow || got.Header().Get("Retry-After") != "1" {
			t.Errorf("%+v %v", doc, got.Header())
		}
	}
	waiting(path)
	waiting(path + "&wait=1ms")
	g.get(path+"&wait=60s", asMallory).refused(404, "entry-unknown", "")
	g.get("ledger/entries?jti=held", asAlice).refused(404, "entry-unknown", "")

	found := make(chan reply)
	go func() { found <- g.get(path+"&wait=60s", asAlice) }()
	g.release()
	var doc entryDoc
	(<-found).read(200, &doc)
	if doc.Index != 1 || doc.Signed {
		t.Errorf("%+v", doc)
	}
	g.get("ledger/entries?wid="+flow+"&wait=60s&jti="+nowhere, asAlice).refused(404, "entry-unknown", "")
}

// An exit ends what waits.
func TestWaitingEndsAtAnExit(t *testing.T) {
	exit, end := context.WithCancel(t.Context())
	end()
	g := newGate(t, func(o *Options) { o.Waits = exit })
	g.add(alice, flow, "act", nil)
	held := ledger.Event{ID: "held", Workflow: flow, Action: "act", Issuer: gateway, Payload: []byte("held"), Unsigned: true}
	if err := g.log.Append(t.Context(), []ledger.Event{held}); err != nil {
		t.Fatal(err)
	}
	if got := g.get("ledger/entries?wait=60s&jti=held&wid="+flow, asAlice); got.Code != 202 {
		t.Errorf("%d %s", got.Code, got.Body)
	}
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
	g := newGate(t, func(o *Options) {
		o.Called = func(_ context.Context, who [16]byte) (bool, error) {
			asked++
			return who == caller, nil
		}
	})
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	g.add(gateway, flow, "pay", ofCall("completed", caller), task, ckpt)
	own, made := Reader{Caller: caller, Credential: true}, Reader{Caller: [16]byte{7}, Credential: true}
	for _, who := range []Reader{own, made} {
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
