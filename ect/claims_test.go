package ect_test

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// judge verifies the example with other claims.
func judge(t *testing.T, change func(*ect.Policy)) func(claims map[string]any) (*ect.Token, error) {
	t.Helper()
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), change)
	return func(claims map[string]any) (*ect.Token, error) {
		t.Helper()
		return v.Verify(t.Context(), a.send(t, a.header(), claims), ect.Presentation{Now: at})
	}
}

// TestRequiredClaims: what is missing or has the wrong type is refused.
func TestRequiredClaims(t *testing.T) {
	verify := judge(t, nil)
	for _, c := range []struct {
		claim string
		wrong []any
		want  ect.Code
	}{
		{"jti", []any{nil, "", 7, []string{taskID}, true}, ect.CodeID},
		{"exec_act", []any{nil, "", 7, "a\nb", "a\x00", "a\u0085b", "a\u2028b", strings.Repeat("a", 257)}, ect.CodeAction},
		{"par", []any{nil, taskID, 7, []any{7}, []any{nil}, map[string]any{}, []string{""}}, ect.CodeParents},
		{"wid", []any{"", 7, []string{workflow}}, ect.CodeWorkflow},
		{"ext", []any{"x", 7, []any{}, true}, ect.CodeExt},
	} {
		for _, wrong := range c.wrong {
			_, err := verify(with(map[string]any{c.claim: wrong}))
			if t.Run(c.claim, func(t *testing.T) { wantCode(t, err, c.want) }); t.Failed() {
				t.Errorf("%s was %v", c.claim, wrong)
			}
		}
	}
	for _, right := range []map[string]any{
		{"exec_act": strings.Repeat("a", 256)}, {"exec_act": "prüfe die Spezifikation"}, {"wid": nil},
		{"inp_hash": nil, "out_hash": nil}, {"sub": "ignored", "tid": 1, "pol": "x", "target": map[string]any{"a": []int{1}}},
	} {
		_, err := verify(with(right))
		wantCode(t, err, "")
	}
}

// TestSpellings: either is read; both must be equal.
func TestSpellings(t *testing.T) {
	verify := judge(t, nil)
	one, two := []string{id(1)}, []string{id(2)}
	for _, c := range []struct {
		changes map[string]any
		want    ect.Code
	}{
		{map[string]any{"par": one}, ""},
		{map[string]any{"par": nil, "pred": one}, ""},
		{map[string]any{"par": one, "pred": one}, ""},
		{map[string]any{"par": one, "pred": []string{strings.ToUpper(id(1))}}, ""},
		{map[string]any{"par": one, "pred": two}, ect.CodeParents},
		{map[string]any{"par": one, "pred": []string{}}, ect.CodeParents},
		{map[string]any{"par": one, "pred": "x"}, ect.CodeParents},
		{map[string]any{"ext": map[string]any{"a": 1}}, ""},
		{map[string]any{"ect_ext": map[string]any{"a": 1}}, ""},
		{map[string]any{"ext": map[string]any{"a": 1}, "ect_ext": map[string]any{"a": 1}}, ""},
		{map[string]any{"ext": map[string]any{"a": 1}, "ect_ext": map[string]any{"a": 2}}, ect.CodeExt},
		{map[string]any{"ext": map[string]any{"a": 1}, "ect_ext": map[string]any{}}, ect.CodeExt},
	} {
		token, err := verify(with(c.changes))
		wantCode(t, err, c.want)
		if err != nil {
			continue
		}
		if (c.changes["par"] != nil || c.changes["pred"] != nil) && token.Parents()[0] != id(1) {
			t.Errorf("parents %v", token.Parents())
		}
		if n, ok := token.Ext().Int("a"); (c.changes["ext"] != nil || c.changes["ect_ext"] != nil) && (!ok || n != 1) {
			t.Errorf("extensions %s", token.Ext().JSON())
		}
	}
}

// TestIDs: UUIDs in any case, never nil or max; other ids where that is allowed.
func TestIDs(t *testing.T) {
	strict, open := judge(t, nil), judge(t, func(p *ect.Policy) { p.AnyID = true })
	for _, wrong := range []string{
		"task-001", "550e8400e29b41d4a716446655440000", "{" + taskID + "}", "urn:uuid:" + taskID, taskID + " ",
		"550e8400-e29b-41d4-a716-44665544000g", "550e8400-e29b-41d4-a716_446655440000",
	} {
		for claim, code := range map[string]ect.Code{"jti": ect.CodeID, "wid": ect.CodeWorkflow} {
			_, err := strict(with(map[string]any{claim: wrong}))
			wantCode(t, err, code)
			if !strings.Contains(wrong, " ") {
				_, err = open(with(map[string]any{claim: wrong}))
				wantCode(t, err, "")
			}
		}
		_, err := strict(with(map[string]any{"par": []string{wrong}}))
		wantCode(t, err, ect.CodeParents)
	}
	for _, never := range []string{"00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-FFFF-ffff-ffffffffffff"} {
		_, err := strict(with(map[string]any{"jti": never}))
		wantCode(t, err, ect.CodeID)
	}
	token, err := strict(with(map[string]any{
		"jti": strings.ToUpper(taskID), "wid": strings.ToUpper(workflow), "par": []string{strings.ToUpper(id(10))},
	}))
	if err != nil || token.ID() != taskID || token.Workflow() != workflow || token.Parents()[0] != id(10) {
		t.Errorf("%v, %v", token, err)
	}
	// The chain of the reference implementation has ids of its own.
	token, err = open(with(map[string]any{"jti": "task-002", "par": []string{"task-001"}}))
	if err != nil || token.ID() != "task-002" || token.Parents()[0] != "task-001" {
		t.Errorf("%v, %v", token, err)
	}
}

// TestHashes: 43 characters of base64url, and the forms of the figures of the drafts
// that use the tokens: cascade Figure 8 and ATD "Checkpoint ECT Format".
func TestHashes(t *testing.T) {
	verify := judge(t, nil)
	const good = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
	const emptyHex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for _, c := range []struct {
		value any
		ok    bool
	}{
		{good, true}, {good + "=", false}, {"sha-256:" + good, false}, {"sha256:" + good, true}, {"sha256-" + good, true},
		{emptyHex, true}, {"sha256:" + strings.ToUpper(emptyHex), true}, {"sha256-" + emptyHex, true}, {emptyHex[1:] + "g", false},
		{"sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=", true}, {"sha256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=", false},
		{"sha256:sha256:" + good, false}, {"SHA256:" + good, false}, {"sha256:", false}, {"sha256-of-agent-state-snapshot", false},
		{"sha256-" + good[1:], false}, {"sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFV=", false},
		{"47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU", false}, {good[1:], false}, {good + "A", false},
		{strings.Repeat("A", 42) + "B", false}, {"", false}, {7, false}, {"\n" + good[1:], false},
	} {
		for claim, code := range map[string]ect.Code{"inp_hash": ect.CodeInputHash, "out_hash": ect.CodeOutputHash} {
			token, err := verify(with(map[string]any{claim: c.value}))
			if c.ok {
				code = ""
			}
			if err == nil && (claim == "inp_hash" && token.InputHash() != ect.Sum(nil) || claim == "out_hash" && token.OutputHash() != ect.Sum(nil)) {
				t.Errorf("%s %v is read as %s and %s", claim, c.value, token.InputHash(), token.OutputHash())
			}
			if t.Run(claim, func(t *testing.T) { wantCode(t, err, code) }); t.Failed() {
				t.Errorf("%s was %v", claim, c.value)
			}
		}
	}
	token := must(verify(figure()))(t)
	wantCode(t, token.CheckInput(ect.Sum([]byte("test"))), "")
	wantCode(t, token.CheckInput(ect.Sum([]byte("tesT"))), ect.CodeInputHash)
	wantCode(t, token.CheckInput(ect.Hash{}), ect.CodeInputHash)
	token = must(verify(with(map[string]any{"inp_hash": nil})))(t)
	wantCode(t, token.CheckInput(ect.Sum(nil)), "")
}

// extOf is a payload with these extensions, byte by byte.
func extOf(ext string) string {
	return fmt.Sprintf(`{"iss":%q,"aud":%q,"iat":%d,"exp":%d,"jti":%q,"exec_act":"a","par":[],"ext":%s}`,
		clinical, gateway, issued, expires, taskID, ext)
}

// TestExtLimits: 4096 octets as received and depth 5 pass, one more of either does not;
// unknown members survive.
func TestExtLimits(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	sized := func(n int) string { return `{"a":"` + strings.Repeat("x", n-len(`{"a":""}`)) + `"}` }
	deep := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	lists := func(n int) string { return `{"a":` + strings.Repeat(`[`, n-1) + strings.Repeat("]", n-1) + "}" }
	for _, c := range []struct {
		ext  string
		want ect.Code
	}{
		{sized(4096), ""}, {sized(4097), ect.CodeExt}, {`{` + strings.Repeat(" ", 4096) + `}`, ect.CodeExt},
		{deep(5), ""}, {deep(6), ect.CodeExt}, {lists(5), ""}, {lists(6), ect.CodeExt}, {deep(100), ect.CodeExt},
		{`{}`, ""}, {`{"a":1,"a":1}`, ect.CodeExt}, {`{"a":{"b":1,"\u0062":2}}`, ect.CodeExt}, {`{"a":01}`, ect.CodeExt},
	} {
		token, err := v.Verify(t.Context(), a.sendJSON(t, a.header(), extOf(c.ext)), ect.Presentation{Now: at})
		wantCode(t, err, c.want)
		if err == nil && token.Ext().JSON() != c.ext {
			t.Errorf("%.40s became %.40s", c.ext, token.Ext().JSON())
		}
	}
	token := must(v.Verify(t.Context(), a.sendJSON(t, a.header(), extOf(`{"com.example.x":{"y":[1]},"é":"\ud83d\ude00"}`)), ect.Presentation{Now: at}))(t)
	if raw, ok := token.Ext().Raw("com.example.x"); !ok || raw != `{"y":[1]}` {
		t.Errorf("got %s", raw)
	}
	if text, ok := token.Ext().Text("é"); !ok || text != "😀" {
		t.Errorf("got %q", text)
	}
}

// TestBothSpellingsOfExt: ext and ect_ext are one claim where they mean the same, and so is a
// member under the names of two vocabularies.
func TestBothSpellingsOfExt(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	both := func(one, two string) string { return extOf(one + `,"ect_ext":` + two) }
	for payload, want := range map[string]ect.Code{
		both(`{"a":1,"b":["x",{"c":null,"d":2}]}`, `{ "b" : ["\u0078",{"d":2.0,"c":null}], "a":1 }`): "",
		both(`{"a":1,"b":2}`, `{"a":2,"b":1}`):                                                       ect.CodeExt,
		both(`{"a":[1,2]}`, `{"a":[2,1]}`):                                                           ect.CodeExt,
		extOf(`{"cascade.ttl":60,"atd.ttl":6e1}`):                                                    "",
		extOf(`{"cascade.ttl":60,"atd.ttl":61}`):                                                     ect.CodeExt,
	} {
		_, err := v.Verify(t.Context(), a.sendJSON(t, a.header(), payload), ect.Presentation{Now: at})
		if t.Run("", func(t *testing.T) { wantCode(t, err, want) }); t.Failed() {
			t.Fatalf("payload %s", payload)
		}
	}
}

// TestAmbiguousJSON: JSON that two readers may understand differently is refused even if it
// is signed.
func TestAmbiguousJSON(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	good := extOf("{}")
	for _, payload := range []string{
		strings.Replace(good, `"par":[]`, `"par":[],"par":[]`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"p\u0061r":[]`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":{"y":1,"y":1}`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":"`+"\xff"+`"`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":"\ud800"`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":"`+"\x01"+`"`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":`+strings.Repeat("[", 40)+strings.Repeat("]", 40), 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":+1`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":1.`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":.1`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],"x":NaN`, 1),
		strings.Replace(good, `"par":[]`, `"par":[],`, 1),
		good + " {}", good + "x", "[" + good + "]", "null", `"x"`, "", good[:len(good)-1], "\ufeff" + good,
	} {
		_, err := v.Verify(t.Context(), a.sendJSON(t, a.header(), payload), ect.Presentation{Now: at})
		if t.Run("", func(t *testing.T) { wantCode(t, err, ect.CodeMalformed) }); t.Failed() {
			t.Fatalf("payload %s", payload)
		}
	}
	for _, payload := range []string{" \t\r\n" + good + "\n", strings.ReplaceAll(good, ",", " ,\n ")} {
		wantCode(t, refusal(t, v, a.sendJSON(t, a.header(), payload)), "")
	}
	wide := `{"x":{`
	for i := range 200 {
		wide += fmt.Sprintf(`"m%d":0,`, i)
	}
	_, err := v.Verify(t.Context(), a.sendJSON(t, a.header(), strings.Replace(good, `{`, wide+`"m17":0},`, 1)), ect.Presentation{Now: at})
	wantCode(t, err, ect.CodeMalformed)
	wantCode(t, refusal(t, v, a.sendJSON(t, a.header(), strings.Replace(good, `{`, wide+`"z":0},`, 1))), "")
}

// TestParentForms: the checks of parents that need no graph.
func TestParentForms(t *testing.T) {
	verify := judge(t, nil)
	many := func(n int) []string {
		list := make([]string, n)
		for i := range list {
			list[i] = id(i + 1)
		}
		return list
	}
	for _, c := range []struct {
		parents []string
		want    ect.Code
	}{
		{many(100), ""}, {many(101), ect.CodeTooManyParents},
		{[]string{id(1), id(2), id(1)}, ect.CodeDuplicateParent},
		{[]string{id(10), strings.ToUpper(id(10))}, ect.CodeDuplicateParent},
		{[]string{taskID}, ect.CodeCycle}, {[]string{strings.ToUpper(taskID)}, ect.CodeCycle},
	} {
		_, err := verify(with(map[string]any{"par": c.parents}))
		wantCode(t, err, c.want)
	}
}

// TestFields: one line, several, joined ones, and the sizes.
func TestFields(t *testing.T) {
	k8, k := strings.Repeat("a", 8<<10), strings.Repeat("a", 1<<10)
	for name, c := range map[string]struct {
		lines []string
		want  []string
		code  ect.Code
	}{
		"none":           {nil, nil, ""},
		"empty":          {[]string{"", " , ,\t"}, nil, ""},
		"one":            {[]string{" a.b.c\t"}, []string{"a.b.c"}, ""},
		"several":        {[]string{"a", "b"}, []string{"a", "b"}, ""},
		"joined":         {[]string{"a,b ,\tc", "d"}, []string{"a", "b", "c", "d"}, ""},
		"largest":        {[]string{k8}, []string{k8}, ""},
		"too large":      {[]string{k8 + "a"}, nil, ect.CodeTooLarge},
		"largest in all": {[]string{k8, k8}, []string{k8, k8}, ""},
		"too much":       {[]string{k8, k8, "a"}, nil, ect.CodeTooLarge},
		"joined by two":  {[]string{k8 + "," + k8[1:]}, []string{k8, k8[1:]}, ""},
		"joined by many": {[]string{strings.Repeat(k+",", 16)}, nil, ect.CodeTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ect.ParseFields(c.lines)
			wantCode(t, err, c.code)
			if !slices.Equal(got, c.want) {
				t.Errorf("got %d tokens, want %d", len(got), len(c.want))
			}
		})
	}
}

// TestBodies: both media types, the array, and bodies of other types.
func TestBodies(t *testing.T) {
	for _, c := range []struct {
		media, body string
		want        []string
		ours        bool
		code        ect.Code
	}{
		{"application/exec+jwt", "a.b.c\n", []string{"a.b.c"}, true, ""},
		{"application/wimse-exec+jwt; charset=utf-8", "a.b.c", []string{"a.b.c"}, true, ""},
		{"Application/JSON", ` ["a.b.c", "d"] `, []string{"a.b.c", "d"}, true, ""},
		{"application/json", `{"a":1}`, nil, true, ect.CodeMalformed},
		{"application/json", `["a",1]`, nil, true, ect.CodeMalformed},
		{"application/json", `["a"]x`, nil, true, ect.CodeMalformed},
		{"application/json", `[""]`, nil, true, ect.CodeMalformed},
		{"application/json", `[]`, nil, true, ect.CodeMissing},
		{"application/exec+jwt", " ", nil, true, ect.CodeMissing},
		{"application/exec+jwt", strings.Repeat("a", ect.MaxToken+1), nil, true, ect.CodeTooLarge},
		{"text/plain", "a.b.c", nil, false, ""},
		{"", "a.b.c", nil, false, ""},
	} {
		got, ours, err := ect.ParseBody(c.media, []byte(c.body))
		wantCode(t, err, c.code)
		if ours != c.ours || err == nil && !slices.Equal(got, c.want) {
			t.Errorf("%s %.20s: %v %v", c.media, c.body, got, ours)
		}
	}
}

// P7: a payload that is cut anywhere is refused without a panic, also with the beginning of
// another value behind the cut.
func TestTruncatedPayloads(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.Algorithms, p.MinLevel = ect.Algorithms(), ect.L1 })
	whole := `{"iss":"spiffe:\/\/x","par":["a\u00e9","\ud83d\ude00"],"iat":1500,"ext":{"cascade.ttl":1,"b":[-1.5e+3,true,[null,{"c":"\\\"\n"}]],"d":"é"},"jti":"\`
	for end := range len(whole) + 1 {
		for _, more := range []string{"", `\`, `\u`, `\u00`, `\ud83d\`, `\ud83d\u`, `"`, `"\`, `{"`, `[`, `-`, `1e`, "\x00", "\xff"} {
			payload := whole[:end] + more
			for _, raw := range []string{a.sendJSON(t, a.header(), payload), base64.RawURLEncoding.EncodeToString([]byte(payload))} {
				if _, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at}); err == nil {
					t.Fatalf("accepted %q", payload)
				} else {
					wantAnyCode(t, err)
				}
				if _, err := ect.ParseInsecure(raw); err == nil {
					t.Fatalf("parsed %q", payload)
				}
			}
			header := base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".e30.e30"
			if _, err := v.Verify(t.Context(), header, ect.Presentation{Now: at}); err == nil {
				t.Fatalf("accepted the header %q", payload)
			}
		}
	}
}
