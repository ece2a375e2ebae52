package rollback

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// fill sets everything that a value holds: texts to one that no document may have.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("secret")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Uint8:
		v.SetUint('s')
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(1987, 6, 5, 4, 3, 2, 1, time.UTC)))
			return
		}
		for _, field := range v.Fields() {
			if field.CanSet() {
				fill(field)
			}
		}
	}
}

// P3, P8: what is recorded of a rollback and its steps and is nobody's business stands in a type of its own, of which
// nothing is shown and all is recorded but for what the plan says.
func TestNothingSecretOfARollbackIsShown(t *testing.T) {
	var secret Journal
	fill(reflect.ValueOf(&secret).Elem())
	var secretOfStep StepJournal
	fill(reflect.ValueOf(&secretOfStep).Elem())
	b := &Rollback{ID: "r", Journal: secret, Steps: []Step{{Checkpoint: "c", StepJournal: secretOfStep}}}
	shown, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	var empty, full map[string]any
	bare, _ := json.Marshal(&Rollback{ID: "r", Steps: []Step{{Checkpoint: "c"}}})
	if json.Unmarshal(bare, &empty) != nil || json.Unmarshal(shown, &full) != nil || !reflect.DeepEqual(empty, full) {
		t.Errorf("%s is more than %s", shown, bare)
	}
	written := store.Encode(nil, b)
	if !bytes.Contains(written, []byte("secret")) {
		t.Fatalf("%q", written)
	}
	read := new(Rollback)
	if err := store.Decode(written, read); err != nil {
		t.Fatal(err)
	}
	secret.Plan, secret.Decisions = nil, nil // which are recorded elsewhere
	if !reflect.DeepEqual(read.Journal, secret) {
		t.Errorf("%+v was read of %+v", read.Journal, secret)
	}
	step := &b.Steps[0]
	var again Step
	if err := store.Decode(store.Encode(nil, step), &again); err != nil {
		t.Fatal(err)
	}
	secretOfStep.What = ""
	if again.StepJournal != secretOfStep {
		t.Errorf("%+v was read of %+v", again.StepJournal, secretOfStep)
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
