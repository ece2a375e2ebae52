package e2e

import (
	"io"
	"strings"
	"testing"
)

// P3: a field that looks like a credential by its name tells callers apart: the customer of a shop never
// gets the answer of another customer, who has the same key.
func TestP3CredentialsInAnyField(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, field := range []string{
		"X-Shopify-Access-Token", "PRIVATE-TOKEN", "JOB-TOKEN", "X-Goog-Api-Key", "apikey", "X-Auth-Token", "X-Consul-Token", "xi-api-key",
		"DD-API-KEY", "DD-APPLICATION-KEY", "Ocp-Apim-Subscription-Key", "Proxy-Authorization", "X-MBX-APIKEY", "X-RapidAPI-Key", "x-functions-key", "X-TrackerToken",
		"X-Amz-Security-Token", "CB-ACCESS-KEY", "X-Authorization",
	} {
		t.Run(field, func(t *testing.T) {
			path := "/" + field
			as := func(secret string) reply {
				return g.call(request{path: path, id: "k", body: `{"as":"` + secret + `"}`, header: headers{field: "Basic " + secret}})
			}
			as("a").want(t, 201, "arrival 1", "executed")
			as("b").want(t, 201, "arrival 2", "executed")
			as("a").want(t, 201, "arrival 1", "replayed")
			u.arrived(path, 2)
		})
	}
	for field, value := range map[string]string{
		"X-CSRF-Token": "1", "X-XSRF-TOKEN": "1", "RequestVerificationToken": "1", "X-Recaptcha-Token": "1", "X-Request-Id": "1", "X-Max-Tokens": "1",
		"X-Author": "1", "Early-Data": "1", "Dpop": "1", "X-Hub-Signature-256": "1", "X-Amz-Client-Token": "1", "X-Otp-Token": "1",
	} {
		t.Run("not "+field, func(t *testing.T) {
			path := "/not/" + field
			as := func(value string) reply {
				return g.call(request{path: path, id: "k", header: headers{"Authorization": "Bearer a", field: value}})
			}
			as(value).want(t, 201, "arrival 1", "executed")
			as(value+"2").want(t, 201, "arrival 1", "replayed")
			u.arrived(path, 1)
		})
	}
}

// The option `credentials` adds fields to those that the pattern finds, and takes fields out.
func TestCredentialsAddAndRemove(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n credentials X-Customer -X-Token-Count\n}", u.addr)
	for i, c := range []struct {
		header headers
		want   string
		status string
	}{
		{headers{"X-Customer": "a", "X-Token-Count": "1"}, "arrival 1", "executed"},
		{headers{"X-Customer": "b", "X-Token-Count": "1"}, "arrival 2", "executed"},
		{headers{"X-Customer": "a", "X-Token-Count": "2"}, "arrival 1", "replayed"},
		{headers{"X-Customer": "a", "X-Api-Key": "k"}, "arrival 3", "executed"},
		{headers{"X-Customer": "a", "X-Api-Key": ""}, "arrival 1", "replayed"},
	} {
		if got := g.call(request{path: "/x", id: "k", header: c.header}); got.header.Get("Execution-Status") != c.status || !strings.Contains(got.body, c.want) {
			t.Errorf("%d: %v: %d %q", i, c.header, got.status, got.body)
		}
	}
}

// P3: a key belongs to the tenant that the call is for: Stripe's customer B is not told what became of A's
// call, though one platform with one credential calls for both.
func TestP3TenantsAreApart(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n tenant X-Shop -X-Project-Id\n}", u.addr)
	for _, field := range []string{"Stripe-Account", "Stripe-Context", "OpenAI-Organization", "OpenAI-Project", "X-Tenant-Id", "X-Organization-Id", "Xero-Tenant-Id",
		"On-Behalf-Of", "X-Shop"} {
		t.Run(field, func(t *testing.T) {
			path := "/" + field
			as := func(tenant string) reply {
				h := headers{"Authorization": "Bearer platform"}
				if tenant != "" {
					h[field] = tenant
				}
				return g.call(request{path: path, id: "k", body: `{"for":"` + tenant + `"}`, header: h})
			}
			as("a").want(t, 201, "arrival 1", "executed")
			as("b").want(t, 201, "arrival 2", "executed")
			as("").want(t, 201, "arrival 3", "executed")
			as("a").want(t, 201, "arrival 1", "replayed")
			as("b").want(t, 201, "arrival 2", "replayed")
			u.arrived(path, 3)
		})
	}
	same := request{path: "/none", id: "k", header: headers{"Authorization": "Bearer p", "X-Project-Id": "1"}}
	g.call(same).want(t, 201, "arrival 1", "executed")
	same.header["X-Project-Id"] = "2"
	g.call(same).want(t, 201, "arrival 1", "replayed")
}

// P1: cookies change by themselves, so they name nobody until the configuration says which of them do: a
// call with a key is refused then, and one without is a new call.
func TestP1CookiesNameNobody(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	keyed := request{path: "/keyed", id: "k", header: headers{"Cookie": "session=a"}}
	refused := g.call(keyed)
	refused.terminal(t, 400, "caller-unstable")
	if !strings.Contains(refused.body, "caller cookie") {
		t.Errorf("the refusal names no line to write: %s", refused.body)
	}
	u.arrived("/keyed", 0)
	unkeyed := request{path: "/unkeyed", header: headers{"Cookie": "session=a"}}
	g.call(unkeyed).want(t, 201, "arrival 1", "executed")
	g.call(unkeyed).want(t, 201, "arrival 2", "executed")
	for _, h := range []headers{
		{"Cookie": "session=a", "Authorization": "Bearer a"},
		{"Cookie": "session=b; _ga=1", "Authorization": "Bearer a"},
		{"Authorization": "Bearer a"},
	} {
		if got := g.call(request{path: "/credential", id: "k", header: h}); !strings.Contains(got.body, "arrival 1") {
			t.Errorf("%v: %d %s", h, got.status, got.body)
		}
	}
	u.arrived("/credential", 1)
}

// P1: with `caller cookie NAME` the values of these cookies name the caller, whatever the others are.
func TestP1CallerCookie(t *testing.T) {
	for name, option := range map[string]string{"cookie": "caller cookie session other", "placeholder": "caller {http.request.cookie.session}"} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s {\n %s\n}", u.addr, option)
			for _, c := range []struct{ cookie, want, status string }{
				{"session=a; _ga=1", "arrival 1", "executed"},
				{"_ga=2; session=a", "arrival 1", "replayed"},
				{"session=a", "arrival 1", "replayed"},
				{"session=b", "arrival 2", "executed"},
				{"_ga=2", "arrival 3", "executed"}, // anonymous
				{"_ga=3", "arrival 3", "replayed"},
				{"", "arrival 3", "replayed"},
			} {
				h := headers{}
				if c.cookie != "" {
					h["Cookie"] = c.cookie
				}
				if got := g.call(request{path: "/x", id: "k", header: h}); !strings.Contains(got.body, c.want) || got.header.Get("Execution-Status") != c.status {
					t.Errorf("%q: %d %q %q, want %s", c.cookie, got.status, got.body, got.header.Get("Execution-Status"), c.want)
				}
			}
		})
	}
}

// P1: the cookie by which Caddy itself chooses an upstream never names a caller.
func TestP1BalancingCookieNamesNobody(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n lb_policy cookie sticky s3cr3t\n}", u.addr)
	call := request{path: "/x", id: "k"}
	g.call(call).want(t, 201, "arrival 1", "executed")
	call.header = headers{"Cookie": "sticky=1234"}
	g.call(call).want(t, 201, "arrival 1", "replayed")
	call.header = headers{"Cookie": "sticky=5678; lb=x"}
	g.call(call).want(t, 201, "arrival 1", "replayed")
	call.header = headers{"Cookie": "sticky=5678; session=x"}
	g.call(call).terminal(t, 400, "caller-unstable")
	u.arrived("/x", 1)
}

// A signature changes with every attempt, so it names nobody either.
func TestP1SignaturesNameNobody(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	signed := headers{"Signature-Input": `sig1=("@method");created=1;keyid="a"`, "Signature": "sig1=:AA==:"}
	g.call(request{path: "/x", id: "k", header: signed}).terminal(t, 400, "caller-unstable")
	g.call(request{path: "/x", id: "k", header: headers{"Proxy-Authorization": "Digest a"}}).terminal(t, 400, "caller-unstable")
	g.call(request{path: "/x", header: signed}).want(t, 201, "arrival 1", "executed")
	signed["X-Api-Key"] = "a"
	g.call(request{path: "/y", id: "k", header: signed}).want(t, 201, "arrival 1", "executed")
	signed["Signature"] = "sig1=:BB==:"
	g.call(request{path: "/y", id: "k", header: signed}).want(t, 201, "arrival 1", "replayed")
}

// P1: a load that would name callers or tenants anew is refused while the store holds keys of the guard, with
// what can be done, and the running configuration goes on. An empty guard, and one of another name, may change.
func TestP1LoadRefusesToFreeKeys(t *testing.T) {
	u := newUpstream(t)
	site := func(name string, lines ...string) string {
		return "agent_proxy " + u.addr + " {\n name " + name + "\n " + strings.Join(lines, "\n ") + "\n}"
	}
	g := start(t, "%s", site("one"))
	g.reload(site("one", "credentials X-Customer", "tenant X-Shop")) // nothing is recorded yet
	call := request{path: "/x", id: "k", header: headers{"Authorization": "Bearer a", "X-Customer": "1"}}
	g.call(call).want(t, 201, "arrival 1", "executed")
	for _, c := range []struct{ change, want string }{
		{"tenant X-Shop", "`credentials` differ"},
		{"credentials X-Customer", "`tenant` differ"},
		{"credentials X-Customer -X-Api-Key\n tenant X-Shop", "`credentials` differ"},
		{"credentials X-Customer\n tenant X-Shop\n caller {http.request.header.X-Customer}", "`caller` differ"},
		{"credentials X-Customer\n tenant X-Shop\n caller cookie session", "`caller` differ"},
		{"", "`credentials` and `tenant` differ"},
	} {
		err := loadConfig(g.config(site("one", c.change)))
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "free_keys") || !strings.Contains(err.Error(), "another `name`") {
			t.Fatalf("%q: %v, want %s", c.change, err, c.want)
		}
		// A connection that the refused configuration had accepted ends with it.
		eventually(t, "the running configuration answers", func() bool {
			res, err := g.client.Get("http://" + g.addr + "/up")
			if err != nil {
				return false
			}
			_, err = io.Copy(io.Discard, res.Body)
			return res.Body.Close() == nil && err == nil
		})
		g.call(call).want(t, 201, "arrival 1", "replayed")
	}
	// The same in other words, in another order, and with what counts anyway.
	g.reload(site("one", "credentials x-customer Authorization X-Consul-Token", "tenant x-shop Stripe-Account"))
	g.call(call).want(t, 201, "arrival 1", "replayed")
	g.reload(site("two", "tenant X-Other"))
	g.call(call).want(t, 201, "arrival 2", "executed")
	g.reload(site("one", "free_keys", "tenant X-Other"))
	other := call
	other.id = "another"
	g.call(other).want(t, 201, "arrival 3", "executed")
	g.reload(site("one", "tenant X-Other"))
	g.call(other).want(t, 201, "arrival 3", "replayed")
	if err := loadConfig(g.config(site("one", "credentials X-Customer", "tenant X-Shop"))); err == nil || !strings.Contains(err.Error(), "free_keys") {
		t.Errorf("going back frees the keys made since: %v", err)
	}
}
