package call

import (
	"io"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P3: a field that looks like a credential by its name tells callers apart: the customer of a shop never
// gets the answer of another customer, who has the same key.
func TestP3CredentialsInAnyField(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, field := range []string{
		"X-Shopify-Access-Token", "PRIVATE-TOKEN", "JOB-TOKEN", "X-Goog-Api-Key", "apikey", "X-Auth-Token", "X-Consul-Token", "xi-api-key",
		"DD-API-KEY", "DD-APPLICATION-KEY", "Ocp-Apim-Subscription-Key", "Proxy-Authorization", "X-MBX-APIKEY", "X-RapidAPI-Key", "x-functions-key", "X-TrackerToken",
		"X-Amz-Security-Token", "CB-ACCESS-KEY", "X-Authorization",
	} {
		t.Run(field, func(t *testing.T) {
			path := "/" + field
			as := func(secret string) harness.Reply {
				return g.Call(harness.Request{Path: path, Id: "k", Body: `{"as":"` + secret + `"}`, Header: harness.Headers{field: "Basic " + secret}})
			}
			as("a").Want(t, 201, "arrival 1", "executed")
			as("b").Want(t, 201, "arrival 2", "executed")
			as("a").Want(t, 201, "arrival 1", "replayed")
			u.Arrived(path, 2)
		})
	}
	for field, value := range map[string]string{
		"X-CSRF-Token": "1", "X-XSRF-TOKEN": "1", "RequestVerificationToken": "1", "X-Recaptcha-Token": "1", "X-Request-Id": "1", "X-Max-Tokens": "1",
		"X-Author": "1", "Early-Data": "1", "Dpop": "1", "X-Hub-Signature-256": "1", "X-Amz-Client-Token": "1", "X-Otp-Token": "1",
	} {
		t.Run("not "+field, func(t *testing.T) {
			path := "/not/" + field
			as := func(value string) harness.Reply {
				return g.Call(harness.Request{Path: path, Id: "k", Header: harness.Headers{"Authorization": "Bearer a", field: value}})
			}
			as(value).Want(t, 201, "arrival 1", "executed")
			as(value+"2").Want(t, 201, "arrival 1", "replayed")
			u.Arrived(path, 1)
		})
	}
}

// The option `credentials` adds fields to those that the pattern finds, and takes fields out.
func TestCredentialsAddAndRemove(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n credentials X-Customer -X-Token-Count\n}", u.Addr)
	for i, c := range []struct {
		header harness.Headers
		want   string
		status string
	}{
		{harness.Headers{"X-Customer": "a", "X-Token-Count": "1"}, "arrival 1", "executed"},
		{harness.Headers{"X-Customer": "b", "X-Token-Count": "1"}, "arrival 2", "executed"},
		{harness.Headers{"X-Customer": "a", "X-Token-Count": "2"}, "arrival 1", "replayed"},
		{harness.Headers{"X-Customer": "a", "X-Api-Key": "k"}, "arrival 3", "executed"},
		{harness.Headers{"X-Customer": "a", "X-Api-Key": ""}, "arrival 1", "replayed"},
	} {
		if got := g.Call(harness.Request{Path: "/x", Id: "k", Header: c.header}); got.Header.Get("Execution-Status") != c.status || !strings.Contains(got.Body, c.want) {
			t.Errorf("%d: %v: %d %q", i, c.header, got.Status, got.Body)
		}
	}
}

// P3: a key belongs to the tenant that the call is for: Stripe's customer B is not told what became of A's
// call, though one platform with one credential calls for both.
func TestP3TenantsAreApart(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n tenant X-Shop -X-Project-Id\n}", u.Addr)
	for _, field := range []string{"Stripe-Account", "Stripe-Context", "OpenAI-Organization", "OpenAI-Project", "X-Tenant-Id", "X-Organization-Id", "Xero-Tenant-Id",
		"On-Behalf-Of", "X-Shop"} {
		t.Run(field, func(t *testing.T) {
			path := "/" + field
			as := func(tenant string) harness.Reply {
				h := harness.Headers{"Authorization": "Bearer platform"}
				if tenant != "" {
					h[field] = tenant
				}
				return g.Call(harness.Request{Path: path, Id: "k", Body: `{"for":"` + tenant + `"}`, Header: h})
			}
			as("a").Want(t, 201, "arrival 1", "executed")
			as("b").Want(t, 201, "arrival 2", "executed")
			as("").Want(t, 201, "arrival 3", "executed")
			as("a").Want(t, 201, "arrival 1", "replayed")
			as("b").Want(t, 201, "arrival 2", "replayed")
			u.Arrived(path, 3)
		})
	}
	same := harness.Request{Path: "/none", Id: "k", Header: harness.Headers{"Authorization": "Bearer p", "X-Project-Id": "1"}}
	g.Call(same).Want(t, 201, "arrival 1", "executed")
	same.Header["X-Project-Id"] = "2"
	g.Call(same).Want(t, 201, "arrival 1", "replayed")
}

// P1: cookies change by themselves, so they name nobody until the configuration says which of them do: a
// call with a key is refused then, and one without is a new call.
func TestP1CookiesNameNobody(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	keyed := harness.Request{Path: "/keyed", Id: "k", Header: harness.Headers{"Cookie": "session=a"}}
	refused := g.Call(keyed)
	refused.Terminal(t, 400, "caller-unstable")
	if !strings.Contains(refused.Body, "caller cookie") {
		t.Errorf("the refusal names no line to write: %s", refused.Body)
	}
	u.Arrived("/keyed", 0)
	unkeyed := harness.Request{Path: "/unkeyed", Header: harness.Headers{"Cookie": "session=a"}}
	g.Call(unkeyed).Want(t, 201, "arrival 1", "executed")
	g.Call(unkeyed).Want(t, 201, "arrival 2", "executed")
	for _, h := range []harness.Headers{
		{"Cookie": "session=a", "Authorization": "Bearer a"},
		{"Cookie": "session=b; _ga=1", "Authorization": "Bearer a"},
		{"Authorization": "Bearer a"},
	} {
		if got := g.Call(harness.Request{Path: "/credential", Id: "k", Header: h}); !strings.Contains(got.Body, "arrival 1") {
			t.Errorf("%v: %d %s", h, got.Status, got.Body)
		}
	}
	u.Arrived("/credential", 1)
}

// P1: with `caller cookie NAME` the values of these cookies name the caller, whatever the others are.
func TestP1CallerCookie(t *testing.T) {
	for name, option := range map[string]string{"cookie": "caller cookie session other", "placeholder": "caller {http.request.cookie.session}"} {
		t.Run(name, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Start(t, "agent_proxy %s {\n %s\n}", u.Addr, option)
			for _, c := range []struct{ cookie, want, status string }{
				{"session=a; _ga=1", "arrival 1", "executed"},
				{"_ga=2; session=a", "arrival 1", "replayed"},
				{"session=a", "arrival 1", "replayed"},
				{"session=b", "arrival 2", "executed"},
				{"_ga=2", "arrival 3", "executed"}, // anonymous
				{"_ga=3", "arrival 3", "replayed"},
				{"", "arrival 3", "replayed"},
			} {
				h := harness.Headers{}
				if c.cookie != "" {
					h["Cookie"] = c.cookie
				}
				if got := g.Call(harness.Request{Path: "/x", Id: "k", Header: h}); !strings.Contains(got.Body, c.want) || got.Header.Get("Execution-Status") != c.status {
					t.Errorf("%q: %d %q %q, want %s", c.cookie, got.Status, got.Body, got.Header.Get("Execution-Status"), c.want)
				}
			}
		})
	}
}

// P1: the cookie by which Caddy itself chooses an upstream never names a caller.
func TestP1BalancingCookieNamesNobody(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n lb_policy cookie sticky s3cr3t\n}", u.Addr)
	call := harness.Request{Path: "/x", Id: "k"}
	g.Call(call).Want(t, 201, "arrival 1", "executed")
	call.Header = harness.Headers{"Cookie": "sticky=1234"}
	g.Call(call).Want(t, 201, "arrival 1", "replayed")
	call.Header = harness.Headers{"Cookie": "sticky=5678; lb=x"}
	g.Call(call).Want(t, 201, "arrival 1", "replayed")
	call.Header = harness.Headers{"Cookie": "sticky=5678; session=x"}
	g.Call(call).Terminal(t, 400, "caller-unstable")
	u.Arrived("/x", 1)
}

// A signature changes with every attempt, so it names nobody either.
func TestP1SignaturesNameNobody(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	signed := harness.Headers{"Signature-Input": `sig1=("@method");created=1;keyid="a"`, "Signature": "sig1=:AA==:"}
	g.Call(harness.Request{Path: "/x", Id: "k", Header: signed}).Terminal(t, 400, "caller-unstable")
	g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Proxy-Authorization": "Digest a"}}).Terminal(t, 400, "caller-unstable")
	g.Call(harness.Request{Path: "/x", Header: signed}).Want(t, 201, "arrival 1", "executed")
	signed["X-Api-Key"] = "a"
	g.Call(harness.Request{Path: "/y", Id: "k", Header: signed}).Want(t, 201, "arrival 1", "executed")
	signed["Signature"] = "sig1=:BB==:"
	g.Call(harness.Request{Path: "/y", Id: "k", Header: signed}).Want(t, 201, "arrival 1", "replayed")
}

// P1: a load that would name callers or tenants anew is refused while the store holds keys of the guard, with
// what can be done, and the running configuration goes on. An empty guard, and one of another name, may change.
func TestP1LoadRefusesToFreeKeys(t *testing.T) {
	u := harness.NewUpstream(t)
	site := func(name string, lines ...string) string {
		return "agent_proxy " + u.Addr + " {\n name " + name + "\n " + strings.Join(lines, "\n ") + "\n}"
	}
	g := harness.Start(t, "%s", site("one"))
	g.Reload(site("one", "credentials X-Customer", "tenant X-Shop")) // nothing is recorded yet
	call := harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Authorization": "Bearer a", "X-Customer": "1"}}
	g.Call(call).Want(t, 201, "arrival 1", "executed")
	for _, c := range []struct{ change, want string }{
		{"tenant X-Shop", "`credentials` differ"},
		{"credentials X-Customer", "`tenant` differ"},
		{"credentials X-Customer -X-Api-Key\n tenant X-Shop", "`credentials` differ"},
		{"credentials X-Customer\n tenant X-Shop\n caller {http.request.header.X-Customer}", "`caller` differ"},
		{"credentials X-Customer\n tenant X-Shop\n caller cookie session", "`caller` differ"},
		{"", "`credentials` and `tenant` differ"},
	} {
		err := harness.LoadConfig(g.Config(site("one", c.change)))
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "free_keys") || !strings.Contains(err.Error(), "another `name`") {
			t.Fatalf("%q: %v, want %s", c.change, err, c.want)
		}
		// A connection that the refused configuration had accepted ends with it.
		harness.Eventually(t, "the running configuration answers", func() bool {
			res, err := g.Client.Get("http://" + g.Addr + "/up")
			if err != nil {
				return false
			}
			_, err = io.Copy(io.Discard, res.Body)
			return res.Body.Close() == nil && err == nil
		})
		g.Call(call).Want(t, 201, "arrival 1", "replayed")
	}
	// The same in other words, in another order, and with what counts anyway.
	g.Reload(site("one", "credentials x-customer Authorization X-Consul-Token", "tenant x-shop Stripe-Account"))
	g.Call(call).Want(t, 201, "arrival 1", "replayed")
	g.Reload(site("two", "tenant X-Other"))
	g.Call(call).Want(t, 201, "arrival 2", "executed")
	g.Reload(site("one", "free_keys", "tenant X-Other"))
	other := call
	other.Id = "another"
	g.Call(other).Want(t, 201, "arrival 3", "executed")
	g.Reload(site("one", "tenant X-Other"))
	g.Call(other).Want(t, 201, "arrival 3", "replayed")
	if err := harness.LoadConfig(g.Config(site("one", "credentials X-Customer", "tenant X-Shop"))); err == nil || !strings.Contains(err.Error(), "free_keys") {
		t.Errorf("going back frees the keys made since: %v", err)
	}
}
