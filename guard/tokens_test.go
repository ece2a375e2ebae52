package guard_test

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const gatewayName, agentName = "spiffe://example.com/gateway", "spiffe://example.com/agent/"

// trust is a bed that verifies the tokens of the agents a and b, in a bubble of time.
type trust struct {
	*bed
	level    ect.Level
	ring     *ect.Ring // of the gateway
	agents   map[string]*ect.Issuer
	sources  []ect.Source     // of the agents' keys
	answer   http.HandlerFunc // of the upstream; nil charges
	evidence *evidence.Evidence
}

// trusting runs a test with tokens of at least this level. Calls to /search are not guarded.
func trusting(t *testing.T, level ect.Level, test func(b *trust)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &trust{agents: map[string]*ect.Issuer{}, level: level}
		b.bed = newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
			if b.answer != nil {
				b.answer(w, r)
				return
			}
			charge(n, w, r)
		})
		ring := func() *ect.Ring {
			r, err := ect.GenerateRing(ect.ES256)
			b.check(err)
			return r
		}
		b.ring = ring()
		for _, name := range []string{"a", "b"} {
			ring, identity := ring(), agentName+name
			owner, err := ect.ParseOwner(identity)
			b.check(err)
			b.sources = append(b.sources, ring.Source(owner))
			b.agents[name], err = ect.NewIssuer(identity, ring)
			b.check(err)
		}
		b.config.Exempt = func(r *http.Request) (bool, error) { return r.URL.Path == "/search", nil }
		b.begin()
		test(b)
	})
}

func (b *trust) check(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// begin is start with a ledger, and returns the policy by which it records.
func (b *trust) begin() *guard.TokenPolicy {
	b.Helper()
	policy := b.policy(b.disk)
	b.start()
	policy.Engine = b.engine
	return policy
}

// policy is a ledger over a store, and the policy by which it records, which the next guard has.
func (b *trust) policy(st store.Store) *guard.TokenPolicy {
	b.Helper()
	ev, err := evidence.Open(b.Context(), evidence.Options{Store: st, Sealer: b.bed.ring, Node: "node", Ring: b.ring})
	b.check(err)
	b.evidence = ev
	b.Cleanup(func() { _ = ev.Close(context.Background()) })
	events, err := ev.EventBuilder(gatewayName)
	b.check(err)
	own, err := events.Source()
	b.check(err)
	policy := &guard.TokenPolicy{
		Evidence: ev, Events: events, LedgerFirst: b.level == ect.L3, HandlesRollback: api.HandlesRollback, FitsPhase: api.FitsPhase,
		Reports: evidence.NewLedger(evidence.Ledger{Log: ev.Log(), Outcomes: ev.Outcomes, Identities: []string{events.Identity()}, Own: events.Own}),
	}
	policy.Verifier, err = ect.NewVerifier(ect.Policy{
		Audience: []string{gatewayName}, Sources: append(b.sources[:2:2], own), MinLevel: min(b.level, ect.L2),
	})
	b.check(err)
	if b.level == ect.L1 {
		ev.AcceptUnsigned()
	}
	b.config.Tokens, b.config.Verifies = func() (*guard.TokenPolicy, error) { return policy, nil }, true
	return policy
}

// token makes a token of an agent.
func (b *trust) token(by *ect.Issuer, c ect.Claims) *ect.Token {
	b.Helper()
	c.Audience, c.Action = []string{gatewayName}, cmp.Or(c.Action, "charge_card")
	token, err := by.Issue(time.Now(), c)
	if err != nil {
		b.Fatal(err)
	}
	return token
}

// has reports that the ledger holds a token of a workflow, which may be empty.
func (b *trust) has(workflow, id string) {
	b.Helper()
	if _, err := b.evidence.Log().Lookup(b.Context(), workflow, id); err != nil {
		b.Errorf("%s: %v", id, err)
	}
}

// send makes a call, such as "POST /pay", with an execution id that may be empty.
func (b *trust) send(call, id, body string, tokens ...string) *httptest.ResponseRecorder {
	b.Helper()
	method, target, _ := strings.Cut(call, " ")
	r := httptest.NewRequestWithContext(b.Context(), method, target, strings.NewReader(body))
	if method == http.MethodGet {
		r = httptest.NewRequestWithContext(b.Context(), method, target, nil)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(ect.FieldName, strings.Join(tokens, ", "))
	if id != "" {
		r.Header.Set("Idempotency-Key", id)
	}
	w := httptest.NewRecorder()
	b.serve(w, r)
	return w
}

// uses makes a call and returns its status, Execution-Status and, of a refusal, the reason.
func (b *trust) uses(call, id, body string, tokens ...string) string {
	b.Helper()
	w := b.send(call, id, body, tokens...)
	var doc struct{ Reason string }
	_ = json.Unmarshal(w.Body.Bytes(), &doc) // else it has none
	return strings.Join(strings.Fields(fmt.Sprint(w.Code, " ", w.Header().Get("Execution-Status"), " ", doc.Reason)), " ")
}

// want compares what uses has returned.
func (b *trust) want(got, want string) {
	b.Helper()
	if got != want {
		b.Errorf("got %q, want %q", got, want)
	}
}

const usedBefore = "403 refused replayed"

// Several tokens of one call: the same are the same call, in whatever order; those of two agents
// are nobody's, and neither are those of two workflows. One that was sent with a request that
// wrote nothing may come along with what follows from it.
func TestSeveralTokensOneCall(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		wid, a := uuid.NewString(), b.agents["a"]
		one, two := b.token(a, ect.Claims{Workflow: wid}).Raw(), b.token(a, ect.Claims{Workflow: wid}).Raw()
		b.want(b.uses("POST /pay", "", "", one, two), "200 executed")
		b.want(b.uses("POST /pay", "", "", two, one), "200 replayed")
		b.was(1)
		three := b.token(a, ect.Claims{Workflow: wid}).Raw()
		b.want(b.uses("POST /pay", "", "", three, b.token(b.agents["b"], ect.Claims{Workflow: wid}).Raw()), "403 refused iss")
		b.want(b.uses("POST /pay", "", "", three, b.token(a, ect.Claims{Workflow: uuid.NewString()}).Raw()), "403 refused wid")
		b.was(1)
		look := b.token(a, ect.Claims{Workflow: wid})
		b.want(b.uses("GET /balance", "", "", look.Raw()), "200")
		b.want(b.uses("POST /pay", "", "", look.Raw(), b.token(a, ect.Claims{Workflow: wid, Parents: []string{look.ID()}}).Raw()), "200 executed")
	})
}

// Of several tokens one was used before: the others are as they were, whatever the level.
func TestSeveralTokensOneUsed(t *testing.T) {
	for _, level := range []ect.Level{ect.L2, ect.L3} {
		trusting(t, level, func(b *trust) {
			wid := uuid.NewString()
			token := func() string { return b.token(b.agents["a"], ect.Claims{Workflow: wid}).Raw() }
			free, taken, used := token(), token(), token()
			b.want(b.uses("GET /used", "", "", used), "200")
			b.want(b.uses("GET /both", "", "", taken), "200")
			b.want(b.uses("GET /both", "", "", free, taken, used), usedBefore)
			b.want(b.uses("GET /else", "", "", free), "200")
			b.want(b.uses("GET /else", "", "", taken), usedBefore)
			b.want(b.uses("GET /both", "", "", taken), "200")
			free = token()
			b.want(b.uses("POST /pay", "k", "", free, used), usedBefore)
			b.want(b.uses("GET /else", "", "", free), "200")
		})
	}
}

// What follows from a request that wrote nothing, and from a retry with a new token, may name its
// token as a parent: that is recorded with it, or was with the retry.
func TestParentsOfEveryKind(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		wid := uuid.NewString()
		var ids []string
		for _, c := range []struct{ call, id, want string }{
			{"GET /balance", "", "200"}, {"GET /balance", "", "200"},
			{"POST /pay", "order-7", "200 executed"}, {"POST /pay", "order-7", "200 replayed"}, {"POST /pay", "order-8", "200 executed"},
		} {
			token := b.token(b.agents["a"], ect.Claims{Workflow: wid, Parents: ids[max(len(ids)-1, 0):]})
			b.want(b.uses(c.call, c.id, "", token.Raw()), c.want)
			ids = append(ids, token.ID())
		}
		for _, id := range ids {
			b.has(wid, id)
		}
	})
}

// A token without a workflow is a parent in any, whether it came with a call or with a request
// that wrote nothing, and is recorded with what follows from it.
func TestParentWithoutAWorkflow(t *testing.T) {
	for call, want := range map[string]string{"POST /balance": "200 executed", "GET /balance": "200"} {
		trusting(t, ect.L2, func(b *trust) {
			first := b.token(b.agents["a"], ect.Claims{})
			second := b.token(b.agents["a"], ect.Claims{Parents: []string{first.ID()}})
			b.want(b.uses(call, "", "", first.Raw()), want)
			b.want(b.uses(call, "", "", second.Raw()), want)
			child := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString(), Parents: []string{second.ID()}})
			b.want(b.uses("POST /pay", "", "", child.Raw()), "200 executed")
			b.has("", first.ID())
			b.has("", second.ID())
		})
	}
}

// failure is an error that the agent b reports of a token.
func (b *trust) failure(wid, of string) *ect.Token {
	b.Helper()
	return b.token(b.agents["b"], ect.Claims{
		Workflow: wid, Action: "error", Parents: []string{of},
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
	})
}

// An upstream that names one error twice does not keep the outcome from being recorded.
func TestUpstreamErrorTwice(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.config.UpstreamIdentity = agentName + "b"
		b.begin()
		wid := uuid.NewString()
		var sent *ect.Token
		var checkpoint string
		b.answer = func(w http.ResponseWriter, r *http.Request) {
			lines := r.Header.Values(ect.FieldName)
			last, err := ect.ParseInsecure(lines[len(lines)-1])
			b.check(err)
			checkpoint = last.ID()
			sent = b.failure(wid, checkpoint)
			says(500, "", ect.FieldName, sent.Raw()+", "+sent.Raw())(w, r)
		}
		b.want(b.uses("POST /pay", "", "", b.token(b.agents["a"], ect.Claims{Workflow: wid}).Raw()), "500 executed")
		b.has(wid, sent.ID())
		b.has(wid, b.evidence.NodeID(checkpoint))
	})
}

// P6: the outcomes of answers that carry one error at the same time are recorded all the same.
func TestUpstreamErrorInManyAnswers(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.disk.takes = time.Second
		wid := uuid.NewString()
		task := func(by string) *ect.Token { return b.token(b.agents[by], ect.Claims{Workflow: wid}) }
		own := task("b") // who is the upstream
		b.want(b.uses("POST /root", "", "", task("a").Raw()), "200 executed")
		b.want(b.uses("POST /root", "", "", own.Raw()), "200 executed")
		sent := b.failure(wid, own.ID())
		b.answer = func(w http.ResponseWriter, r *http.Request) {
			<-time.After(time.Minute)
			says(200, "", ect.FieldName, sent.Raw())(w, r)
		}
		var all sync.WaitGroup
		var answers [20]*httptest.ResponseRecorder
		for i := range answers {
			token := task("a").Raw()
			all.Go(func() { answers[i] = b.send("POST /pay", "", "", token) })
		}
		all.Wait()
		b.has(wid, sent.ID())
		for _, w := range answers {
			b.want(w.Header().Get("Execution-Status"), "executed")
			b.has(wid, b.evidence.NodeID(w.Header().Get("Execution-Checkpoint")))
		}
	})
}

// P1: of many uses of one token at once, for other keys and for requests that are not guarded,
// exactly one is good.
func TestTokenHasOneUse(t *testing.T) {
	for _, level := range []ect.Level{ect.L2, ect.L3} {
		trusting(t, level, func(b *trust) {
			b.disk.takes = time.Second
			token := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString()}).Raw()
			var passed atomic.Int64
			var all sync.WaitGroup
			for n := range 20 {
				call := fmt.Sprint([]string{"GET /balance?n=", "POST /pay/"}[min(n%2+int(ect.L3-level), 1)], n)
				all.Go(func() {
					if got := b.uses(call, fmt.Sprint(n), "", token); strings.HasPrefix(got, "200") {
						passed.Add(1)
					} else {
						b.want(got, usedBefore)
					}
				})
			}
			all.Wait()
			b.was(1)
			if n := passed.Load(); n != 1 {
				b.Errorf("%d uses were good", n)
			}
		})
	}
}

// A token that came along as a parent is bound to nothing, and reads for nobody, at whatever level. One that has read
// may come along.
func TestParentsReadNothing(t *testing.T) {
	for _, level := range []ect.Level{ect.L2, ect.L3} {
		trusting(t, level, func(b *trust) {
			a, wid := b.agents["a"], uuid.NewString()
			parent, read := b.token(a, ect.Claims{Workflow: wid}), b.token(a, ect.Claims{Workflow: wid})
			b.want(b.uses("GET /read", "", "", read.Raw()), "200")
			b.want(b.uses("POST /pay", "", "", parent.Raw(), b.token(a, ect.Claims{Workflow: wid, Parents: []string{parent.ID(), read.ID()}}).Raw()), "200 executed")
			b.want(b.uses("GET /balance", "", "", parent.Raw()), usedBefore)
			b.want(b.uses("GET /read", "", "", read.Raw()), "200")
		})
	}
}

// ECT, "Unique within wid, or globally if there is no wid": of two tokens with one jti, one of
// them without a workflow, exactly one is good (P1), also where both come at once.
func TestTokenWithoutWorkflowIsUniqueAnywhere(t *testing.T) {
	for _, level := range []ect.Level{ect.L2, ect.L3} {
		trusting(t, level, func(b *trust) {
			b.disk.takes = time.Second
			pair := func() [2]string {
				id, a := uuid.NewString(), b.agents["a"]
				return [2]string{b.token(a, ect.Claims{ID: id}).Raw(), b.token(a, ect.Claims{ID: id, Workflow: uuid.NewString()}).Raw()}
			}
			for _, calls := range [][2]string{{"POST /1", "POST /2"}, {"POST /1", "GET /2"}, {"GET /1", "POST /2"}, {"GET /1", "GET /2"}} {
				both := pair()
				var got [2]string
				var all sync.WaitGroup
				for i := range both {
					all.Go(func() { got[i] = b.uses(calls[i], "", "{}", both[i]) })
				}
				all.Wait()
				if good := strings.HasPrefix(got[0], "200"); good == strings.HasPrefix(got[1], "200") || got[0] != usedBefore && got[1] != usedBefore {
					b.Errorf("%v of %v at once: %q", level, calls, got)
				}
			}
			for _, call := range []string{"POST /3", "GET /3"} {
				for first := range 2 {
					both := pair()
					good := strings.TrimSpace("200 " + map[bool]string{true: "executed"}[call[0] == 'P'])
					b.want(b.uses(call, "", "{}", both[first]), good)
					b.want(b.uses(call, "", "{}", both[1-first]), usedBefore)
					b.want(b.uses(call, "", "{}", both[first]), strings.Replace(good, "executed", "replayed", 1))
				}
			}
		})
	}
}

// A token is good for one body, and one that names the hash of a body for that alone, guarded or
// not.
func TestTokensAndBodies(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		token := func(c ect.Claims) string { return b.token(b.agents["a"], c).Raw() }
		pay := token(ect.Claims{})
		b.want(b.uses("POST /pay", "k", `{"amount":1}`, pay), "200 executed")
		b.want(b.uses("POST /pay", "k", `{"amount":2}`, pay), usedBefore)
		b.want(b.uses("POST /pay", "k", `{"amount": 1.0}`, pay), "200 replayed") // the same by value
		b.want(b.uses("GET /pay", "", "", pay), usedBefore)
		body := `{"query":"` + strings.Repeat("x", 3<<10) + `"}`
		for call, good := range map[string]string{"POST /pay": "200 executed", "POST /search": "200"} {
			named := ect.Claims{Input: ect.Sum([]byte(body))}
			b.want(b.uses(call, "", body, token(named)), good)
			b.want(b.uses(call, "", "{}", token(named)), "403 refused inp_hash")
		}
		search := token(ect.Claims{})
		b.want(b.uses("POST /search", "", "{}", search), "200")
		b.want(b.uses("POST /search", "", `{"x":1}`, search), usedBefore)
	})
}

// A token in the gateway's name that the ledger does not hold was not issued by it, whoever has
// the key.
func TestForgedTokensOfTheGateway(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		thief, err := ect.NewIssuer(gatewayName, b.ring)
		if err != nil {
			b.Fatal(err)
		}
		b.want(b.uses("POST /pay", "", "", b.token(thief, ect.Claims{Workflow: uuid.NewString()}).Raw()), "403 refused parent-unknown")
		b.was(0)
	})
}

// Tokens that come with a call are their author's, in whatever order: one without a signature
// beside it makes nobody of who has signed.
func TestUnsignedTokenBesideASignedOne(t *testing.T) {
	trusting(t, ect.L1, func(b *trust) {
		signed := func() string { return b.token(b.agents["a"], ect.Claims{}).Raw() }
		unsigned := func() string {
			now := time.Now().Unix()
			return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"iss":%q,"aud":%q,"iat":%d,"exp":%d,"jti":%q,"exec_act":"act","par":[]}`,
				agentName+"a", gatewayName, now, now+600, uuid.NewString()))
		}
		b.want(b.uses("POST /pay", "order-7", "", signed()), "200 executed")
		b.want(b.uses("POST /pay", "order-7", "", signed(), unsigned()), "200 replayed")
		b.want(b.uses("POST /pay", "order-7", "", unsigned(), signed()), "200 replayed")
		b.was(1)
	})
}

// P1: a retry comes when it comes. A token whose time is over is still good for the call that it
// was used for, which is answered from the record, and for nothing new.
func TestLateTokens(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		token := func() string { return b.token(b.agents["a"], ect.Claims{Life: 10 * time.Second}).Raw() }
		used, refused, unused := token(), token(), token()
		b.want(b.uses("POST /pay", "", "", used), "200 executed")
		b.answer = says(429, "")
		b.want(b.uses("POST /refused", "", "", refused), "429 executed")
		<-time.After(ect.Skew + 11*time.Second)
		b.want(b.uses("POST /pay", "", "", used), "200 replayed")
		const late = "403 refused expired"
		b.want(b.uses("POST /else", "", "", used), late)
		b.want(b.uses("POST /pay", "", "{}", used), late)
		b.want(b.uses("GET /pay", "", "", used), late)
		b.want(b.uses("POST /new", "", "", unused), late)
		b.want(b.uses("POST /refused", "", "", refused), late) // its key is free: it would be anew
		b.was(2)
	})
}

// ATD and AERR, "Replay": while a stream runs, however long after the time of its key, its token
// is good for that call alone, which a retry follows; afterwards, for as long as the key is kept.
func TestATokenOutlivesNoStream(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.config.Actions = []*guard.Action{{Name: "default", Policy: guard.Policy{Deadline: jsontime.Duration(10 * time.Second), StreamIdle: jsontime.Duration(time.Hour), RetainResult: jsontime.Duration(time.Hour), RetainKey: jsontime.Duration(time.Hour)}}}
		h, err := guard.New(b.config)
		if err != nil {
			b.Fatal(err)
		}
		b.guard = h
		const minutes = 23 * 60
		b.answer = func(w http.ResponseWriter, _ *http.Request) {
			for range minutes {
				_, _ = io.WriteString(w, "x")
				_ = http.NewResponseController(w).Flush()
				<-time.After(time.Minute)
			}
		}
		token := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString(), Life: 24 * time.Hour}).Raw()
		var all sync.WaitGroup
		all.Go(func() { b.want(b.uses("POST /stream", "k", "", token), "200 executed") })
		synctest.Wait()
		b.want(b.uses("POST /pay", "another", "", token), usedBefore)
		all.Go(func() { b.want(b.uses("POST /stream", "k", "", token), "200 attached") })
		const late = "403 refused too-old"
		for range 2 {
			<-time.After(8 * time.Hour)
			b.want(b.uses("POST /pay", "another", "", token), late)
		}
		all.Go(func() { b.want(b.uses("POST /stream", "k", "", token), "200 attached") })
		all.Wait()
		b.want(b.uses("POST /stream", "k", "", token), "200 replayed")
		b.want(b.uses("POST /pay", "another", "", token), late)
		b.was(1)
		for e, err := range b.disk.Scan(b.Context(), store.Prefix([]byte("j"))) { // what is kept of it has an end
			if left := time.Until(e.Expires); err != nil || left < 50*time.Minute || left > 3*time.Hour {
				b.Errorf("it is kept for %s, %v", left, err)
			}
		}
	})
}

// P4, C-6.1-a: a request that changes nothing brings a token that cannot be bound: it is refused, or passes with
// `fail_open` where the store is full. A spent token stays spent meanwhile. When there is room again the token is good
// for one use, and for that alone.
func TestTokensThatCannotBeBound(t *testing.T) {
	for _, open := range []bool{false, true} {
		trusting(t, ect.L2, func(b *trust) {
			b.guard.FailOpen = open
			token := b.token(b.agents["a"], ect.Claims{}).Raw()
			spent := b.token(b.agents["a"], ect.Claims{}).Raw()
			b.want(b.uses("GET /spent", "", "", spent), "200")
			full := func([]store.Write) error { return store.ErrFull }
			b.disk.before.Store(&full)
			want := map[bool]string{false: "503 refused", true: "200"}[open]
			b.want(b.uses("GET /balance", "", "", token), want)
			b.want(b.uses("GET /other", "", "", spent), usedBefore)
			b.want(b.uses("GET /public", "", ""), "200")
			b.disk.before.Store(nil)
			b.disk.broken.Store(true)
			b.want(b.uses("GET /other", "", "", b.token(b.agents["a"], ect.Claims{}).Raw()), "503 refused")
			b.disk.broken.Store(false)
			b.want(b.uses("GET /balance", "", "", token), "200")
			b.want(b.uses("POST /pay", "k", "", token), usedBefore)
			b.want(b.uses("GET /other", "", "", token), usedBefore)
		})
	}
}

// P1, P7: what an upstream writes into Execution-Context is anybody's text. It changes nothing of
// what became of the call, and ends nothing else.
func TestHostileTokensOfUpstreams(t *testing.T) {
	for _, text := range []string{`{"ext":{"a":"\`, `{"ext":{"\`, `{"ext":{"a":"\ud83d\`, `{`, "\xff", ``} {
		trusting(t, ect.L2, func(b *trust) {
			hostile := base64.RawURLEncoding.EncodeToString([]byte(text))
			for _, status := range []int{201, 500} {
				b.answer = says(status, "", ect.FieldName, hostile)
				call := fmt.Sprint("POST /", status)
				b.want(b.uses(call, "k", ""), fmt.Sprint(status, " executed"))
				<-time.After(time.Minute) // its record may come after its end
				b.want(b.uses(call, "k", ""), fmt.Sprint(status, " replayed"))
			}
			b.was(2)
			if got := b.uses("POST /new", "", "", hostile); text != "" && !strings.HasPrefix(got, "40") {
				b.Errorf("from a client: %s", got)
			}
		})
	}
}

// placing reports that a batch gives events their places in the ledger.
func placing(batch []store.Write) bool {
	return slices.ContainsFunc(batch, func(w store.Write) bool { return w.Place != nil })
}

// ECT level L3, P4: a ledger that takes nothing lets nothing on, also where the guard fails open.
// The key of a call is free afterwards, and its token is good for it; so is that of an exempted
// request with a body, which no retry could be known by.
func TestLevel3LedgerFails(t *testing.T) {
	trusting(t, ect.L3, func(b *trust) {
		b.guard.FailOpen = true
		broken := errors.New("broken")
		wid := uuid.NewString()
		token := func() string { return b.token(b.agents["a"], ect.Claims{Workflow: wid}).Raw() }
		type call struct{ line, id, body, token string }
		use := func(c call, want string) { b.Helper(); b.want(b.uses(c.line, c.id, c.body, c.token), want) }
		done := call{"POST /done", "done", "", token()}
		use(done, "200 executed")
		calls := []call{
			{"POST /pay", "k", "", token()}, {"GET /balance", "", "", token()},
			{"POST /done", "done", "", token()}, // a retry with a new token
			{"POST /search", "", "{}", token()},
		}
		const unrecorded, unproven = "503 refused", "503 refused ledger_unavailable"

		b.disk.broken.Store(true) // nothing is written
		for i, want := range []string{unrecorded, unproven, unrecorded, unproven} {
			use(calls[i], want)
		}
		use(done, "200 replayed") // what was proven before is answered
		b.disk.broken.Store(false)

		before := func(batch []store.Write) error { // nothing gets its place
			if placing(batch) {
				return broken
			}
			return nil
		}
		b.disk.before.Store(&before)
		var all sync.WaitGroup
		for i, want := range []string{unrecorded, unproven, unrecorded, unproven} {
			all.Go(func() { use(calls[i], want) })
		}
		all.Wait()
		synctest.Wait()
		unused := func(batch []store.Write) error { // no use is recorded
			if slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'j' }) {
				return broken
			}
			return nil
		}
		b.disk.before.Store(&unused)
		use(calls[3], unproven)
		synctest.Wait()
		b.disk.before.Store(nil)
		b.was(1)
		for i, want := range []string{"200 executed", "200", "200 replayed", "200"} {
			use(calls[i], want)
		}
		use(calls[3], usedBefore)
		b.was(4)
	})
}

// ECT level L3, P4: a request with a body whose client has left before its token is recorded has used nothing up.
func TestLevel3ClientLeaves(t *testing.T) {
	trusting(t, ect.L3, func(b *trust) {
		token := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString()})
		r := httptest.NewRequest("POST", "/search", strings.NewReader("{}"))
		r.Header.Set(ect.FieldName, token.Raw())
		ctx, leave := context.WithCancel(b.Context())
		leave()
		b.serve(httptest.NewRecorder(), r.WithContext(ctx))
		b.was(0)
		b.want(b.uses("POST /search", "", "{}", token.Raw()), "200")
		b.was(1)
	})
}

// A retry of a running call attaches, with the same token, which is good for nothing else.
func TestTokenAttaches(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.answer = func(w http.ResponseWriter, r *http.Request) { slowly(1, w, r) }
		token := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString()}).Raw()
		var all sync.WaitGroup
		for _, want := range []string{"200 executed", "200 attached"} {
			all.Go(func() { b.want(b.uses("POST /slow", "", "", token), want) })
			synctest.Wait()
		}
		b.want(b.uses("POST /slow", "other", "", token), usedBefore)
		all.Wait()
		b.was(1)
	})
}

// ECT level L3, P4: where a token is in the tree with its commit, nothing waits; and if that commit fails, nothing goes on
// and the token is good for the next try.
func TestLevel3InTheCommit(t *testing.T) {
	trusting(t, ect.L3, func(b *trust) {
		fails := func(batch []store.Write) error {
			if placing(batch) {
				return errors.New("no space left on device")
			}
			return nil
		}
		b.disk.before.Store(&fails)
		token := b.token(b.agents["a"], ect.Claims{Workflow: uuid.NewString()}).Raw()
		b.want(b.uses("POST /search", "", "{}", token), "503 refused ledger_unavailable")
		b.was(0)
		b.disk.before.Store(nil)
		begun := time.Now()
		b.want(b.uses("POST /search", "", "{}", token), "200")
		if waited := time.Since(begun); waited > 2*b.disk.takes {
			t.Errorf("it waited %s", waited)
		}
		b.was(1)
	})
}
