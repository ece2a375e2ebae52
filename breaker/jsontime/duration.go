// Package jsontime has the durations of configurations, as breakers, bulkheads, guards and Caddy's modules read them.
package jsontime

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration of a configuration. JSON has it in nanoseconds, or as text like "30s" or "7d".
type Duration time.Duration

// UnmarshalJSON implements json.Unmarshaler.
func (d *Duration) UnmarshalJSON(b []byte) (err error) {
	var v time.Duration
	if len(b) == 0 || b[0] != '"' {
		err = json.Unmarshal(b, &v)
	} else {
		v, err = time.ParseDuration(days.ReplaceAllStringFunc(strings.Trim(string(b), `"`), func(text string) string {
			n, err := strconv.ParseFloat(strings.TrimSuffix(text, "d"), 64)
			if err != nil {
				return text // which is no duration
			}
			return strconv.FormatFloat(n*24, 'f', -1, 64) + "h"
		}))
	}
	*d = Duration(v)
	return err
}

// days matches a number of days.
var days = regexp.MustCompile(`[0-9.+-]+d`)
