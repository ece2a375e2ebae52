package rollback

import (
	"bytes"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
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

// P3, P8: of a rollback and its steps only these members are shown. What is recorded beside them stands in types of
// their own, of which nothing is shown and all is recorded but for what the plan says.
func TestNothingSecretOfARollbackIsShown(t *testing.T) {
	b := new(Rollback)
	fillShown(reflect.ValueOf(b).Elem(), "open")
	text, err := json.Marshal(b)
	if err != nil || strings.Contains(string(text), "secret") {
		t.Errorf("%s, %v", text, err)
	}
	var shown any
	if err := json.Unmarshal(text, &shown); err != nil {
		t.Fatal(err)
	}
	members := map[string]bool{}
	membersOf(shown, "", members)
	want := strings.Fields(`
		along asked cascaded cascaded.agent cascaded.status checkpoint_id dependants due ect effect
		elsewhere escalations failed_agents finished follow_up joined kept_as missing operator others
		plan_hash prepared reason requester rollback_id scope state state_hash_after state_hash_before
		status steps steps.action steps.agent steps.attempts steps.begun steps.call steps.call.action
		steps.call.created steps.call.execution steps.call.execution_id steps.call.host steps.call.method
		steps.call.path steps.cause steps.checkpoint_id steps.critical steps.earlier steps.effect
		steps.ended steps.escalation steps.http_status steps.last_cause steps.level steps.reason
		steps.review steps.state steps.state_hash_after steps.state_hash_before steps.status steps.token
		steps.via steps.way timed_out tokens tokens.complete tokens.start uncovered unreached
		unreached.agent unreached.checkpoint_id unreached.reason unreached.status urgency waits_for workflow
		workflow_name`)
	if got := slices.Sorted(maps.Keys(members)); !slices.Equal(got, want) {
		t.Errorf("a member more or less is shown:\n%q\n%q", got, want)
	}
	written := store.Encode(nil, b)
	if !bytes.Contains(written, []byte("secret")) {
		t.Fatalf("%q", written)
	}
	read := new(Rollback)
	if err := store.Decode(written, read); err != nil {
		t.Fatal(err)
	}
	secret := b.Journal
	secret.Plan, secret.Decisions = nil, nil // which are recorded elsewhere
	if !reflect.DeepEqual(read.Journal, secret) {
		t.Errorf("%+v was read of %+v", read.Journal, secret)
	}
	step, again := b.Steps[0], Step{}
	if err := store.Decode(store.Encode(nil, &step), &again); err != nil {
		t.Fatal(err)
	}
	step.What = ""
	if again.StepJournal != step.StepJournal {
		t.Errorf("%+v was read of %+v", again.StepJournal, step.StepJournal)
	}
}

// A record that is none must not pass for a step that was not begun (P5).
func TestStepsThatWereBegunAreRecorded(t *testing.T) {
	for state, good := range map[StepState]bool{"": false, StepPending: false, "of_a_newer_build": false, StepRunning: true, StepDone: true} {
		if err := (&Step{State: state}).check(); (err == nil) != good {
			t.Errorf("%q: %v", state, err)
		}
	}
}
