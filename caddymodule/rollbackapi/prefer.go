package rollbackapi

import (
	"strconv"
	"strings"
	"time"
)

// patience is how long the answer may wait: as `Prefer` (RFC 7240) or the parameter wait
// says, else by default, and never longer than LongestWait.
func (q *question) patience(byDefault time.Duration) (time.Duration, error) {
	wait := byDefault
	for preference := range strings.SplitSeq(strings.Join(q.r.Header.Values("Prefer"), ","), ",") {
		name, value, _ := strings.Cut(preference, "=")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "respond-async":
			wait = 0
		case "wait":
			// What cannot be read is ignored, as RFC 7240 asks for.
			if seconds, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 32); err == nil {
				wait = time.Duration(seconds) * time.Second
			}
		}
	}
	if text := q.r.URL.Query().Get("wait"); text != "" {
		if seconds, err := strconv.ParseUint(text, 10, 32); err == nil {
			text = strconv.FormatUint(seconds, 10) + "s"
		}
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return 0, badParameter("wait is neither a duration, like 30s, nor a number of seconds.")
		}
		wait = d
	}
	return min(wait, LongestWait), nil
}
