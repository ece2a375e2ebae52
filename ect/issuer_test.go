package ect_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

func edRing(t testing.TB) *ect.Ring {
	t.Helper()
	ring := must(ect.GenerateRing(ect.EdDSA))(t)
	return ring
}

// TestIssueRefuses: what a verifier would refuse is not issued.
func TestIssueRefuses(t *testing.T) {
	issuer := issuerOf(t, edRing(t))
	many := make([]string, 101)
	for i := range many {
		many[i] = id(i + 1)
	}
	for name, c := range map[string]struct {
		change func(*ect.Claims)
		want   ect.Code
	}{
		"no action":       {func(c *ect.Claims) { c.Action = "" }, ect.CodeAction},
		"control":         {func(c *ect.Claims) { c.Action = "a\nb" }, ect.CodeAction},
		"no audience":     {func(c *ect.Claims) { c.Audience = nil }, ect.CodeAudience},
		"empty audience":  {func(c *ect.Claims) { c.Audience = []string{""} }, ect.CodeAudience},
		"id":              {func(c *ect.Claims) { c.ID = "ckpt-uuid" }, ect.CodeID},
		"workflow":        {func(c *ect.Claims) { c.Workflow = "bgp-failover-v2" }, ect.CodeWorkflow},
		"parent":          {func(c *ect.Claims) { c.Parents = []string{"x"} }, ect.CodeParents},
		"many parents":    {func(c *ect.Claims) { c.Parents = many }, ect.CodeTooManyParents},
		"equal parents":   {func(c *ect.Claims) { c.Parents = []string{id(1), strings.ToUpper(id(1))} }, ect.CodeDuplicateParent},
		"its own parent":  {func(c *ect.Claims) { c.ID, c.Parents = id(1), []string{id(1)} }, ect.CodeCycle},
		"a good one":      {func(*ect.Claims) {}, ""},
		"life of a day":   {func(c *ect.Claims) { c.Life = 24 * time.Hour }, ""},
		"hundred parents": {func(c *ect.Claims) { c.Parents = many[:100] }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			claims := ect.Claims{Audience: []string{gateway}, Action: "a"}
			c.change(&claims)
			_, err := issuer.Issue(at, claims)
			wantCode(t, err, c.want)
		})
	}
	for _, life := range []time.Duration{-1, time.Millisecond, 25 * time.Hour} {
		if _, err := issuer.Issue(at, ect.Claims{Audience: []string{gateway}, Action: "a", Life: life}); err == nil {
			t.Errorf("a life of %v", life)
		}
	}
	if _, err := ect.NewIssuer(clinical, nil); err == nil {
		t.Error("without a ring: accepted")
	}
	for _, identity := range []string{"", "spiffe://Example.com/x"} {
		if _, err := ect.NewIssuer(identity, edRing(t)); err == nil {
			t.Errorf("%q: accepted", identity)
		}
	}
}

// TestIssueExt: what is not JSON, stands twice or is too large is not issued.
func TestIssueExt(t *testing.T) {
	issuer := issuerOf(t, edRing(t))
	for name, ext := range map[string]*ect.ExtBuilder{
		"not a number":           ext().Number("a", math.NaN()),
		"infinite":               ext().Number("a", math.Inf(1)),
		"not JSON":               ext().JSON("a", "{"),
		"two values":             ext().JSON("a", "1 2"),
		"twice":                  ext().Int("a", 1).Int("a", 2),
		"twice by both names":    ext().Int("atd.ttl", 1).Int(ect.MemberTTL, 1),
		"too large":              ext().Text("a", strings.Repeat("x", 4096)),
		"too deep":               ext().JSON("a", "[[[[[]]]]]"),
		"a list that is no list": ext().Text("cascade.blast_radius", strings.Repeat("x", 5000)),
	} {
		if token, err := issuer.Issue(at, ect.Claims{Audience: []string{gateway}, Action: "a", Ext: ext, Vocabulary: ect.ATD}); err == nil {
			t.Errorf("%s: %s", name, token.Payload())
		}
	}
	token := must(issuer.Issue(at, ect.Claims{Audience: []string{gateway}, Action: "a", Ext: ext().Text("a", "\x00\"\\\n<é😀\xff").JSON("b", ` {"c" : 1} `)}))(t)
	if text, _ := token.Ext().Text("a"); text != "\x00\"\\\n<é😀\ufffd" {
		t.Errorf("%q", text)
	}
	if !json.Valid([]byte(token.Payload())) {
		t.Errorf("%s is not JSON", token.Payload())
	}
}

// TestListsAreCut: lists of agents lose their end where the extensions would be over
// 4096 bytes; the count beside them stays.
func TestListsAreCut(t *testing.T) {
	var agents []string
	var outcomes []ect.Outcome
	for i := range 1000 {
		agents = append(agents, fmt.Sprintf("spiffe://example.com/agent/%d", i))
		outcomes = append(outcomes, ect.Outcome{Agent: agents[i], Status: "completed"})
	}
	issuer := issuerOf(t, edRing(t))
	claims := ect.Claims{Audience: []string{gateway}, Action: "cascade_detected", Ext: ext().
		Int("cascade.affected_agents", 1000).Texts("cascade.blast_radius", agents).Texts(ect.MemberFailedAgents, agents[:3]).
		Outcomes(ect.MemberCascaded, outcomes).Text("cascade.pattern", "depth_first")}
	d := must(issuer.Draft(at, claims))(t)
	if n := len(d.Ext().JSON()); n > 4096 || n < 3000 {
		t.Errorf("cut to %d bytes", n)
	}
	if n, _ := d.Ext().Int("cascade.affected_agents"); n != 1000 {
		t.Errorf("count %d", n)
	}
	radius, ok := d.Ext().Texts("cascade.blast_radius")
	if !ok || len(radius) > 0 && radius[0] != agents[0] {
		t.Errorf("%v", radius)
	}
	if failed, _ := d.Ext().Texts(ect.MemberFailedAgents); len(failed) != 3 {
		t.Errorf("a short list was cut to %v", failed)
	}
	// The same builder again: cutting has changed nothing in it.
	again, err := issuer.Draft(at, claims)
	if err != nil || again.Ext().JSON() != d.Ext().JSON() {
		t.Errorf("the second time %v", err)
	}
	small, err := issuer.Draft(at, ect.Claims{Audience: []string{gateway}, Action: "a", Ext: ext().Texts("cascade.blast_radius", agents[:10])})
	if list, _ := small.Ext().Texts("cascade.blast_radius"); err != nil || len(list) != 10 {
		t.Errorf("%d of 10, cut without need, %v", len(list), err)
	}
}

// TestDraftIsSignedLater: a draft can be stored as its payload, and signed later with the
// same id.
func TestDraftIsSignedLater(t *testing.T) {
	ring := edRing(t)
	issuer := issuerOf(t, ring)
	d := must(issuer.Draft(at, ect.Claims{Audience: []string{gateway}, Action: "checkpoint", Workflow: workflow, Parents: []string{}, Ext: ext().Bool(ect.MemberReversible, true)}))(t)
	kept := must(ect.ParseDraft(d.Payload()))(t)
	if kept.ID() != d.ID() || kept.Event() != ect.EventCheckpoint {
		t.Errorf("%s became %s", d.Payload(), kept.Payload())
	}
	token := must(issuer.Sign(kept))(t)
	if token.Payload() != d.Payload() || token.ID() != d.ID() {
		t.Errorf("signed %s", token.Payload())
	}
	owner := must(ect.ParseOwner(clinical))(t)
	v := verifier(t, ring.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	read, err := v.Verify(t.Context(), token.Raw(), ect.Presentation{Now: at})
	if err != nil || read.Digest() != token.Digest() {
		t.Errorf("%v", err)
	}
	for _, broken := range []string{"", "{}", `{"jti":"x"}`} {
		if _, err := ect.ParseDraft(broken); err == nil {
			t.Errorf("%s is a draft", broken)
		}
	}
}
