package hitl

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// fillShown sets all that a value holds: texts to "secret" where no JSON may have them, else to "open".
func fillShown(v reflect.Value, text string) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8:
		v.SetUint(1)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillShown(v.Elem(), text)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fillShown(key, text)
		fillShown(value, text)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillShown(v.Index(0), text)
	case reflect.Array:
		for i := range v.Len() {
			fillShown(v.Index(i), text)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(1987, 6, 5, 4, 3, 2, 1, time.UTC)))
			return
		}
		for i := range v.NumField() {
			of := text
			if v.Type().Field(i).Tag.Get("json") == "-" {
				of = "secret"
			}
			if field := v.Field(i); field.CanSet() || v.Type().Field(i).Anonymous {
				fillShown(field, of)
			}
		}
	}
}

// membersOf adds the paths of all members of a JSON value.
func membersOf(value any, path string, to map[string]bool) {
	switch v := value.(type) {
	case map[string]any:
		for name, member := range v {
			to[path+name] = true
			membersOf(member, path+name+".", to)
		}
	case []any:
		for _, one := range v {
			membersOf(one, path, to)
		}
	}
}

// P8: of an escalation only these members are shown, and nothing of what is stored beside them: neither where a
// participant is reached, nor which tokens have decided.
func TestNothingSecretOfAnEscalationIsShown(t *testing.T) {
	e := new(Escalation)
	fillShown(reflect.ValueOf(e).Elem(), "open")
	text, err := json.Marshal(Page{Escalations: []Escalation{*e}, Next: "open"})
	if err != nil || strings.Contains(string(text), "secret") {
		t.Errorf("%s, %v", text, err)
	}
	var shown struct{ Escalations []map[string]any }
	if err := json.Unmarshal(text, &shown); err != nil || len(shown.Escalations) != 1 {
		t.Fatalf("%s, %v", text, err)
	}
	members := map[string]bool{}
	membersOf(shown.Escalations[0], "", members)
	want := strings.Fields(`
		attempts caller cause changed deadline decisions decisions.at decisions.by decisions.decision
		decisions.reason held id last_error level level_name links links.checkpoint links.error
		links.execution links.rollback links.upstream next_attempt next_role opened participants
		participants.agent participants.at participants.confirmed participants.reason participants.state
		participants.unreachable_since proposal proposal.kind proposal.plan_hash proposal.request_hash
		proposal.text quorum requester required_role resolution state status summary token unreachable_human
		workflow workflow_name`)
	if got := slices.Sorted(maps.Keys(members)); !slices.Equal(got, want) {
		t.Errorf("a member more or less is shown:\n%q\n%q", got, want)
	}
}
