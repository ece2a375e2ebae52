package hitl_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

func secret(first byte, size int) string {
	key := make([]byte, size)
	for i := range key {
		key[i] = first + byte(i)
	}
	return "whsec_" + base64.StdEncoding.EncodeToString(key)
}

func TestConfigIsChecked(t *testing.T) {
	good := []string{secret(1, 32)}
	for name, c := range map[string]struct {
		config hitl.WebhookConfig
		want   string // in the error; empty for none
	}{
		"https":             {hitl.WebhookConfig{URL: "https://example.com/hook?team=7", Secrets: good}, ""},
		"localhost":         {hitl.WebhookConfig{URL: "http://localhost:8080/", Secrets: good}, ""},
		"127.1.2.3":         {hitl.WebhookConfig{URL: "http://127.1.2.3", Secrets: good}, ""},
		"::1":               {hitl.WebhookConfig{URL: "http://[::1]:80", Secrets: good}, ""},
		"shortest, longest": {hitl.WebhookConfig{URL: "https://example.com", Secrets: []string{secret(1, 24), secret(1, 64)}}, ""},
		"plain http":        {hitl.WebhookConfig{URL: "http://example.com/hook", Secrets: good}, "use https"},
		"looks local":       {hitl.WebhookConfig{URL: "http://localhost.example.com", Secrets: good}, "use https"},
		"looks like ::1":    {hitl.WebhookConfig{URL: "http://127.0.0.1.example.com", Secrets: good}, "use https"},
		"no url":            {hitl.WebhookConfig{Secrets: good}, "no host"},
		"path":              {hitl.WebhookConfig{URL: "/hook", Secrets: good}, "no host"},
		"ftp":               {hitl.WebhookConfig{URL: "ftp://example.com", Secrets: good}, `scheme is "ftp"`},
		"unreadable":        {hitl.WebhookConfig{URL: "https://a b/", Secrets: good}, "cannot be read"},
		"user":              {hitl.WebhookConfig{URL: "https://hush:hush@example.com", Secrets: good}, "user or a password"},
		"fragment":          {hitl.WebhookConfig{URL: "https://example.com/#hush", Secrets: good}, "fragment"},
		"no secret":         {hitl.WebhookConfig{URL: "https://example.com"}, "there are 0"},
		"nine secrets":      {hitl.WebhookConfig{URL: "https://example.com", Secrets: make([]string, 9)}, "there are 9"},
		"no prefix":         {hitl.WebhookConfig{URL: "https://example.com", Secrets: []string{good[0], "hushhushhushhushhush"}}, "secret 2 of 2: it does not begin with whsec_"},
		"not base64":        {hitl.WebhookConfig{URL: "https://example.com", Secrets: []string{"whsec_hush!"}}, "not standard base64"},
		"short":             {hitl.WebhookConfig{URL: "https://example.com", Secrets: []string{secret(1, 23)}}, "it has 23 bytes; 24 to 64"},
		"long":              {hitl.WebhookConfig{URL: "https://example.com", Secrets: []string{secret(1, 65)}}, "it has 65 bytes"},
	} {
		_, err := hitl.NewWebhook(c.config)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err == nil {
			continue
		}
		// P8: no secret is in an error.
		for _, s := range append(c.config.Secrets, "hush") {
			if s != "" && strings.Contains(err.Error(), strings.TrimPrefix(s, "whsec_")) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// The guide for operators explains every cause that a message may have.
func TestCausesAreDocumented(t *testing.T) {
	guide, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, cause := range hitl.Causes() {
		if !strings.Contains(string(guide), "`"+string(cause)+"`") {
			t.Errorf("docs/operations.md does not explain %s", cause)
		}
	}
}

func escalation() hitl.Escalation {
	return hitl.Escalation{
		ID: "01234567-89ab-8def-8123-456789abcdef", Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "Ä mail & more.",
		Workflow: "w", Links: hitl.Links{Checkpoint: "k", Rollback: "r"},
		State: hitl.Open, Opened: time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC), Attempts: 3, LevelName: "approval",
	}
}

func notifier(t *testing.T, c hitl.WebhookConfig) *hitl.WebhookNotifier {
	t.Helper()
	if c.Secrets == nil {
		c.Secrets = []string{secret(1, 32)}
	}
	n, err := hitl.NewWebhook(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// serve starts a receiver on a real socket.
func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

// expected is the signature as the specification describes it, computed apart.
func expected(t *testing.T, secret, id, timestamp string, body []byte) string {
	t.Helper()
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		t.Fatal(err)
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", id, timestamp, body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// What arrives is signed with every secret, fresh, and says what the documentation says.
func TestMessageOnTheWire(t *testing.T) {
	type message struct {
		request *http.Request
		body    []byte
	}
	arrived := make(chan message, 1)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		arrived <- message{r, body}
		w.WriteHeader(http.StatusNoContent)
	})
	secrets := []string{secret(1, 32), secret(99, 24)}
	n := notifier(t, hitl.WebhookConfig{URL: s.URL + "/hook?team=7", Secrets: secrets, Gateway: "gw"})
	before := time.Now().Unix()
	if err := n.Notify(t.Context(), escalation()); err != nil {
		t.Fatal(err)
	}
	m := <-arrived
	const want = `{"type":"escalation.opened","timestamp":"2026-11-20T10:00:00Z","data":{"id":"01234567-89ab-8def-8123-456789abcdef",` +
		`"gateway":"gw","level":2,"level_name":"approval","cause":"irreversible_rollback","summary":"Ä mail \u0026 more.","workflow":"w",` +
		`"links":{"checkpoint":"k","rollback":"r"}}}`
	if string(m.body) != want {
		t.Errorf("got  %s\nwant %s", m.body, want)
	}
	h := m.request.Header
	if m.request.Method != "POST" || m.request.URL.String() != "/hook?team=7" || h.Get("Content-Type") != "application/json" {
		t.Errorf("%s %s %v", m.request.Method, m.request.URL, h)
	}
	id, timestamp := h.Get("webhook-id"), h.Get("webhook-timestamp")
	at, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil || at < before || at > time.Now().Unix() || id != escalation().ID {
		t.Errorf("id %q, timestamp %q", id, timestamp)
	}
	var signatures []string
	for _, s := range secrets {
		signatures = append(signatures, expected(t, s, id, timestamp, m.body))
	}
	if got := strings.Fields(h.Get("webhook-signature")); !slices.Equal(got, signatures) {
		t.Errorf("signatures %v instead of %v", got, signatures)
	}
}

// The body is the same in every attempt, so that a receiver may compare.
func TestBodyStaysTheSame(t *testing.T) {
	bodies := make(chan string, 2)
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies <- string(body)
	})
	n := notifier(t, hitl.WebhookConfig{URL: s.URL})
	e := escalation()
	for range 2 {
		if err := n.Notify(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		e.Attempts, e.LastError, e.NextAttempt = 7, "x", time.Now()
	}
	if a, b := <-bodies, <-bodies; a != b {
		t.Errorf("%s\n%s", a, b)
	}
}

func TestWhatAnswersMean(t *testing.T) {
	var status int
	var after string
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if after != "" {
			w.Header().Set("Retry-After", after)
		}
		w.WriteHeader(status)
		fmt.Fprint(w, strings.Repeat("x", 100))
	})
	n := notifier(t, hitl.WebhookConfig{URL: s.URL})
	for _, c := range []struct {
		status  int
		after   string
		ok      bool
		refused bool
		later   time.Duration
	}{
		{status: 200, ok: true}, {status: 202, ok: true}, {status: 299, ok: true, after: "7"},
		{status: 410, refused: true},
		{status: 429, after: "7", later: 7 * time.Second}, {status: 503, after: "8", later: 8 * time.Second},
		{status: 429}, {status: 503, after: "soon"}, {status: 500, after: "7"},
		{status: 300}, {status: 400}, {status: 401}, {status: 404}, {status: 502}, {status: 504},
	} {
		status, after = c.status, c.after
		err := n.Notify(t.Context(), escalation())
		if (err == nil) != c.ok || errors.Is(err, hitl.ErrRefused) != c.refused {
			t.Errorf("%d: %v", c.status, err)
		}
		var later *hitl.LaterError
		if errors.As(err, &later) != (c.later > 0) || later != nil && later.After != c.later {
			t.Errorf("%d with Retry-After %q: %+v", c.status, c.after, later)
		}
		if err != nil && !strings.Contains(err.Error(), strconv.Itoa(c.status)) {
			t.Errorf("%d: %v", c.status, err)
		}
	}
}

// A redirect is not followed, not even to where the message came from.
func TestRedirectIsNotFollowed(t *testing.T) {
	reached := make(chan string, 9)
	other := serve(t, func(_ http.ResponseWriter, r *http.Request) { reached <- r.Method })
	for _, status := range []int{301, 302, 303, 307, 308} {
		s := serve(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, other.URL, status) })
		err := notifier(t, hitl.WebhookConfig{URL: s.URL}).Notify(t.Context(), escalation())
		if err == nil || errors.Is(err, hitl.ErrRefused) || !strings.Contains(err.Error(), "redirects are not followed") {
			t.Errorf("%d: %v", status, err)
		}
	}
	if len(reached) > 0 {
		t.Errorf("a redirect was followed by %s", <-reached)
	}
}

// A receiver that never answers costs an attempt its time-out, or what the dispatcher gives it.
func TestSlowReceiverTimesOut(t *testing.T) {
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		<-r.Context().Done()
	})
	err := notifier(t, hitl.WebhookConfig{URL: s.URL, Timeout: 50 * time.Millisecond}).Notify(t.Context(), escalation())
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the own time-out: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := notifier(t, hitl.WebhookConfig{URL: s.URL}).Notify(ctx, escalation()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the dispatcher's: %v", err)
	}
}

// The status decides; an answer without an end is not read to it.
func TestEndlessAnswerIsCut(t *testing.T) {
	const enough = 64 << 20 // more than all buffers on the way hold
	sent := make(chan int, 1)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		n := 0
		for n < enough {
			m, err := w.Write(make([]byte, 1<<16))
			n += m
			if err != nil {
				break
			}
		}
		sent <- n
	})
	if err := notifier(t, hitl.WebhookConfig{URL: s.URL, Timeout: time.Minute}).Notify(t.Context(), escalation()); err != nil {
		t.Fatal(err)
	}
	if n := <-sent; n >= enough {
		t.Errorf("all %d bytes were read", n)
	}
}

func TestHugeHeaderIsRefused(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) })
	if err := notifier(t, hitl.WebhookConfig{URL: s.URL}).Notify(t.Context(), escalation()); err == nil {
		t.Error("taken")
	}
}

func TestReceiverIsAuthenticated(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(s.Close)
	s.Config.ErrorLog = nil
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	if err := notifier(t, hitl.WebhookConfig{URL: s.URL, Roots: roots}).Notify(t.Context(), escalation()); err != nil {
		t.Error(err)
	}
	var unknown x509.UnknownAuthorityError
	if err := notifier(t, hitl.WebhookConfig{URL: s.URL}).Notify(t.Context(), escalation()); !errors.As(err, &unknown) {
		t.Errorf("with an unknown authority: %v", err)
	}
}

// P8: errors are recorded and logged, and show neither a secret nor the URL's path.
func TestP8ErrorsShowNoSecrets(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	gone := httptest.NewServer(nil)
	gone.Close()
	for _, base := range []string{s.URL, gone.URL} {
		err := notifier(t, hitl.WebhookConfig{URL: base + "/hush?token=hush"}).Notify(t.Context(), escalation())
		if err == nil || strings.Contains(err.Error(), "hush") || strings.Contains(err.Error(), "whsec") {
			t.Error(err)
		}
		if host := strings.TrimPrefix(base, "http://"); err != nil && !strings.Contains(err.Error(), host) {
			t.Errorf("%v does not name %s", err, host)
		}
	}
}
