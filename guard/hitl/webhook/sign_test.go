package webhook

import (
	"net/http"
	"testing"
	"time"
)

// The vector that implementations of the Standard Webhooks specification share.
func TestStandardWebhooksVector(t *testing.T) {
	key, err := parseSecret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	if err != nil {
		t.Fatal(err)
	}
	got := sign([][]byte{key}, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`))
	if want := "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="; got != want {
		t.Errorf("%s instead of %s", got, want)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"": 0, "0": 0, "-1": 0, "1.5": 0, "soon": 0, "7": 7 * time.Second,
		"18446744073709551615": 24 * time.Hour, "99999999999999999999": 0,
		now.Add(time.Minute).Format(http.TimeFormat):      time.Minute,
		now.Add(-time.Minute).Format(http.TimeFormat):     0,
		now.Add(1000 * time.Hour).Format(http.TimeFormat): 24 * time.Hour,
	} {
		if got := retryAfter(value, now); got != want {
			t.Errorf("%q: %s instead of %s", value, got, want)
		}
	}
}

func FuzzRetryAfter(f *testing.F) {
	f.Add("7")
	f.Add("Fri, 20 Nov 2026 10:00:00 GMT")
	f.Fuzz(func(t *testing.T, value string) {
		if got := retryAfter(value, time.Unix(1_800_000_000, 0)); got < 0 || got > 24*time.Hour {
			t.Errorf("%q: %s", value, got)
		}
	})
}
