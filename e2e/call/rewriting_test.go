package call

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: no handler and no matcher of Caddy that changes a request, added or removed by a
// reload, changes the key of a call: given, derived or asked for, it goes by the request
// as the caller has sent it.
func TestP1RewritingChangesNoKey(t *testing.T) {
	const (
		wholePath = harness.ExecutionsPath
		stripped  = "/v1" + harness.ExecutionsPath
	)
	guard := "agent_proxy %s {\n missing_id derive 10m\n}"
	before := func(directives string) string { return directives + "\n" + guard }
	for _, c := range []struct {
		name, without, with string
		askWithout, askWith string // where the executions endpoint is; empty if nowhere
	}{
		{"handle_path", "handle /v1/* {\n" + guard + "\n}", "handle_path /v1/* {\n" + guard + "\n}", "", stripped},
		{"route", guard, "route {\n uri strip_prefix /v1\n " + guard + "\n}", wholePath, wholePath},
		{"rewrite", guard, before("rewrite * /other{uri}"), wholePath, wholePath},
		{"rewrite to one place", guard, before("rewrite * /one"), wholePath, wholePath},
		{"rewrite of the query", guard, before("rewrite * ?other=1"), wholePath, wholePath},
		{"uri strip_prefix", guard, before("uri strip_prefix /v1"), wholePath, wholePath},
		{"uri strip_suffix", guard, before("uri strip_suffix x"), wholePath, wholePath},
		{"uri replace", guard, before("uri replace / /more/ 1"), wholePath, wholePath},
		{"uri path_regexp", guard, before("uri path_regexp x y"), wholePath, wholePath},
		{"uri query", guard, before("uri query added yes"), wholePath, wholePath},
		{"try_files", guard, before("try_files {path} /fallback"), wholePath, wholePath},
		{"method PUT", guard, before("method PUT"), wholePath, wholePath},
		{"method GET", guard, before("method GET"), wholePath, wholePath},
		{"request_header", guard, before("request_header X-Other other\nrequest_header -User-Agent"), wholePath, wholePath},
		{"vars", guard, before("vars seen {path}"), wholePath, wholePath},
		{"map", guard, before("map {path} {where} {\n default here\n}"), wholePath, wholePath},
		{"a matcher", guard, "@v1 path /v1/*\nuri @v1 strip_prefix /v1\n" + guard, wholePath, wholePath},
		{"an action by the rewritten path", guard,
			"uri strip_prefix /v1\nagent_proxy %s {\n missing_id derive 10m\n action pay {\n match path /x\n }\n}", wholePath, wholePath},
	} {
		for _, added := range []bool{true, false} {
			name, first, second, asked := c.name+" is added", c.without, c.with, c.askWith
			if !added {
				name, first, second, asked = c.name+" is removed", c.with, c.without, c.askWithout
			}
			t.Run(name, func(t *testing.T) {
				u := harness.NewUpstream(t)
				site := func(text string) string { return strings.ReplaceAll(text, "%s", u.Addr) }
				g := harness.Start(t, "%s", site(first))
				given := harness.Request{Path: "/v1/x?q=1", Id: "k", Header: harness.Ann}
				derived := harness.Request{Path: "/v1/derived?q=1", Header: harness.Ann}
				one, two := g.Retry(given), g.Retry(derived)
				if one.Header.Get("Execution-Status") != "executed" || two.Header.Get("Execution-Status") != "executed" {
					t.Fatalf("%v %v", one, two)
				}
				g.Reload(site(second))
				g.Retry(given).Want(t, 201, one.Body, "replayed")
				g.Retry(derived).Want(t, 201, two.Body, "replayed")
				if got := u.Total(); got != 2 {
					t.Errorf("P1: %d calls for 2 keys", got)
				}
				if asked == "" {
					return
				}
				// A server of before the reload may still take a question, and forward it.
				ask := func(question string) (got harness.Reply) {
					harness.Eventually(t, "the gateway answers, by the configuration that was loaded", func() bool {
						before := u.Total()
						got = g.Retry(harness.Request{Method: "GET", Path: asked + question, Header: harness.Ann})
						return u.Total() == before
					})
					return got
				}
				got := ask("k").Execution(t, "k")
				if got.Method != "POST" || got.Path != "/v1/x" {
					t.Errorf("recorded as %s %s", got.Method, got.Path)
				}
				out := ask("k/output")
				if out.Status != 201 || out.Body != one.Body {
					t.Errorf("output: %d %q", out.Status, out.Body)
				}
				ask("k?method=POST&path=/v1/x").Execution(t, "k")
			})
		}
	}
}

// P1: calls to two services are two calls, although a handler makes one path of theirs:
// with one id, with derived ids, and for guards that share a name.
func TestP1ServicesBehindOnePathAreApart(t *testing.T) {
	for name, sites := range map[string]string{
		"handle_path": `handle_path /payments/* {
			agent_proxy %[1]s {
				name payments%[3]s
				missing_id derive 10m
			}
		}
		handle_path /mail/* {
			agent_proxy %[2]s {
				name mail%[3]s
				missing_id derive 10m
			}
		}`,
		"rewrite": `handle /payments/* {
			rewrite * /send
			agent_proxy %[1]s {
				name payments%[3]s
				missing_id derive 10m
			}
		}
		handle /mail/* {
			rewrite * /send
			agent_proxy %[2]s {
				name mail%[3]s
				missing_id derive 10m
			}
		}`,
	} {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, shared %v", name, shared), func(t *testing.T) {
				payments, mail := harness.NewUpstream(t), harness.NewUpstream(t)
				text := fmt.Sprintf(sites, payments.Addr, mail.Addr, "")
				if shared {
					text = strings.NewReplacer("name payments", "name both shared", "name mail", "name both shared").Replace(text)
				}
				g := harness.Start(t, "%s", text)
				for _, id := range []string{"k", ""} {
					n := 1
					if id == "" {
						n = 2
					}
					pay, send := harness.Request{Path: "/payments/send", Id: id, Header: harness.Ann}, harness.Request{Path: "/mail/send", Id: id, Header: harness.Ann}
					g.Call(pay).Want(t, 201, fmt.Sprint("arrival ", n), "executed")
					g.Call(send).Want(t, 201, fmt.Sprint("arrival ", n), "executed")
					g.Call(pay).Want(t, 201, fmt.Sprint("arrival ", n), "replayed")
					g.Call(send).Want(t, 201, fmt.Sprint("arrival ", n), "replayed")
				}
				if payments.Total() != 2 || mail.Total() != 2 {
					t.Errorf("%d payments and %d mails", payments.Total(), mail.Total())
				}
			})
		}
	}
}

// P1: a call that a header sends to another guard of the name, which is meant to share it,
// finds its record there.
func TestP1SharedNameIsOneNamespace(t *testing.T) {
	one, two := harness.NewUpstream(t), harness.NewUpstream(t)
	g := harness.Start(t, `@other header X-Other yes
	agent_proxy @other %[2]s {
		name both shared
	}
	agent_proxy %[1]s {
		name both shared
	}`, one.Addr, two.Addr)
	g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Ann}).Want(t, 201, "arrival 1", "executed")
	other := harness.Headers{"X-Other": "yes"}
	for name, value := range harness.Ann {
		other[name] = value
	}
	g.Call(harness.Request{Path: "/x", Id: "k", Header: other}).Want(t, 201, "arrival 1", "replayed")
	two.Arrived("/x", 0)
}

// P1, P3: what would let two calls or callers be taken for one is refused when the
// configuration is loaded, with the line that cures it, and the running one goes on.
func TestLoadRefusesAmbiguousGuards(t *testing.T) {
	u := harness.NewUpstream(t)
	auth := func(user string) string {
		return user + " $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS"
	}
	for name, c := range map[string]struct{ site, more, want string }{
		"two of one name in a site": {
			"handle_path /a/* {\n agent_proxy %s\n}\nhandle_path /b/* {\n agent_proxy %s\n}", "", "name default shared"},
		"two authentications": {
			"basic_auth /a/* {\n " + auth("alice") + "\n}\nbasic_auth /b/* {\n " + auth("bob") + "\n}\nagent_proxy %s {\n name tools\n}", "",
			"through 2 authentications, in which one user name can be several users: give each of them a guard of its own, or, if they know the same users, write `name tools shared`"},
		"a named route": {
			"basic_auth {\n " + auth("alice") + "\n}\ninvoke tools", "http://two.example:PORT {\n basic_auth {\n " + auth("bob") + "\n}\n invoke tools\n}",
			"stands in a named route that is invoked at"},
		"the host":                 {"request_header Host other.example\nagent_proxy %s", "", "`header_up Host ...`"},
		"a credential":             {"request_header Authorization \"Bearer x\"\nagent_proxy %s", "", "request_header changes Authorization"},
		"a credential by name":     {"request_header X-Tenant-Key x\nagent_proxy %s {\n credentials X-Tenant-Key\n}", "", "request_header changes X-Tenant-Key"},
		"a field is taken out":     {"request_header -X-Api*\nagent_proxy %s", "", "request_header removes X-Api*"},
		"a credential by its look": {"request_header X-Consul-Token x\nagent_proxy %s", "", "`credentials -X-Consul-Token`"},
		"a tenant":                 {"request_header -Stripe-Account\nagent_proxy %s", "", "`tenant -Stripe-Account`"},
		"what is to be done":       {"request_header -If-Match\nagent_proxy %s", "", "request_header changes If-Match"},
		"what is compared":         {"request_header X-Revision x\nagent_proxy %s {\n compare X-Rev*\n}", "", "request_header changes X-Revision"},
		"a part of it":             {"request_header Cookie a b\nagent_proxy %s", "", "request_header changes Cookie"},
		"the media type":           {"@x path /x\nroute @x {\n request_header Content-Type text/plain\n}\nagent_proxy %s", "", "request_header changes Content-Type"},
		"the key":                  {"request_header Idempotency-Key \"tenant-{header.Idempotency-Key}\"\nagent_proxy %s", "", "request_header changes Idempotency-Key before the guard"},
		"a key by its name":        {"request_header +X-Tenant-Idempotency-Key x\nagent_proxy %s", "", "Write `header_up X-Tenant-Idempotency-Key ...`"},
		"keys are taken out":       {"request_header -*-Idempotency-Key\nagent_proxy %s", "", "request_header changes X-Idempotency-Key"},
		"a configured key":         {"handle {\n request_header X-Order o (.)\n agent_proxy %s {\n execution_id header X-Order\n}\n}", "", "request_header changes X-Order"},
		"a key in a text":          {"request_header X-Order x\nagent_proxy %s {\n execution_id placeholder o-{header.X-Order}\n}", "", "request_header changes X-Order"},
		"a key that is copied":     {"forward_auth 127.0.0.1:1 {\n uri /x\n copy_headers User>Idempotency-Key\n}\nagent_proxy %s", "", "Idempotency-Key is set from the answer of a proxy"},
		"a key in the query":       {"uri query op x{query.op}\nagent_proxy %s {\n execution_id placeholder {query.op}\n}", "", "a rewrite changes the URI"},
		"the method":               {"agent_proxy %s {\n method POST\n}", "", "Write `method POST` before the guard"},
		"the method behind":        {"route {\n agent_guard\n method put\n reverse_proxy %s\n}", "", "requests are sent with the method PUT"},
		"the method by chance":     {"route {\n agent_guard\n reverse_proxy %s {\n method {header.M}\n @x status 500\n handle_response @x {\n respond x\n}\n}\n}", "", "sent with the method"},
		"the body":                 {"request_body {\n set other\n}\nagent_proxy %s", "", "request_body replaces the body"},
	} {
		t.Run(name, func(t *testing.T) {
			running := "agent_proxy " + u.Addr
			g := harness.Launch(t, harness.Setup{Site: running, Address: func(port string) string { return "http://one.example:" + port }})
			port := g.Addr[strings.LastIndexByte(g.Addr, ':')+1:]
			text := g.Config(strings.ReplaceAll(c.site, "%s", u.Addr)) + strings.ReplaceAll(c.more, "PORT", port)
			if strings.Contains(text, "invoke") { // named routes stand before the sites
				options, sites, _ := strings.Cut(text, "\nhttp://")
				text = options + "\n&(tools) {\n agent_proxy " + u.Addr + "\n}\nhttp://" + sites
			}
			err := harness.LoadConfig(text)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got  %v\nwant ...%s", err, c.want)
			}
			got := g.Retry(harness.Request{Path: "/" + name, Id: "k", Header: harness.Ann, Host: "one.example"})
			if got.Status != 201 {
				t.Errorf("the running configuration answers %d %q", got.Status, got.Body)
			}
		})
	}
}

// In JSON, sites in two servers are one only where all that tells them apart is equal: the
// upstream and the accounts too.
func TestLoadComparesSitesOfTwoServers(t *testing.T) {
	const hash = "$2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS"
	port := func() string { _, p, _ := strings.Cut(harness.FreeAddress(t), ":"); return p }
	for name, c := range map[string]struct {
		one, two string
		same     bool
	}{
		"equal":            {"basic_auth {\n alice " + hash + "\n}\nagent_proxy 127.0.0.1:1", "basic_auth {\n alice " + hash + "\n}\nagent_proxy 127.0.0.1:1", true},
		"other upstreams":  {"agent_proxy 127.0.0.1:1", "agent_proxy 127.0.0.1:2", false},
		"other accounts":   {"basic_auth {\n alice " + hash + "\n}\nagent_proxy 127.0.0.1:1", "basic_auth {\n alice " + hash[:len(hash)-1] + "e\n}\nagent_proxy 127.0.0.1:1", false},
		"none and another": {"agent_proxy 127.0.0.1:1", "basic_auth {\n alice " + hash + "\n}\nagent_proxy 127.0.0.1:1", false},
		"other headers":    {"request_header X-Site one\nagent_proxy 127.0.0.1:1", "request_header X-Site two\nagent_proxy 127.0.0.1:1", false},
		"other rewrites":   {"route {\n agent_proxy 127.0.0.1:1\n}", "route {\n rewrite * /two{uri}\n agent_proxy 127.0.0.1:1\n}", false},
		"a fixed answer":   {"agent_proxy 127.0.0.1:1", "respond /health ok\nagent_proxy 127.0.0.1:1", true},
	} {
		t.Run(name, func(t *testing.T) {
			g := harness.Start(t, "respond ok")
			two := strings.Replace(c.two, "agent_proxy 127.0.0.1:1", "agent_proxy 127.0.0.1:1 {\n name two\n}", 1)
			two = strings.Replace(two, "agent_proxy 127.0.0.1:2", "agent_proxy 127.0.0.1:2 {\n name two\n}", 1)
			one := strings.Replace(c.one, "agent_proxy 127.0.0.1:1", "agent_proxy 127.0.0.1:1 {\n name one\n}", 1)
			config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(g.Config(one)+"http://127.0.0.1:"+port()+" {\n"+two+"\n}\n"), nil)
			if err != nil {
				t.Fatal(err)
			}
			err = caddy.Load([]byte(strings.ReplaceAll(string(config), `"name":"two"`, `"name":"one"`)), true)
			if (err == nil) != c.same || err != nil && !strings.Contains(err.Error(), "`name one shared` in both") {
				t.Error(err)
			}
		})
	}
}

// What is one thing needs no word: a site with several addresses, an authentication for all
// of its guards, and a header that tells nobody apart.
func TestLoadTakesWhatIsOne(t *testing.T) {
	u := harness.NewUpstream(t)
	const hash = "$2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS"
	port := func() string { _, p, _ := strings.Cut(harness.FreeAddress(t), ":"); return p }
	for name, site := range map[string]string{
		"guards behind one authentication": "basic_auth {\n alice " + hash + "\n}\nagent_proxy /a/* %s {\n name a\n}\nagent_proxy /b/* %s {\n name b\n}",
		"an authentication in each handle": "handle /a/* {\n basic_auth {\n alice " + hash + "\n}\n agent_proxy %s {\n name a\n}\n}\n" +
			"handle {\n basic_auth {\n alice " + hash[:len(hash)-1] + "e\n}\n agent_proxy %s {\n name b\n}\n}",
		"a key that is none":     "request_header Idempotency-Key x\nagent_proxy %s {\n execution_id header X-Order\n}",
		"a rewritten path":       "uri strip_prefix /v1\nagent_proxy %s {\n execution_id placeholder {query.op}\n}",
		"the method before":      "method POST\nagent_proxy %s",
		"a safe method":          "agent_proxy %s {\n method GET\n}",
		"QUERY":                  "agent_proxy %s {\n method QUERY\n}",
		"SEARCH":                 "agent_proxy %s {\n method search\n}",
		"PROPFIND":               "route {\n agent_guard\n method PROPFIND\n reverse_proxy %s\n}",
		"REPORT":                 "agent_proxy %s {\n method REPORT\n}",
		"an asked proxy":         "forward_auth 127.0.0.1:1 {\n uri /x\n copy_headers X-User\n}\nagent_proxy %s",
		"a header of no meaning": "request_header X-Site one\nagent_proxy %s",
		"behind the guard":       "agent_proxy %s {\n header_up Host other.example\n header_up Authorization \"Bearer x\"\n}",
		"a bound of bodies":      "request_body {\n max_size 1MB\n}\nagent_proxy %s",
		"shared authentications": "basic_auth /a/* {\n alice " + hash + "\n}\nbasic_auth /b/* {\n bob " + hash + "\n}\nagent_proxy %s {\n name tools shared\n}",
		"a host, and any":        "agent_proxy %s\n}\nhttp://127.0.0.1:" + port() + ", http://:" + port() + " {\n agent_proxy %s {\n name two\n}",
		"several addresses":      "basic_auth {\n alice " + hash + "\n}\nagent_proxy %s\n}\nhttp://127.0.0.1:" + port() + ", http://two.example:" + port() + " {\n agent_proxy %s {\n name two\n}",
	} {
		t.Run(name, func(t *testing.T) {
			harness.Start(t, "%s", strings.ReplaceAll(site, "%s", u.Addr))
		})
	}
}
