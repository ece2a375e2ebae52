package drawing_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	. "github.com/agent-guard/caddy-agent-guard/guard/drawing"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is\n%s", name, got)
	}
}

func everything() *Drawing {
	return &Drawing{
		Title:  "Rollback f1b1c2d3: finished, partial",
		Notes:  []string{"scope sub_dag", "undone from the bottom to the top"},
		Layers: []string{"level 2", "level 1", "level 0"},
		Nodes: []Node{
			{Layer: 0, Name: "spiffe://example.com/planner", State: "undo: completed", Tone: Good, Lines: []string{"POST /v1/orders", "ended 12:00:03"}},
			{Layer: 1, Name: "spiffe://example.com/billing", State: "undo: failed (refused)", Tone: Bad, Lines: []string{"POST /v1/charges", "", "ended 12:00:02"}},
			{Layer: 1, Name: "spiffe://example.com/stock", State: "undo: running", Tone: Active},
			{Layer: 2, Name: "spiffe://example.com/mail", State: "escalate: escalated", Tone: Warning, Lines: []string{"irreversible"}},
			{Layer: 2, Name: "", State: "undo: pending"},
			{Layer: 2, Name: `<script>alert("1")</script> & 'more' \N \"`, State: "a\x00b\u202e\nc\xff", Lines: []string{strings.Repeat("long ", 40), "漢字かな交じり文"}},
		},
		Edges: []Edge{{0, 1}, {0, 2}, {1, 3}, {2, 3}, {1, 4}, {2, 5}, {0, 5}, {0, 99}, {-1, 0}, {2, 2}},
	}
}

// The forms, the hostile texts included, are files to look at: testdata/*.svg in a browser.
func TestGoldenDrawings(t *testing.T) {
	d := everything()
	golden(t, "everything.svg", d.SVG())
	golden(t, "everything.dot", d.DOT())
	golden(t, "everything.txt", []byte(d.Tree()))
	if again := everything(); !bytes.Equal(d.SVG(), again.SVG()) || !bytes.Equal(d.DOT(), again.DOT()) || d.Tree() != again.Tree() {
		t.Error("drawn twice it is another picture")
	}
	wide := &Drawing{Title: "wide", Layers: []string{"level 1", "level 0"}, Nodes: []Node{{Name: "top", State: "completed", Tone: Good}}}
	for i := range 12 {
		wide.Nodes = append(wide.Nodes, Node{Layer: 1, Name: fmt.Sprint("leaf ", i), State: "completed", Tone: Good})
		wide.Edges = append(wide.Edges, Edge{0, 12 - i})
	}
	golden(t, "wide.svg", wide.SVG())
	golden(t, "wide.txt", []byte(wide.Tree()))
	golden(t, "empty.svg", new(Drawing).SVG())
}

// A long chain, and one with something beside each link, stay readable; large graphs stay small.
func TestLargeDrawingsAreBounded(t *testing.T) {
	comb := &Drawing{}
	for i := range 5000 {
		comb.Nodes = append(comb.Nodes, Node{Layer: i, Name: fmt.Sprint("link ", i)}, Node{Layer: i + 1, Name: fmt.Sprint("beside ", i)})
		comb.Edges = append(comb.Edges, Edge{2 * i, 2*i + 1}, Edge{2 * i, 2*i + 2})
	}
	text := comb.Tree()
	if n := strings.Count(text, "●"); n != 10_000 {
		t.Errorf("%d lines of nodes", n)
	}
	for line := range strings.Lines(text) {
		if at := strings.Index(line, "●"); at > 60 {
			t.Fatalf("a node at column %d", at)
		}
	}
	for _, drawn := range [][]byte{comb.SVG(), comb.DOT()} {
		if !bytes.Contains(drawn, []byte("9000 more are not drawn.")) || len(drawn) > 2<<20 {
			t.Errorf("%d bytes of 10,000 nodes", len(drawn))
		}
	}
	dense := &Drawing{Nodes: make([]Node, 500)}
	for i := range 500 {
		dense.Nodes[i].Layer = i / 250
	}
	for i := range 250 {
		for j := range 250 {
			dense.Edges = append(dense.Edges, Edge{i, 250 + j})
		}
	}
	for _, drawn := range [][]byte{dense.SVG(), dense.DOT()} {
		if !bytes.Contains(drawn, []byte("54500 more arrows are not drawn.")) || len(drawn) > 4<<20 {
			t.Errorf("%d bytes of 62,500 arrows", len(drawn))
		}
	}
}

// elements are those that an SVG may have, with their attributes.
var elements = map[string]string{
	"svg": "xmlns width height viewBox role font-family font-size fill", "title": "", "g": "",
	"rect": "x y width height rx fill stroke stroke-width", "path": "d fill stroke", "text": "x y font-weight",
}

// checkSVG: it is XML with a fixed set of elements and attributes, none of which can run
// anything or lead out, and the texts are those that were given.
func checkSVG(t *testing.T, svg []byte, texts int) {
	t.Helper()
	dec := xml.NewDecoder(bytes.NewReader(svg))
	dec.Strict = true
	found, depth := 0, 0
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch token := token.(type) {
		case xml.StartElement:
			depth++
			may, ok := elements[token.Name.Local]
			if !ok {
				t.Fatalf("an element %s in\n%s", token.Name.Local, svg)
			}
			for _, a := range token.Attr {
				if !strings.Contains(" "+may+" ", " "+a.Name.Local+" ") {
					t.Fatalf("%s has %s in\n%s", token.Name.Local, a.Name.Local, svg)
				}
			}
			if token.Name.Local == "text" {
				found++
			}
		case xml.EndElement:
			depth--
		case xml.CharData:
			if strings.ContainsFunc(strings.Trim(string(token), "\n"), func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Fatalf("%q can be not seen", token)
			}
		default:
			t.Fatalf("a %T in\n%s", token, svg)
		}
	}
	if found != texts || depth != 0 {
		t.Fatalf("%d texts, want %d, in\n%s", found, texts, svg)
	}
}

// checkDOT reads a drawing as Graphviz's own scanner does: quoted strings, in which only \" and
// \\ are special, and outside of them only our own words.
func checkDOT(t *testing.T, dot []byte) (labels int) {
	t.Helper()
	text := string(dot)
	var plain strings.Builder
	for {
		before, rest, quoted := strings.Cut(text, `"`)
		plain.WriteString(before)
		if !quoted {
			break
		}
		end := 0
		for rest[end] != '"' { // a quote that is missing is a test that panics
			if rest[end] == '\\' {
				if end++; !strings.ContainsRune(`\"l`, rune(rest[end])) {
					t.Fatalf("an escape %q in\n%s", rest[end-1:end+1], dot)
				}
			}
			if rest[end] == '&' && !strings.HasPrefix(rest[end:], "&amp;") {
				t.Fatalf("an entity in\n%s", dot)
			}
			end++
		}
		if r := rest[:end]; !utf8.ValidString(r) || strings.ContainsFunc(r, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q can be not seen", r)
		}
		text = rest[end+1:]
		plain.WriteString("Q")
	}
	for _, word := range strings.FieldsFunc(plain.String(), func(r rune) bool { return strings.ContainsRune(" \n\t[]{};,=->", r) }) {
		switch word {
		case "digraph", "G", "graph", "node", "edge", "rankdir", "TB", "labelloc", "labeljust", "t", "l", "fontname", "monospace",
			"label", "Q", "shape", "box", "style", "color", "fillcolor", "rank", "same":
			continue
		}
		if number := strings.TrimPrefix(word, "n"); number == word || strings.Trim(number, "0123456789") != "" {
			t.Fatalf("%q stands outside of quotes in\n%s", word, dot)
		}
	}
	return strings.Count(plain.String(), "label=Q")
}

func TestDrawingsOfStrangersAreHarmless(t *testing.T) {
	checkSVG(t, everything().SVG(), 3+3+19)
	if n := checkDOT(t, everything().DOT()); n != 1+6 {
		t.Errorf("%d labels", n)
	}
}

// Whatever an agent calls itself, and whatever ids it makes up, is text.
func FuzzTexts(f *testing.F) {
	for _, seed := range []string{
		"spiffe://example.com/a", `"];evil [label="`, `\`, `\"`, `\\"`, `a\`, "]]>", "<![CDATA[", "<!--", "&#x0;", "&lt;script&gt;", "\x00\xff\u2028\u202e",
		"</text><script href='http://example.com/'/>", strings.Repeat("漢", 99), "\ufffe\uffff", "e\u0301\u200b", "<<b>>", `\N\G\l`, "'\"<>&",
	} {
		f.Add(seed, seed, seed)
	}
	f.Fuzz(func(t *testing.T, title, name, line string) {
		d := &Drawing{
			Title: title, Notes: []string{line}, Layers: []string{name, line},
			Nodes: []Node{{Name: name, State: title, Lines: []string{line}}, {Layer: 1, Name: line, Lines: []string{name, title}}}, Edges: []Edge{{0, 1}},
		}
		texts := 2 + 2 // names of nodes, title and note
		for _, there := range []string{name, line, title, line, name, title} {
			if there != "" {
				texts++
			}
		}
		checkSVG(t, d.SVG(), texts)
		if n := checkDOT(t, d.DOT()); n != 3 {
			t.Fatalf("%d labels in\n%s", n, d.DOT())
		}
		if text := d.Tree(); strings.Count(text, "\n") != 2+1+2 || strings.ContainsFunc(strings.ReplaceAll(text, "\n", ""), func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q", text)
		}
	})
}
