package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// EventOf is a token of an event with all members that its draft asks for, but those of without.
func EventOf(action string, v ect.Vocabulary, wid string, parents []string, without ...ect.Member) ect.Claims {
	members := map[ect.Member]string{}
	event, _ := ect.ParseEvent(action)
	for m, value := range map[ect.Event]map[ect.Member]string{
		ect.EventCheckpoint:       {ect.MemberReversible: "true", ect.MemberRollbackURI: `"https://a.example/rollback"`, ect.MemberTTL: "3600"},
		ect.EventError:            {ect.MemberSeverity: `"error"`, ect.MemberErrorType: `"timeout"`, ect.MemberCheckpointID: `""`},
		ect.EventCircuitOpen:      {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`, ect.MemberErrorRate: "0.75", ect.MemberWindow: "60"},
		ect.EventCircuitHalfOpen:  {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`},
		ect.EventCircuitClose:     {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`, ect.MemberTotalCooldown: "90"},
		ect.EventRollbackRequest:  {ect.MemberReason: `"why"`, ect.MemberCascade: "false"},
		ect.EventRollbackComplete: {ect.MemberStatus: `"completed"`},
		ect.EventWorkflowStart:    {ect.MemberWorkflowName: `"the flow"`, ect.MemberDescription: `"what it does"`},
		ect.EventWorkflowComplete: {ect.MemberWorkflowName: `"the flow"`, ect.MemberTerminalStatus: `"success"`},
	}[event] {
		if !slices.Contains(without, m) {
			members[m] = value
		}
	}
	ext := new(ect.ExtBuilder)
	for m, value := range members {
		ext.JSON(m, value)
	}
	c := ect.Claims{Workflow: wid, Action: action, Vocabulary: v, Parents: parents, Ext: ext}
	if event == ect.EventCheckpoint {
		c.Output = ect.Sum([]byte("a state"))
	}
	return c
}

// Reports tells of an error at a checkpoint, in AERR's words, and returns its id.
func (s *Saga) Reports(checkpoint string) string {
	s.T.Helper()
	token := s.A.Issue(EventOf("aerr:error", ect.AERR, s.Wid, []string{checkpoint}))
	if got := s.G.Call(With(token, Request{Path: "/.well-known/cascade/errors", Reader: Nothing{}})); got.Status != http.StatusCreated {
		s.T.Fatalf("%d %s", got.Status, got.Body)
	}
	return token.ID()
}

// Entry is a token as the ledger shows it to an agent, waited for until it has its place.
func (g *Gateway) Entry(a *Agent, wid, id string) *ect.Unverified {
	g.T.Helper()
	var got Reply
	Eventually(g.T, id+" stands in the ledger", func() bool {
		got = g.Get(a, "ledger/entries?jti="+id+"&wid="+wid)
		return got.Status == http.StatusOK
	})
	token, err := ect.ParseInsecure(Document[struct{ Token string }](g.T, got).Token)
	if err != nil {
		g.T.Fatalf("%s: %v", id, err)
	}
	return token
}

// Events are the tokens of one event in a workflow that has so many nodes, in the order of
// the workflow's page.
func (s *Saga) Events(nodes int, event ect.Event) (all []*ect.Unverified) {
	s.T.Helper()
	for _, n := range s.G.SettledView(s.A, s.Wid, nodes).Nodes {
		if n.Event == string(event) {
			all = append(all, s.G.Entry(s.A, s.Wid, n.JTI))
		}
	}
	return all
}

// Follows checks what a token follows from.
func Follows(t *testing.T, u *ect.Unverified, parents ...string) {
	t.Helper()
	got := u.Parents()
	slices.Sort(got)
	slices.Sort(parents)
	if !slices.Equal(got, parents) {
		t.Errorf("%s follows from %v, want %v", u.Action(), got, parents)
	}
}

// Says checks the members of a token's extensions: all of want are there as they would be
// written in JSON, and those of absent are not.
func Says(t *testing.T, u *ect.Unverified, want map[ect.Member]string, absent ...ect.Member) {
	t.Helper()
	for m, value := range want {
		if raw, _ := u.Ext().Raw(m); raw != value {
			t.Errorf("%s says %s = %s, want %s: %s", u.Action(), m, raw, value, u.Payload())
		}
	}
	for _, m := range absent {
		if raw, there := u.Ext().Raw(m); there {
			t.Errorf("%s says %s = %s: %s", u.Action(), m, raw, u.Payload())
		}
	}
}

// Quoted is a string in JSON.
func Quoted(text string) string { return fmt.Sprintf("%q", text) }

// Sign makes a token of a payload as it stands.
func (a *Agent) Sign(t *testing.T, payload string) string {
	t.Helper()
	text, err := a.ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	var set struct {
		Keys []struct{ Kid, D string }
	}
	if err := json.Unmarshal(text, &set); err != nil || len(set.Keys) == 0 {
		t.Fatal(err, len(set.Keys))
	}
	k := set.Keys[0]
	raw, err := base64.RawURLEncoding.DecodeString(k.D)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), raw)
	if err != nil {
		t.Fatal(err)
	}
	part := base64.RawURLEncoding.EncodeToString
	signed := part([]byte(fmt.Sprintf(`{"alg":"ES256","kid":%q,"typ":%q}`, k.Kid, ect.TokenType))) + "." + part([]byte(payload))
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return signed + "." + part(append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...))
}
