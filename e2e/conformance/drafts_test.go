package conformance

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The examples of the five documents stand under testdata/drafts, in their order and word for
// word. docs/drafts.md has a row for each, and says what becomes of it here.
const (
	draftsDir  = "testdata/drafts"
	draftsPage = "../../docs/drafts.md"
)

// What docs/drafts.md says of an example.
const (
	asShown   = "as shown"   // it is taken, or answered, or written as the document has it
	otherwise = "otherwise"  // and why not stands in the row
	noMessage = "no message" // a drawing, or a document for somebody else
)

// example is what a test does with one example.
type example struct {
	says string
	// differs are the members that are not written as the figure has them.
	differs []string
	run     func(d *drafts, text string) []shown
}

// shown is a figure and what the gateway has in its place.
type shown struct{ figure, got string }

// drafts is a walk through the examples of one document.
type drafts struct {
	t   *testing.T
	g   *harness.Gateway
	a   *harness.Agent
	b   *harness.Agent
	wid string
	// places are what stands for the placeholders of the figures.
	places []string
	// answer is the answer to the request before.
	answer harness.Reply
	// started is the last circuit_breaker_open that the agent has sent.
	started string
}

// set says what stands for a placeholder from now on.
func (d *drafts) set(place, value string) { d.places = append([]string{place, value}, d.places...) }

// fill puts ids, hashes and times into a text.
func (d *drafts) fill(text string) string { return strings.NewReplacer(d.places...).Replace(text) }

// hash is a hash in the form of the claims.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// token signs a figure of a token: its text as it stands, behind the claims that every token
// has and the figures leave out. more are further members.
func (d *drafts) token(by *harness.Agent, text string, more ...string) string {
	d.t.Helper()
	text = d.fill(text)
	head := fmt.Sprintf(`"iss":%q,"aud":%q,"iat":%d,"exp":%d,"wid":%q`,
		by.Issuer.Identity(), harness.GatewayIdentity, time.Now().Unix(), time.Now().Add(5*time.Minute).Unix(), d.wid)
	var has map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &has); err != nil {
		d.t.Fatalf("%v: %s", err, text)
	}
	if has["par"] == nil && !slices.ContainsFunc(more, func(m string) bool { return strings.HasPrefix(m, `"par"`) }) {
		more = append(more, `"par":[]`)
	}
	if has["jti"] == nil {
		more = append(more, fmt.Sprintf(`"jti":%q`, uuid.NewString()))
	}
	for _, m := range more {
		head += "," + m
	}
	if len(has) > 0 {
		head += ","
	}
	return by.Sign(d.t, "{"+head+strings.TrimPrefix(strings.TrimSpace(text), "{"))
}

// id is the jti of a token.
func (d *drafts) id(raw string) string {
	d.t.Helper()
	token, err := ect.ParseInsecure(raw)
	if err != nil {
		d.t.Fatal(err)
	}
	return token.ID()
}

// calls makes a call with a token, which must be taken, and returns its checkpoint.
func (d *drafts) calls(raw string) string {
	d.t.Helper()
	got := d.g.Call(harness.Request{Method: "PUT", Path: "/docs/" + uuid.NewString(), Body: "x", Header: harness.Headers{ect.FieldName: raw, "Content-Type": "text/plain"}})
	if got.Status != http.StatusCreated {
		d.t.Fatalf("the call is answered %d %s", got.Status, got.Body)
	}
	return got.Header.Get("Execution-Checkpoint")
}

// acts makes a call of the agent's own with a token that is in no figure.
func (d *drafts) acts(by *harness.Agent, after ...string) (id, checkpoint string) {
	d.t.Helper()
	raw := by.Issue(ect.Claims{Workflow: d.wid, Action: "update_config", Parents: after}).Raw()
	return d.id(raw), d.calls(raw)
}

// posts sends an error, which must be taken.
func (d *drafts) posts(raw string) {
	d.t.Helper()
	if got := d.g.Call(harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}, Header: harness.Headers{ect.FieldName: raw}}); got.Status != http.StatusCreated {
		d.t.Fatalf("the error is answered %d %s", got.Status, got.Body)
	}
}

// asks sends a figure of a request with a token.
func (d *drafts) asks(text, raw string) harness.Reply {
	d.t.Helper()
	lines := strings.Split(strings.TrimSpace(d.fill(text)), "\n")
	parts := strings.Fields(lines[0])
	r := harness.Request{Method: parts[0], Path: parts[1], Header: harness.Headers{}}
	for lines = lines[1:]; len(lines) > 0 && !strings.HasPrefix(lines[0], "{"); lines = lines[1:] {
		name, value, _ := strings.Cut(lines[0], ": ")
		r.Header[name] = value
	}
	if r.Body = strings.Join(lines, "\n"); r.Body == "" && r.Method == "POST" {
		r.Reader = harness.Nothing{}
	}
	r.Header[ect.FieldName] = raw
	d.answer = d.g.Call(r)
	return d.answer
}

// written is a token of the gateway's own as it stands in the ledger.
func (d *drafts) written(id string) string {
	d.t.Helper()
	var got harness.Reply
	harness.Eventually(d.t, "the token stands in the ledger", func() bool {
		got = d.g.Get(d.a, "ledger/entries?jti="+id+"&wid="+d.wid)
		return got.Status == http.StatusOK
	})
	return claimsOf(d.t, harness.Document[struct{ Token string }](d.t, got).Token)
}

// event waits for the gateway's own token of an event, and returns its id.
func (d *drafts) event(event string, but ...string) (id string) {
	d.t.Helper()
	harness.Eventually(d.t, event+" stands in the ledger", func() bool {
		for _, n := range harness.Document[harness.WorkflowView](d.t, d.g.Get(d.a, "workflows/"+d.wid)).Nodes {
			if n.Event == event && !slices.Contains(but, n.JTI) {
				id = n.JTI
				return true
			}
		}
		return false
	})
	return id
}

func claimsOf(t *testing.T, raw string) string {
	t.Helper()
	token, err := ect.ParseInsecure(raw)
	if err != nil {
		t.Fatalf("%v: %q", err, raw)
	}
	return token.Payload()
}

// look is a token that asks for nothing but to see.
func (d *drafts) look() string { return d.a.Issue(ect.Claims{Workflow: d.wid, Action: "look"}).Raw() }

// sends is a figure of a token that an agent sends with a call.
func sends(more ...string) func(*drafts, string) []shown {
	return func(d *drafts, text string) []shown {
		raw := d.token(d.a, text, more...)
		d.calls(raw)
		d.started = d.id(raw)
		return nil
	}
}

// prepared are what the figures of a document follow from.
func (d *drafts) prepared() {
	d.t.Helper()
	action, checkpoint := d.acts(d.a)
	failed := d.a.Issue(ect.Claims{Workflow: d.wid, Action: "error", Parents: []string{action}}).Raw()
	d.posts(failed)
	d.places = []string{
		"550e8400-e29b-41d4-a716-446655440001", checkpoint,
		"failed-action-ect-uuid", action, "action-ect-uuid", action, "error-ect-uuid", d.id(failed), "error-uuid", uuid.NewString(),
		"urn:uuid:...", "urn:uuid:" + uuid.NewString(), `"out_hash": "sha256:..."`, `"out_hash": "sha256:` + hash("state") + `"`,
		"sha256:...", "sha256:" + hash("state"),
		"sha256-of-agent-state-snapshot", "sha256-" + hash("state"), "sha256-of-restored-state", "sha256-" + hash("restored"),
	}
}

var draftExamples = map[string]example{
	"cascade/01": {says: noMessage}, "cascade/02": {says: noMessage}, "cascade/08": {says: noMessage}, "cascade/15": {says: noMessage},
	"aerr/03": {says: noMessage},
	"atd/05":  {says: noMessage}, "atd/08": {says: noMessage}, "atd/14": {says: noMessage},

	"cascade/03": {says: asShown, run: asksForCircuits},
	"cascade/04": {says: asShown, run: answered},
	"cascade/05": {says: asShown, run: func(d *drafts, text string) []shown {
		d.set("cb-open-uuid", uuid.NewString())
		sends()(d, text)
		return []shown{{text, d.written(d.event("circuit_breaker_open", d.started))}}
	}},
	"cascade/06": {says: asShown, run: func(d *drafts, text string) []shown {
		d.set("cb-close-uuid", uuid.NewString())
		sends()(d, text)
		harness.HalfOpen(d.t, d.places[slices.Index(d.places, "failing upstream")+1])
		if got := d.g.Call(harness.Request{Path: "/fails/no-more", Header: harness.Headers{ect.FieldName: d.look()}}); got.Status != http.StatusCreated {
			d.t.Fatalf("the probe: %d %s", got.Status, got.Body)
		}
		return []shown{{text, d.written(d.event("circuit_breaker_close", d.started))}}
	}},
	"cascade/07": {says: asShown, run: sends()},
	"cascade/09": {says: otherwise, differs: []string{"out_hash"}, run: func(d *drafts, text string) []shown {
		d.set("ckpt-uuid", uuid.NewString())
		sends()(d, text)
		_, own := d.acts(d.a)
		d.set("ckpt-uuid", own) // which the next examples go back to
		return []shown{{text, d.written(own)}}
	}},
	"cascade/10": {says: asShown, run: func(d *drafts, text string) []shown {
		d.set("{jti}", d.fill("ckpt-uuid"))
		got := d.asks(text, d.look())
		doc := harness.Document[struct {
			Token        string
			Verification map[string]any
		}](d.t, got)
		if claimsOf(d.t, doc.Token) == "" || len(doc.Verification) == 0 {
			d.t.Error(got.Body)
		}
		return nil
	}},
	"cascade/11": {says: asShown, run: func(d *drafts, text string) []shown {
		d.acts(d.b, d.fill("ckpt-uuid")) // of another agent, for cascade.cascaded
		d.set("rb-start-uuid", uuid.NewString())
		got := d.asks(text, d.token(d.a, draftText(d.t, "cascade/13")))
		if doc := harness.Document[harness.PreparedDoc](d.t, got); doc.Status != "prepared" || len(doc.Agents) != 2 {
			d.t.Errorf("%s", got.Body)
		}
		return nil
	}},
	"cascade/12": {says: asShown, run: func(d *drafts, text string) []shown {
		d.set("rb-start-uuid", uuid.NewString())
		got := d.asks(text, d.token(d.a, draftText(d.t, "cascade/13")))
		harness.Document[harness.RollbackDoc](d.t, got).Want(d.t, "completed")
		return nil
	}},
	"cascade/13": {says: asShown, run: func(d *drafts, text string) []shown {
		return []shown{{text, d.written(harness.Document[harness.RollbackDoc](d.t, d.answer).Tokens.Start)}}
	}},
	"cascade/14": {says: otherwise, differs: []string{"out_hash"}, run: func(d *drafts, text string) []shown {
		d.set("rb-complete-uuid", uuid.NewString())
		sends()(d, text)
		return []shown{{text, claimsOf(d.t, harness.Document[harness.RollbackDoc](d.t, d.answer).ECT)}}
	}},

	"aerr/01": {says: asShown, run: func(d *drafts, text string) []shown {
		return sends(`"exec_act":"aerr:checkpoint"`, `"out_hash":"`+hash("state")+`"`, `"par":["`+d.fill("action-ect-uuid")+`"]`)(d, text)
	}},
	"aerr/02": {says: asShown, run: func(d *drafts, text string) []shown {
		_, own := d.acts(d.a)
		d.set("550e8400-e29b-41d4-a716-446655440001", own) // which the next examples go back to
		raw := d.token(d.a, text, `"exec_act":"aerr:error"`, `"par":["`+d.fill("550e8400-e29b-41d4-a716-446655440001")+`"]`)
		d.posts(raw)
		d.set("the error", d.id(raw))
		return nil
	}},
	"aerr/04": {says: asShown, run: asksForCircuits},
	"aerr/05": {says: asShown, run: answered},
	"aerr/06": {says: asShown, run: func(d *drafts, text string) []shown {
		d.acts(d.b, d.fill("550e8400-e29b-41d4-a716-446655440001"))
		raw := d.token(d.a, "{}", `"par":["`+d.fill("the error")+`"]`, `"exec_act":"aerr:rollback_request"`)
		if got := d.asks(text, raw); got.Status != http.StatusOK {
			d.t.Fatalf("%d %s", got.Status, got.Body)
		}
		return nil
	}},
	"aerr/07": {says: asShown, run: undone},

	"atd/01": {says: asShown, run: func(d *drafts, text string) []shown {
		sends()(d, text)
		d.set("wf-start-ect-uuid", d.started)
		return nil
	}},
	"atd/02": {says: asShown, run: func(d *drafts, text string) []shown {
		sends()(d, text)
		d.wid = uuid.NewString() // that workflow is over
		d.prepared()
		return nil
	}},
	"atd/03": {says: asShown, run: func(d *drafts, text string) []shown {
		d.set("ckpt-uuid", uuid.NewString())
		sends()(d, text)
		return nil
	}},
	"atd/04": {says: asShown, run: func(d *drafts, text string) []shown {
		d.posts(d.token(d.a, text))
		return nil
	}},
	"atd/06": {says: asShown, run: sends()},
	"atd/07": {says: asShown, run: sends()},
	"atd/09": {says: asShown, run: constrains},
	"atd/10": {says: asShown, run: func(d *drafts, text string) []shown {
		_, own := d.acts(d.a)
		d.set("ckpt-uuid", own)
		d.acts(d.b, d.fill("ckpt-uuid"))
		raw := d.token(d.a, draftText(d.t, "atd/11"))
		d.set("rollback-request-uuid", d.id(raw))
		if got := d.asks(text, raw); got.Status != http.StatusOK {
			d.t.Fatalf("%d %s", got.Status, got.Body)
		}
		return nil
	}},
	"atd/11": {says: asShown, run: func(*drafts, string) []shown { return nil }}, // went with the request before
	"atd/12": {says: asShown, run: undone},
	"atd/13": {says: asShown, run: constrains},
}

// asksForCircuits asks for the breakers once one of them is open.
func asksForCircuits(d *drafts, text string) []shown {
	for range 2 {
		d.g.Call(harness.Request{Path: "/fails", Header: harness.Headers{ect.FieldName: d.a.Issue(ect.Claims{Workflow: d.wid}).Raw()}})
	}
	harness.Eventually(d.t, "the breaker is open, and its token told", func() bool {
		got := d.asks(text, d.look())
		return strings.Contains(got.Body, `"open_ect"`) && strings.Contains(got.Body, `"last_failure_ect"`)
	})
	return nil
}

// answered compares a figure with the answer before.
func answered(d *drafts, text string) []shown { return []shown{{text, d.answer.Body}} }

// undone is answered, of a rollback that has succeeded.
func undone(d *drafts, text string) []shown {
	if strings.Count(d.answer.Body, `status": "completed"`) < 2 { // of the whole, and of the other agent
		d.t.Error(d.answer.Body)
	}
	return answered(d, text)
}

// constrains sends constraints in the extensions of a call's token.
func constrains(d *drafts, text string) []shown {
	return sends()(d, `{"exec_act": "update_config", "ext": `+text+"}")
}

func draftText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(draftsDir, name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Every example of the five documents goes through a running gateway, in its order and word
// for word but for ids, hashes and hosts. What is answered or written has the members of the
// document's figure, with their types. Where it has not, docs/drafts.md says why.
func TestEveryExampleOfTheDrafts(t *testing.T) {
	page, err := os.ReadFile(draftsPage)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{} // by example
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); len(cells) > 4 {
			rows[strings.Trim(cells[1], " `")] = strings.TrimSpace(cells[3]) + "|" + strings.TrimSpace(cells[4])
		}
	}
	walked := 0
	for _, name := range []string{"cascade", "aerr", "atd"} {
		t.Run(name, func(t *testing.T) {
			d := newDrafts(t)
			files, err := filepath.Glob(filepath.Join(draftsDir, name, "*.txt"))
			if err != nil || len(files) == 0 {
				t.Fatal(err)
			}
			for _, file := range files { // in their order
				at := name + "/" + strings.TrimSuffix(filepath.Base(file), ".txt")
				x, known := draftExamples[at]
				says, why, _ := strings.Cut(rows[at], "|")
				if !known || says != x.says {
					t.Errorf("%s: the page says %q, the test %q", at, says, x.says)
				}
				if x.says == otherwise && why == "" {
					t.Errorf("%s: the page does not say why", at)
				}
				walked++
				if x.run == nil {
					continue
				}
				ok := t.Run(filepath.Base(file), func(t *testing.T) {
					d.t, d.g.T, d.a.T, d.b.T = t, t, t, t
					text := draftText(t, at)
					for _, s := range x.run(d, text) {
						differs := compare(t, d.fill(s.figure), s.got)
						if !slices.Equal(differs, x.differs) {
							t.Errorf("%q differ, and %q should:\n%s\n%s", differs, x.differs, s.figure, s.got)
						}
						for _, m := range differs {
							if !strings.Contains(why, "`"+m+"`") {
								t.Errorf("the page does not name %s", m)
							}
						}
					}
				})
				if d.t, d.g.T, d.a.T, d.b.T = t, t, t, t; !ok {
					return // what follows builds on it
				}
			}
		})
	}
	if !t.Failed() && walked != len(draftExamples) {
		t.Errorf("%d examples, and the test knows %d", walked, len(draftExamples))
	}
	for _, name := range []string{"brief", "guard"} {
		if rows[name] == "" {
			t.Errorf("the page does not say that %s has no example", name)
		}
	}
}

// newDrafts runs a gateway with an upstream that fails, before which stands a breaker, and one
// whose state can be put back.
func newDrafts(t *testing.T) *drafts {
	t.Helper()
	fails, lab, a, b := harness.NewUpstream(t), harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	fails.On("/fails", harness.Status(http.StatusServiceUnavailable, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: fmt.Sprintf(`
		@fails path /fails* /.well-known/cascade/circuits /aerr/circuits
		handle @fails {
			agent_proxy %[1]s {
				name fails
				breaker {
					consecutive 2
					cooldown 10h
					downstream %[1]s spiffe://example.com/agent/router-mgr
				}
			}
		}
		handle {
			agent_proxy %[2]s {
				%[3]s
			}
		}`, fails.Addr, lab.Addr, harness.SagaActions)})
	d := &drafts{t: t, g: g, a: a, b: b, wid: uuid.NewString()}
	d.prepared()
	d.set("failing upstream", fails.Addr)
	return d
}

// compare says which members of a figure are not there, or are of another type. A whole number
// stays one, a text with the name of a hash keeps that, and a list has at least one element if
// the figure's has, all of the figure's kind.
func compare(t *testing.T, figure, got string) (differs []string) {
	t.Helper()
	var want, have any
	for text, into := range map[string]*any{figure: &want, got: &have} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	compareAt("", want, have, &differs)
	slices.Sort(differs)
	return differs
}

func compareAt(at string, want, have any, differs *[]string) {
	same := false
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		for name, value := range w {
			member := strings.TrimPrefix(at+"."+name, ".")
			if got, there := h[name]; there {
				compareAt(member, value, got, differs)
			} else {
				*differs = append(*differs, member)
			}
		}
		same = ok
	case []any:
		h, ok := have.([]any)
		same = ok && (len(w) == 0 || len(h) > 0)
		for _, element := range h {
			if len(w) > 0 {
				compareAt(at+"[]", w[0], element, differs)
			}
		}
	case string:
		h, ok := have.(string)
		same = ok && h != ""
		for _, prefix := range []string{"sha256:", "urn:uuid:"} {
			same = same && strings.HasPrefix(w, prefix) == strings.HasPrefix(h, prefix)
		}
	case float64:
		h, ok := have.(float64)
		same = ok && (w != math.Trunc(w) || h == math.Trunc(h))
	case bool:
		_, same = have.(bool)
	}
	if !same {
		*differs = append(*differs, at)
	}
}
