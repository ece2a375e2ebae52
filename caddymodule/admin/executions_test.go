package admin_test

import (
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Section "Admin API": every filter, alone and together.
func TestListFilters(t *testing.T) {
	r, o := newRig(t)
	// One a minute, the first at two o'clock.
	minute := func(f func()) {
		f()
		r.now = r.now.Add(time.Minute)
	}
	minute(func() { o.doubt(call{id: "0", workflow: "w-1"}) })
	minute(func() {
		_, e := o.claim(call{id: "1", action: "refund", guard: "other"})
		o.settle(e, guard.Outcome{Verdict: guard.Completed})
	})
	minute(func() { o.claim(call{id: "2", caller: "user:bob", method: "PUT"}) })
	minute(func() { o.doubt(call{id: "3", caller: "user:bob", action: "refund", workflow: "w-1"}) })
	bob := o.guard.Caller("user:bob")
	for query, want := range map[string]string{
		"":                                      "3210",
		"state=in_doubt":                        "30",
		"state=in_doubt,running":                "320",
		"state=in_doubt&state=completed":        "310",
		"guard=other":                           "1",
		"action=refund":                         "31",
		"method=PUT":                            "2",
		"caller=" + hex.EncodeToString(bob[:]):  "32",
		"workflow=w-1":                          "30",
		"min_age=2m":                            "10",
		"max_age=3m":                            "321",
		"min_age=2m&max_age=3m":                 "1",
		"min_age=1h":                            "",
		"max_age=2d":                            "3210",
		"from=2026-11-20T14:02:00Z":             "32",
		"to=2026-11-20T14:02:00Z":               "10",
		"to=2026-11-20T16:02:00%2B02:00":        "10",
		"from=2026-11-20T14:01:00Z&max_age=90s": "3",
		"to=2026-11-20T14:03:00Z&min_age=3m":    "0",
		"workflow=w-1&action=refund&state=in_doubt&method=PUT": "",
		"workflow=w-1&action=refund&state=in_doubt":            "3",
	} {
		var page admin.Page
		r.get("executions?"+query, &page)
		var got strings.Builder
		for _, x := range page.Executions {
			got.WriteString(x.ExecutionID)
		}
		if got.String() != want || page.Next != "" || page.Executions == nil {
			t.Errorf("%s: %q, want %q; next %q", query, got.String(), want, page.Next)
		}
	}
}

// Section "Admin API": what is misspelled is not a filter that all pass.
func TestListRefuses(t *testing.T) {
	r, _ := newRig(t)
	for query, words := range map[string]string{
		"states=in_doubt":                   `"states" is no parameter here`,
		"state=doubtful":                    `"doubtful" is no state; use claimed, running`,
		"action=a&action=b":                 "action: it stands 2 times",
		"caller=abcd":                       "no caller's hash; a listing shows it, with 32 digits",
		"caller=" + strings.Repeat("z", 32): "no caller's hash",
		"min_age=soon":                      `min_age: "soon" is no duration; write one like 10m, 4h or 2d`,
		"max_age=-3m":                       "max_age: -3m is negative",
		"from=yesterday":                    `from: "yesterday" is no time; write one like`,
		"limit=0":                           `limit: "0" is not from 1 to 1000`,
		"limit=1001":                        `limit: "1001" is not from 1 to 1000`,
		"limit=many":                        `limit: "many" is not from 1 to 1000`,
		"after=here":                        "not where a page begins",
		"state=in_doubt&x=%zz":              "query: invalid URL escape",
		"store=a&store=b":                   "not open",
		"store=&store=":                     "store: it stands 2 times",
	} {
		status := http.StatusBadRequest
		if words == "not open" {
			status = http.StatusNotFound
		}
		r.refuses("GET", "executions?"+query, "", status, words)
	}
	r.refuses("GET", "executions/abcd?state=in_doubt", "", http.StatusBadRequest, `"state" is no parameter here; there are store`)
	r.refuses("GET", "store?limit=1", "", http.StatusBadRequest, `"limit" is no parameter`)
}

// Section "Admin API": pages are as large as was asked, and follow each other.
func TestListPages(t *testing.T) {
	r, o := newRig(t)
	var want []string
	for i := range 120 {
		want = append(want, o.doubt(call{id: fmt.Sprint(i)}).Hex())
		r.now = r.now.Add(time.Second)
	}
	slices.Reverse(want)
	for limit, first := range map[string]int{"": 50, "7": 7, "120": 120, "1000": 120} {
		var got []string
		query := url.Values{}
		if limit != "" {
			query.Set("limit", limit)
		}
		for {
			var page admin.Page
			r.get("executions?"+query.Encode(), &page)
			if got == nil && len(page.Executions) != first {
				t.Errorf("limit %q: %d executions on the first page", limit, len(page.Executions))
			}
			for _, x := range page.Executions {
				got = append(got, x.Key)
			}
			if page.Next == "" {
				break
			}
			query.Set("after", page.Next)
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %q: %d executions, want %d in their order", limit, len(got), len(want))
		}
	}
}

// Section "Admin API": what is shown of an execution in each state, to the letter.
// P8: neither body nor answer nor credential is in it.
func TestGoldenShow(t *testing.T) {
	r, o := newRig(t)
	keys := map[string]string{}
	name := func(state string, key guard.Key) { keys[state] = key.Hex() }
	key, _ := o.claim(call{id: "run", workflow: "w-1"})
	name("running", key)
	key, e := o.claim(call{id: "done"})
	name("completed", key)
	r.now = r.now.Add(90 * time.Second)
	o.settle(e, guard.Outcome{Verdict: guard.Completed})
	name("in_doubt", o.doubt(call{id: "lost"}))
	free := o.doubt(call{id: "freed"})
	name("free", free)
	r.decide(free, `{"decision": "not_applied", "operator": "ada", "reason": "no such charge"}`)
	applied := o.doubt(call{id: "applied"})
	name("applied", applied)
	r.decide(applied, `{"decision": "applied", "operator": "ada", "reason": "found ch_1"}`)
	var got strings.Builder
	for _, state := range []string{"running", "completed", "in_doubt", "free", "applied"} {
		w, refused := r.ask("GET", "executions/"+keys[state], "")
		if refused.HTTPStatus != 0 {
			t.Fatalf("%s: %v", state, refused)
		}
		fmt.Fprintf(&got, "%s: %s", state, w.Body)
		short, refused := r.ask("GET", "executions/"+keys[state][:16], "")
		if refused.HTTPStatus != 0 || short.Body.String() == "" {
			t.Errorf("%s by its first digits: %v", state, refused)
		}
	}
	text := regexp.MustCompile(`[0-9a-f]{32,64}`).ReplaceAllString(got.String(), "HEX")
	text = regexp.MustCompile(`"size":[1-9]\d+`).ReplaceAllString(text, `"size":N`) // as it is encoded
	golden(t, "testdata/show.golden", text)
	// The result's time is over, then the key's.
	var x admin.Execution
	r.now = r.now.Add(2 * time.Hour)
	if r.get("executions/"+keys["completed"], &x); x.Detail != "result_expired" || x.Result.Replayable || x.Age != 7290 {
		t.Errorf("%+v", x)
	}
	r.now = r.now.Add(48 * time.Hour)
	r.refuses("GET", "executions/"+keys["completed"], "", http.StatusNotFound, "no such execution")
}

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file.
func golden(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("got:\n%s\nwant:\n%s", text, want)
	}
}

// decide resolves key, which must be possible.
func (r *rig) decide(key guard.Key, decision string) {
	r.t.Helper()
	if _, refused := r.ask("POST", "executions/"+key.Hex()+"/resolve", decision); refused.HTTPStatus != 0 {
		r.t.Fatalf("%s: %d %v", decision, refused.HTTPStatus, refused)
	}
}

// Section "Admin API": names that mean no execution, or more than one.
func TestShowRefuses(t *testing.T) {
	r, o := newRig(t)
	seen := map[string]bool{}
	twice := ""
	for i := 0; twice == ""; i++ {
		prefix := o.doubt(call{id: fmt.Sprint(i)}).Hex()[:4]
		if seen[prefix] {
			twice = prefix
		}
		seen[prefix] = true
	}
	r.refuses("GET", "executions/"+twice, "", http.StatusBadRequest, "more than one execution's key begins like this")
	r.refuses("POST", "executions/"+twice+"/resolve", `{"decision":"applied","operator":"a","reason":"b"}`, http.StatusBadRequest, "more than one")
	r.refuses("GET", "executions/abc", "", http.StatusNotFound, "nor a whole checkpoint or execution id")
	r.refuses("GET", "executions/nonsense", "", http.StatusNotFound, "no such execution")
	r.refuses("GET", "executions/"+strings.Repeat("0", 64), "", http.StatusNotFound, "no such execution")
}

// Nothing goes on for those who have left.
func TestLeavingEndsTheWork(t *testing.T) {
	r, o := newRig(t)
	o.doubt(call{id: "a"})
	gone, leave := context.WithCancel(ctx)
	leave()
	for _, target := range []string{"executions", "executions/abcd", "store"} {
		req := httptest.NewRequest("GET", "/agent_guard/"+target, nil).WithContext(gone)
		if err := r.api.ServeHTTP(httptest.NewRecorder(), req); err == nil {
			t.Errorf("%s was answered", target)
		}
	}
}
