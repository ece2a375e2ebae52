package hitl_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// genuine is what a receiver does before it believes a message: a signature fits, and it
// is fresh. It then looks whether it has seen the webhook-id before.
func genuine(h http.Header, body []byte, secret string, now time.Time) bool {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		return false
	}
	sent, err := strconv.ParseInt(h.Get("webhook-timestamp"), 10, 64)
	if err != nil || now.Sub(time.Unix(sent, 0)).Abs() > 5*time.Minute {
		return false
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", h.Get("webhook-id"), h.Get("webhook-timestamp"), body)
	for _, signature := range strings.Fields(h.Get("webhook-signature")) {
		version, text, _ := strings.Cut(signature, ",")
		given, err := base64.StdEncoding.DecodeString(text)
		if version == "v1" && err == nil && hmac.Equal(given, mac.Sum(nil)) {
			return true
		}
	}
	return false
}

// An escalation goes from where it is opened to a receiver that checks it.
func Example() {
	const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		if err != nil || !genuine(r.Header, body, secret, time.Now()) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		var message struct {
			Type string
			Data struct{ Cause, Summary string }
		}
		_ = json.Unmarshal(body, &message)
		fmt.Println(message.Type, message.Data.Cause)
		fmt.Println(message.Data.Summary)
	}))
	defer receiver.Close()

	notifier, err := hitl.NewWebhook(hitl.WebhookConfig{URL: receiver.URL, Secrets: []string{secret}})
	if err != nil {
		panic(err)
	}
	defer notifier.Close()
	ctx, stop := context.WithCancel(context.Background())
	escalations := hitl.NewStore(memory.New(memory.Options{}), seal.Generate())
	_, err = escalations.Open(ctx, hitl.Opening{
		Key: "rollback-1/checkpoint-7", Level: hitl.Approval, Cause: hitl.CauseIrreversible,
		Summary: "The mail of checkpoint-7 cannot be unsent.",
	})
	if err != nil {
		panic(err)
	}
	escalations.Deliver(ctx, hitl.Delivery{Notify: notifier.Notify, OnAttempt: func(e hitl.Escalation, _ error) {
		fmt.Println(e.State)
		stop()
	}})
	// Output:
	// escalation.opened irreversible_rollback
	// The mail of checkpoint-7 cannot be unsent.
	// notified
}
