package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// printable shows text of a caller's on a terminal: without anything that the terminal
// would obey, and with nothing that looks like something else.
func printable(text string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return text
	}
	return strconv.QuoteToGraphic(text)
}

// short is the part of a key or a hash that logs show.
func short(hash string, digits int) string {
	if len(hash) > digits {
		return hash[:digits]
	}
	return hash
}

// cut is text in at most n characters.
func cut(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

// ago is a number of seconds in its largest unit.
func ago(seconds int64) string {
	switch d := time.Duration(seconds) * time.Second; {
	case d < time.Minute:
		return fmt.Sprintf("%ds", seconds)
	case d < time.Hour:
		return fmt.Sprintf("%dm", seconds/60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", seconds/3600)
	default:
		return fmt.Sprintf("%dd", seconds/86400)
	}
}

// moment is a time with its distance from now.
func moment(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	text := t.UTC().Format(time.RFC3339)
	if seconds := int64(now.Sub(t) / time.Second); seconds >= 0 {
		return text + " (" + ago(seconds) + " ago)"
	}
	return text + " (in " + ago(int64(t.Sub(now)/time.Second)) + ")"
}

// size is a number of bytes in the unit that suits it.
func size(bytes uint64) string {
	if bytes < 1<<10 {
		return fmt.Sprintf("%d B", bytes)
	}
	value, unit := float64(bytes), 0
	for value >= 1<<10 && unit < 4 {
		value, unit = value/(1<<10), unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGT"[unit-1])
}

// dash stands for nothing in a table.
func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
