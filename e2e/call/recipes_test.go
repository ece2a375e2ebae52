package call

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// recipe runs a gateway with a snippet of docs/recipes before an upstream.
func recipe(t *testing.T, name, upstream string) *harness.Gateway {
	t.Helper()
	return harness.Launch(t, harness.Setup{Before: "import ../../docs/recipes/" + name + ".caddyfile\n", Site: "import " + name + " " + upstream})
}

// Each snippet is linked to from docs/recipes.md, names its provider's page, has the name of its
// file, and a test here.
func TestRecipesAreListed(t *testing.T) {
	page, err := os.ReadFile("../../docs/recipes.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("recipes_test.go")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("../../docs/recipes/*.caddyfile")
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

// keeper is an API that keeps idempotency keys: it answers a repetition from its record, and has
// no effect then.
type keeper struct {
	mu      sync.Mutex
	effects int
	known   map[string]string
	do      []func(http.ResponseWriter, *harness.Arrival) // with the first arrivals, after their effect
	n       int
}

func (k *keeper) answer(w http.ResponseWriter, a *harness.Arrival) {
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
	harness.Status(200, said, "Content-Type", "application/json")(w, a)
}

// Stripe answers a repetition of a key from its record for 24 hours
// (https://docs.stripe.com/api/idempotent_requests), and 409 without keeping anything where
// another request holds a lock.
func TestRecipeStripe(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "stripe", u.Addr)
	k := &keeper{do: []func(http.ResponseWriter, *harness.Arrival){harness.ExecutesAndDrops}}
	u.On("/v1/payment_intents", k.answer)
	pay := harness.Bearer("/v1/payment_intents", "order-7", "amount=1200&currency=eur", "Content-Type", "application/x-www-form-urlencoded")
	g.Call(pay) // its answer is lost
	g.Call(pay).Want(t, 200, `{"id":"effect-1"}`, "executed")
	g.Call(pay).Want(t, 200, `{"id":"effect-1"}`, "replayed")
	if u.Arrived("/v1/payment_intents", 2); k.effects != 1 {
		t.Errorf("%d payments", k.effects)
	}
	u.On("/v1/refunds", sequence(harness.Status(409, `{"error":{"code":"lock_timeout"}}`), harness.Status(200, `{"id":"re_1"}`)))
	refund := harness.Bearer("/v1/refunds", "refund-7", "charge=ch_1", "Content-Type", "application/x-www-form-urlencoded")
	if got := g.Call(refund); got.Status != 409 {
		t.Errorf("locked: %d", got.Status)
	}
	g.Call(refund).Want(t, 200, `{"id":"re_1"}`, "executed")
	// What has no key is not sent again by the guard.
	u.On("/v1/payouts", harness.ExecutesAndDrops)
	payout := harness.Bearer("/v1/payouts", "", "amount=5", "Content-Type", "application/x-www-form-urlencoded")
	g.Call(payout).InDoubt(t)
	g.Call(payout).InDoubt(t)
	u.Arrived("/v1/payouts", 1)
}

// Inference runs each time, a batch (https://platform.openai.com/docs/api-reference/batch) once.
// 529 is Anthropic's overload (https://docs.anthropic.com/en/api/errors).
func TestRecipeLLM(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "llm", u.Addr)
	for _, path := range []string{"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"} {
		u.On(path, sequence(harness.Status(429, "{}"), harness.Status(200, "{}")))
		g.Call(harness.Bearer(path, "", "{}")).Passed(t, 429)
		g.Call(harness.Bearer(path, "", "{}", "X-Stainless-Retry-Count", "1")).Passed(t, 200)
		u.Arrived(path, 2)
	}
	for _, path := range []string{"/v1/batches", "/v1/messages/batches"} {
		u.On(path, sequence(harness.Status(529, `{"type":"error"}`), harness.Status(200, `{"id":"batch_1"}`)))
		batch := harness.Bearer(path, "", `{"input_file_id":"file-1"}`)
		if got := g.Call(batch); got.Status != 529 {
			t.Errorf("overloaded: %d", got.Status)
		}
		batch.Header["X-Stainless-Retry-Count"] = "1"
		g.Call(batch).Want(t, 200, `{"id":"batch_1"}`, "executed")
		batch.Header["X-Stainless-Retry-Count"] = "2" // its answer was lost behind the gateway
		g.Call(batch).Want(t, 200, `{"id":"batch_1"}`, "replayed")
		u.Arrived(path, 2)
	}
	u.On("/v1/files", harness.Status(200, `{"id":"file-1"}`))
	file := func(boundary, count string) harness.Request {
		return harness.Bearer("/v1/files", "", "--"+boundary+"\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--"+boundary+"--\r\n",
			"Content-Type", "multipart/form-data; boundary="+boundary, "X-Stainless-Retry-Count", count)
	}
	g.Call(file("one", "0")).Want(t, 200, `{"id":"file-1"}`, "executed")
	g.Call(file("two", "1")).Want(t, 200, `{"id":"file-1"}`, "replayed") // an SDK makes a boundary for each attempt
	u.Arrived("/v1/files", 1)
}

// GitHub creates an issue for each POST, and refuses with 403 or 429 and Retry-After
// (https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api).
func TestRecipeGitHub(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "github", u.Addr)
	issue := harness.Bearer("/repos/o/r/issues", "", `{"title":"a bug"}`)
	u.On(issue.Path, sequence(harness.Status(403, `{"message":"secondary rate limit"}`, "Retry-After", "1"), harness.Status(201, `{"number":1}`), harness.ExecutesAndDrops))
	if got := g.Call(issue); got.Status != 403 {
		t.Errorf("limited: %d", got.Status)
	}
	g.Call(issue).Want(t, 201, `{"number":1}`, "executed")
	g.Call(issue).InDoubt(t) // meant once more, and its answer is lost
	g.Call(issue).InDoubt(t)
	u.Arrived(issue.Path, 3)
	u.On("/markdown", harness.Status(200, "<p>x</p>"))
	g.Call(harness.Bearer("/markdown", "", `{"text":"x"}`)).Passed(t, 200)
	u.On("/user", harness.Status(200, "{}"))
	g.Call(harness.Request{Method: "GET", Path: "/user"}).Passed(t, 200)
}

// Slack answers 200 with "ok": false, and 429 with Retry-After (https://api.slack.com/web,
// https://api.slack.com/apis/rate-limits).
func TestRecipeSlack(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "slack", u.Addr)
	post := harness.Bearer("/api/chat.postMessage", "", `{"channel":"C1","text":"hello"}`)
	u.On(post.Path, sequence(
		harness.Status(429, `{"ok":false,"error":"ratelimited"}`, "Retry-After", "1"), harness.Status(200, `{"ok":false,"error":"not_in_channel"}`),
		harness.Status(200, `{"ok":true,"ts":"1.1"}`), harness.ExecutesAndDrops))
	if got := g.Call(post); got.Status != 429 {
		t.Errorf("limited: %d", got.Status)
	}
	g.Call(post).Want(t, 200, `{"ok":false,"error":"not_in_channel"}`, "executed")
	g.Call(post).Want(t, 200, `{"ok":true,"ts":"1.1"}`, "executed")
	g.Call(post).InDoubt(t)
	g.Call(post).InDoubt(t)
	u.Arrived(post.Path, 4)
	for _, path := range []string{"/api/conversations.list", "/api/conversations.history", "/api/users.info", "/api/search.messages", "/api/auth.test"} {
		u.On(path, harness.Status(200, `{"ok":true}`))
		g.Call(harness.Bearer(path, "", "{}")).Passed(t, 200)
	}
}

// Resend sends one mail for an Idempotency-Key
// (https://resend.com/docs/dashboard/emails/idempotency-keys).
func TestRecipeMail(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "mail", u.Addr)
	k := &keeper{do: []func(http.ResponseWriter, *harness.Arrival){harness.ExecutesAndDrops, harness.Status(409, `{"name":"concurrent_idempotent_requests"}`)}}
	u.On("/emails", k.answer)
	mail := harness.Bearer("/emails", "welcome-user/1", `{"to":"a@example.com"}`)
	g.Call(mail)                                // its answer is lost
	if got := g.Call(mail); got.Status != 409 { // the first one is still in progress there
		t.Errorf("in progress: %d %s", got.Status, got.Body)
	}
	g.Call(mail).Want(t, 200, `{"id":"effect-1"}`, "executed")
	if u.Arrived("/emails", 3); k.effects != 1 {
		t.Errorf("%d mails", k.effects)
	}
	// agentmail-mcp #49: a mail without a key is sent again after a time-out.
	u.On("/emails/batch", harness.ExecutesAndDrops)
	batch := harness.Bearer("/emails/batch", "", `[{"to":"a@example.com"}]`)
	g.Call(batch).InDoubt(t)
	g.Call(batch).InDoubt(t)
	u.Arrived("/emails/batch", 1)
}

// AWS names a call by a token in its body, and Google by a request id in the query or the body.
func TestRecipesOfClouds(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "aws", u.Addr+" {http.request.header.X-Agent}")
	signed := harness.Request{Path: "/", Body: `{"Name":"db","ClientRequestToken":"token-1"}`, Header: map[string]string{
		"Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1, Signature=1", "X-Agent": "ada",
	}}
	g.Call(signed).Want(t, 201, "arrival 1", "executed")
	signed.Header["Authorization"] = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1, Signature=2"
	g.Call(signed).Want(t, 201, "arrival 1", "replayed")

	g = recipe(t, "google", u.Addr)
	for _, r := range []harness.Request{harness.Bearer("/query?requestId=8e03978e", "", `{"name":"vm"}`), harness.Bearer("/body", "", `{"requestId":"8e03978e"}`)} {
		g.Call(r).Want(t, 201, "arrival 1", "executed")
		g.Call(r).Want(t, 201, "arrival 1", "replayed")
	}
}

// An MCP server answers a tool call on its POST
// (https://modelcontextprotocol.io/specification/2025-11-25/basic/transports).
func TestRecipeMCP(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := recipe(t, "mcp", addr)
	g.Call(harness.Message(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)).Passed(t, 200)
	g.Call(harness.Message(harness.ToolCall("2", "get", ""))).Passed(t, 200)
	g.Call(harness.Message(harness.ToolCall("3", "pay", harness.KeyA))).Want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("4", "pay", harness.KeyA))).Want(t, 200, `{"jsonrpc":"2.0","id":4,"result":{"content":[],"n":1}}`, "replayed")
	// hostinger api-mcp-server #68: a tool that writes is called again, byte by byte, after its
	// answer was lost.
	for range 2 {
		if got := g.Call(harness.Message(harness.ToolCall("5", "cut", ""))); got.Status != 200 {
			t.Errorf("cut: %d %s", got.Status, got.Body)
		}
	}
	if s.Count("cut") != 1 {
		t.Errorf("%d executions", s.Count("cut"))
	}
}

// An agent may use the messageId to know a message again, and answers with a task or a message
// (https://a2a-protocol.org/v1.0.0/specification/, 3.1.1).
func TestRecipeA2A(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "a2a", u.Addr)
	u.On("/", func(w http.ResponseWriter, a *harness.Arrival) {
		id := a.Body[strings.Index(a.Body, `"id":`)+5:]
		id = id[:strings.IndexAny(id, ",}")]
		harness.Status(200, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"n":%d}}`, id, a.N), "Content-Type", "application/json")(w, a)
	})
	send := func(id, message string) harness.Request {
		return harness.Bearer("/", "", `{"jsonrpc":"2.0","id":`+id+`,"method":"SendMessage","params":{"message":{"messageId":"`+message+`","role":"ROLE_USER","parts":[{"text":"pay"}]}}}`, "A2A-Version", "1.0")
	}
	g.Call(send("1", "m1")).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"n":1}}`, "executed")
	g.Call(send("2", "m1")).Want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"n":1}}`, "replayed")
	g.Call(send("3", "m2")).Want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"n":2}}`, "executed")
	g.Call(harness.Bearer("/", "", `{"jsonrpc":"2.0","id":4,"method":"GetTask","params":{"id":"t"}}`, "A2A-Version", "1.0")).Passed(t, 200)
	u.Arrived("/", 3)
}

// PostgREST answers 201 for a row, and 409 where a constraint is violated and nothing was written
// (https://docs.postgrest.org/en/latest/references/errors.html).
func TestRecipeDatabase(t *testing.T) {
	u := harness.NewUpstream(t)
	g := recipe(t, "database", u.Addr)
	row := harness.Bearer("/people", "", `{"id":1}`)
	u.On(row.Path, sequence(harness.Status(409, `{"code":"23505"}`), harness.Status(201, ""), harness.ExecutesAndDrops))
	row.Id = "row-1"
	if got := g.Call(row); got.Status != 409 {
		t.Errorf("violated: %d", got.Status)
	}
	g.Call(row).Want(t, 201, "", "executed")
	g.Call(row).Want(t, 201, "", "replayed")
	row.Id = ""
	g.Call(row).InDoubt(t)
	g.Call(row).InDoubt(t)
	u.Arrived(row.Path, 3)
	u.On("/rpc/total", harness.Status(200, "7"))
	g.Call(harness.Request{Method: "GET", Path: "/rpc/total"}).Passed(t, 200)
}
