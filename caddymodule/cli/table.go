package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// table prints rows page by page. Columns grow with what comes, and never shrink, so
// that pages stand below each other.
type table struct {
	out    io.Writer
	widths []int
	begun  bool
}

// print writes a page. The header goes before the first.
func (t *table) print(header []string, rows [][]string) error {
	if !t.begun {
		rows = append([][]string{header}, rows...)
		t.begun, t.widths = true, make([]int, len(header))
	}
	for _, row := range rows {
		for i, cell := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		last := len(row) - 1
		for i, cell := range row[:last] {
			b.WriteString(cell)
			b.WriteString(strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(cell)+2))
		}
		b.WriteString(row[last])
		b.WriteByte('\n')
	}
	_, err := io.WriteString(t.out, b.String())
	return err
}

// sheet prints names with their values.
type sheet struct {
	b     strings.Builder
	width int
}

// line adds a name with its value, unless that is empty.
func (s *sheet) line(name, value string) {
	if value != "" {
		fmt.Fprintf(&s.b, "%-*s  %s\n", s.width, name, value)
	}
}

// encode prints v as JSON. Raw JSON keeps its members as they came.
func encode(out io.Writer, v any) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(v)
}
