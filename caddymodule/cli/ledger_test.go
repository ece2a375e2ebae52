package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const origin = "gateway.example/ledger"

// logbook is a real ledger behind a real admin API.
type logbook struct {
	admin.Store // the routes of the ledger ask for nothing of it
	t           *testing.T
	ledger      admin.Ledger
	address     string
}

func (*logbook) Paths() []string                   { return []string{"/data"} }
func (b *logbook) View(string) (admin.Store, bool) { return b, true }
func (*logbook) Unopened() (string, error)         { return "", nil }
func (*logbook) Release()                          {}
func (b *logbook) Ledger() *admin.Ledger           { return &b.ledger }
func (b *logbook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := admin.New(b).ServeHTTP(w, r)
	if refused, ok := err.(caddy.APIError); ok {
		w.WriteHeader(refused.HTTPStatus)
		_ = json.NewEncoder(w).Encode(map[string]string{"error": refused.Error()})
	}
}

func newLogbook(t *testing.T) *logbook {
	t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, "gateway.example")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := note.NewVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	log, err := ledger.Open(t.Context(), ledger.Options{
		Store: memory.New(memory.Options{}), Sealer: seal.Generate(), Origin: origin, HeadSigner: signer, HeadKeys: note.VerifierList(verifier),
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &logbook{t: t, ledger: admin.Ledger{Log: log, Key: func(string) string { return public }}}
	server := httptest.NewServer(b)
	b.address = server.Listener.Addr().String()
	t.Cleanup(func() {
		server.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := log.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return b
}

// record puts events into the tree.
func (b *logbook) record(events ...ledger.Event) {
	b.t.Helper()
	for _, e := range events {
		if err := b.ledger.Log.Append(b.t.Context(), []ledger.Event{e}); err != nil {
			b.t.Fatal(err)
		}
	}
}

// Each node of a fleet has a log: one is chosen by its name, or all are exported into one file, which is
// verified whole, and in which none may be missing.
func TestLedgerOfAFleet(t *testing.T) {
	st, sealer := memory.New(memory.Options{}), seal.Generate()
	keys, signers := map[string]string{}, map[string]note.Signer{}
	names := []string{"agent-guard/a", "agent-guard/b", "agent-guard/c"}
	for _, name := range names {
		private, public, err := note.GenerateKey(rand.Reader, name)
		if err != nil {
			t.Fatal(err)
		}
		if signers[name], err = note.NewSigner(private); err != nil {
			t.Fatal(err)
		}
		keys[name] = public
	}
	keysOf := func(name string) (note.Verifiers, error) {
		key, err := note.NewVerifier(keys[name])
		return note.VerifierList(key), err
	}
	signer, jwks := issuerOf(t, gatewayID)
	var b *logbook
	for n, name := range slices.Backward(names) {
		of, err := keysOf(name)
		if err != nil {
			t.Fatal(err)
		}
		log, err := ledger.Open(t.Context(), ledger.Options{
			Store: st, Sealer: sealer, Origin: name, HeadSigner: signers[name], HeadKeys: of, KeysOf: keysOf,
		})
		if err != nil {
			t.Fatal(err)
		}
		b = &logbook{t: t, ledger: admin.Ledger{Log: log, Key: func(name string) string { return keys[name] }}}
		for range n + 1 {
			b.record(event(t, signer, "charge"))
		}
		t.Cleanup(func() { _ = log.Close(context.Background()) })
	}
	server := httptest.NewServer(b) // of a
	t.Cleanup(server.Close)
	b.address = server.Listener.Addr().String()

	head := document[evidence.LedgerHead](t, "ledger", "head", "--address", b.address)
	if head.Origin != names[0] || head.Size != 1 || len(head.Logs) != 2 || head.Logs[0].Origin != names[1] || head.Logs[0].Size != 2 ||
		head.Logs[1].Size != 3 || head.Logs[1].Key != keys[names[2]] {
		t.Fatalf("%+v", head)
	}
	if shown := says(t, "ledger", "head", "--address", b.address); !strings.Contains(shown, "\nlog      "+names[2]+"\n") {
		t.Errorf("%s", shown)
	}
	one := document[evidence.LedgerHead](t, "ledger", "head", "--address", b.address, "--log", names[2])
	if one.Origin != names[2] || one.Size != 3 || len(one.Logs) != 0 {
		t.Errorf("%+v", one)
	}
	if out := says(t, "ledger", "check", "--address", b.address, "--log", names[1]); !strings.Contains(out, "entries  2\n") {
		t.Errorf("%s", out)
	}
	refuses(t, "has no log nobody", "ledger", "check", "--address", b.address, "--log", "nobody")
	kept := put(t, "head-b", says(t, "ledger", "head", "--note", "--log", names[1], "--address", b.address))

	args := func(file string, of ...string) []string {
		all := []string{"ledger", "verify", file}
		for _, name := range of {
			all = append(all, "--key", keys[name])
		}
		return all
	}
	export := func(log string) string {
		file := filepath.Join(t.TempDir(), "export")
		says(t, "ledger", "export", "--address", b.address, "--log", log, "--out", file)
		return file
	}
	single := export(names[1])
	if doc := document[proved](t, args(single, names[1])...); doc.Origin != names[1] || doc.Entries != 2 {
		t.Errorf("%+v", doc)
	}
	whole := export("all")
	docs := document[[]proved](t, append(args(whole, names...), "--head", kept, "--jwks", jwks)...)
	if len(docs) != 3 || docs[0].Entries != 1 || docs[1].Entries != 2 || docs[1].Heads != 1 || docs[2].Entries != 3 || docs[2].Signatures.Verified != 3 {
		t.Errorf("%+v", docs)
	}
	if said := says(t, args(whole, names...)...); !strings.HasPrefix(said, whole+" holds, with the exports of 3 logs.\n") || strings.Count(said, "\nlog ") != 3 {
		t.Errorf("%s", said)
	}
	refuses(t, "the log "+names[1]+" is missing, whose key is given", args(export(names[0]), names[:2]...)...)
	refuses(t, "DOES NOT HOLD", args(whole, names[:2]...)...) // no key for the third
	text, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	title := []byte(exportTitle)
	second := bytes.Index(text[1:], title) + 1
	third := bytes.LastIndex(text, title)
	for what, changed := range map[string][]byte{
		"altered":               bytes.Replace(text, text[second+60:second+70], []byte("AAAAAAAAAA"), 1),
		"one twice":             append(bytes.Clone(text), text[third:]...),
		"cut":                   text[:len(text)-3],
		"cut in second":         append(bytes.Clone(text[:third-30]), text[third:]...),
		"one left out":          append(bytes.Clone(text[:second]), text[third:]...),
		"something else behind": append(bytes.Clone(text), "more"...),
	} {
		if _, _, err := runWith(t, "", args(put(t, "changed", string(changed)), names...)...); err == nil || !strings.Contains(err.Error(), "DOES NOT HOLD") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// issuerOf makes tokens under a fresh key, and the file of the public set.
func issuerOf(t *testing.T, identity string) (*ect.Issuer, string) {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer(identity, ring)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ring.PublicSet(time.Now(), identity)
	if err != nil {
		t.Fatal(err)
	}
	return issuer, put(t, "jwks.json", string(set))
}

const (
	agentA    = "spiffe://example.com/agent/a"
	gatewayID = "spiffe://example.com/gateway"
	someID    = "550e8400-e29b-41d4-a716-446655440000"
	someWID   = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
)

// unsigned is a token of level L1.
func unsigned(payload string) string { return base64.RawURLEncoding.EncodeToString([]byte(payload)) }

// event is the ledger event of a fresh token.
func event(t *testing.T, issuer *ect.Issuer, action string) ledger.Event {
	t.Helper()
	token, err := issuer.Issue(time.Now(), ect.Claims{Audience: []string{gatewayID}, Action: action, Workflow: someWID})
	if err != nil {
		t.Fatal(err)
	}
	return ledger.Event{
		ID: token.ID(), Workflow: token.Workflow(), Action: token.Action(), Issuer: token.Issuer(), Time: token.IssuedAt(), Payload: []byte(token.Raw()),
	}
}

// evidenceArgs are the flags that an export is verified with.
func (b *logbook) evidenceArgs(command, file string, more ...string) []string {
	return append([]string{"ledger", command, file, "--origin", origin, "--key", b.ledger.Key(origin)}, more...)
}

// export exports into a file.
func (b *logbook) export() string {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "ledger.export")
	if out := says(b.t, "ledger", "export", "--address", b.address, "--out", file); out != "" {
		b.t.Errorf("%s", out)
	}
	return file
}

// Issue 4, "offline verification": what a server exports holds without it, against its
// key and against heads that were kept.
func TestLedgerRoundTrip(t *testing.T) {
	b := newLogbook(t)
	signer, _ := issuerOf(t, gatewayID)
	b.record(event(t, signer, "checkpoint"))
	kept := put(t, "head", says(t, "ledger", "head", "--note", "--address", b.address))
	b.record(event(t, signer, "charge"), event(t, signer, "error"))

	head := document[evidence.LedgerHead](t, "ledger", "head", "--address", b.address)
	shown := says(t, "ledger", "head", "--address", b.address)
	if head.Size != 3 || head.Origin != origin || !strings.Contains(shown, "\nkey      "+head.Key+"\nsize     3\nroot     "+head.Root.String()+"\n") {
		t.Errorf("%+v\n%s", head, shown)
	}
	want := fmt.Sprintf("log      %s\nsize     3\nroot     %s\nentries  3\npruned   0\nfaults   none\n", origin, head.Root.String())
	if out := says(t, "ledger", "check", "--address", b.address); out != want {
		t.Errorf("%s", out)
	}
	file := b.export()
	if info, err := os.Stat(file); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	refuses(t, "--out: "+file+" is there", "ledger", "export", "--address", b.address, "--out", file)
	text := says(t, "ledger", "export", "--address", b.address)
	isTerminal = func(io.Writer) bool { return true }
	t.Cleanup(func() { isTerminal = onTerminal })
	refuses(t, "give --out FILE, or --out - for the terminal", "ledger", "export", "--address", b.address)
	if says(t, "ledger", "export", "--address", b.address, "--out", "-") != text {
		t.Error("--out - writes something else")
	}
	if written, err := os.ReadFile(file); err != nil || string(written) != text {
		t.Errorf("%v: the file and the stream differ", err)
	}

	doc := document[proved](t, b.evidenceArgs("verify", file, "--head", kept)...)
	if !doc.Holds || doc.Origin != origin || doc.Size != 3 || doc.Root != head.Root || doc.Entries != 3 || doc.Pruned != 0 || doc.Heads != 1 ||
		doc.Newest.IsZero() || doc.Signatures != nil {
		t.Errorf("%+v", doc)
	}
	said, _, err := runWith(t, text, b.evidenceArgs("verify", "-")...)
	if err != nil || !strings.HasPrefix(said, "the export holds.\n") || !strings.Contains(said, "heads    none to compare with") || !strings.Contains(said, "root     "+head.Root.String()) {
		t.Errorf("%v %s", err, said)
	}
}

// What was altered is found and named, and nothing of it is printed.
func TestLedgerVerifyTampered(t *testing.T) {
	b, other := newLogbook(t), newLogbook(t)
	signer, _ := issuerOf(t, gatewayID)
	for range 4 {
		b.record(event(t, signer, "charge"))
	}
	whole, err := os.ReadFile(b.export())
	if err != nil {
		t.Fatal(err)
	}
	b.record(event(t, signer, "later"))
	later := put(t, "head", says(t, "ledger", "head", "--note", "--address", b.address))
	lines := bytes.SplitAfter(whole, []byte("\n"))
	joined := func(l ...[]byte) string { return string(bytes.Join(l, nil)) }
	for _, c := range []struct {
		words, text string
		more        []string
	}{
		{"DOES NOT HOLD: the proof does not hold: entry 1: reordered", joined(lines[0], lines[1], lines[2], lines[4], lines[3], lines[5], lines[6]), nil},
		{"DOES NOT HOLD: the proof does not hold: entry 1: reordered", joined(lines[0], lines[1], lines[2], lines[4], lines[5], lines[6]), nil},
		{"it ends in line", joined(lines[:6]...), nil},
		{"DOES NOT HOLD", "", nil}, // nothing is left of it
		{"DOES NOT HOLD", string(lines[0][:9]), nil},
		{"DOES NOT HOLD", "another first line\n" + joined(lines[1:]...), nil},
		{"DOES NOT HOLD", joined(lines[:1]...) + "hello\n", nil},
		{"altered is no export of a ledger", "hello\n", nil},
		{"altered is no export of a ledger", "# A title\n\n" + strings.Repeat("Words. ", 100), nil},
		{"there were 5", string(whole), []string{"--head", later}},
		{"something follows the end", string(whole) + "\n", nil},
		{"a head of the log", string(whole), []string{"--origin", "other.example/ledger"}},
	} {
		file := put(t, "altered", c.text)
		for _, command := range []string{"verify", "list"} {
			refuses(t, c.words, b.evidenceArgs(command, file, c.more...)...)
			refuses(t, c.words, append(b.evidenceArgs(command, file, c.more...), "-o", "json")...)
		}
	}
	refuses(t, "DOES NOT HOLD", "ledger", "verify", put(t, "whole", string(whole)), "--origin", origin, "--key", other.ledger.Key(origin))
	for i := range len(whole) / 64 {
		altered := bytes.Clone(whole)
		altered[i*64] ^= 1
		refuses(t, "DOES NOT HOLD", b.evidenceArgs("verify", put(t, "altered", string(altered)))...)
	}
}

// Pruned entries are counted with who vouched for them; content that somebody else has taken
// out is not taken for it.
func TestLedgerVerifyPruned(t *testing.T) {
	b := newLogbook(t)
	for i := range 258 {
		e := ledger.Event{ID: fmt.Sprint("id-", i), Payload: []byte("p")}
		if i > 1 {
			e.KeepUntil = time.Now().Add(time.Hour)
		}
		b.record(e)
	}
	if n, err := b.ledger.Log.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != 2 {
		t.Fatalf("%d pruned: %v", n, err)
	}
	file := b.export()
	key := strings.Join(strings.SplitN(b.ledger.Key(origin), "+", 3)[:2], "+")
	doc := document[proved](t, b.evidenceArgs("verify", file)...)
	if doc.Entries != 256 || doc.Pruned != 2 || len(doc.Vouchers) != 1 || doc.Vouchers[0] != (ledger.Voucher{Key: key, Entries: 2}) {
		t.Errorf("%+v", doc)
	}
	want := "\npruned   2, vouched for by " + key + "\n"
	if said := says(t, b.evidenceArgs("verify", file)...); !strings.Contains(said, want) {
		t.Errorf("%s", said)
	}
	if said := says(t, "ledger", "check", "--address", b.address); !strings.Contains(said, want) {
		t.Errorf("%s", said)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(whole), "\n")
	for i, line := range lines {
		if text, ok := strings.CutPrefix(line, "entry "); ok {
			leaf, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
			if err != nil {
				t.Fatal(err)
			}
			hash := tlog.RecordHash(leaf)
			lines[i] = "pruned " + base64.StdEncoding.EncodeToString(hash[:]) + "\n"
		}
	}
	refuses(t, "DOES NOT HOLD: the proof does not hold: entry 2: its content is missing, and nobody vouches that it was pruned",
		b.evidenceArgs("verify", put(t, "emptied", strings.Join(lines, "")))...)
	two := []ledger.Voucher{{Key: "a", Entries: 1}, {Key: "b", Entries: 2}}
	if said := describePruned(3, two); said != "3, vouched for by a (1), b (2)" {
		t.Errorf("%s", said)
	}
}

// The tree holds no signature of what is signed when it is shown: an export that lacks it, or has
// another in its place, is of the same tree. Both are told from a token that never was.
func TestLedgerVerifySignaturesBesideTheTree(t *testing.T) {
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer(gatewayID, ring)
	if err != nil {
		t.Fatal(err)
	}
	public, err := ring.PublicSet(time.Now(), gatewayID)
	if err != nil {
		t.Fatal(err)
	}
	draft, err := issuer.Draft(time.Now(), ect.Claims{Audience: []string{gatewayID}, Action: "checkpoint", Workflow: someWID})
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Sign(draft)
	if err != nil {
		t.Fatal(err)
	}
	header, _ := ring.Header()
	entry := func(header []byte, payload string) *ledger.Entry {
		return &ledger.Entry{Leaf: []byte("a leaf"), Event: ledger.Event{ID: draft.ID(), Issuer: gatewayID, Header: header, Payload: []byte(payload)}}
	}
	found, err := newSignatures(put(t, "keys", string(public)))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*ledger.Entry{
		entry(nil, token.Raw()), entry(header, draft.Payload()), entry([]byte(`{"kid":"another"}`), draft.Payload()),
	} {
		if err := found.add(t.Context(), e); err != nil {
			t.Error(err)
		}
	}
	want := "1 signatures hold, 2 entries are not signed, 1 of these LACK THEIR SIGNATURE though --jwks has the key"
	if found.Verified != 1 || found.Unsigned != 2 || found.Lacking != 1 || found.describe() != want {
		t.Errorf("%+v %s", found, found.describe())
	}
	at := strings.LastIndexByte(token.Raw(), '.') + 1
	forged := entry(nil, token.Raw()[:at]+strings.Repeat("A", 86))
	if err := found.add(t.Context(), forged); err == nil || !strings.Contains(err.Error(), "the signature beside it does not hold: only the entry is in the tree") {
		t.Errorf("beside the tree: %v", err)
	}
	forged.Leaf = append([]byte("a leaf with "), forged.Payload...)
	if err := found.add(t.Context(), forged); err == nil || !strings.Contains(err.Error(), "its token does not hold") {
		t.Errorf("in the tree: %v", err)
	}
}

// With public keys the tokens are verified too; what nobody has keys for is counted, and
// one that is false is named.
func TestLedgerVerifyTokens(t *testing.T) {
	signer, jwks := issuerOf(t, gatewayID)
	agent, _ := issuerOf(t, agentA)
	forger, _ := issuerOf(t, gatewayID)
	b := newLogbook(t)
	bare := ledger.Event{ID: "bare", Payload: []byte(unsigned(`{"jti":"` + someID + `"}`))}
	b.record(event(t, signer, "checkpoint"), event(t, agent, "charge"), bare, event(t, signer, "error"), event(t, forger, "forged"))
	file := b.export()
	doc := document[proved](t, b.evidenceArgs("verify", file, "--jwks", jwks)...)
	if s := doc.Signatures; s == nil || s.Verified != 2 || s.Unsigned != 1 || len(s.Unknown) != 2 || s.Unknown[agentA] != 1 || s.Unknown[gatewayID] != 1 {
		t.Errorf("%+v", doc.Signatures)
	}
	want := "tokens   2 signatures hold, 1 entries are not signed, 2 NOT LOOKED AT for want of the keys of " + agentA + ", " + gatewayID + "\n"
	if out := says(t, b.evidenceArgs("verify", file, "--jwks", jwks)...); !strings.Contains(out, want) {
		t.Errorf("%s", out)
	}
	refuses(t, "--jwks: keys in", b.evidenceArgs("verify", file, "--jwks", put(t, "bad", "{}"))...)

	for words, alter := range map[string]func(*ledger.Event){
		"entry 0: its token does not hold: the signature does not hold (signature)": func(e *ledger.Event) { copy(e.Payload[len(e.Payload)-4:], "AAAA") },
		"entry 0: its id and issuer are not those of its token":                     func(e *ledger.Event) { e.ID = someID },
		"entry 0: its token cannot be read: malformed":                              func(e *ledger.Event) { e.Payload = []byte("a.b.c") },
	} {
		b := newLogbook(t)
		e := event(t, signer, "charge")
		alter(&e)
		b.record(e)
		refuses(t, "DOES NOT HOLD: "+words, b.evidenceArgs("verify", b.export(), "--jwks", jwks)...)
	}
}

// A listing has what the entries say, in their order.
func TestLedgerList(t *testing.T) {
	b := newLogbook(t)
	signer, _ := issuerOf(t, gatewayID)
	first, second := event(t, signer, "checkpoint"), event(t, signer, "charge")
	evil := ledger.Event{ID: "x", Action: "\x1b[2J", Parents: []string{first.ID}, Payload: []byte("p")}
	b.record(first, second, evil)
	file := b.export()
	type listing struct{ Entries []listedEntry }
	all := document[listing](t, b.evidenceArgs("list", file)...)
	if len(all.Entries) != 3 {
		t.Fatalf("%+v", all)
	}
	for i, e := range []ledger.Event{first, second, evil} {
		got := all.Entries[i]
		if got.Index != int64(i) || got.ID != e.ID || got.Workflow != e.Workflow || got.Action != e.Action || got.Issuer != e.Issuer ||
			got.Token != string(e.Payload) || got.Recorded.IsZero() || got.Parents == nil || len(got.Parents) != len(e.Parents) {
			t.Errorf("%d: %+v", i, got)
		}
	}
	for filter, want := range map[string]int{
		"--action=charge": 1, "--workflow=" + someWID: 2, "--id=" + first.ID: 1, "--id=none": 0,
	} {
		if got := document[listing](t, b.evidenceArgs("list", file, filter)...); len(got.Entries) != want {
			t.Errorf("%s: %+v", filter, got)
		}
	}
	out := strings.Split(says(t, b.evidenceArgs("list", file)...), "\n")
	if len(out) != 5 || strings.Join(strings.Fields(out[0]), " ") != "INDEX RECORDED ACTION ISSUER WORKFLOW ID" ||
		!strings.HasSuffix(out[1], gatewayID+"  "+someWID+"  "+first.ID) || !strings.Contains(out[3], `"\x1b[2J"`) || strings.Contains(out[3], "\x1b") {
		t.Errorf("%q", out)
	}
	nothing, hint, err := run(t, b.evidenceArgs("list", file, "--id", "none")...)
	if err != nil || nothing != "" || hint != "no entries\n" {
		t.Errorf("%v %q %q", err, nothing, hint)
	}
}

// What a server finds wrong is shown, and is a failure of the command.
func TestLedgerCheckShowsFaults(t *testing.T) {
	server := newAdminServer(t, func(*http.Request) any {
		return `{"origin":"o","size":7,"root":"cm9vdHJvb3Ryb290cm9vdHJvb3Ryb290cm9vdHJvb3Q=","entries":6,"pruned":0,
			"faults":[{"index":3,"what":"missing"},{"what":"the head \u001b[2J"}],"count":5}`
	})
	want := "log      o\nsize     7\nroot     cm9vdHJvb3Ryb290cm9vdHJvb3Ryb290cm9vdHJvb3Q=\nentries  6\npruned   0\nfault    entry 3: missing\nfault    \"the head \\x1b[2J\"\nfault    and 3 more\n"
	out, _, err := server.run(t, "ledger", "check")
	if err == nil || err.Error() != "the ledger is not as it was written: 5 faults" || out != want {
		t.Errorf("%v\n%s", err, out)
	}
	if out, _, err := server.run(t, "ledger", "check", "-o", "json"); err == nil || !strings.Contains(out, `"count": 5`) {
		t.Errorf("%v\n%s", err, out)
	}
}

// An export that breaks off, or is none, leaves no file behind.
func TestLedgerExportFails(t *testing.T) {
	for words, handler := range map[string]http.HandlerFunc{
		"it broke off": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(admin.Mark, "1")
			_, _ = w.Write([]byte("agent-guard ledger export 2\n"))
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
		"knows no agent guard":                             http.NotFound,
		"answers something else than the agent guard does": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) },
		"configure `identity`": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte("{\"error\":\"no ledger: configure `identity`\"}"))
		},
	} {
		server := httptest.NewServer(handler)
		file := filepath.Join(t.TempDir(), "export")
		refuses(t, words, "ledger", "export", "--address", server.Listener.Addr().String(), "--out", file)
		if _, err := os.Stat(file); !os.IsNotExist(err) {
			t.Errorf("%s: a file is left: %v", words, err)
		}
		server.Close()
	}
}

// What is asked wrongly is refused before anything is read.
func TestWrongLedgerFlags(t *testing.T) {
	b := newLogbook(t)
	file := b.export()
	for _, c := range []struct {
		words string
		args  []string
	}{
		{`required flag(s) "key" not set`, []string{"ledger", "verify", file}},
		{`--key: "abc" is no public key of a ledger`, b.evidenceArgs("verify", file, "--key", "abc")},
		{"--head: open", b.evidenceArgs("verify", file, "--head", "none")},
		{"--head: " + file + ": the proof does not hold", b.evidenceArgs("verify", file, "--head", file)},
		{"no such file", b.evidenceArgs("verify", "none")},
		{"list reads twice; give it a file", b.evidenceArgs("list", "-")},
		{"give one FILE with an export; there are 2", b.evidenceArgs("verify", file, file)},
		{"unknown flag: --address", b.evidenceArgs("verify", file, "--address", b.address)},
		{"--out: open", []string{"ledger", "export", "--address", b.address, "--out", filepath.Join(file, "x")}},
	} {
		refuses(t, c.words, c.args...)
	}
}
