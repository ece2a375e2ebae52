//go:build unix

package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// procIdentity is what the command shows of the identity.
type procIdentity struct {
	Name, File, Algorithm string
	Keys                  []procIdentityKey
}

type procIdentityKey struct {
	ID, Alg, Created, Until string
	Signs                   bool
}

// signs is the name of the key in use, which stands last.
func (i procIdentity) signs(t *testing.T) string {
	t.Helper()
	last := len(i.Keys) - 1
	for n, key := range i.Keys {
		if key.Signs != (n == last) || (key.Until == "") != key.Signs {
			t.Errorf("%+v", i.Keys)
		}
	}
	return i.Keys[last].ID
}

func (s *procSite) identity(t *testing.T, args ...string) procIdentity {
	t.Helper()
	return procDocument[procIdentity](t, s.operate(t, append([]string{"identity"}, append(args, "-o", "json")...)...).says(t))
}

// jwks is the published set, as it came, and the names of its keys.
func (g *procGateway) jwks(t *testing.T) (string, []string) {
	t.Helper()
	status, text := g.read(t, "jwks")
	if status != http.StatusOK {
		t.Fatalf("the keys: %d %s", status, text)
	}
	var set struct{ Keys []map[string]any }
	if err := json.Unmarshal([]byte(text), &set); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	var names []string
	for _, key := range set.Keys {
		if key["d"] != nil {
			t.Fatal("P8: a private key is published")
		}
		names = append(names, key["kid"].(string))
	}
	slices.Sort(names)
	return text, names
}

// wantSigned holds that the whole ledger verifies with the keys, every signature
// included, and returns how many those were.
func (s *procSite) wantSigned(t *testing.T, jwks string) int {
	t.Helper()
	ledgersOf(t, s) // waits for the sequencer, and leaves the export
	head := procDocument[struct{ Key string }](t, s.operate(t, "ledger", "head", "-o", "json").says(t))
	keys := s.path("gateway-keys.json")
	if err := os.WriteFile(keys, []byte(jwks), 0o600); err != nil {
		t.Fatal(err)
	}
	said := s.operate(t, "ledger", "verify", s.path("ledger.export"), "--key", head.Key, "--jwks", keys, "-o", "json").says(t)
	proved := procDocument[struct {
		Holds      bool
		Entries    int
		Signatures struct {
			Verified, Unsigned int
			Unknown            map[string]int
		}
	}](t, said)
	if !proved.Holds || proved.Entries == 0 || proved.Signatures.Verified != proved.Entries {
		t.Errorf("not all signatures hold: %s", said)
	}
	return proved.Signatures.Verified
}

// wantSecret holds that nobody else can read the key file.
func (s *procSite) wantSecret(t *testing.T, file string) {
	t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("P8: %s has mode %v, not 0600", file, info.Mode())
	}
}

// Issue 4, "The gateway's own key": it rotates under load, beside reloads, without a
// restart. No call fails, replaced keys stay published until their tokens have expired,
// and all that was ever signed verifies, also after a restart.
func TestProcessRotatesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity spiffe://example.com/gateway"
	file := site.path("data.identity")
	gateway := site.start(t)
	site.wantSecret(t, file)
	first := site.identity(t, "show")
	if first.Name != "spiffe://example.com/gateway" || first.File != file || first.Algorithm != "ES256" || len(first.Keys) != 1 {
		t.Fatalf("%+v", first)
	}
	kids := []string{first.signs(t)}

	var calls atomic.Int64
	var clients sync.WaitGroup
	stop := make(chan struct{})
	for worker := range 2 {
		clients.Go(func() {
			for n := 0; ; n++ {
				c := procCall{id: fmt.Sprintf("rotated-%d-%d", worker, n)}
				a := gateway.retry(t, c)
				if a.status != http.StatusCreated { // a replay, where a reload has cut the first answer
					t.Errorf("%s: %v", c.id, a)
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
		eventuallyWithin(t, procBound, "load", func() bool { return calls.Load() >= before+20 || t.Failed() })
	}
	for n := range 3 {
		more()
		rotated := site.identity(t, "rotate")
		if len(rotated.Keys) != n+2 || slices.Contains(kids, rotated.signs(t)) {
			t.Fatalf("%+v after %q", rotated, kids)
		}
		kids = append(kids, rotated.signs(t))
		site.guard = fmt.Sprintf("deadline %ds", 60+n)
		gateway.reload(t)
		if now := site.identity(t, "show"); now.signs(t) != rotated.signs(t) {
			t.Errorf("a reload brings back the key %s", now.signs(t))
		}
	}
	more()
	close(stop)
	clients.Wait()
	site.wantSecret(t, file)
	jwks, published := gateway.jwks(t)
	slices.Sort(kids)
	if !slices.Equal(published, kids) {
		t.Errorf("published %q, made %q", published, kids)
	}
	signed := site.wantSigned(t, jwks)
	if int64(signed) < 2*calls.Load() {
		t.Errorf("%d signatures of %d calls", signed, calls.Load())
	}
	eventuallyWithin(t, procBound, "the replaced keys are gone from the file", func() bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.Count(string(text), `"d"`) == 1
	})
	gateway.end(t)
	said := gateway.log.String()
	if strings.Contains(said, `"level":"error"`) {
		t.Errorf("errors in the log:\n%s", gateway.log.tail(4000))
	}
	if got := strings.Count(said, `"msg":"signing key rotated"`); got != 3 {
		t.Errorf("%d rotations are logged", got)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var private []struct{ D string }
	if err := json.Unmarshal([]byte(procDocument[struct{ Keys json.RawMessage }](t, string(text)).Keys), &private); err != nil {
		t.Fatal(err)
	}
	private = slices.DeleteFunc(private, func(key struct{ D string }) bool { return key.D == "" })
	if len(private) != 1 || strings.Contains(said, private[0].D) {
		t.Errorf("P8: %d private keys are in the file; the log must hold none", len(private))
	}

	gateway = site.start(t)
	if again, names := gateway.jwks(t); !slices.Equal(names, kids) || again != jwks {
		t.Errorf("after the restart %q are published", names)
	}
	gateway.post(t, procCall{id: "late"})
	site.wantSigned(t, jwks)

	// A theft: nothing older is published any more, and all records verify that were signed. For the
	// others see TestProcessSignsWhenShown.
	site.identity(t, "rotate")
	eventuallyWithin(t, procBound, "what was recorded before is signed", func() bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.Count(string(text), `"d"`) == 1
	})
	stolen := site.identity(t, "rotate", "--stolen")
	eventuallyWithin(t, procBound, "only the new key is published", func() bool {
		_, names := gateway.jwks(t)
		return slices.Equal(names, []string{stolen.signs(t)})
	})
	gateway.post(t, procCall{id: "latest"})
	ring, err := ect.LoadRing(file)
	if err != nil {
		t.Fatal(err)
	}
	all, err := ring.PublicSet(time.Time{}, "spiffe://example.com/gateway")
	if err != nil {
		t.Fatal(err)
	}
	site.wantSigned(t, string(all))
	gateway.end(t)
}

// Issue 4, "The gateway's own key": without the key file nothing is signed with another
// key in silence, neither by a rotation nor by a start.
func TestProcessLosesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity spiffe://example.com/gateway"
	file := site.path("data.identity")
	gateway := site.start(t)
	gateway.post(t, procCall{id: "one"})
	kid := site.identity(t, "show").signs(t)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	site.operate(t, "identity", "rotate").fails(t, "the key file does not hold the key that signs now", file+" is missing: put it back from your backup")
	if now := site.identity(t, "show"); now.signs(t) != kid {
		t.Errorf("%+v", now)
	}
	gateway.post(t, procCall{id: "two"})
	gateway.end(t)
	wantProcSays(t, site.refused(t), file, "is missing, and the ledger holds tokens that were signed with it", "put it back from your backup")
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("another key was made: %v", err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	gateway = site.start(t)
	jwks, names := gateway.jwks(t)
	if !slices.Equal(names, []string{kid}) {
		t.Errorf("published %q", names)
	}
	site.wantSigned(t, jwks)

	// Taken out of the configuration, there is nothing to rotate.
	site.app = ""
	gateway.reload(t)
	eventuallyWithin(t, procBound, "the configuration before is gone", func() bool { return site.operate(t, "identity", "show").code != 0 })
	for _, verb := range []string{"show", "rotate"} {
		site.operate(t, "identity", verb).fails(t, "the gateway over the store "+site.path("data")+" has no identity", "configure `identity`")
	}
	gateway.end(t)
}

// Section "CLI": the identity in every form, from a real server.
func TestGoldenProcessIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity spiffe://example.com/gateway"
	site.start(t)
	show := func(text string) string {
		for i, key := range site.identity(t, "show").Keys {
			text = strings.ReplaceAll(text, key.ID, fmt.Sprint("KEY-", i, strings.Repeat("-", len(key.ID)-5)))
		}
		// How wide a column is depends on how old the key is.
		return regexp.MustCompile(` {3,}`).ReplaceAllString(strings.ReplaceAll(text, site.dir, "DIR"), "  ")
	}
	procGolden(t, "identity_show", show(site.operate(t, "identity", "show").says(t)))
	rotated := site.operate(t, "identity", "rotate")
	procGolden(t, "identity_rotate", show(rotated.says(t)))
	if !strings.HasPrefix(rotated.err, "Copy the key file anew.") {
		t.Errorf("%q", rotated.err)
	}
	for _, args := range [][]string{{"identity"}, {"identity", "rotate", "--help"}} {
		if got := site.operate(t, args...).says(t); !strings.Contains(got, "Usage:") {
			t.Errorf("%v prints no help: %s", args, got)
		}
	}
}
