package option

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// DecodeJSON decodes the JSON of a module into it, and refuses members that the module does not have. Errors have the path
// of the member, like `breaker/window` or `actions/0/deadline`.
func DecodeJSON[T any](text []byte, into *T) error {
	if err := jsonx.Decode(bytes.NewReader(text), into); err == nil || !json.Valid(text) {
		return err
	}
	path, err := locate(bytes.TrimSpace(text), func(text []byte) error { return jsonx.Decode(bytes.NewReader(text), new(T)) })
	if bad := (*json.UnmarshalTypeError)(nil); errors.As(err, &bad) {
		err = fmt.Errorf("it must be %s, not %s", kindOf(bad.Type), bad.Value)
	}
	if len(path) == 0 {
		return err
	}
	return fmt.Errorf("%s: %w", strings.Join(path, "/"), err)
}

// locate returns the path of the innermost value in text with which alone decode fails, and the error.
func locate(text []byte, decode func(text []byte) error) (path []string, err error) {
	within := func(name, before string, value []byte, after string) bool {
		only := func(value []byte) error { return decode([]byte(before + string(value) + after)) }
		if only(value) == nil {
			return false
		}
		path, err = locate(value, only)
		path = append([]string{name}, path...)
		return true
	}
	if o, ok := jsonx.ObjectOf(text); ok && decode([]byte("{}")) == nil {
		for _, m := range o {
			if within(m.Name, string(jsonx.AppendText([]byte("{"), m.Name))+":", m.Value, "}") {
				return path, err
			}
		}
	}
	if text[0] == '[' && decode([]byte("[]")) == nil {
		i := 0
		for value := range jsonx.Elements(text) {
			if within(strconv.Itoa(i), "[", value, "]") {
				return path, err
			}
			i++
		}
	}
	return nil, decode(text)
}

// kindOf says what a value of type t is written as.
func kindOf(t reflect.Type) string {
	if t == reflect.TypeFor[time.Duration]() {
		return `a duration like "30s"`
	}
	return cmp.Or(map[reflect.Kind]string{
		reflect.Bool: "true or false", reflect.String: "a string", reflect.Float64: "a number",
		reflect.Slice: "an array", reflect.Map: "an object", reflect.Struct: "an object",
	}[t.Kind()], "a whole number")
}
