package harness

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/google/uuid"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// Open makes a call and returns its answer with the body still to come.
func (g *Gateway) Open(r Request, execution string) *http.Response {
	g.T.Helper()
	res, err := g.Send(r)
	if err != nil {
		g.T.Fatal(err)
	}
	g.T.Cleanup(func() { res.Body.Close() })
	if got := res.Header.Get("Execution-Status"); got != execution {
		g.T.Fatalf("%d, Execution-Status %q, want %q", res.StatusCode, got, execution)
	}
	return res
}

// Leaving begins a call and returns what breaks it off.
func (g *Gateway) Leaving(r Request) (leave func()) {
	g.T.Helper()
	req, cancel := WithCancel(g.Build(r))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if res, err := r.Client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	g.T.Cleanup(cancel)
	return func() {
		cancel()
		Wait(g.T, done, "the end of the call")
	}
}

// Headers are the header fields of a request, by name.
type Headers = map[string]string

// Authority issues certificates for tests.
type Authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
	File string
	next int64
}

// NewAuthority makes an authority with a key of its own.
func NewAuthority(t *testing.T) *Authority {
	t.Helper()
	a := &Authority{key: newKey(t), pool: x509.NewCertPool(), next: 2}
	a.cert = a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, a.key)
	a.pool.AddCert(a.cert)
	a.File = filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, a.File, "CERTIFICATE", a.cert.Raw)
	return a
}

func (a *Authority) sign(t *testing.T, template *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = template
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// Issue makes a client's certificate.
func (a *Authority) Issue(t *testing.T, subject pkix.Name, uris []*url.URL) *tls.Certificate {
	t.Helper()
	a.next++
	key := newKey(t)
	cert := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: subject, URIs: uris,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, key)
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

// Files writes a server's certificate and key, and returns their names.
func (a *Authority) Files(t *testing.T, host string) string {
	t.Helper()
	a.next++
	key := newKey(t)
	cert := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: host},
		DNSNames: []string{host}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, key)
	dir := t.TempDir()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, filepath.Join(dir, "cert.pem"), "CERTIFICATE", cert.Raw)
	writePEM(t, filepath.Join(dir, "key.pem"), "PRIVATE KEY", der)
	return filepath.Join(dir, "cert.pem") + " " + filepath.Join(dir, "key.pem")
}

// Client is the TLS configuration of a client that trusts a, with or without a
// certificate of its own.
func (a *Authority) Client(cert *tls.Certificate) *tls.Config {
	config := &tls.Config{RootCAs: a.pool, ServerName: "localhost"}
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	}
	return config
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Upgrade sends a request that asks for a protocol, and returns the answer and the connection.
func (g *Gateway) Upgrade(method, path, protocol string) (Reply, io.ReadWriteCloser) {
	g.T.Helper()
	conn := g.Dial()
	in := bufio.NewReader(conn)
	Write(g.T, conn, method+" "+path+" HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		g.T.Fatal(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		return Read(res), conn
	}
	return Reply{Status: res.StatusCode, Header: res.Header}, struct {
		io.Reader
		io.WriteCloser
	}{in, conn}
}

// NoRetry checks that an answer tells of the doubt and keeps every SDK from retrying.
func (r Reply) NoRetry(t *testing.T) {
	t.Helper()
	for name, want := range map[string]string{"Execution-Status": "in_doubt", "X-Should-Retry": "false", "Stripe-Should-Retry": "false"} {
		if got := r.Header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%d has %s %q, want %q", r.Status, name, got, want)
		}
	}
}

// ErrorOf is the error token in an answer to a call with a token: it tells of this call, is
// meant for its caller, and is what the ledger has.
func (g *Gateway) ErrorOf(t *testing.T, a *Agent, call *ect.Token, got Reply) *ect.Unverified {
	t.Helper()
	lines := append(got.Header.Values(ect.FieldName), got.Trailer.Values(ect.FieldName)...)
	if len(lines) != 1 {
		t.Fatalf("%d: the answer has %d lines of %s: %v", got.Status, len(lines), ect.FieldName, got.Header)
	}
	token, err := ect.ParseInsecure(lines[0])
	if err != nil {
		t.Fatal(err)
	}
	if token.Event() != ect.EventError || token.Workflow() != call.Workflow() || !slices.Contains(token.Audience(), a.Issuer.Identity()) {
		t.Errorf("the error of %d says %s", got.Status, token.Payload())
	}
	var stands Reply
	Eventually(t, "the error stands in the ledger", func() bool {
		stands = g.Get(a, "ledger/entries?jti="+token.ID()+"&wid="+token.Workflow())
		return stands.Status == http.StatusOK
	})
	entry := Document[struct{ Token string }](t, stands)
	if entry.Token != lines[0] {
		t.Errorf("the ledger has %q, and the answer %q", entry.Token, lines[0])
	}
	return token
}

// Questions are all ways to ask after the id k.
var Questions = []string{"k", "k?wait=10s", "k?method=POST&path=/x", "k/output", "k/output?wait=10s"}

// Asked asks all questions and returns what a client sees of the answers.
func (g *Gateway) Asked(r Request) []string {
	g.T.Helper()
	var seen []string
	for _, question := range Questions {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			r := r
			r.Method, r.Path = method, ExecutionsPath+question
			got := g.Call(r)
			h := maps.Clone(got.Header)
			delete(h, "Date")
			seen = append(seen, fmt.Sprint(method, " ", question, ": ", got.Status, h, got.Body))
		}
	}
	return seen
}

// ann and bob are two callers.
var Ann, Bob = Headers{"X-Api-Key": "ann"}, Headers{"X-Api-Key": "bob"}

// ExecutionsPath begins the paths of executions.
const ExecutionsPath = "/.well-known/cascade/executions/"

// ExecutionDoc is one execution in the answer.
type ExecutionDoc struct {
	Key        string    `json:"key"`
	Method     string    `json:"method"`
	Path       string    `json:"path"`
	Action     string    `json:"action"`
	Workflow   string    `json:"workflow_name"`
	State      string    `json:"state"`
	Cause      string    `json:"cause"`
	Created    time.Time `json:"created"`
	Deadline   time.Time `json:"deadline"`
	Settled    time.Time `json:"settled"`
	Status     int       `json:"status"`
	Replayable bool      `json:"replayable"`
	SafeNewKey *bool     `json:"safe_new_key"`
	OutputURL  string    `json:"output_url"`
	Result     *struct {
		Kept    bool      `json:"kept"`
		Expires time.Time `json:"expires"`
	} `json:"result"`
}

// executions reads r as a list of executions of the id.
func (r Reply) executions(t *testing.T, status int, id string) []ExecutionDoc {
	t.Helper()
	var doc struct {
		ID         string         `json:"execution_id"`
		Executions []ExecutionDoc `json:"executions"`
	}
	if err := json.Unmarshal([]byte(r.Body), &doc); err != nil || r.Status != status || doc.ID != id {
		t.Fatalf("want %d and the executions of %s, got %d %q (%v)", status, id, r.Status, r.Body, err)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
		"Cross-Origin-Resource-Policy": "same-origin", "Content-Length": fmt.Sprint(len(r.Body)), "Execution-Status": "",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	return doc.Executions
}

// Execution reads r as the state of one execution.
func (r Reply) Execution(t *testing.T, id string) ExecutionDoc {
	t.Helper()
	all := r.executions(t, 200, id)
	if len(all) != 1 {
		t.Fatalf("%d executions: %s", len(all), r.Body)
	}
	return all[0]
}

// Slug is that of the problem in r.
func (r Reply) Slug() string {
	var doc ProblemDoc
	_ = json.Unmarshal([]byte(r.Body), &doc) // the caller compares
	return doc.Type[strings.LastIndexByte(doc.Type, '/')+1:]
}

// OnlyReader hides the length of what it reads.
type OnlyReader struct{ io.Reader }

// Waiting counts the goroutines that are in a function.
func Waiting(function string) int {
	var dump bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&dump, 1); err != nil {
		panic(err) // a buffer takes everything
	}
	total := 0
	for block := range strings.SplitSeq(dump.String(), "\n\n") {
		if i := strings.Index(block, " @ "); i > 0 && strings.Contains(block, function) {
			first := block[:i]
			var n int
			if _, err := fmt.Sscan(first[strings.LastIndexByte(first, '\n')+1:], &n); err == nil {
				total += n
			}
		}
	}
	return total
}

// Followers waits until n calls follow an execution. They are invisible from
// outside while it has not answered.
func Followers(t *testing.T, n int) {
	t.Helper()
	Eventually(t, fmt.Sprintf("%d calls are attached", n), func() bool {
		return Waiting("execution.(*Follower).wait") >= n
	})
}

// RawCodec takes messages as they are.
type RawCodec struct{}

// Marshal implements encoding.Codec.
func (RawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

// Unmarshal implements encoding.Codec.
func (RawCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = slices.Clone(data); return nil }

// Name implements encoding.Codec.
func (RawCodec) Name() string { return "raw" }

// GrpcClient is a connection of grpc-go that retries whatever it may.
func (g *Gateway) GrpcClient() *grpc.ClientConn {
	g.T.Helper()
	conn, err := grpc.NewClient("passthrough:///"+g.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(RawCodec{})),
		grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.001s",
			"maxBackoff": "0.001s", "backoffMultiplier": 1, "retryableStatusCodes":
			["INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"]}}]}`))
	if err != nil {
		g.T.Fatal(err)
	}
	g.T.Cleanup(func() { _ = conn.Close() })
	return conn
}

// H2cClient speaks HTTP/2 without TLS.
func (g *Gateway) H2cClient() *http.Client {
	client := g.NewClient(nil)
	transport := client.Transport.(Recorded).Transport
	transport.DisableKeepAlives = false
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
	return client
}

// H2Client speaks HTTP/2 over TLS.
func (g *Gateway) H2Client(config *tls.Config) *http.Client {
	client := g.NewClient(config)
	transport := client.Transport.(Recorded).Transport
	transport.DisableKeepAlives = false
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP2(true)
	return client
}

// Outcome is what a retry of a forwarded call finds.
type Outcome int

const (
	Released  Outcome = iota // it runs again
	Completed                // it gets the first answer again
	InDoubt                  // it is refused
	Resent                   // it is in doubt, and sent again under the upstream's key
)

// Status is the Execution-Status of the answer that leads to the outcome.
func (o Outcome) Status() string {
	if o == InDoubt || o == Resent {
		return "in_doubt"
	}
	return "executed"
}

// Check makes the call again and holds the outcome.
func (g *Gateway) Check(u *Upstream, r Request, first Reply, want Outcome) {
	g.T.Helper()
	again := g.Call(r)
	switch want {
	case Released, Resent:
		again.Want(g.T, 201, "arrival 2", "executed")
		u.Arrived(r.Path, 2)
	case Completed:
		again.Want(g.T, first.Status, first.Body, "replayed")
		u.Arrived(r.Path, 1)
	case InDoubt:
		doc := again.Terminal(g.T, 409, "in-doubt")
		if doc.State != "in_doubt" || doc.ExecutionID != r.Id || *doc.SafeNewKey {
			g.T.Errorf("in doubt: %s", again.Body)
		}
		if got := again.Header.Get("Execution-Id"); got != r.Id {
			g.T.Errorf("Execution-Id is %q", got)
		}
		u.Arrived(r.Path, 1)
	}
}

// Flood is an answer of many bytes, which differ from block to block.
type Flood struct {
	Size  int
	Begun chan struct{} // closed when the header has left
	Taken chan struct{} // closed when all of it was taken from the upstream
	Hold  *Gate         // after the first block; nil without
}

// NewFlood makes a flood of size bytes.
func NewFlood(size int) *Flood {
	return &Flood{Size: size, Begun: make(chan struct{}), Taken: make(chan struct{})}
}

const floodBlock = 64 << 10

func (f *Flood) block(i int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%07d\n", i), floodBlock/8)
}

// Answer sends the flood as the answer of an upstream.
func (f *Flood) Answer(w http.ResponseWriter, _ *Arrival) {
	w.Header().Set("Content-Length", fmt.Sprint(f.Size))
	_ = http.NewResponseController(w).Flush()
	close(f.Begun)
	for i := range f.Size / floodBlock {
		if i == 1 && f.Hold != nil {
			f.Hold.Pass()
		}
		if _, err := w.Write(f.block(i)); err != nil {
			return
		}
	}
	_ = http.NewResponseController(w).Flush()
	close(f.Taken)
}

// Sum is what a reader of the whole answer has.
func (f *Flood) Sum() string {
	h := sha256.New()
	for i := range f.Size / floodBlock {
		h.Write(f.block(i))
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

var (
	// ShortHash is the form of a hash in lists.
	ShortHash = regexp.MustCompile(`^[0-9a-f]{16}$`)
	// LongHash is the form of a hash in documents.
	LongHash = regexp.MustCompile(`^[0-9a-f]{32}$`)
)

// Somebody is how one person comes to one site.
type Somebody struct {
	Host   string
	Client *http.Client
	Header Headers
}

// Does makes r a request of this person.
func (s Somebody) Does(r Request) Request {
	r.Host, r.Client = s.Host, s.Client
	if r.Header == nil {
		r.Header = Headers{}
	}
	for name, value := range s.Header {
		r.Header[name] = value
	}
	return r
}

// traces are the names of what a call leaves behind.
type traces struct{ id, workflow, named, checkpoint, rollback string }

// ways are all paths on which somebody could ask after them.
func (s traces) ways() []string {
	base := "/.well-known/cascade/"
	return []string{
		base + "executions/" + s.id, base + "executions/" + s.id + "?wait=1s", base + "executions/" + s.id + "/output",
		base + "executions/" + s.id + "?method=POST&path=/pay",
		base + "workflows/" + s.workflow, base + "workflows/" + s.named,
		base + "checkpoints/" + s.checkpoint + "?wait=100ms", // else it is waited for longer
		base + "ledger/entries?jti=" + s.checkpoint + "&wid=" + s.named, base + "ledger/entries?jti=" + s.checkpoint,
		base + "rollback/" + s.rollback,
		base + "circuits?wid=" + s.workflow, base + "circuits?wid=" + s.named, "/aerr/circuits?wid=" + s.named,
	}
}

// looks is what somebody is answered on all of them, without their names.
func (g *Gateway) looks(who Somebody, s traces) []string {
	g.T.Helper()
	var seen []string
	for _, path := range s.ways() {
		for _, method := range []string{"GET", "HEAD"} {
			got := g.Call(who.Does(Request{Method: method, Path: path}))
			h := got.Header.Clone()
			h.Del("Date")
			text := fmt.Sprint(method, " ", path, ": ", got.Status, h, got.Body)
			for _, name := range []string{s.id, s.workflow, s.named, s.checkpoint, s.rollback} {
				text = strings.ReplaceAll(text, name, "X")
			}
			seen = append(seen, text)
		}
	}
	return seen
}

// Apart holds that what one has done does not exist for the other, on any endpoint and by
// no answer to a call (P3). ops asks for a rollback of it, at a site of the endpoints alone.
func (g *Gateway) Apart(boss *Agent, ops, one Somebody, others ...Somebody) {
	t := g.T
	t.Helper()
	s := traces{id: "id-" + uuid.NewString(), workflow: uuid.NewString()}
	none := traces{"id-" + uuid.NewString(), uuid.NewString(), uuid.NewString(), uuid.NewString(), uuid.NewString()}
	unseen := make([][]string, len(others))
	for i, other := range others {
		unseen[i] = g.looks(other, none)
	}

	call := Request{Path: "/pay", Id: s.id, Header: Headers{"Workflow-Id": s.workflow}}
	first := g.Call(one.Does(call))
	if first.Status != 201 || first.Header.Get("Execution-Status") != "executed" {
		t.Fatalf("%d %v %s", first.Status, first.Header, first.Body)
	}
	s.checkpoint = first.Header.Get("Execution-Checkpoint")
	var doc struct {
		Workflow string `json:"wid"`
	}
	Eventually(t, "the checkpoint is in the ledger", func() bool {
		got := g.Call(one.Does(Request{Method: "GET", Path: "/.well-known/cascade/checkpoints/" + s.checkpoint}))
		return got.Status == 200 && json.Unmarshal([]byte(got.Body), &doc) == nil
	})
	s.named, s.rollback = doc.Workflow, "urn:uuid:"+uuid.NewString()
	f := &Flow{g, s.named}
	asking := Request{Path: rollback.Path, Body: fmt.Sprintf(
		`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute", "scope": "single"}`, s.rollback, s.checkpoint)}
	got := g.Call(ops.Does(With(boss.Issue(f.Request(s.checkpoint, `, "scope": "single"`)), asking)))
	if got.Status != 200 {
		t.Fatalf("no rollback: %d %s", got.Status, got.Body)
	}

	// Who has made the call sees it, so that the paths are those of something.
	for _, way := range []string{"executions/" + s.id, "workflows/" + s.workflow, "checkpoints/" + s.checkpoint, "rollback/" + s.rollback} {
		if got := g.Call(one.Does(Request{Method: "GET", Path: "/.well-known/cascade/" + way})); got.Status != 200 {
			t.Errorf("who has made the call sees nothing at %s: %d %s", way, got.Status, got.Body)
		}
	}
	var theirs []string
	for i, other := range others {
		for j, seen := range g.looks(other, s) {
			if seen != unseen[i][j] {
				t.Errorf("P3: somebody else at %s can tell that it exists:\n%s\n%s", other.Host, unseen[i][j], seen)
			}
		}
		for index := range 8 {
			got := g.Call(other.Does(Request{Method: "GET", Path: fmt.Sprint("/.well-known/cascade/ledger/entries/", index)}))
			if got.Status < 400 {
				t.Errorf("P3: somebody else at %s reads entry %d: %s", other.Host, index, got.Body)
			}
		}
	}
	for _, other := range others {
		// The same id with another request: neither a result nor a mismatch, and a workflow
		// of the same name is another one.
		again := call
		again.Body, again.Header = `{"amount":2}`, Headers{"Workflow-Id": s.workflow}
		got := g.Call(other.Does(again))
		if got.Header.Get("Execution-Status") != "executed" {
			t.Errorf("P3: somebody else's call at %s: %d %v %s", other.Host, got.Status, got.Header, got.Body)
		}
		mine := got.Header.Get("Execution-Checkpoint")
		theirs = append(theirs, mine)
		Eventually(t, "the other's workflow is there", func() bool {
			got = g.Call(other.Does(Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + s.workflow}))
			return got.Status == 200 && strings.Contains(got.Body, mine)
		})
		if strings.Contains(got.Body, s.checkpoint) {
			t.Errorf("P3: the other's workflow at %s has the first one's nodes: %s", other.Host, got.Body)
		}
	}
	view := g.Call(one.Does(Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + s.workflow}))
	for _, checkpoint := range theirs {
		if strings.Contains(view.Body, checkpoint) {
			t.Errorf("P3: the first one's workflow has the others' nodes: %s", view.Body)
		}
	}
}

// Sights holds which upstreams' breakers somebody sees.
func (g *Gateway) Sights(t *testing.T, who Somebody, want ...string) {
	t.Helper()
	var got []string
	for _, c := range Document[CircuitsView](t, g.Call(who.Does(Request{Method: "GET", Path: "/.well-known/cascade/circuits"}))).Circuits {
		got = append(got, c.Upstream)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s sees the breakers of %v, want %v", who.Host, got, want)
	}
}

// Bearer is a call with a credential.
func Bearer(path, id, body string, header ...string) Request {
	r := Request{Path: path, Id: id, Body: body, Header: map[string]string{"Authorization": "Bearer ada"}}
	for i := 0; i < len(header); i += 2 {
		r.Header[header[i]] = header[i+1]
	}
	return r
}

// ExecutesAndDrops has its effect, and loses the answer.
func ExecutesAndDrops(http.ResponseWriter, *Arrival) { panic(http.ErrAbortHandler) }

// InDoubt checks that a call is refused since an equal one, or one of its id, may have been
// executed.
func (r Reply) InDoubt(t *testing.T) {
	t.Helper()
	if r.Status != 409 || r.Header.Get("Execution-Status") != "in_doubt" && r.Header.Get("Execution-Status") != "refused" || !strings.Contains(r.Body, "in-doubt") {
		t.Errorf("in doubt: %d %v %s", r.Status, r.Header, r.Body)
	}
}

// Passed checks that an answer is none of the guard's.
func (r Reply) Passed(t *testing.T, status int) {
	t.Helper()
	if r.Status != status || r.Header.Get("Execution-Status") != "" {
		t.Errorf("passed: %d %v %s", r.Status, r.Header, r.Body)
	}
}

// Cut makes n calls whose clients wait together, and leave once all have arrived upstream. It
// returns when the gateway knows that.
func (g *Gateway) Cut(t *testing.T, u *Upstream, n int, r Request) {
	t.Helper()
	if r.Client == nil {
		r.Client = g.Client
	}
	r.Header = maps.Clone(r.Header)
	r.Header[Leaver] = "yes"
	before, known := u.Arrivals(r.Path), Left.Load()
	var all []func()
	for i := range n {
		all = append(all, g.Leaving(r))
		Eventually(t, "the call has arrived", func() bool { return u.Arrivals(r.Path) == before+i+1 })
	}
	for _, leave := range all {
		leave()
	}
	Eventually(t, "the gateway knows that the clients have left", func() bool { return Left.Load() == known+int64(n) })
}

// Idle waits until nothing runs.
func Idle(t *testing.T) {
	t.Helper()
	Eventually(t, "the executions are settled", func() bool { return Waiting("guard.(*Call).execute") == 0 })
}

// Recognized checks that an answer names the execution that its call was recognised as.
func (r Reply) Recognized(t *testing.T) {
	t.Helper()
	if id := r.Header.Get("Execution-Recognized"); id == "" || id != r.Header.Get("Execution-Id") {
		t.Errorf("Execution-Recognized is %q, Execution-Id %q", id, r.Header.Get("Execution-Id"))
	}
}

// ItsOwn checks that an answer is that of a call of its own.
func (r Reply) ItsOwn(t *testing.T) {
	t.Helper()
	if id := r.Header.Get("Execution-Recognized"); id != "" || r.Header.Get("Execution-Id") == "" {
		t.Errorf("a call of its own was recognised as %q (%s)", id, r.Header.Get("Execution-Id"))
	}
}

// Held answers with the number of the arrival once the gate is open.
func Held(hold *Gate) func(http.ResponseWriter, *Arrival) {
	return func(w http.ResponseWriter, a *Arrival) {
		hold.Pass()
		Status(201, fmt.Sprint("arrival ", a.N))(w, a)
	}
}

// ErrBroken is the error of a TestStore that is broken.
var ErrBroken = errors.New("the disk is full")

// testStore is a store in memory that a test can slow down, break, or move in time.
// It outlives its gateway, as a directory does.
type testStore struct {
	Path   string
	Memory *memory.Store
	users  sync.WaitGroup // gateways that have it open

	mu     sync.Mutex
	ahead  time.Duration
	commit func([]store.Write) error
	get    func(key []byte) error
}

// TestStores finds the stores of the tests that run, by path.
var TestStores sync.Map

// NewTestStore makes a store that a Caddyfile names by path.
func NewTestStore(path string) *testStore {
	s := &testStore{Path: path}
	s.Memory = memory.New(memory.Options{Now: s.now})
	TestStores.Store(path, s)
	return s
}

// Closed waits until nobody has the store open, after a stop: Caddy does not wait for the last
// handlers of a configuration that it stops. They hold the store, and what is written beside it.
func (s *testStore) Closed() { s.users.Wait() }

func (s *testStore) Forget() {
	TestStores.Delete(s.Path)
	_ = s.Memory.Close()
}

func (s *testStore) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.ahead)
}

// Pass moves the store's clock.
func (s *testStore) Pass(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

// OnCommit calls f before every commit; nil stops that. An error of f is the commit's.
func (s *testStore) OnCommit(f func([]store.Write) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commit = f
}

// OnGet calls f before every Get of a key; nil stops that.
func (s *testStore) OnGet(f func(key []byte) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.get = f
}

// HoldCommits lets every commit from now on wait for the gate.
func (s *testStore) HoldCommits(g *Gate) {
	s.OnCommit(func([]store.Write) error {
		g.Pass()
		return nil
	})
}

// FailCommits lets every commit from now on fail.
func (s *testStore) FailCommits(err error) {
	s.OnCommit(func([]store.Write) error { return err })
}

// opened is the view of a testStore that a gateway opens and closes.
type opened struct {
	*memory.Store
	s     *testStore
	close func()
}

func (o opened) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	o.s.mu.Lock()
	f := o.s.commit
	o.s.mu.Unlock()
	if f != nil {
		if err := f(batch); err != nil {
			return 0, err
		}
	}
	return o.Store.Commit(ctx, batch...)
}

func (o opened) Get(ctx context.Context, key []byte) (store.Entry, error) {
	o.s.mu.Lock()
	f := o.s.get
	o.s.mu.Unlock()
	if f != nil {
		if err := f(key); err != nil {
			return store.Entry{}, err
		}
	}
	return o.Store.Get(ctx, key)
}

func (o opened) Close() error {
	o.close()
	return nil
}

func init() {
	caddy.RegisterModule(storeModule{})
}

// storeModule is the store module that opens TestStores.
type storeModule struct {
	Path string `json:"path"`
}

func (storeModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.e2e", New: func() caddy.Module { return new(storeModule) }}
}

func (m *storeModule) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&m.Path) {
		return d.ArgErr()
	}
	return nil
}

func (m *storeModule) StorePath() (string, error) { return m.Path, nil }

func (m *storeModule) OpenStore(*zap.Logger) (store.Store, error) {
	found, ok := TestStores.Load(m.Path)
	if !ok {
		return nil, store.ErrClosed
	}
	s := found.(*testStore)
	s.users.Add(1)
	return opened{s.Memory, s, sync.OnceFunc(s.users.Done)}, nil
}

var _ caddymodule.StoreOpener = (*storeModule)(nil)
