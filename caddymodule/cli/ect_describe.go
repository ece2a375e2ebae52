package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ownLines are the claims that have a line of their own.
var ownLines = []string{
	"iss", "aud", "iat", "exp", "jti", "wid", "exec_act", "par", "pred", "inp_hash", "out_hash", "ext", "ect_ext",
}

// describeToken is the token line by line.
func describeToken(t *ect.Unverified, header json.RawMessage, now time.Time) string {
	s := sheet{width: 11}
	level := "L1, without a signature"
	if t.Level() > ect.L1 {
		var head struct{ Typ string }
		_ = json.Unmarshal(header, &head) // it was parsed before
		s.line("typ", printable(head.Typ))
		s.line("alg", missing(printable(t.Algorithm())))
		s.line("kid", missing(printable(t.KeyID())))
		level = t.Level().String() + ", with a signature"
	}
	s.line("level", level)
	s.line("issuer", missing(printable(t.Issuer())))
	s.line("audience", missing(listed(t.Audience())))
	s.line("issued", missing(moment(t.IssuedAt(), now)))
	s.line("expires", missing(expiry(t.Expires(), now)))
	s.line("id", missing(printable(t.ID())))
	s.line("workflow", dash(printable(t.Workflow())))
	parents := missing(listed(t.Parents()))
	if t.Parents() != nil && len(t.Parents()) == 0 {
		parents = "none: it is a root"
	}
	s.line("parents", parents)
	s.line("action", missing(printable(t.Action())))
	s.line("event", describeEvent(t))
	s.line("lacks", joined(t.Lacks(), t.Vocabulary()))
	s.line("input hash", t.InputHash().String())
	s.line("output hash", t.OutputHash().String())
	for _, line := range describeMembers(t) {
		s.line("extension", line)
	}
	var claims map[string]json.RawMessage
	_ = json.Unmarshal([]byte(t.Payload()), &claims) // it was parsed before
	for _, name := range slices.Sorted(maps.Keys(claims)) {
		if !slices.Contains(ownLines, name) {
			s.line("other claim", printable(name)+" = "+printable(string(claims[name])))
		}
	}
	return s.b.String()
}

// missing shows that a claim is not there that should be.
func missing(text string) string {
	if text == "" {
		return "(missing)"
	}
	return text
}

func listed(all []string) string {
	shown := make([]string, 0, len(all))
	for _, one := range all {
		shown = append(shown, printable(one))
	}
	return strings.Join(shown, ", ")
}

// expiry is a time after which something is over.
func expiry(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	text := t.UTC().Format(time.RFC3339)
	if left := t.Sub(now); left >= 0 {
		return text + " (expires in " + ago(int64(left/time.Second)) + ")"
	}
	return text + " (EXPIRED " + ago(int64(now.Sub(t)/time.Second)) + " ago)"
}

// describeEvent says what the action means, by its names in all vocabularies.
func describeEvent(t *ect.Unverified) string {
	if t.Event() == "" {
		return "none: an action of the issuer's own"
	}
	var names []string
	for _, v := range vocabularies {
		name := v.Event(t.Event())
		if v != ect.Cascade && name == string(t.Event()) {
			name = "has no name for it"
		}
		names = append(names, v.String()+": "+name)
	}
	return strings.Join(names, ", ")
}

// describeMembers are the extension members as they are written, with their names in
// the cascade vocabulary where those differ.
func describeMembers(t *ect.Unverified) (lines []string) {
	if t.Ext().JSON() == "" {
		return nil
	}
	var members map[string]json.RawMessage
	_ = json.Unmarshal([]byte(t.Ext().JSON()), &members) // it was parsed before
	for _, name := range slices.Sorted(maps.Keys(members)) {
		line := fmt.Sprintf("%s = %s", printable(name), printable(string(members[name])))
		if m := ect.ParseMember(name, t.Event()); string(m) != name {
			line += " (" + string(m) + ")"
		}
		lines = append(lines, line)
	}
	return lines
}
