package circuits_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

func parse(text string) (circuits.Settings, error) {
	var s circuits.Settings
	return s, s.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
}

// Every option of the block, as JSON.
func TestCaddyfile(t *testing.T) {
	s, err := parse(`breaker {
		verify_probe
		window 30s
		threshold 40%
		min_volume 20
		consecutive 5
		slow 2s 80%
		patience 90s
		cooldown 10s 2m
		jitter 10%
		workflow_threshold 5%
		by_operation
		probe_prefer off
		probe_timeout 20s
		mode observe
		failure 5xx 408
		in_band json /error/type overloaded*
		in_band header X-Failed
		in_band sse_error
		downstream localhost:9001 spiffe://example.com/a
		downstream unix//run/b.sock spiffe://example.com/b
	}`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"window":30000000000,"threshold":0.4,"min_volume":20,"consecutive":5,"slow_call":2000000000,` +
		`"slow_threshold":0.8,"patience":90000000000,"cooldown":10000000000,"max_cooldown":120000000000,"jitter":0.1,` +
		`"workflow_threshold":0.05,"by_operation":true,"probe_prefer":-1,"probe_timeout":20000000000,"mode":"observe","failure_status":[5,408],` +
		`"in_band":[{"json":"/error/type","value":"overloaded*"},{"header":"X-Failed"},{"sse_error":true}],` +
		`"downstream":{"localhost:9001":"spiffe://example.com/a","unix//run/b.sock":"spiffe://example.com/b"},"verify_probe":true}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if s, err := parse("breaker {\nworkflow_threshold off\n}"); err != nil || s.WorkflowThreshold != -1 {
		t.Errorf("workflow_threshold off: %+v, %v", s, err)
	}
	if s, err := parse("breaker off"); err != nil || !s.Off {
		t.Errorf("off: %+v, %v", s, err)
	}
}

// An error names the option, what is wrong, what would be right, and the line.
func TestCaddyfileErrors(t *testing.T) {
	for line, want := range map[string]string{
		"window 0s":                              `breaker: window: "0s" is no positive duration (like 500ms, 30s or 5m), at Testfile:2`,
		"window 2h":                              "breaker: window is 2h0m0s; it has to be from 1s to 1h, at Testfile:2",
		"threshold 50":                           `breaker: threshold: "50" is no share (like 50%) above 0% and below 100%`,
		"threshold 100%":                         `"100%" is no share`,
		"min_volume none":                        `breaker: min_volume: "none" is no count (like 10); it must be at least 1`,
		"slow 1s 2s 3s":                          "breaker: slow: wrong number of arguments; the syntax is `slow <duration> [<percent>]`",
		"cooldown 30s 10s":                       "breaker: cooldown (longest) is 10s; it has to be no shorter than cooldown, at most 24h",
		"cooldown 25h":                           `"25h" is too long; it must be at most 24h`,
		"jitter 60%":                             "breaker: jitter is 0.6; it has to be from 0 to 0.5",
		"workflow_threshold none":                `breaker: workflow_threshold: "none" is no share (like 50%) above 0% and below 100%`,
		"workflow_threshold":                     "breaker: workflow_threshold: wrong number of arguments; the syntax is `workflow_threshold off|<percent>`",
		"mode open":                              `breaker: mode: "open" is unknown; use auto, observe, forced_open or forced_closed`,
		"failure 5x":                             `"5x" is no final status; use 200 to 599, or a class from 2xx to 5xx`,
		"failure 199":                            "failure: 199 is no final status; use 200 to 599, or a class from 2 to 5",
		"in_band json error":                     `breaker: in_band: json "error"`,
		"in_band header no:field":                `"no:field" is no name of a header field`,
		"in_band sse_error x":                    "use json <pointer> [<value>], header <field> [<value>] or sse_error",
		"downstream a:1 no-uri":                  "breaker: downstream a:1: ",
		"downstream a:1 u:a\ndownstream a:1 u:b": "breaker: downstream: a:1 is named twice, at Testfile:3",
		"jitter 1%\njitter 2%":                   "breaker: jitter stands twice, at Testfile:3",
		"verify_probe":                           "breaker: verify_probe: there is no identity to hold answers to; name the upstreams' with downstream, at Testfile:3",
		"verify_probe no":                        "the syntax is `verify_probe`",
		"by_operation yes":                       "the syntax is `by_operation`",
		"treshold 50%":                           `breaker has no option "treshold"; it has by_operation, consecutive,`,
	} {
		_, err := parse("breaker {\n" + line + "\n}")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\nwant %s", line, err, want)
		}
	}
	for _, text := range []string{"breaker on", "breaker off off", "breaker off {\nwindow 1s\n}"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

// JSON is held to what the Caddyfile is.
func TestValidate(t *testing.T) {
	for want, s := range map[string]circuits.Settings{
		"":                        {},
		"window: -1s is negative": {Window: caddy.Duration(-time.Second)},
		"mode: unknown(9)":        {Mode: 9},
		"workflow_threshold is 1; it has to be above 0 and below 1, or negative to heed no workflow": {WorkflowThreshold: 1},
		"threshold is 1.5":               {Threshold: 1.5},
		"failure: 700":                   {FailureStatus: []int{700}},
		"a rule names 2 places":          {InBand: []circuits.InBand{{JSON: "/a", SSEError: true}}},
		"a rule names 0 places":          {InBand: []circuits.InBand{{Value: "x"}}},
		"sse_error takes no value":       {InBand: []circuits.InBand{{Value: "x", SSEError: true}}},
		"downstream: ":                   {Downstream: map[string]string{"host:x": "spiffe://example.com/a"}},
		"verify_probe: there is no ":     {VerifyProbe: true},
		"downstream a:1: \"\" is no URI": {Downstream: map[string]string{"a:1": ""}},
	} {
		err := s.Validate()
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Which answers failed, by status, header and body.
func TestFaults(t *testing.T) {
	c := open(t, circuits.Settings{FailureStatus: []int{5, 408}, InBand: []circuits.InBand{
		{Header: "X-Status", Value: "fail*"}, {Header: "X-Broken"},
		{JSON: "/error"}, {JSON: "/state", Value: "*down"}, {JSON: "/code", Value: "*9*"},
	}}, nil, true)
	for status, want := range map[int]bool{200: false, 404: false, 408: true, 409: false, 500: true, 503: true} {
		if c.Failed(status) != want {
			t.Errorf("%d: failed is %v", status, !want)
		}
	}
	for value, want := range map[string]string{"failed": "header X-Status", "ok": "", "unfailed": ""} {
		if got := c.HeaderFault(http.Header{"X-Status": {"fine", value}}); got != want {
			t.Errorf("X-Status %s: %q", value, got)
		}
	}
	if got := c.HeaderFault(http.Header{"X-Broken": {""}}); got != "header X-Broken" {
		t.Errorf("X-Broken: %q", got)
	}
	for body, want := range map[string]string{
		`{"error":{"type":"overloaded"}}`: "json /error", `{"error":true}`: "json /error", `{"error":"x"}`: "json /error",
		`{"error":null}`: "", `{"state":"shut down"}`: "json /state", `{"state":"down, up"}`: "",
		`{"code":194}`: "json /code", `{"code":18}`: "", `{"error":`: "", ``: "",
	} {
		if got := c.BodyFault([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	if json, events := c.LooksInto(); !json || events {
		t.Errorf("looks into JSON %v, into events %v", json, events)
	}
}

func open(t *testing.T, s circuits.Settings, upstreams []string, more bool) *circuits.Circuits {
	t.Helper()
	c, err := circuits.Open(s, upstreams, more)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// trip opens a breaker.
func trip(t *testing.T, b *breaker.Breaker) {
	t.Helper()
	for range 10 {
		p, err := b.Acquire(breaker.Op{})
		if err != nil {
			t.Fatal(err)
		}
		p.Done(breaker.Outcome{Class: breaker.Failure, Cause: "connection refused"})
	}
	if b.Refusal() == nil {
		t.Fatal("ten failures did not open the breaker")
	}
}
