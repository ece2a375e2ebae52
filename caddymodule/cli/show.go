package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// show asks the server and prints the answer: unchanged with --output json, else described.
func show[T any](cmd *cobra.Command, o *options, q question, describe func(*T, time.Time) string) (*T, error) {
	answer, text, err := ask[T](cmd.Context(), o, q)
	if err != nil {
		return nil, err
	}
	return answer, o.print(cmd, text, func(now time.Time) string { return describe(answer, now) })
}

// showing returns the RunE of a command that shows the answer to a question.
func showing[T any](o *options, q question, describe func(*T, time.Time) string) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		_, err := show(cmd, o, q.of(args), describe)
		return err
	}
}

// print writes the document with --output json, else its description.
func (o *options) print(cmd *cobra.Command, document any, describe func(now time.Time) string) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), document)
	}
	_, err := io.WriteString(cmd.OutOrStdout(), describe(time.Now()))
	return err
}

// encode prints v as JSON. Raw JSON keeps its members and their order.
func encode(out io.Writer, v any) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(v)
}

// list streams things of one kind: as one JSON document, or as a table.
type list[T any] struct {
	cmd    *cobra.Command
	name   string         // of the things, which is also the path that lists them
	row    func(*T) []any // the columns' names and the cells of a thing
	json   bool
	table  table
	listed int
}

func newList[T any](cmd *cobra.Command, o *options, name string, row func(*T) []any) *list[T] {
	return &list[T]{cmd: cmd, name: name, row: row, json: o.json(), table: table{now: time.Now()}}
}

// add prints things, whose documents are given.
func (l *list[T]) add(documents ...json.RawMessage) error {
	var text strings.Builder
	rows := make([][]any, 0, len(documents))
	for _, document := range documents {
		if l.json {
			fmt.Fprintf(&text, "%s\n  %s", l.separator(), document)
		} else {
			thing := new(T)
			if err := json.Unmarshal(document, thing); err != nil {
				return err
			}
			rows = append(rows, l.row(thing))
		}
		l.listed++
	}
	text.WriteString(l.table.page(rows...))
	_, err := io.WriteString(l.cmd.OutOrStdout(), text.String())
	return err
}

// separator returns what goes before the next document: the beginning of the list, or a comma.
func (l *list[T]) separator() string {
	if l.listed > 0 {
		return ","
	}
	return fmt.Sprintf("{%q:[", l.name)
}

// end ends the list; next, if not empty, is the cursor of the next page.
func (l *list[T]) end(unreadable int, next string) error {
	if l.json {
		begin, members := "", ""
		if l.listed == 0 {
			begin = l.separator()
		}
		if unreadable > 0 {
			members = fmt.Sprintf(",\n\"unreadable\":%d", unreadable)
		}
		if next != "" {
			members += fmt.Sprintf(",\n\"next\":%q", next)
		}
		_, err := fmt.Fprintf(l.cmd.OutOrStdout(), "%s]%s}\n", begin, members)
		return err
	}
	hints := l.cmd.ErrOrStderr()
	if l.listed == 0 {
		fmt.Fprintln(hints, "no", l.name)
	}
	if unreadable > 0 {
		fmt.Fprintf(hints, "%d %s are recorded and cannot be read.\n", unreadable, l.name)
	}
	if next != "" {
		all := ""
		if l.cmd.Flags().Lookup("all") != nil {
			all = ", --all lists all"
		}
		fmt.Fprintf(hints, "There are more: --after %s goes on%s.\n", next, all)
	}
	return nil
}

// paging is the part of a list that is requested, with the filters that the list has.
type paging struct {
	query url.Values
	limit int
	all   bool
}

// flags adds the flags of a command that lists; whole says that it may list all.
func (p *paging) flags(cmd *cobra.Command, whole bool) {
	usage := "The most to list"
	if whole {
		usage += "; with --all, how many to ask for at a time"
		cmd.Flags().BoolVar(&p.all, "all", false, "List all")
	}
	cmd.Flags().IntVar(&p.limit, "limit", 50, usage)
	complete(cmd, "limit")
	filterFlag(cmd, p.query, "after", "Continue after this place, as an earlier listing printed it")
}

// listPage is a page of any list of the admin API. Its documents stay undecoded.
type listPage struct {
	Executions, Escalations, Rollbacks []json.RawMessage
	Unreadable                         int
	Next                               string
}

// listPages requests and prints pages until the limit is reached or none is left. An empty page
// is not the last one.
func listPages[T any](cmd *cobra.Command, o *options, p *paging, name string, row func(*T) []any) error {
	if p.limit < 1 {
		return errors.New("--limit must be at least 1")
	}
	out, unreadable := newList(cmd, o, name, row), 0
	for {
		want := p.limit
		if !p.all {
			want -= out.listed
		}
		p.query.Set("limit", strconv.Itoa(min(want, execution.MaxPage)))
		page, _, err := ask[listPage](cmd.Context(), o, question{path: name, query: p.query})
		if err != nil {
			return err
		}
		unreadable += page.Unreadable
		if err := out.add(slices.Concat(page.Executions, page.Escalations, page.Rollbacks)...); err != nil {
			return err
		}
		if page.Next == "" || !p.all && out.listed >= p.limit {
			return out.end(unreadable, page.Next)
		}
		p.query.Set("after", page.Next)
	}
}

// table aligns rows page by page. Columns grow and never shrink, so that pages line up.
type table struct {
	now    time.Time
	widths []int
	begun  bool
}

// blank is the text of a cell that stays empty without a value. Others get a dash then.
type blank string

// page formats rows, each of which has the name of a column before the cell in it. The first page begins with the
// names.
func (t *table) page(rows ...[]any) string {
	var lines [][]string
	for _, row := range rows {
		var names, cells []string
		for i := 0; i < len(row); i += 2 {
			cell := shown(row[i+1], t.now)
			if _, is := row[i+1].(blank); cell == "" && !is {
				cell = "-"
			}
			names, cells = append(names, row[i].(string)), append(cells, cell)
		}
		if !t.begun {
			t.begun, lines = true, append(lines, names)
		}
		lines = append(lines, cells)
	}
	for _, line := range lines {
		t.widths = append(t.widths, make([]int, max(0, len(line)-len(t.widths)))...)
		for i, cell := range line {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, line := range lines {
		last := len(line) - 1
		for i, cell := range line[:last] {
			b.WriteString(cell + strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(cell)+2))
		}
		b.WriteString(line[last] + "\n")
	}
	return b.String()
}

// tableOf is a table of one page.
func tableOf[T any](now time.Time, all []T, row func(*T) []any) string {
	rows := make([][]any, len(all))
	for i := range all {
		rows[i] = row(&all[i])
	}
	return (&table{now: now}).page(rows...)
}

// lines shows a thing line by line, by names with their values. A name without a value is left out.
func lines(now time.Time, width int, pairs ...any) string {
	var b strings.Builder
	for i := 0; i < len(pairs); i += 2 {
		if text := shown(pairs[i+1], now); text != "" {
			fmt.Fprintf(&b, "%-*s  %s\n", width, pairs[i], text)
		}
	}
	return b.String()
}

// shown is the text of a value: of a time with its distance from now, of anything safe for a terminal.
func shown(value any, now time.Time) string {
	switch value := value.(type) {
	case time.Time:
		return moment(value, now)
	case []string:
		return printable(strings.Join(value, ", "))
	default:
		return printable(fmt.Sprint(value))
	}
}

// printable makes a caller's text safe for a terminal: no control sequences, and nothing that
// looks like something else.
func printable(text string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return text
	}
	return strconv.QuoteToGraphic(text)
}

// short returns the beginning of a key or a hash, as in logs.
func short(hash string, digits int) string {
	if len(hash) > digits {
		return hash[:digits]
	}
	return hash
}

// cut shortens text to at most n characters.
func cut(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

// ago formats seconds in their largest unit.
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

// moment formats a time with its distance from now.
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

// size formats bytes in a fitting unit.
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

// number formats n; zero is empty.
func number(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}
