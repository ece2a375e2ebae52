package admin_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// Section "Admin API": breakers are shown, and their modes set.
func TestCircuits(t *testing.T) {
	r, o := newRig(t)
	var got proxy.Document
	if r.get("circuits", &got); got.Circuits != nil {
		t.Errorf("%+v", got)
	}
	o.circuits = []proxy.Circuit{{Upstream: "a:1"}, {Upstream: "b:1", Class: "write", Status: breaker.Status{State: breaker.Open}}}
	if r.get("circuits", &got); !slices.Equal(got.Circuits, o.circuits) {
		t.Errorf("%+v", got)
	}
	w, refused := r.ask("POST", "circuits/mode", `{"upstream": "b:1", "class": "write", "mode": "forced_open"}`)
	if refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &got) != nil || got.Circuits[1].Mode != breaker.ForcedOpen || got.Circuits[0].Mode != breaker.Auto {
		t.Errorf("%v %s", refused, w.Body)
	}
}

// Section "Admin API": what is not understood sets no mode.
func TestCircuitRefusals(t *testing.T) {
	r, o := newRig(t)
	o.circuits = []proxy.Circuit{{Upstream: "a:1"}}
	for body, want := range map[string]string{
		``:                                    "the request is no",
		`[]`:                                  "the request is no",
		`{"upstream": "a:1"}`:                 "mode: it is missing",
		`{"mode": "observe"}`:                 "upstream: it is missing",
		`{"upstream": "a:1", "mode": "open"}`: "the request is no",
		`{"upstream": "a:1", "mode": "observe", "clas": "write"}`: "the request is no",
		`{"upstream": "a:1", "mode": "observe"} {}`:               "something stands behind it",
	} {
		r.refuses("POST", "circuits/mode", body, http.StatusBadRequest, want)
	}
	r.refuses("POST", "circuits/mode", `{"upstream": "c:1", "mode": "observe"}`, http.StatusNotFound, `the upstream "c:1" has no circuit breaker: one`)
	r.refuses("POST", "circuits/mode", `{"upstream": "c:1", "class": "read", "mode": "observe"}`, http.StatusNotFound, `no circuit breaker of the class "read": one`)
	r.refuses("GET", "circuits?twice=1", "", http.StatusBadRequest, `"twice" is no parameter`)
	if o.circuits[0].Mode != breaker.Auto {
		t.Errorf("%+v", o.circuits)
	}
	o.unkept = errors.New("the disk is full")
	r.refuses("POST", "circuits/mode", `{"upstream": "a:1", "mode": "observe"}`, http.StatusServiceUnavailable, "the disk is full")
}

// Section "Admin API": the identity is shown with its keys, and rotated.
func TestIdentity(t *testing.T) {
	r, o := newRig(t)
	first := admin.IdentityKey{ID: "first", Algorithm: "ES256", Created: r.now, Until: r.now.Add(time.Hour)}
	o.identity = &admin.Identity{
		Name: "spiffe://example.com/gateway", File: "/data/one.identity", Algorithm: "ES256", Keys: []admin.IdentityKey{first},
	}
	var got admin.Identity
	if r.get("identity", &got); got.Name != o.identity.Name || got.File != o.identity.File || !slices.Equal(got.Keys, o.identity.Keys) {
		t.Errorf("%+v", got)
	}
	for body, stolen := range map[string]bool{"": false, "{}": false, `{"stolen": false}`: false, `{"stolen": true}`: true} {
		w, refused := r.ask("POST", "identity/rotate", body)
		if refused.HTTPStatus != 0 || json.Unmarshal(w.Body.Bytes(), &got) != nil || !slices.Equal(got.Keys, o.identity.Keys) {
			t.Errorf("%s: %v %s", body, refused, w.Body)
		}
		if o.stolen[len(o.stolen)-1] != stolen {
			t.Errorf("%s: stolen: %v", body, o.stolen)
		}
	}
}

// Section "Admin API": a rotation that is not understood, or cannot be, changes nothing
// and says why.
func TestIdentityRefusals(t *testing.T) {
	r, o := newRig(t)
	for method, target := range map[string]string{"GET": "identity", "POST": "identity/rotate"} {
		r.refuses(method, target, "", http.StatusNotFound, "the gateway over the store /data/one has no identity, and signs nothing: configure `identity`")
		r.refuses(method, target+"?twice=1", "", http.StatusBadRequest, `"twice" is no parameter`)
	}
	o.identity = new(admin.Identity)
	for _, body := range []string{`{"stollen": true}`, `{"stolen": "yes"}`, `{"stolen": true} {}`, "stolen", "[]", `{"stolen": `, `"`} {
		r.refuses("POST", "identity/rotate", body, http.StatusBadRequest, `the request is no {"stolen": true} or {}`)
	}
	if len(o.stolen) != 0 {
		t.Errorf("rotated %d times", len(o.stolen))
	}
	o.rotation = caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New("the file is missing")}
	r.refuses("POST", "identity/rotate", "", http.StatusConflict, "the file is missing")
	o.rotation = errors.New("read-only file system")
	r.refuses("POST", "identity/rotate", "", http.StatusInternalServerError, "read-only file system")
}

const origin = "gateway.example/ledger"

// ledgerOver gives the store a ledger with n entries. It is not started again, so that
// what a test appends waits.
func (o *opened) ledgerOver(st store.Store, n int) note.Verifiers {
	t := o.rig.t
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
	keys := note.VerifierList(verifier)
	options := ledger.Options{Store: st, Sealer: seal.Generate(), Origin: origin, HeadSigner: signer, HeadKeys: keys}
	open := func() *ledger.Log {
		log, err := ledger.Open(ctx, options)
		if err != nil {
			t.Fatal(err)
		}
		return log
	}
	filling := open()
	for i := range n {
		event := ledger.Event{ID: fmt.Sprint("id-", i), Workflow: "w", Action: "checkpoint", Payload: bytes.Repeat([]byte("x"), 1000)}
		if err := filling.Append(ctx, []ledger.Event{event}); err != nil {
			t.Fatal(err)
		}
	}
	if err := filling.Close(ctx); err != nil {
		t.Fatal(err)
	}
	o.ledger = &admin.Ledger{Log: open(), Key: func(string) string { return public }}
	return keys
}

// Section "Admin API": the head with its key.
func TestLedgerHead(t *testing.T) {
	r, o := newRig(t)
	keys := o.ledgerOver(memory.New(memory.Options{}), 3)
	var head evidence.LedgerHead
	r.get("ledger/head", &head)
	parsed, err := ledger.ParseHead([]byte(head.Note), origin, keys)
	if err != nil || head.Origin != origin || head.Size != 3 || parsed.Size != 3 || head.Root != parsed.Root || head.Key != o.ledger.Key(origin) {
		t.Errorf("%v %+v", err, head)
	}
}

// Section "Admin API": an export is a stream that is verified without the server.
func TestLedgerExport(t *testing.T) {
	r, o := newRig(t)
	keys := o.ledgerOver(memory.New(memory.Options{}), 300)
	w, refused := r.ask("GET", "ledger/export", "")
	if refused.HTTPStatus != 0 || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
		t.Fatalf("%v %v", refused, w.Header())
	}
	if found, err := ledger.VerifyExport(w.Body, origin, keys, nil); err != nil || found.Entries != 300 {
		t.Errorf("%+v %v", found, err)
	}
}

// timed is a connection that notes until when writes may take.
type timed struct {
	*httptest.ResponseRecorder
	deadlines []time.Time
}

func (t *timed) SetWriteDeadline(at time.Time) error {
	t.deadlines = append(t.deadlines, at)
	return nil
}

// A reader that takes nothing cannot hold the store for ever; who was served is not
// cut off later.
func TestLedgerExportIsBounded(t *testing.T) {
	r, o := newRig(t)
	o.ledgerOver(memory.New(memory.Options{}), 1)
	w := &timed{ResponseRecorder: httptest.NewRecorder()}
	begin := time.Now()
	if err := r.api.ServeHTTP(w, httptest.NewRequest("GET", "/agent_guard/ledger/export", nil)); err != nil {
		t.Fatal(err)
	}
	if n := len(w.deadlines); n < 2 || !w.deadlines[0].After(begin) || !w.deadlines[n-1].IsZero() {
		t.Errorf("%v", w.deadlines)
	}
}

// cutting is a store that fails in the middle of a scan.
type cutting struct {
	store.Store
	after int
}

func (c *cutting) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		n := 0
		for record, err := range c.Store.Scan(ctx, r) {
			if n++; n > c.after {
				yield(store.Entry{}, store.ErrUnhealthy)
				return
			}
			if !yield(record, err) {
				return
			}
		}
	}
}

// An export that breaks off is not taken for a whole one: before the first byte it is
// an error, after it the connection is cut.
func TestLedgerExportBreaksOff(t *testing.T) {
	r, o := newRig(t)
	st := &cutting{Store: memory.New(memory.Options{}), after: 1000}
	o.ledgerOver(st, 200)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if err := r.api.ServeHTTP(w, q); err != nil {
			http.Error(w, err.Error(), http.StatusTeapot)
		}
	}))
	defer server.Close()
	for after, begun := range map[int]bool{1: false, 150: true} {
		st.after = after
		resp, err := http.Get(server.URL + "/agent_guard/ledger/export")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if begun && (resp.StatusCode != http.StatusOK || err == nil) || !begun && (resp.StatusCode != http.StatusTeapot || err != nil || resp.Header.Get(admin.Mark) != "") {
			t.Errorf("after %d: %d, %v, %d bytes", after, resp.StatusCode, err, len(text))
		}
	}
	st.after = 1
	r.refuses("GET", "ledger/export", "", http.StatusServiceUnavailable, "restart needed")
	if w, _ := r.ask("GET", "ledger/export", ""); w.Header().Get("Retry-After") != "1" {
		t.Errorf("an export that can be had later: %v", w.Header())
	}
	r.refuses("GET", "ledger/verify", "", http.StatusServiceUnavailable, "restart needed")
}

// Section "Admin API": the report of a verification names what is wrong; a ledger that
// is whole has no faults, and says so with an empty list.
func TestLedgerVerify(t *testing.T) {
	r, o := newRig(t)
	st := memory.New(memory.Options{})
	o.ledgerOver(st, 5)
	head := o.ledger.Log.Head()
	var report ledger.Report
	r.get("ledger/verify", &report)
	if report.Origin != origin || report.Size != 5 || report.Root != head.Root || report.Entries != 5 || report.Pruned != 0 ||
		report.Faults == nil || len(report.Faults) != 0 || report.Count != 0 {
		t.Errorf("%+v", report)
	}
	// An entry is taken away: its key is the one that ends in its index.
	var gone []byte
	for record, err := range st.Scan(ctx, store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		if bytes.HasPrefix(record.Key, []byte("le")) && record.Key[len(record.Key)-1] == 3 {
			gone = record.Key
		}
	}
	if _, err := st.Commit(ctx, store.Write{Key: gone, Delete: true}); err != nil {
		t.Fatal(err)
	}
	report = ledger.Report{}
	r.get("ledger/verify", &report)
	if report.Count == 0 || len(report.Faults) == 0 || report.Faults[0].Index == nil || *report.Faults[0].Index != 3 || report.Faults[0].What == "" {
		t.Errorf("%+v", report)
	}
	r.refuses("GET", "ledger/export", "", http.StatusInternalServerError, "the log was altered")
}

// Section "Admin API": a store without a ledger says what to configure.
func TestNoLedger(t *testing.T) {
	r, _ := newRig(t)
	for _, what := range []string{"head", "export", "verify"} {
		r.refuses("GET", "ledger/"+what, "", http.StatusNotFound, "the store /data/one has no ledger: configure `identity`")
		r.refuses("GET", "ledger/"+what+"?size=1", "", http.StatusBadRequest, `"size" is no parameter`)
	}
}
