//go:build unix

package evidence

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Issue 4, "The gateway's own key": it rotates under load, beside reloads, without a
// restart. No call fails, replaced keys stay published until their tokens have expired,
// and all that was ever signed verifies, also after a restart.
func TestProcessRotatesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity spiffe://example.com/gateway"
	file := site.Path("data.identity")
	gateway := site.Start(t)
	site.WantSecret(t, file)
	first := site.Identity(t, "show")
	if first.Name != "spiffe://example.com/gateway" || first.File != file || first.Algorithm != "ES256" || len(first.Keys) != 1 {
		t.Fatalf("%+v", first)
	}
	kids := []string{first.Signs(t)}

	var calls atomic.Int64
	var clients sync.WaitGroup
	stop := make(chan struct{})
	for worker := range 2 {
		clients.Go(func() {
			for n := 0; ; n++ {
				c := harness.ProcCall{Id: fmt.Sprintf("rotated-%d-%d", worker, n)}
				a := gateway.Retry(t, c)
				if a.Status != http.StatusCreated { // a replay, where a reload has cut the first answer
					t.Errorf("%s: %v", c.Id, a)
					return
				}
				calls.Add(1)
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	more := func() {
		before := calls.Load()
		harness.EventuallyWithin(t, harness.ProcBound, "load", func() bool { return calls.Load() >= before+20 || t.Failed() })
	}
	for n := range 3 {
		more()
		rotated := site.Identity(t, "rotate")
		if len(rotated.Keys) != n+2 || slices.Contains(kids, rotated.Signs(t)) {
			t.Fatalf("%+v after %q", rotated, kids)
		}
		kids = append(kids, rotated.Signs(t))
		site.Guard = fmt.Sprintf("deadline %ds", 60+n)
		gateway.Reload(t)
		if now := site.Identity(t, "show"); now.Signs(t) != rotated.Signs(t) {
			t.Errorf("a reload brings back the key %s", now.Signs(t))
		}
	}
	more()
	close(stop)
	clients.Wait()
	site.WantSecret(t, file)
	jwks, published := gateway.Jwks(t)
	slices.Sort(kids)
	if !slices.Equal(published, kids) {
		t.Errorf("published %q, made %q", published, kids)
	}
	signed := site.WantSigned(t, jwks)
	if int64(signed) < 2*calls.Load() {
		t.Errorf("%d signatures of %d calls", signed, calls.Load())
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the replaced keys are gone from the file", func() bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.Count(string(text), `"d"`) == 1
	})
	gateway.End(t)
	said := gateway.Log.String()
	if strings.Contains(said, `"level":"error"`) {
		t.Errorf("errors in the log:\n%s", gateway.Log.Tail(4000))
	}
	if got := strings.Count(said, `"msg":"signing key rotated"`); got != 3 {
		t.Errorf("%d rotations are logged", got)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var private []struct{ D string }
	if err := json.Unmarshal([]byte(harness.ProcDocument[struct{ Keys json.RawMessage }](t, string(text)).Keys), &private); err != nil {
		t.Fatal(err)
	}
	private = slices.DeleteFunc(private, func(key struct{ D string }) bool { return key.D == "" })
	if len(private) != 1 || strings.Contains(said, private[0].D) {
		t.Errorf("P8: %d private keys are in the file; the log must hold none", len(private))
	}

	gateway = site.Start(t)
	if again, names := gateway.Jwks(t); !slices.Equal(names, kids) || again != jwks {
		t.Errorf("after the restart %q are published", names)
	}
	gateway.Post(t, harness.ProcCall{Id: "late"})
	site.WantSigned(t, jwks)

	// A theft: nothing older is published any more, and all records verify that were signed. For the
	// others see TestProcessSignsWhenShown.
	site.Identity(t, "rotate")
	harness.EventuallyWithin(t, harness.ProcBound, "what was recorded before is signed", func() bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.Count(string(text), `"d"`) == 1
	})
	stolen := site.Identity(t, "rotate", "--stolen")
	harness.EventuallyWithin(t, harness.ProcBound, "only the new key is published", func() bool {
		_, names := gateway.Jwks(t)
		return slices.Equal(names, []string{stolen.Signs(t)})
	})
	gateway.Post(t, harness.ProcCall{Id: "latest"})
	ring, err := ect.LoadRing(file)
	if err != nil {
		t.Fatal(err)
	}
	all, err := ring.PublicSet(time.Time{}, "spiffe://example.com/gateway")
	if err != nil {
		t.Fatal(err)
	}
	site.WantSigned(t, string(all))
	gateway.End(t)
}

// Issue 4, "The gateway's own key": without the key file nothing is signed with another
// key in silence, neither by a rotation nor by a start.
func TestProcessLosesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity spiffe://example.com/gateway"
	file := site.Path("data.identity")
	gateway := site.Start(t)
	gateway.Post(t, harness.ProcCall{Id: "one"})
	kid := site.Identity(t, "show").Signs(t)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	site.Operate(t, "identity", "rotate").Fails(t, "the key file does not hold the key that signs now", file+" is missing: put it back from your backup")
	if now := site.Identity(t, "show"); now.Signs(t) != kid {
		t.Errorf("%+v", now)
	}
	gateway.Post(t, harness.ProcCall{Id: "two"})
	gateway.End(t)
	harness.WantProcSays(t, site.Refused(t), file, "is missing, and the ledger holds tokens that were signed with it", "put it back from your backup")
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("another key was made: %v", err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	gateway = site.Start(t)
	jwks, names := gateway.Jwks(t)
	if !slices.Equal(names, []string{kid}) {
		t.Errorf("published %q", names)
	}
	site.WantSigned(t, jwks)

	// Taken out of the configuration, there is nothing to rotate.
	site.App = ""
	gateway.Reload(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the configuration before is gone", func() bool { return site.Operate(t, "identity", "show").Code != 0 })
	for _, verb := range []string{"show", "rotate"} {
		site.Operate(t, "identity", verb).Fails(t, "the gateway over the store "+site.Path("data")+" has no identity", "configure `identity`")
	}
	gateway.End(t)
}

// Section "CLI": the identity in every form, from a real server.
func TestGoldenProcessIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity spiffe://example.com/gateway"
	site.Start(t)
	show := func(text string) string {
		for i, key := range site.Identity(t, "show").Keys {
			text = strings.ReplaceAll(text, key.ID, fmt.Sprint("KEY-", i, strings.Repeat("-", len(key.ID)-5)))
		}
		// How wide a column is depends on how old the key is.
		return regexp.MustCompile(` {3,}`).ReplaceAllString(strings.ReplaceAll(text, site.Dir, "DIR"), "  ")
	}
	harness.ProcGolden(t, "identity_show", show(site.Operate(t, "identity", "show").Says(t)))
	rotated := site.Operate(t, "identity", "rotate")
	harness.ProcGolden(t, "identity_rotate", show(rotated.Says(t)))
	if !strings.HasPrefix(rotated.Err, "Copy the key file anew.") {
		t.Errorf("%q", rotated.Err)
	}
	for _, args := range [][]string{{"identity"}, {"identity", "rotate", "--help"}} {
		if got := site.Operate(t, args...).Says(t); !strings.Contains(got, "Usage:") {
			t.Errorf("%v prints no help: %s", args, got)
		}
	}
}
