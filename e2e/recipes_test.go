package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// recipe runs a gateway with a snippet of docs/recipes before an upstream.
func recipe(t *testing.T, name, upstream string) *gateway {
	t.Helper()
	return launch(t, setup{before: "import ../docs/recipes/" + name + ".caddyfile\n", site: "import " + name + " " + upstream})
}

// Each snippet is linked to from docs/recipes.md, names its provider's page, has the name of its
// file, and a test here.
func TestRecipesAreListed(t *testing.T) {
	page, err := os.ReadFile("../docs/recipes.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("recipes_test.go")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("../docs/recipes/*.caddyfile")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d snippets, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		base := filepath.Base(file)
		name := strings.TrimSuffix(base, ".caddyfile")
		if !strings.Contains(string(page), "(recipes/"+base+")") {
			t.Errorf("docs/recipes.md does not link to %s", base)
		}
		if !strings.Contains(string(tests), `recipe(t, "`+name+`"`) {
			t.Errorf("%s has no test", base)
		}
		if !strings.Contains(string(text), "\n("+name+") {\n") || !strings.Contains(string(text), "# https://") || !strings.Contains(string(text), "Use: import "+name+" ") {
			t.Errorf("%s has no snippet %s, no use, or no link", base, name)
		}
		if string(caddyfile.Format(text)) != string(text) {
			t.Errorf("%s is not formatted: caddy fmt --overwrite", base)
		}
		if strings.Contains(string(text), "header_up Host") {
			t.Errorf("%s sets Host, which Caddy does by itself for https, with a warning where it is said", base)
		}
		_, use, _ := strings.Cut(string(text), "Use: ")
		use, _, _ = strings.Cut(use, "\n")
		whole := fmt.Sprintf("{\n\tadmin off\n\tagent_guard {\n\t\tstore badger %s\n\t}\n}\nimport %s\nhttp://localhost:8080 {\n\t%s\n}\n", t.TempDir(), file, use)
		adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(whole), map[string]any{"filename": "Caddyfile"})
		if err != nil || len(warnings) > 0 {
			t.Errorf("%s: %v %v", base, err, warnings)
			continue
		}
		var config caddy.Config
		if err := json.Unmarshal(adapted, &config); err != nil {
			t.Fatal(err)
		}
		if err := caddy.Validate(&config); err != nil {
			t.Errorf("%s: %v", base, err)
		}
	}
}

// bearer is a call with a credential.
func bearer(path, id, body string, header ...string) request {
	r := request{path: path, id: id, body: body, header: map[string]string{"Authorization": "Bearer ada"}}
	for i := 0; i < len(header); i += 2 {
		r.header[header[i]] = header[i+1]
	}
	return r
}

// executesAndDrops has its effect, and loses the answer.
func executesAndDrops(http.ResponseWriter, *arrival) { panic(http.ErrAbortHandler) }

// inDoubt checks that a call is refused since an equal one, or one of its id, may have been
// executed.
func (r reply) inDoubt(t *testing.T) {
	t.Helper()
	if r.status != 409 || r.header.Get("Execution-Status") != "in_doubt" && r.header.Get("Execution-Status") != "refused" || !strings.Contains(r.body, "in-doubt") {
		t.Errorf("in doubt: %d %v %s", r.status, r.header, r.body)
	}
}

// passed checks that an answer is none of the guard's.
func (r reply) passed(t *testing.T, status int) {
	t.Helper()
	if r.status != status || r.header.Get("Execution-Status") != "" {
		t.Errorf("passed: %d %v %s", r.status, r.header, r.body)
	}
}

// keeper is an API that keeps idempotency keys: it answers a repetition from its record, and has
// no effect then.
type keeper struct {
	mu      sync.Mutex
	effects int
	known   map[string]string
	do      []func(http.ResponseWriter, *arrival) // with the first arrivals, after their effect
	n       int
}

func (k *keeper) answer(w http.ResponseWriter, a *arrival) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key := a.Header.Get("Idempotency-Key")
	said, ok := k.known[key]
	if !ok || key == "" {
		k.effects++
		said = fmt.Sprintf(`{"id":"effect-%d"}`, k.effects)
		if k.known == nil {
			k.known = map[string]string{}
		}
		k.known[key] = said
	}
	k.n++
	if k.n <= len(k.do) {
		k.do[k.n-1](w, a)
		return
	}
	status(200, said, "Content-Type", "application/json")(w, a)
}

// Stripe answers a repetition of a key from its record for 24 hours
// (https://docs.stripe.com/api/idempotent_requests), and 409 without keeping anything where
// another request holds a lock.
func TestRecipeStripe(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "stripe", u.addr)
	k := &keeper{do: []func(http.ResponseWriter, *arrival){executesAndDrops}}
	u.on("/v1/payment_intents", k.answer)
	pay := bearer("/v1/payment_intents", "order-7", "amount=1200&currency=eur", "Content-Type", "application/x-www-form-urlencoded")
	g.call(pay) // its answer is lost
	g.call(pay).want(t, 200, `{"id":"effect-1"}`, "executed")
	g.call(pay).want(t, 200, `{"id":"effect-1"}`, "replayed")
	if u.arrived("/v1/payment_intents", 2); k.effects != 1 {
		t.Errorf("%d payments", k.effects)
	}
	u.on("/v1/refunds", sequence(status(409, `{"error":{"code":"lock_timeout"}}`), status(200, `{"id":"re_1"}`)))
	refund := bearer("/v1/refunds", "refund-7", "charge=ch_1", "Content-Type", "application/x-www-form-urlencoded")
	if got := g.call(refund); got.status != 409 {
		t.Errorf("locked: %d", got.status)
	}
	g.call(refund).want(t, 200, `{"id":"re_1"}`, "executed")
	// What has no key is not sent again by the guard.
	u.on("/v1/payouts", executesAndDrops)
	payout := bearer("/v1/payouts", "", "amount=5", "Content-Type", "application/x-www-form-urlencoded")
	g.call(payout).inDoubt(t)
	g.call(payout).inDoubt(t)
	u.arrived("/v1/payouts", 1)
}

// Inference runs each time, a batch (https://platform.openai.com/docs/api-reference/batch) once.
// 529 is Anthropic's overload (https://docs.anthropic.com/en/api/errors).
func TestRecipeLLM(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "llm", u.addr)
	for _, path := range []string{"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"} {
		u.on(path, sequence(status(429, "{}"), status(200, "{}")))
		g.call(bearer(path, "", "{}")).passed(t, 429)
		g.call(bearer(path, "", "{}", "X-Stainless-Retry-Count", "1")).passed(t, 200)
		u.arrived(path, 2)
	}
	for _, path := range []string{"/v1/batches", "/v1/messages/batches"} {
		u.on(path, sequence(status(529, `{"type":"error"}`), status(200, `{"id":"batch_1"}`)))
		batch := bearer(path, "", `{"input_file_id":"file-1"}`)
		if got := g.call(batch); got.status != 529 {
			t.Errorf("overloaded: %d", got.status)
		}
		batch.header["X-Stainless-Retry-Count"] = "1"
		g.call(batch).want(t, 200, `{"id":"batch_1"}`, "executed")
		batch.header["X-Stainless-Retry-Count"] = "2" // its answer was lost behind the gateway
		g.call(batch).want(t, 200, `{"id":"batch_1"}`, "replayed")
		u.arrived(path, 2)
	}
	u.on("/v1/files", status(200, `{"id":"file-1"}`))
	file := func(boundary, count string) request {
		return bearer("/v1/files", "", "--"+boundary+"\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--"+boundary+"--\r\n",
			"Content-Type", "multipart/form-data; boundary="+boundary, "X-Stainless-Retry-Count", count)
	}
	g.call(file("one", "0")).want(t, 200, `{"id":"file-1"}`, "executed")
	g.call(file("two", "1")).want(t, 200, `{"id":"file-1"}`, "replayed") // an SDK makes a boundary for each attempt
	u.arrived("/v1/files", 1)
}

// GitHub creates an issue for each POST, and refuses with 403 or 429 and Retry-After
// (https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api).
func TestRecipeGitHub(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "github", u.addr)
	issue := bearer("/repos/o/r/issues", "", `{"title":"a bug"}`)
	u.on(issue.path, sequence(status(403, `{"message":"secondary rate limit"}`, "Retry-After", "1"), status(201, `{"number":1}`), executesAndDrops))
	if got := g.call(issue); got.status != 403 {
		t.Errorf("limited: %d", got.status)
	}
	g.call(issue).want(t, 201, `{"number":1}`, "executed")
	g.call(issue).inDoubt(t) // meant once more, and its answer is lost
	g.call(issue).inDoubt(t)
	u.arrived(issue.path, 3)
	u.on("/markdown", status(200, "<p>x</p>"))
	g.call(bearer("/markdown", "", `{"text":"x"}`)).passed(t, 200)
	u.on("/user", status(200, "{}"))
	g.call(request{method: "GET", path: "/user"}).passed(t, 200)
}

// Slack answers 200 with "ok": false, and 429 with Retry-After (https://api.slack.com/web,
// https://api.slack.com/apis/rate-limits).
func TestRecipeSlack(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "slack", u.addr)
	post := bearer("/api/chat.postMessage", "", `{"channel":"C1","text":"hello"}`)
	u.on(post.path, sequence(
		status(429, `{"ok":false,"error":"ratelimited"}`, "Retry-After", "1"), status(200, `{"ok":false,"error":"not_in_channel"}`),
		status(200, `{"ok":true,"ts":"1.1"}`), executesAndDrops))
	if got := g.call(post); got.status != 429 {
		t.Errorf("limited: %d", got.status)
	}
	g.call(post).want(t, 200, `{"ok":false,"error":"not_in_channel"}`, "executed")
	g.call(post).want(t, 200, `{"ok":true,"ts":"1.1"}`, "executed")
	g.call(post).inDoubt(t)
	g.call(post).inDoubt(t)
	u.arrived(post.path, 4)
	for _, path := range []string{"/api/conversations.list", "/api/conversations.history", "/api/users.info", "/api/search.messages", "/api/auth.test"} {
		u.on(path, status(200, `{"ok":true}`))
		g.call(bearer(path, "", "{}")).passed(t, 200)
	}
}

// Resend sends one mail for an Idempotency-Key
// (https://resend.com/docs/dashboard/emails/idempotency-keys).
func TestRecipeMail(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "mail", u.addr)
	k := &keeper{do: []func(http.ResponseWriter, *arrival){executesAndDrops, status(409, `{"name":"concurrent_idempotent_requests"}`)}}
	u.on("/emails", k.answer)
	mail := bearer("/emails", "welcome-user/1", `{"to":"a@example.com"}`)
	g.call(mail)                                // its answer is lost
	if got := g.call(mail); got.status != 409 { // the first one is still in progress there
		t.Errorf("in progress: %d %s", got.status, got.body)
	}
	g.call(mail).want(t, 200, `{"id":"effect-1"}`, "executed")
	if u.arrived("/emails", 3); k.effects != 1 {
		t.Errorf("%d mails", k.effects)
	}
	// agentmail-mcp #49: a mail without a key is sent again after a time-out.
	u.on("/emails/batch", executesAndDrops)
	batch := bearer("/emails/batch", "", `[{"to":"a@example.com"}]`)
	g.call(batch).inDoubt(t)
	g.call(batch).inDoubt(t)
	u.arrived("/emails/batch", 1)
}

// AWS names a call by a token in its body, and Google by a request id in the query or the body.
func TestRecipesOfClouds(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "aws", u.addr+" {http.request.header.X-Agent}")
	signed := request{path: "/", body: `{"Name":"db","ClientRequestToken":"token-1"}`, header: map[string]string{
		"Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1, Signature=1", "X-Agent": "ada",
	}}
	g.call(signed).want(t, 201, "arrival 1", "executed")
	signed.header["Authorization"] = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1, Signature=2"
	g.call(signed).want(t, 201, "arrival 1", "replayed")

	g = recipe(t, "google", u.addr)
	for _, r := range []request{bearer("/query?requestId=8e03978e", "", `{"name":"vm"}`), bearer("/body", "", `{"requestId":"8e03978e"}`)} {
		g.call(r).want(t, 201, "arrival 1", "executed")
		g.call(r).want(t, 201, "arrival 1", "replayed")
	}
}

// An MCP server answers a tool call on its POST
// (https://modelcontextprotocol.io/specification/2025-11-25/basic/transports).
func TestRecipeMCP(t *testing.T) {
	s, addr := newToolServer(t)
	g := recipe(t, "mcp", addr)
	g.call(message(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)).passed(t, 200)
	g.call(message(toolCall("2", "get", ""))).passed(t, 200)
	g.call(message(toolCall("3", "pay", keyA))).want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}`, "executed")
	g.call(message(toolCall("4", "pay", keyA))).want(t, 200, `{"jsonrpc":"2.0","id":4,"result":{"content":[],"n":1}}`, "replayed")
	// hostinger api-mcp-server #68: a tool that writes is called again, byte by byte, after its
	// answer was lost.
	for range 2 {
		if got := g.call(message(toolCall("5", "cut", ""))); got.status != 200 {
			t.Errorf("cut: %d %s", got.status, got.body)
		}
	}
	if s.count("cut") != 1 {
		t.Errorf("%d executions", s.count("cut"))
	}
}

// An agent may use the messageId to know a message again, and answers with a task or a message
// (https://a2a-protocol.org/v1.0.0/specification/, 3.1.1).
func TestRecipeA2A(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "a2a", u.addr)
	u.on("/", func(w http.ResponseWriter, a *arrival) {
		id := a.body[strings.Index(a.body, `"id":`)+5:]
		id = id[:strings.IndexAny(id, ",}")]
		status(200, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"n":%d}}`, id, a.n), "Content-Type", "application/json")(w, a)
	})
	send := func(id, message string) request {
		return bearer("/", "", `{"jsonrpc":"2.0","id":`+id+`,"method":"SendMessage","params":{"message":{"messageId":"`+message+`","role":"ROLE_USER","parts":[{"text":"pay"}]}}}`, "A2A-Version", "1.0")
	}
	g.call(send("1", "m1")).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"n":1}}`, "executed")
	g.call(send("2", "m1")).want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"n":1}}`, "replayed")
	g.call(send("3", "m2")).want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"n":2}}`, "executed")
	g.call(bearer("/", "", `{"jsonrpc":"2.0","id":4,"method":"GetTask","params":{"id":"t"}}`, "A2A-Version", "1.0")).passed(t, 200)
	u.arrived("/", 3)
}

// PostgREST answers 201 for a row, and 409 where a constraint is violated and nothing was written
// (https://docs.postgrest.org/en/latest/references/errors.html).
func TestRecipeDatabase(t *testing.T) {
	u := newUpstream(t)
	g := recipe(t, "database", u.addr)
	row := bearer("/people", "", `{"id":1}`)
	u.on(row.path, sequence(status(409, `{"code":"23505"}`), status(201, ""), executesAndDrops))
	row.id = "row-1"
	if got := g.call(row); got.status != 409 {
		t.Errorf("violated: %d", got.status)
	}
	g.call(row).want(t, 201, "", "executed")
	g.call(row).want(t, 201, "", "replayed")
	row.id = ""
	g.call(row).inDoubt(t)
	g.call(row).inDoubt(t)
	u.arrived(row.path, 3)
	u.on("/rpc/total", status(200, "7"))
	g.call(request{method: "GET", path: "/rpc/total"}).passed(t, 200)
}
