package webhook_test

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl/webhook"
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
		config webhook.Config
		want   string // in the error; empty for none
	}{
		"https":             {webhook.Config{URL: "https://example.com/hook?team=7", Secrets: good}, ""},
		"localhost":         {webhook.Config{URL: "http://localhost:8080/", Secrets: good}, ""},
		"127.1.2.3":         {webhook.Config{URL: "http://127.1.2.3", Secrets: good}, ""},
		"::1":               {webhook.Config{URL: "http://[::1]:80", Secrets: good}, ""},
		"shortest, longest": {webhook.Config{URL: "https://example.com", Secrets: []string{secret(1, 24), secret(1, 64)}}, ""},
		"plain http":        {webhook.Config{URL: "http://example.com/hook", Secrets: good}, "use https"},
		"looks local":       {webhook.Config{URL: "http://localhost.example.com", Secrets: good}, "use https"},
		"looks like ::1":    {webhook.Config{URL: "http://127.0.0.1.example.com", Secrets: good}, "use https"},
		"no url":            {webhook.Config{Secrets: good}, "no host"},
		"path":              {webhook.Config{URL: "/hook", Secrets: good}, "no host"},
		"ftp":               {webhook.Config{URL: "ftp://example.com", Secrets: good}, `scheme is "ftp"`},
		"unreadable":        {webhook.Config{URL: "https://a b/", Secrets: good}, "cannot be read"},
		"user":              {webhook.Config{URL: "https://hush:hush@example.com", Secrets: good}, "user or a password"},
		"fragment":          {webhook.Config{URL: "https://example.com/#hush", Secrets: good}, "fragment"},
		"no secret":         {webhook.Config{URL: "https://example.com"}, "there are 0"},
		"nine secrets":      {webhook.Config{URL: "https://example.com", Secrets: make([]string, 9)}, "there are 9"},
		"no prefix":         {webhook.Config{URL: "https://example.com", Secrets: []string{good[0], "hushhushhushhushhush"}}, "secret 2 of 2: it does not begin with whsec_"},
		"not base64":        {webhook.Config{URL: "https://example.com", Secrets: []string{"whsec_hush!"}}, "not standard base64"},
		"short":             {webhook.Config{URL: "https://example.com", Secrets: []string{secret(1, 23)}}, "it has 23 bytes; 24 to 64"},
		"long":              {webhook.Config{URL: "https://example.com", Secrets: []string{secret(1, 65)}}, "it has 65 bytes"},
		"negative timeout":  {webhook.Config{URL: "https://example.com", Secrets: good, Timeout: -1}, "timeout"},
		"long timeout":      {webhook.Config{URL: "https://example.com", Secrets: good, Timeout: time.Hour}, "up to 1m0s"},
	} {
		err := c.config.Check()
		if _, newErr := webhook.New(c.config); (newErr == nil) != (err == nil) {
			t.Errorf("%s: Check says %v, New %v", name, err, newErr)
		}
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
