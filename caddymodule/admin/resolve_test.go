package admin_test

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// P1: an operator's "applied" makes the given answer the result, byte for byte.
func TestP1ResolveApplied(t *testing.T) {
	binary := "\x00\xff\xfebinary"
	large := strings.Repeat("\x01", 256<<10) // six bytes each in JSON
	quoted, _ := json.Marshal(large)
	for name, c := range map[string]struct{ result, body string }{
		"text":    {`{"status": 201, "header": {"content-type": ["application/json"], "X-Two": ["a", "b"]}, "body": "{\"id\":\"ch_1\"}"}`, `{"id":"ch_1"}`},
		"binary":  {`{"status": 200, "body_base64": "` + base64.StdEncoding.EncodeToString([]byte(binary)) + `"}`, binary},
		"nothing": {`{"status": 204}`, ""},
		"length":  {`{"status": 200, "header": {"Content-Length": ["2"]}, "body": "ok"}`, "ok"},
		"largest": {`{"status": 200, "body": ` + string(quoted) + `}`, large},
	} {
		t.Run(name, func(t *testing.T) {
			r, o := newRig(t)
			key := o.doubt(call{id: "a"})
			w, refused := r.ask("POST", "executions/"+key.Hex()[:16]+"/resolve",
				`{"decision": "applied", "operator": "ada", "reason": "it is there", "result": `+c.result+`}`)
			if refused.HTTPStatus != 0 {
				t.Fatal(refused)
			}
			var x admin.Execution
			if err := json.Unmarshal(w.Body.Bytes(), &x); err != nil {
				t.Fatal(err)
			}
			if x.State != "completed" || x.Detail != "replayable" || len(x.Resolutions) != 1 || !x.Resolutions[0].Applied {
				t.Errorf("%+v", x)
			}
			found, err := o.guard.Look(ctx, key)
			if err != nil {
				t.Fatal(err)
			}
			result, err := o.guard.Result(ctx, key, found.Finding)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(result.Body(ctx))
			if err != nil || string(body) != c.body {
				t.Errorf("replays %d bytes, %v", len(body), err)
			}
			if name == "text" && (result.Head.Status != 201 || result.Head.Header["Content-Type"][0] != "application/json" || len(result.Head.Header["X-Two"]) != 2) {
				t.Errorf("replays %+v", result.Head)
			}
			if len(o.resolved) != 1 || o.resolved[0].Operator != "ada" || !o.resolved[0].Applied {
				t.Errorf("told: %+v", o.resolved)
			}
		})
	}
}

// P1: "not applied" frees the key, and only of what is in doubt; it is decided once.
func TestP1ResolveNotApplied(t *testing.T) {
	const decision = `{"decision": "not_applied", "operator": "ada", "reason": "none"}`
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	r.decide(key, decision)
	var x admin.Execution
	r.get("executions/"+key.Hex()[:16], &x)
	if x.State != admin.StateFree || x.Key != key.Hex() || len(x.Resolutions) != 1 || x.Resolutions[0].Cause != "connection_lost" {
		t.Errorf("%+v", x)
	}
	target := "executions/" + key.Hex() + "/resolve"
	r.refuses("POST", target, decision, http.StatusNotFound, "no such execution")

	_, e := o.claim(call{id: "a"})
	r.refuses("POST", target, decision, http.StatusConflict, "the execution is not in doubt: it is running")
	o.settle(e, guard.Outcome{Verdict: guard.Completed})
	r.refuses("POST", target, decision, http.StatusConflict, "the execution is not in doubt: it is completed")
	r.refuses("POST", "executions/"+strings.Repeat("0", 64)+"/resolve", decision, http.StatusNotFound, "no such execution")
	if len(o.resolved) != 1 {
		t.Errorf("told %d times", len(o.resolved))
	}
}

// A decision that somebody else was faster with is refused, and not told.
func TestResolveLosesARace(t *testing.T) {
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	first := make(chan int)
	for range 8 {
		go func() {
			_, refused := r.ask("POST", "executions/"+key.Hex()+"/resolve", `{"decision": "not_applied", "operator": "ada", "reason": "none"}`)
			first <- refused.HTTPStatus
		}()
	}
	won := 0
	for range 8 {
		select {
		case status := <-first:
			switch status {
			case 0:
				won++
			case http.StatusConflict, http.StatusNotFound:
			default:
				t.Errorf("status %d", status)
			}
		case <-time.After(time.Minute):
			t.Fatal("no answer")
		}
	}
	if won != 1 {
		t.Errorf("decided %d times", won)
	}
}

// Section "Admin API": a decision is taken as it was meant, or not at all.
func TestResolveRefuses(t *testing.T) {
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	target := "executions/" + key.Hex() + "/resolve"
	refuses := func(body string, status int, words string) {
		t.Helper()
		r.refuses("POST", target, body, status, words)
	}
	applied := func(result string) string {
		return `{"decision": "applied", "operator": "ada", "reason": "seen", "result": ` + result + `}`
	}
	large, _ := json.Marshal(strings.Repeat("x", 256<<10+1))
	for body, words := range map[string]string{
		``:     "the request is no decision: EOF",
		`null`: `decision: "" is unknown; use applied or not_applied`,
		`[]`:   "the request is no decision",
		`{"decision": "applied", "operator": "ada", "reason": "x", "forced": true}`:               `unknown field "forced"`,
		`{"decision": "applied", "operator": "ada", "reason": "x"} {}`:                            "something stands behind the decision",
		`{"decision": "maybe", "operator": "ada", "reason": "x"}`:                                 `decision: "maybe" is unknown`,
		`{"decision": "applied", "reason": "x"}`:                                                  "operator: who decides must be named",
		`{"decision": "applied", "operator": "ada"}`:                                              "reason: say what you have found out",
		`{"decision": "applied", "operator": "` + strings.Repeat("a", 257) + `", "reason": "x"}`:  "of at most 256 and 1024 bytes",
		`{"decision": "applied", "operator": "a", "reason": "` + strings.Repeat("a", 1025) + `"}`: "of at most 256 and 1024 bytes",
		"{\"decision\": \"applied\", \"operator\": \"\xff\", \"reason\": \"x\"}":                  "not UTF-8",
		`{"decision": "not_applied", "operator": "a", "reason": "x", "result": {"status": 200}}`:  "what was not applied has none",
		applied(`{}`):                                                                 "status: 0 is no final status; use 200 to 599",
		applied(`{"status": 100}`):                                                    "status: 100 is no final status",
		applied(`{"status": 600}`):                                                    "status: 600 is no final status",
		applied(`{"status": "200"}`):                                                  "the request is no decision",
		applied(`{"status": 200, "headers": {}}`):                                     `unknown field "headers"`,
		applied(`{"status": 204, "body": "x"}`):                                       "an answer with the status 204 has none",
		applied(`{"status": 200, "body": "x", "body_base64": "eA=="}`):                "not both",
		applied(`{"status": 200, "body_base64": "%%"}`):                               "body_base64: illegal base64",
		applied(`{"status": 200, "body": ` + string(large) + `}`):                     "larger than 256 KiB",
		applied(`{"status": 200, "header": {"X Y": ["z"]}}`):                          `"X Y" is no name of a header field`,
		applied(`{"status": 200, "header": {"X": ["a\nb"]}}`):                         "a control character",
		applied(`{"status": 200, "header": {"X": []}}`):                               "X has no values",
		applied(`{"status": 200, "header": {"X": ["1"], "x": ["2"]}}`):                "X stands twice",
		applied(`{"status": 200, "header": {"Content-Length": ["3"]}, "body": "ok"}`): "the body has 2 bytes",
		applied(`{"status": 200, "header": {"Content-Encoding": ["gzip"]}}`):          "give the plain body",
		applied(`{"status": 200, "header": {"Trailer": ["X"]}}`):                      "give the plain body",
		applied(`{"status": 200, "header": {"Transfer-Encoding": ["chunked"]}}`):      "Transfer-Encoding is never replayed",
		applied(`{"status": 200, "header": {"Connection": ["close"]}}`):               "Connection is never replayed",
		applied(`{"status": 200, "header": {"set-cookie": ["a=b"]}}`):                 "Set-Cookie is never replayed",
		applied(`{"status": 200, "header": {"Execution-Status": ["executed"]}}`):      "Execution-Status is never replayed",
	} {
		refuses(body, http.StatusBadRequest, words)
	}
	refuses(`"`+strings.Repeat("x", 2<<20)+`"`, http.StatusRequestEntityTooLarge, "more than 2097152 bytes")
	r.refuses("POST", target+"?force=1", `{}`, http.StatusBadRequest, `"force" is no parameter`)
	if found, err := o.guard.Look(ctx, key); err != nil || found.Standing != guard.Doubtful || len(o.resolved) != 0 {
		t.Errorf("P1: something was decided: %+v, %v", found, err)
	}
}
