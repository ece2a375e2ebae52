package execution

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

// fillAll sets all that a value holds: texts and bytes to s.
func fillAll(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("s")
	case reflect.Uint8:
		v.SetUint('s')
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillAll(v.Index(0))
	case reflect.Array:
		for i := range v.Len() {
			fillAll(v.Index(i))
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)))
			return
		}
		for _, field := range v.Fields() {
			if field.CanSet() {
				fillAll(field)
			}
		}
	}
}

// P3, P8: of an execution only the members of Shown are shown, in whatever state it is; neither who called, nor what was
// asked and answered.
func TestNothingSecretOfAnExecutionIsShown(t *testing.T) {
	record := new(Record)
	fillAll(reflect.ValueOf(record).Elem())
	for _, state := range States() {
		record.State = state
		text, err := json.Marshal((&Recorded{Finding: Finding{Record: record}}).Show())
		if err != nil {
			t.Fatal(err)
		}
		var members map[string]any
		if err := json.Unmarshal(text, &members); err != nil {
			t.Fatal(err)
		}
		delete(members, "key")
		want := "action created deadline method path settled state status workflow_name"
		switch state {
		case StateInDoubt:
			want = "action cause created deadline method path settled state status workflow_name"
		case StateCompleted:
			want = "action created deadline method path result settled state status workflow_name"
		}
		names := make([]string, 0, len(members))
		for _, field := range reflect.VisibleFields(reflect.TypeFor[Shown]()) {
			names = append(names, strings.Split(field.Tag.Get("json"), ",")[0])
		}
		for _, name := range names {
			if shown := members[name] != nil; name != "key" && shown != strings.Contains(" "+want+" ", " "+name+" ") {
				t.Errorf("%v: %s is shown: %v", state, name, shown)
			}
			delete(members, name)
		}
		if len(members) > 0 {
			t.Errorf("%v: %v is shown too", state, members)
		}
	}
}
