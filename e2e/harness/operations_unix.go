//go:build unix

package harness

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// asksAll makes the first gateway of a star ask the others for what they have.
func asksAll(sites ...*ProcSite) string {
	text := "rollback {\n partial allow\n prepare_timeout 3s\n"
	for i, site := range sites {
		if i > 0 {
			text += fmt.Sprintf(" participants http://%s/.well-known/cascade/rollback %s\n", site.Addr, StarIdentity(i))
		}
	}
	return text + "}"
}

// NewAskingStar is a star whose first gateway names the others as participants.
func NewAskingStar(t *testing.T) *Star {
	t.Helper()
	return LayAskingStar(t).Begin()
}

// LayAskingStar is LayStar with participants that ask people.
func LayAskingStar(t *testing.T) *Star {
	t.Helper()
	c := LayStar(t)
	for i := 1; i < len(c.Sites); i++ {
		c.A.Also = append(c.A.Also, StarIdentity(i))
		c.Sites[i].App += "rollback {\n coordinators " + GatewayIdentity + "\n }"
	}
	c.Sites[0].App += asksAll(c.Sites...)
	c.Before(0, c.Behind(1, "/charges /mail"), c.Behind(2, "/docs/*"))
	return c
}

// Direct makes a call at the gateway at a place, which the first one does not see: the agent's token
// is for that gateway alone.
func (c *Star) Direct(n int, r Request, after ...string) SagaStep {
	c.T.Helper()
	s := *c.Saga
	s.G = c.Sites[n].Gateway(c.T)
	got := s.G.Call(With(s.A.Issue(ect.Claims{Audience: []string{StarIdentity(n)}, Workflow: s.Wid, Parents: after}), r))
	step := SagaStep{got.Header.Get("Execution-Checkpoint"), got}
	if step.Status >= 300 || step.Checkpoint == "" {
		c.T.Fatalf("%d %s %v", step.Status, step.Body, step.Header)
	}
	return step
}

var procStack = regexp.MustCompile(`,"stacktrace":"[^"]*"`)

// ProcLog collects what a process says, and tells when it has said something.
type ProcLog struct {
	mu    sync.Mutex
	text  bytes.Buffer
	waits []procWait
}

type procWait struct {
	said func(text []byte) bool
	done chan struct{}
}

// Write implements io.Writer.
func (l *ProcLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.text.Write(p)
	l.waits = slices.DeleteFunc(l.waits, func(w procWait) bool {
		said := w.said(l.text.Bytes())
		if said {
			close(w.done)
		}
		return said
	})
	return n, err
}

// Wait returns a channel that is closed once the log's text is as said.
func (l *ProcLog) Wait(said func(text []byte) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := procWait{said, make(chan struct{})}
	if said(l.text.Bytes()) {
		close(w.done)
	} else {
		l.waits = append(l.waits, w)
	}
	return w.done
}

// When is closed once the process has said text.
func (l *ProcLog) When(text string) <-chan struct{} {
	return l.Wait(func(said []byte) bool { return bytes.Contains(said, []byte(text)) })
}

// Line is closed once the process has said n lines.
func (l *ProcLog) Line(n int) <-chan struct{} {
	return l.Wait(func(said []byte) bool { return bytes.Count(said, []byte{'\n'}) >= n })
}

// Has reports whether the log has a text.
func (l *ProcLog) Has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.text.Bytes(), []byte(text))
}

// Says waits until the process has said text, and reports whether it has: what it says
// comes through a pipe.
func (l *ProcLog) Says(text string) bool {
	select {
	case <-l.When(text):
		return true
	case <-time.After(Patience):
		return false
	}
}

func (l *ProcLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail is the end of what the process has said, without the stacks of its lines.
func (l *ProcLog) Tail(n int) string {
	text := procStack.ReplaceAllString(l.String(), "")
	return text[max(0, len(text)-n):]
}

// Metrics reads /metrics of the admin endpoint.
func (g *ProcGateway) Metrics(t *testing.T) map[string]string {
	t.Helper()
	return ParseSamples(g.MetricsText(t))
}

// MetricsText reads the metrics.
func (g *ProcGateway) MetricsText(t *testing.T) string {
	t.Helper()
	status, text, err := g.Admin("GET", "/metrics", "", "")
	for range 10 { // the admin endpoint of the configuration before closes its connections
		if err == nil {
			break
		}
		status, text, err = g.Admin("GET", "/metrics", "", "")
	}
	if err != nil || status != http.StatusOK {
		t.Fatalf("/metrics: %d %v\n%.2000s", status, err, text)
	}
	return text
}

// ProcOutput is what a command has said.
type ProcOutput struct {
	Out, Err string
	Code     int
}

// Operate runs `caddy agent-guard` at the gateway's admin endpoint.
func (s *ProcSite) Operate(t *testing.T, args ...string) ProcOutput {
	t.Helper()
	return ProcRun(t, s.Operator(t, args...))
}

// Operator is the command of an operator at this gateway.
func (s *ProcSite) Operator(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := s.Command(t.Context(), "command", append([]string{"agent-guard"}, args...)...)
	cmd.Env = append(cmd.Env, "CADDY_ADMIN="+s.Admin, "USER=ada")
	return cmd
}

// ProcRun runs a command to its end.
func ProcRun(t *testing.T, cmd *exec.Cmd) ProcOutput {
	t.Helper()
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	failed := cmd.Run()
	if exit := (*exec.ExitError)(nil); failed != nil && !errors.As(failed, &exit) {
		t.Fatal(failed)
	}
	return ProcOutput{out.String(), err.String(), cmd.ProcessState.ExitCode()}
}

// Says fails unless the command succeeded, and returns what it printed.
func (o ProcOutput) Says(t *testing.T) string {
	t.Helper()
	if o.Code != 0 {
		t.Fatalf("exit code %d: %s", o.Code, o.Err)
	}
	return o.Out
}

// Fails fails unless the command ended with 1 and these words on stderr.
func (o ProcOutput) Fails(t *testing.T, words ...string) {
	t.Helper()
	if o.Code != 1 || o.Out != "" {
		t.Errorf("exit code %d, output %q", o.Code, o.Out)
	}
	for _, w := range words {
		if !strings.Contains(o.Err, w) {
			t.Errorf("%q is not in\n%s", w, o.Err)
		}
	}
}

// ProcDocument reads what was printed as one JSON document.
func ProcDocument[T any](t *testing.T, text string) (v T) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	if err := decoder.Decode(&v); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if decoder.More() {
		t.Fatalf("more than one document:\n%s", text)
	}
	return v
}

// ProcExecution is what tests read of an execution.
type ProcExecution struct {
	Key, State, Detail, Cause, Action, Workflow, Caller string
	ExecutionID                                         string `json:"execution_id"`
	Resolutions                                         []struct {
		Applied          bool
		Operator, Reason string
	}
}

// ProcPage is a page of the list of executions.
type ProcPage struct {
	Executions []ProcExecution
	Next       string
}

// procChanging is what differs from run to run: keys, hashes, times and ages.
var procChanging = regexp.MustCompile(`\b[0-9a-f]{8,64}\b|\b\d{4}-\d\d-\d\dT[0-9:]+Z|\b\d+[smh]\b *|127\.0\.0\.1:\d+`)

// ProcGolden compares what a command has printed with a file.
func ProcGolden(t *testing.T, name, text string) {
	t.Helper()
	text = procChanging.ReplaceAllStringFunc(text, func(s string) string {
		switch {
		case strings.Contains(s, "T") && strings.HasSuffix(s, "Z"):
			return "TIME"
		case strings.Contains(s, ":"):
			return "HOST"
		case len(s) >= 8:
			return strings.Repeat("f", len(s))
		default:
			return "AGE "
		}
	})
	file := filepath.Join("testdata", name+".golden")
	if *UpdateGolden {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, text, want)
	}
}

// ProcLost is an upstream that acts, and whose answer is lost.
func ProcLost(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) }

// Doubtful makes a call that goes into doubt, and returns its key.
func (g *ProcGateway) Doubtful(t *testing.T, upstream *ProcUpstream, c ProcCall) string {
	t.Helper()
	upstream.Script(c.Id, ProcLost)
	if a := g.Post(t, c); a.Problem() != "in-doubt" && a.Status != http.StatusBadGateway {
		t.Fatalf("%v", a)
	}
	page := ProcDocument[ProcPage](t, g.Site.Operate(t, "executions", "list", "-o", "json").Says(t))
	for _, x := range page.Executions {
		if x.ExecutionID == c.Id && x.State == "in_doubt" {
			return x.Key
		}
	}
	t.Fatalf("%s is not in doubt: %+v", c.Id, page)
	return ""
}

// Without is a configuration in which the guard does not stand.
func (s *ProcSite) Without() string {
	return fmt.Sprintf("{\n admin %s\n persist_config off\n servers {\n protocols h1 h2c\n }\n }\nhttp://%s {\n bind 127.0.0.1\n respond 404\n }\n",
		s.Admin, s.Addr)
}

// Read asks below /.well-known/cascade/ as the caller of all calls.
func (g *ProcGateway) Read(t *testing.T, path string) (status int, body string) {
	t.Helper()
	client := ProcDial()
	defer client.CloseIdleConnections()
	EventuallyWithin(t, ProcBound, "an answer", func() bool {
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+g.Site.Addr+"/.well-known/cascade/"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+ProcCredential)
		resp, err := client.Do(req)
		if err != nil { // a reload closes connections
			return false
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		status, body = resp.StatusCode, string(text)
		return err == nil
	})
	return status, body
}

// ProcSearch looks for secrets in all files below a directory, and in their names.
func ProcSearch(t *testing.T, when, dir string, secrets []string) {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil // the store works meanwhile
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			return nil
		}
		found = found || strings.Contains(path, "/data/")
		ProcFind(t, when+": "+path, append(b, path...), secrets)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if !found {
		t.Fatal("no file of the store was looked at")
	}
}

// ProcFind fails where a secret stands in text, plain or encoded.
func ProcFind(t *testing.T, where string, text []byte, secrets []string) {
	t.Helper()
	for _, secret := range secrets {
		for _, form := range []string{
			secret, hex.EncodeToString([]byte(secret)),
			strings.TrimRight(base64.StdEncoding.EncodeToString([]byte(secret)), "=")[:len(secret)],
		} {
			if i := bytes.Index(text, []byte(form)); i >= 0 {
				t.Errorf("P8: %s holds %q: ...%.200q", where, form, text[max(0, i-60):])
				break
			}
		}
	}
}

// WantProcSays fails unless the text holds all the words.
func WantProcSays(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q is not in what the gateway says:\n%s", word, text)
		}
	}
}
