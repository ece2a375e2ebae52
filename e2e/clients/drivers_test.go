package clients

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stripe/stripe-go/v85"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// task is one call that a client makes.
type task struct {
	N       int    `json:"n"`
	Client  string `json:"client"`
	Base    string `json:"base"`
	Key     string `json:"key"`
	Amount  int    `json:"amount"`
	Retries int    `json:"retries"`
	// Of agents: how often the call is meant, the milliseconds that the client waits for an
	// answer (0: longer than anything takes), and the tools of a tour.
	Times   int        `json:"times"`
	Timeout int        `json:"timeout"`
	Calls   []toolCall `json:"calls"`
	// Of programs that copy, upload and push: what they do, one after the other.
	Steps []string `json:"steps"`
}

// toolCall is a call of a tool, with how many notifications of its progress come.
type toolCall struct {
	Name     string         `json:"name"`
	Args     map[string]any `json:"args"`
	Progress int            `json:"progress"`
}

// sight is what the code that made the call sees.
type sight struct {
	N int `json:"n"`
	// OK says that it takes the call for done, with the effect ID.
	OK   bool   `json:"ok"`
	ID   string `json:"id"`
	Seen string `json:"seen"`
}

// remote hands tasks to a program that runs beside the test, and its answers back.
type remote struct {
	send func(task)
	mu   sync.Mutex
	n    int
	wait map[int]chan sight
}

func (r *remote) call(t *testing.T, a task) sight {
	t.Helper()
	answer := make(chan sight, 1)
	r.mu.Lock()
	r.n++
	a.N = r.n
	r.wait[a.N] = answer
	r.mu.Unlock()
	r.send(a)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case s := <-answer:
		return s
	case <-ctx.Done():
		t.Errorf("%s has not answered", a.Client)
		return sight{Seen: "nothing"}
	}
}

func (r *remote) answered(s sight) {
	r.mu.Lock()
	answer := r.wait[s.N]
	r.mu.Unlock()
	if answer != nil {
		answer <- s
	}
}

// startNode runs the SDKs of package.json.
func startNode(t *testing.T) *remote {
	t.Helper()
	if _, err := os.Stat("node_modules"); err != nil {
		t.Fatal("the SDKs are not there: run `npm ci` in e2e/clients, with Node 20 or newer")
	}
	node := exec.Command("node", "driver.mjs")
	node.Stderr = os.Stderr
	in, err := node.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := node.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Start(); err != nil {
		t.Fatalf("Node is needed: %v", err)
	}
	lines := make(chan task)
	r := &remote{wait: map[int]chan sight{}, send: func(a task) { lines <- a }}
	go func() {
		encoder := json.NewEncoder(in)
		for a := range lines {
			_ = encoder.Encode(a) // who waits is told by its time
		}
		_ = in.Close()
	}()
	read := make(chan struct{})
	go func() {
		defer close(read)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			var s sight
			if json.Unmarshal(scanner.Bytes(), &s) == nil {
				r.answered(s)
			}
		}
	}()
	t.Cleanup(func() {
		close(lines)
		<-read
		_ = node.Wait()
	})
	return r
}

//go:embed page.html
var page []byte

// startBrowser runs Chromium with a page that makes calls with fetch, from an origin of
// its own.
func startBrowser(t *testing.T) *remote {
	t.Helper()
	tasks := make(chan task)
	r := &remote{wait: map[int]chan sight{}, send: func(a task) { tasks <- a }}
	ended := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/":
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = w.Write(page)
		case "/next":
			select {
			case a := <-tasks:
				_ = json.NewEncoder(w).Encode(a)
			case <-ended:
				w.WriteHeader(http.StatusGone)
			case <-q.Context().Done():
			}
		case "/result":
			var s sight
			if json.NewDecoder(q.Body).Decode(&s) == nil {
				r.answered(s)
			}
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(server.Close)
	profile, err := os.MkdirTemp("", "clients-profile")
	if err != nil {
		t.Fatal(err)
	}
	name := ""
	for _, known := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(known); err == nil {
			name = path
			break
		}
	}
	if name == "" {
		t.Fatal("Chromium is needed, and not there")
	}
	browser := exec.Command(name, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
		"--user-data-dir="+profile, server.URL)
	browser.Env = append(os.Environ(), "HOME="+profile, "XDG_CONFIG_HOME="+profile, "XDG_CACHE_HOME="+profile)
	if err := browser.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(ended)
		_ = browser.Process.Kill()
		_ = browser.Wait()
		_ = os.RemoveAll(profile) // its own children may still write there
	})
	return r
}

// callStripeGo makes the call with stripe-go.
func callStripeGo(t *testing.T, a task) sight {
	backend := stripe.GetBackendWithConfig(stripe.APIBackend, &stripe.BackendConfig{
		URL: stripe.String(a.Base), MaxNetworkRetries: stripe.Int64(int64(a.Retries)), EnableTelemetry: stripe.Bool(false),
		LeveledLogger: &stripe.LeveledLogger{Level: stripe.LevelNull},
	})
	client := stripe.NewClient("sk_test_1", stripe.WithBackends(&stripe.Backends{API: backend}))
	params := &stripe.PaymentIntentCreateParams{Amount: stripe.Int64(int64(a.Amount)), Currency: stripe.String("eur")}
	params.SetIdempotencyKey(a.Key)
	intent, err := client.V1PaymentIntents.Create(t.Context(), params)
	var known *stripe.Error
	switch {
	case err == nil:
		return sight{OK: true, ID: intent.ID, Seen: "succeeds"}
	case errors.As(err, &known):
		return sight{Seen: strings.TrimSpace(fmt.Sprintf("returns *stripe.Error %d %s", known.HTTPStatusCode, known.Code))}
	}
	return sight{Seen: "returns an error that is no *stripe.Error"}
}

// callCurl makes the call with curl, which tries again what it calls transient.
func callCurl(t *testing.T, a task) sight {
	file := filepath.Join(t.TempDir(), "body")
	cmd := exec.CommandContext(t.Context(), "curl", "-sS", "--fail-with-body", "--retry", fmt.Sprint(a.Retries), "--max-time", "60",
		"-o", file, "-w", "%{http_code}", "-H", "Content-Type: application/json", "-H", "Idempotency-Key: "+a.Key,
		"-H", "Authorization: Bearer t", "-d", fmt.Sprintf(`{"amount":%d}`, a.Amount), a.Base+"/pay")
	out, err := cmd.Output()
	body, _ := os.ReadFile(file)
	var doc struct {
		ID    string `json:"id"`
		Error struct {
			Code string `json:"code"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &doc)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return sight{OK: true, ID: doc.ID, Seen: "succeeds"}
	case errors.As(err, &exit):
		return sight{Seen: strings.TrimSpace(fmt.Sprintf("exits with %d, %s %s", exit.ExitCode(), out, doc.Error.Code))}
	}
	return sight{Seen: err.Error()}
}

// asIs is the codec of messages that are bytes.
type asIs struct{}

func (asIs) Marshal(v any) ([]byte, error)      { return v.([]byte), nil }
func (asIs) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (asIs) Name() string                       { return "proto" }

// retrying is a policy of gRPC as its documentation shows it.
const retrying = `{"methodConfig": [{"name": [{}], "retryPolicy": {
	"maxAttempts": 3, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE", "ABORTED"]}}]}`

// callGRPC makes the call with grpc-go.
func callGRPC(t *testing.T, a task) sight {
	target, err := url.Parse(a.Base)
	if err != nil {
		return sight{Seen: err.Error()}
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if a.Retries > 0 {
		options = append(options, grpc.WithDefaultServiceConfig(retrying))
	}
	conn, err := grpc.NewClient("passthrough:///"+target.Host, options...)
	if err != nil {
		return sight{Seen: err.Error()}
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "idempotency-key", a.Key, "authorization", "Bearer t")
	var out []byte
	err = conn.Invoke(ctx, "/pay.v1.Pay/Charge", fmt.Appendf(nil, "amount %d", a.Amount), &out, grpc.ForceCodec(asIs{}))
	if err != nil {
		return sight{Seen: "returns " + status.Code(err).String()}
	}
	return sight{OK: true, ID: string(out), Seen: "succeeds"}
}
