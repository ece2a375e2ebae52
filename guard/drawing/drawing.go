// Package drawing draws layered graphs, such as the steps of a rollback, as SVG, in the language
// of Graphviz, and as text.
//
// The same drawing gives the same bytes. Nothing in it runs, and it refers to nothing outside
// (no script, font, image or link). All texts may come from strangers: they are cut, characters
// that cannot be seen are replaced, and the rest is escaped for its place.
package drawing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Tone is the color of a node. It says nothing that State does not.
type Tone uint8

// The tones.
const (
	Plain   Tone = iota // not begun, or without a state
	Active              // under way
	Good                // done
	Warning             // left to a person, or done in part
	Bad                 // failed
)

// Node is a box.
type Node struct {
	// Layer is its place from top to bottom, from 0 on.
	Layer int
	// Name is the first line.
	Name string
	// State is the second, in a few words.
	State string
	// Tone is its color.
	Tone Tone
	// Lines are further lines; empty ones are left out.
	Lines []string
}

// Edge is an arrow between two nodes, by their places in Drawing.Nodes. Its end is in a lower
// layer than its beginning.
type Edge struct{ From, To int }

// Drawing is a layered graph. Edges between nodes that do not exist are left out.
type Drawing struct {
	// Title is the first line, Notes are those below it.
	Title string
	Notes []string
	// Layers are the names of layers; those without one have none.
	Layers []string
	Nodes  []Node
	Edges  []Edge
}

// The most that is shown. Readers are told of nodes and arrows beyond.
const (
	maxNodes = 1000 // of an image
	maxEdges = 8000 // of an image
	maxNotes = 12   // of a drawing
	maxLines = 6    // of a node
	maxTitle = 100  // columns of the title and of notes
	boxWidth = 48   // columns of a line in a box
)

// bounded is what is shown of a drawing, with texts that can be shown.
func (d *Drawing) bounded(nodes, edges, width int) *Drawing {
	b := &Drawing{Title: clean(d.Title, maxTitle)}
	for _, note := range d.Notes[:min(len(d.Notes), maxNotes)] {
		b.Notes = append(b.Notes, clean(note, maxTitle))
	}
	for _, name := range d.Layers {
		b.Layers = append(b.Layers, clean(name, width))
	}
	for _, n := range d.Nodes[:min(len(d.Nodes), nodes)] {
		shown := Node{Layer: max(n.Layer, 0), Name: clean(n.Name, width), State: clean(n.State, width), Tone: n.Tone}
		for _, line := range n.Lines {
			if line != "" && len(shown.Lines) < maxLines {
				shown.Lines = append(shown.Lines, clean(line, width))
			}
		}
		b.Nodes = append(b.Nodes, shown)
	}
	left := 0
	for _, e := range d.Edges {
		switch {
		case e.From < 0 || e.To < 0 || max(e.From, e.To) >= len(b.Nodes) || e.From == e.To:
		case len(b.Edges) == edges:
			left++
		default:
			b.Edges = append(b.Edges, e)
		}
	}
	if n := len(d.Nodes) - len(b.Nodes); n > 0 {
		b.Notes = append(b.Notes, fmt.Sprintf("%d more are not drawn.", n))
	}
	if left > 0 {
		b.Notes = append(b.Notes, fmt.Sprintf("%d more arrows are not drawn.", left))
	}
	return b
}

// clean is a text of at most width columns. What cannot be seen, or turns the direction of what
// follows, is replaced: it could make one name look like another.
func clean(text string, width int) string {
	var b strings.Builder
	columns := 0
	for i, r := range text {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			r = '\uFFFD'
		}
		if columns += columnsOf(r); columns > width-1 && i+utf8.RuneLen(r) < len(text) || columns > width {
			b.WriteRune('…')
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// columnsOf is how many columns a character takes at most.
func columnsOf(r rune) int {
	if r < 0x1100 {
		return 1
	}
	return 2
}

func columnsIn(text string) (n int) {
	for _, r := range text {
		n += columnsOf(r)
	}
	return n
}

// colors are the border and the ground of each tone: dark and light, so that black text can be
// read on all of them.
var colors = [...]struct{ border, ground string }{
	Plain: {"#5f6368", "#f4f4f4"}, Active: {"#174ea6", "#e3edfd"}, Good: {"#0d652d", "#e2f3e6"},
	Warning: {"#8a5a00", "#fdf1d0"}, Bad: {"#a50e0e", "#fbe3e1"},
}

func (t Tone) colors() (border, ground string) {
	c := colors[min(int(t), len(colors)-1)]
	return c.border, c.ground
}

// DOT is the drawing in the language of Graphviz (text/vnd.graphviz, in UTF-8).
func (d *Drawing) DOT() []byte {
	d = d.bounded(maxNodes, maxEdges, boxWidth)
	var b strings.Builder
	b.WriteString("digraph G {\n\tgraph [rankdir=TB, labelloc=t, labeljust=l, fontname=monospace, label=\"")
	for _, line := range append([]string{d.Title}, d.Notes...) {
		b.WriteString(dotText(line) + `\l`)
	}
	b.WriteString("\"];\n\tnode [shape=box, style=\"filled,rounded\", fontname=monospace];\n\tedge [color=\"#5f6368\"];\n")
	for i := range d.Nodes {
		n := &d.Nodes[i]
		border, ground := n.Tone.colors()
		fmt.Fprintf(&b, "\tn%d [color=\"%s\", fillcolor=\"%s\", label=\"", i, border, ground)
		for _, line := range n.lines() {
			b.WriteString(dotText(line) + `\l`)
		}
		b.WriteString("\"];\n")
	}
	for _, layer := range d.layers() {
		if len(layer) > 1 {
			b.WriteString("\t{ rank=same;")
			for _, i := range layer {
				fmt.Fprintf(&b, " n%d;", i)
			}
			b.WriteString(" }\n")
		}
	}
	for _, e := range d.Edges {
		fmt.Fprintf(&b, "\tn%d -> n%d;\n", e.From, e.To)
	}
	b.WriteString("}\n")
	return []byte(b.String())
}

// dotText is a text within quotes of DOT: a label, in which backslashes lead escapes and & leads
// entities.
var dotText = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `&`, `&amp;`).Replace

func (n *Node) lines() []string {
	all := []string{n.Name}
	if n.State != "" {
		all = append(all, n.State)
	}
	return append(all, n.Lines...)
}

// layers are the nodes of each layer, in their order. Layers without nodes are left out.
func (d *Drawing) layers() [][]int {
	order := make([]int, len(d.Nodes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(d.Nodes[a].Layer, d.Nodes[b].Layer) })
	var layers [][]int
	for n, i := range order {
		if n == 0 || d.Nodes[order[n-1]].Layer != d.Nodes[i].Layer {
			layers = append(layers, nil)
		}
		last := len(layers) - 1
		layers[last] = append(layers[last], i)
	}
	return layers
}

// arrange orders the nodes of each layer by where their neighbors stand, so that fewer arrows
// cross: a fixed number of sweeps of the barycenter heuristic, in whole numbers, so that every
// machine finds the same.
func (d *Drawing) arrange(layers [][]int) {
	at, around := make([]int, len(d.Nodes)), make([][2][]int, len(d.Nodes))
	for _, e := range d.Edges {
		around[e.To][0] = append(around[e.To][0], e.From)
		around[e.From][1] = append(around[e.From][1], e.To)
	}
	place := func(layer []int) {
		for n, i := range layer {
			at[i] = (2*n + 1) * 1_000_000 / len(layer)
		}
	}
	for _, layer := range layers {
		place(layer)
	}
	mean := make([]int, len(d.Nodes))
	for sweep := range 6 {
		side := sweep % 2 // downwards by what is above, upwards by what is below
		for n := range layers {
			layer := layers[n]
			if side == 1 {
				layer = layers[len(layers)-1-n]
			}
			for _, i := range layer {
				mean[i] = at[i]
				if near := around[i][side]; len(near) > 0 {
					sum := 0
					for _, j := range near {
						sum += at[j]
					}
					mean[i] = sum / len(near)
				}
			}
			slices.SortStableFunc(layer, func(a, b int) int { return cmp.Compare(mean[a], mean[b]) })
			place(layer)
		}
	}
}

// Measures of an SVG, in pixels. Text is monospaced, so that its width is known.
const (
	charWidth  = 7.3
	lineHeight = 16
	padding    = 8
	gapAcross  = 24
	gapDown    = 48
	margin     = 20
	// maxAcross is how many nodes stand side by side; a layer with more has several rows.
	maxAcross = 5
)

type box struct{ x, y, height int }

// SVG is the drawing as an image (image/svg+xml).
func (d *Drawing) SVG() []byte {
	d = d.bounded(maxNodes, maxEdges, boxWidth)
	layers := d.layers()
	d.arrange(layers)

	head := margin + lineHeight*(1+len(d.Notes)) + padding
	columns, label := 0, 0
	for i := range d.Nodes {
		for _, line := range d.Nodes[i].lines() {
			columns = max(columns, columnsIn(line))
		}
	}
	for _, name := range d.Layers {
		label = max(label, width(columnsIn(name))+gapAcross)
	}
	across := 1
	for _, layer := range layers {
		across = max(across, min(len(layer), maxAcross))
	}
	wide := width(columns) + 2*padding
	total := across*(wide+gapAcross) - gapAcross

	boxes := make([]box, len(d.Nodes))
	var names strings.Builder
	y := head
	for _, layer := range layers {
		y += gapDown / 2
		if at := d.Nodes[layer[0]].Layer; at < len(d.Layers) && d.Layers[at] != "" {
			writeText(&names, margin, y+lineHeight, "", d.Layers[at])
		}
		for len(layer) > 0 {
			row := layer[:min(len(layer), maxAcross)]
			layer = layer[len(row):]
			x := margin + label + (total-len(row)*(wide+gapAcross)+gapAcross)/2
			tall := 0
			for _, i := range row {
				height := len(d.Nodes[i].lines())*lineHeight + 2*padding
				boxes[i] = box{x, y, height}
				x += wide + gapAcross
				tall = max(tall, height)
			}
			y += tall + gapDown/2
		}
	}
	width := 2*margin + label + total
	for _, line := range append([]string{d.Title}, d.Notes...) {
		width = max(width, 2*margin+int(float64(columnsIn(line))*charWidth+0.5))
	}

	var b strings.Builder
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\" font-family=\"monospace\" font-size=\"12\" fill=\"#111111\">\n",
		width, y+margin, width, y+margin)
	fmt.Fprintf(&b, "<title>%s</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n", xmlText(d.Title))
	writeText(&b, margin, margin+lineHeight/2, ` font-weight="bold"`, d.Title)
	for n, note := range d.Notes {
		writeText(&b, margin, margin+lineHeight/2+lineHeight*(n+1), "", note)
	}
	b.WriteString(names.String())
	for _, e := range d.Edges {
		writeEdge(&b, boxes[e.From], boxes[e.To], wide)
	}
	for i := range d.Nodes {
		writeNode(&b, &d.Nodes[i], boxes[i], wide)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func width(columns int) int { return int(float64(columns)*charWidth + 0.5) }

// writeEdge draws a curve with a head.
func writeEdge(b *strings.Builder, from, to box, wide int) {
	x1, y1, x2, y2 := from.x+wide/2, from.y+from.height, to.x+wide/2, to.y
	bend := max((y2-y1)/2, gapDown/2)
	fmt.Fprintf(b, "<path d=\"M%d %dC%d %d %d %d %d %d\" fill=\"none\" stroke=\"#5f6368\"/>", x1, y1, x1, y1+bend, x2, y2-bend, x2, y2-6)
	fmt.Fprintf(b, "<path d=\"M%d %dl-4 -8h8z\" fill=\"#5f6368\"/>\n", x2, y2)
}

func writeNode(b *strings.Builder, n *Node, at box, wide int) {
	border, ground := n.Tone.colors()
	fmt.Fprintf(b, "<g><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"5\" fill=\"%s\" stroke=\"%s\" stroke-width=\"1.5\"/>\n",
		at.x, at.y, wide, at.height, ground, border)
	for k, line := range n.lines() {
		style := ""
		if k == 0 {
			style = ` font-weight="bold"`
		}
		writeText(b, at.x+padding, at.y+padding+lineHeight*k+lineHeight*3/4, style, line)
	}
	b.WriteString("</g>\n")
}

func writeText(b *strings.Builder, x, y int, style, text string) {
	fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\"%s>%s</text>\n", x, y, style, xmlText(text))
}

// xmlText is a text in XML, in an element or an attribute. clean has left no character that XML
// does not have.
var xmlText = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "'", "&#39;").Replace

// treeWidth is the most columns of a part of a line.
const treeWidth = 120

// Tree is the drawing as text, with a line for each node. A node stands below the first one that
// an arrow leads from; the line says if there are others. Of the nodes below one, that with the most
// below it comes last and goes on in the same column: a chain is a column, and n nodes need at most
// log n columns.
func (d *Drawing) Tree() string {
	d = d.bounded(len(d.Nodes), len(d.Edges), treeWidth)
	t := tree{Drawing: d, below: make([][]int, len(d.Nodes)), above: make([][]int, len(d.Nodes)), size: make([]int, len(d.Nodes))}
	for _, e := range d.Edges {
		if d.Nodes[e.From].Layer < d.Nodes[e.To].Layer {
			t.above[e.To] = append(t.above[e.To], e.From)
		}
	}
	var roots []int
	layers := d.layers()
	for _, i := range slices.Concat(layers...) {
		if len(t.above[i]) == 0 {
			roots = append(roots, i)
		} else {
			t.below[t.above[i][0]] = append(t.below[t.above[i][0]], i)
		}
	}
	slices.Reverse(layers)
	for _, i := range slices.Concat(layers...) {
		t.size[i] = 1
		slices.SortStableFunc(t.below[i], func(a, b int) int { return cmp.Compare(t.size[a], t.size[b]) })
		for _, j := range t.below[i] {
			t.size[i] += t.size[j]
		}
	}
	t.b.WriteString(d.Title + "\n")
	for _, note := range d.Notes {
		t.b.WriteString(note + "\n")
	}
	for _, i := range roots {
		t.b.WriteString("\n")
		t.column("", "", i)
	}
	return t.b.String()
}

type tree struct {
	*Drawing
	b     strings.Builder
	below [][]int // in the tree
	above [][]int
	size  []int
}

// column writes a node, and what is below it in the same column or in others beside it.
func (t *tree) column(first, before string, i int) {
	for {
		t.line(first, i)
		next := t.below[i]
		if len(next) == 0 {
			return
		}
		last := next[len(next)-1]
		for _, j := range next[:len(next)-1] {
			t.column(before+"├─", before+"│ ", j)
		}
		if first = before; len(next) > 1 && len(t.below[last]) == 0 {
			first += "└─"
		}
		i = last
	}
}

func (t *tree) line(before string, i int) {
	n := &t.Nodes[i]
	parts := []string{n.Name}
	if n.State != "" {
		parts = append(parts, n.State)
	}
	if n.Layer < len(t.Layers) && t.Layers[n.Layer] != "" {
		parts = append(parts, t.Layers[n.Layer])
	}
	parts = append(parts, n.Lines...)
	if n := len(t.above[i]) - 1; n > 0 {
		parts = append(parts, fmt.Sprintf("(below %d more)", n))
	}
	t.b.WriteString(before + "● " + strings.Join(parts, "  ") + "\n")
}

// InWords joins the parts that are not empty.
func InWords(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

// Label writes a label before a text; nothing where there is none.
func Label(label, text string) string {
	if text == "" {
		return ""
	}
	return label + " " + text
}

// Time writes a time in milliseconds (RFC 3339); nothing for zero.
func Time(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format("2006-01-02T15:04:05.000Z07:00")
}
