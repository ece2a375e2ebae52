package plan

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

const (
	memberHints       = "resource_hints"
	memberConstraints = "constraints"
	resourcePrefix    = "atd.resource_"
	circuitThreshold  = "atd.circuit_threshold"
	circuitWindow     = "atd.circuit_window_s"

	maxID          = 128
	maxText        = 256
	maxDescription = 4096
	maxTimeoutS    = 365 * 24 * 60 * 60
	maxWhole       = 1 << 30
	maxNesting     = 32
)

var decimal = regexp.MustCompile(`^[0-9]{1,6}(\.[0-9]{1,3})?$`)

// reader reads a descriptor. What is wrong with a value is noted, and reading goes on; the methods
// return false where the text is no JSON.
type reader struct {
	jsonx.Scanner
	plan  *Descriptor
	edges [][2]string
	list  string // the list that is being read, nodes or edges, or empty
	found []finding
	more  int
	work  int // how many steps were made with nodes and edges
}

// finding is a problem of an element of a list, whose id may come later in the text.
type finding struct {
	Problem
	list  string
	place int
}

func (r *reader) note(member, format string, args ...any) {
	r.add(finding{Problem{Member: member, Text: fmt.Sprintf(format, args...)}, r.list, r.place()})
}

// place is that of the element that is being read.
func (r *reader) place() int {
	if r.list == "edges" {
		return len(r.edges) - 1
	}
	return len(r.plan.Nodes) - 1
}

func (r *reader) add(f finding) {
	if len(r.found) == maxProblems {
		r.more++
		return
	}
	r.found = append(r.found, f)
}

// err names the elements.
func (r *reader) err() *Error {
	e := &Error{More: r.more}
	for _, f := range r.found {
		f.Node = cmp.Or(f.Node, r.element(f.list, f.place))
		e.Problems = append(e.Problems, f.Problem)
	}
	return e
}

// element names an element of a list, by its id if that is one.
func (r *reader) element(list string, place int) string {
	if list == "" || place < 0 {
		return ""
	}
	if list == "nodes" {
		if id := r.plan.Nodes[place].ID; id != "" && len(id) <= maxID && visible(id) {
			return cut(id)
		}
	}
	return fmt.Sprintf("%s[%d]", list, place)
}

// syntax is the problem of a text that is not read to its end.
func (r *reader) syntax() Problem {
	at, p := r.At, Problem{}
	var wrong *json.SyntaxError
	switch err := json.Unmarshal([]byte(r.JSON), new(any)); {
	case errors.As(err, &wrong):
		at, p.Text = int(wrong.Offset), wrong.Error()
	case r.TwiceNamed:
		p.Text = "the name stands twice in one object; write it once"
	case r.NotUnicode && r.Name == "":
		p.Text = "a name is no valid Unicode; write UTF-8, and surrogates in pairs"
	case r.NotUnicode:
		p.Text = "the text is no valid Unicode; write UTF-8, and surrogates in pairs"
	case r.TooDeep:
		p.Text = fmt.Sprintf("the value nests too deep; at most %d levels are allowed", maxNesting)
	default:
		p.Text = "it is no object"
	}
	if (r.TwiceNamed || r.NotUnicode || r.TooDeep) && wrong == nil {
		p.Node, p.Member = r.element(r.list, r.place()), cut(r.Name)
	}
	p.Text = fmt.Sprintf("line %d: %s", 1+strings.Count(r.JSON[:min(at, len(r.JSON))], "\n"), p.Text)
	return p
}

func (r *reader) document() bool {
	ok := r.Document(func(name string) (ok bool) {
		switch name {
		case "wf_id":
			r.plan.WorkflowID, ok = r.text(name, maxText)
		case "description":
			r.plan.Description, ok = r.text(name, maxDescription)
		case "nodes":
			ok = r.elements(name, MaxNodes, func() bool {
				r.plan.Nodes = append(r.plan.Nodes, Node{})
				n := &r.plan.Nodes[len(r.plan.Nodes)-1]
				return r.object("", func(name string) bool { return r.node(n, name) })
			})
		case "edges":
			ok = r.elements(name, maxEdges, func() bool {
				r.edges = append(r.edges, [2]string{})
				e := &r.edges[len(r.edges)-1]
				return r.object("", func(name string) bool { return r.edge(e, name) })
			})
		default:
			ok = r.unknown(name, "wf_id, description, nodes, edges")
		}
		return ok
	})
	if ok && r.plan.WorkflowID == "" && !r.noted("", 0, "wf_id") {
		r.note("wf_id", "is missing or empty; name the plan")
	}
	if ok && len(r.plan.Nodes) == 0 && !r.noted("", 0, "nodes") {
		r.note("nodes", "there are none; a plan has at least one")
	}
	return ok
}

// noted reports whether a problem of a member is noted; list is empty for those of the whole plan.
func (r *reader) noted(list string, place int, member string) bool {
	return slices.ContainsFunc(r.found, func(f finding) bool {
		return f.list == list && (list == "" || f.place == place) && f.Member == member
	})
}

// elements reads a list of at most so many objects.
func (r *reader) elements(name string, most int, element func() bool) bool {
	if r.Peek() != '[' {
		return r.instead(name, "write a list")
	}
	n := 0
	r.list = name
	ok := r.Elements(func() bool {
		if n++; n > most {
			_, ok := r.Value()
			return ok
		}
		return element()
	})
	if ok { // else the problem is that of the element
		r.list = ""
	}
	if n > most {
		r.note(name, "there are %d; at most %d are allowed", n, most)
	}
	return ok
}

func (r *reader) object(member string, each func(name string) bool) bool {
	if r.Peek() != '{' {
		return r.instead(member, "write an object")
	}
	return r.Members(each)
}

func (r *reader) node(n *Node, name string) (ok bool) {
	switch name {
	case "id":
		if n.ID, ok = r.text(name, maxID); !visible(n.ID) {
			r.note(name, "is %q; use visible ASCII characters, since header fields name nodes", cut(n.ID))
		}
	case "label":
		n.Label, ok = r.text(name, maxText)
	case "reversible":
		var v bool
		if v, ok = r.boolean(name); ok {
			n.Reversible = &v
		}
	case "hitl_required":
		n.HITLRequired, ok = r.boolean(name)
	case memberHints:
		var h Hints
		ok = r.object(name, func(hint string) bool {
			if !slices.Contains(hintNames, hint) {
				return r.unknown(name+"."+hint, strings.Join(hintNames, ", ")+"; times are in seconds, sizes in MB")
			}
			return r.hint(&h, name+"."+hint, hint)
		})
		r.merge(n, h)
	case memberConstraints:
		var h Hints
		ok = r.object(name, func(c string) bool { return r.constraint(n, &h, c) })
		r.merge(n, h)
	default:
		ok = r.unknown(name, "id, label, reversible, hitl_required, resource_hints, constraints")
	}
	return ok
}

// hintNames are the members of resource_hints. In constraints they have a prefix.
var hintNames = []string{"priority", "timeout_s", "cpu", "memory_mb", "gpu", "network_mbps"}

func (r *reader) hint(h *Hints, member, name string) (ok bool) {
	switch name {
	case "priority":
		const right = "use critical, high, normal or low"
		if r.Peek() != '"' {
			return r.instead(member, right)
		}
		if h.Priority, ok = r.Text(); ok && !slices.Contains(bulkhead.Classes(), h.Priority) {
			r.note(member, "is %q; %s", cut(h.Priority), right)
			h.Priority = ""
		}
	case "timeout_s":
		h.TimeoutS, ok = r.whole(member, 1, maxTimeoutS, "whole seconds, from 1 to a year")
	case "memory_mb":
		h.MemoryMB, ok = r.whole(member, 0, maxWhole, "a whole number of MB")
	case "network_mbps":
		h.NetworkMbps, ok = r.whole(member, 0, maxWhole, "a whole number of Mbit/s")
	case "cpu":
		h.CPU, ok = r.amount(member)
	case "gpu":
		h.GPU, ok = r.amount(member)
	}
	return ok
}

func (r *reader) constraint(n *Node, h *Hints, name string) (ok bool) {
	member := memberConstraints + "." + cut(name)
	hint, isHint := strings.CutPrefix(name, resourcePrefix)
	switch {
	case isHint && slices.Contains(hintNames, hint):
		return r.hint(h, member, hint)
	case name == circuitThreshold:
		const right = "a share above 0 and below 1"
		if n.CircuitThreshold, ok = r.number(member, right, positive); ok && n.CircuitThreshold >= 1 {
			r.note(member, "is %v; write %s", n.CircuitThreshold, right)
		}
	case name == circuitWindow:
		const right = "seconds, 1 or more"
		if n.CircuitWindowS, ok = r.number(member, right, positive); ok && n.CircuitWindowS != 0 && n.CircuitWindowS < 1 {
			r.note(member, "is %v; write %s", n.CircuitWindowS, right)
		}
	case strings.HasPrefix(name, "atd."):
		return r.unknown(member, resourcePrefix+strings.Join(hintNames, ", "+resourcePrefix)+", "+circuitThreshold+", "+circuitWindow)
	default:
		var value string
		if value, _, ok = r.Raw(); ok {
			n.Others = append(n.Others, Constraint{name, jsonx.Canonical(value)})
		}
	}
	return ok
}

// merge adds hints to those that a node has. One need is said once, or twice in the same way.
func (r *reader) merge(n *Node, h Hints) {
	has := &n.Hints
	has.Priority = one(r, "priority", has.Priority, h.Priority)
	has.TimeoutS = one(r, "timeout_s", has.TimeoutS, h.TimeoutS)
	has.CPU = one(r, "cpu", has.CPU, h.CPU)
	has.MemoryMB = one(r, "memory_mb", has.MemoryMB, h.MemoryMB)
	has.GPU = one(r, "gpu", has.GPU, h.GPU)
	has.NetworkMbps = one(r, "network_mbps", has.NetworkMbps, h.NetworkMbps)
}

func one[T comparable](r *reader, hint string, a, b T) T {
	var none T
	switch {
	case b == none:
		return a
	case a != none && a != b:
		r.note(memberHints+"."+hint, "and constraints.%s%s are not the same (%v and %v): say it once", resourcePrefix, hint, a, b)
	}
	return b
}

func (r *reader) edge(e *[2]string, name string) (ok bool) {
	switch name {
	case "from":
		e[0], ok = r.text(name, maxID)
	case "to":
		e[1], ok = r.text(name, maxID)
	default:
		ok = r.unknown(name, "from, to")
	}
	return ok
}

// unknown notes a member that does not exist.
func (r *reader) unknown(member, known string) bool {
	r.note(cut(member), "there is no such member; there are %s", known)
	_, ok := r.Value()
	return ok
}

// instead notes a value of another kind.
func (r *reader) instead(member, right string) bool {
	raw, _, ok := r.Raw()
	r.note(member, "is %s; %s", cut(strings.Join(strings.Fields(raw), " ")), right)
	return ok
}

// text reads a string of at most so many characters.
func (r *reader) text(member string, most int) (string, bool) {
	if r.Peek() != '"' {
		return "", r.instead(member, "write a string")
	}
	v, ok := r.Text()
	switch {
	case !ok, len(v) <= most && visible(v): // most of them
	case utf8.RuneCountInString(v) > most:
		r.note(member, "has more than %d characters", most)
	case strings.ContainsFunc(v, unicode.IsControl):
		r.note(member, "has control characters")
	}
	return v, ok
}

// visible reports whether a text has only visible ASCII characters.
func visible(v string) bool {
	for i := range len(v) {
		if v[i] < '!' || v[i] > '~' {
			return false
		}
	}
	return true
}

func (r *reader) boolean(member string) (bool, bool) {
	if c := r.Peek(); c != 't' && c != 'f' {
		return false, r.instead(member, "write true or false")
	}
	raw, _, ok := r.Raw()
	return raw == "true", ok
}

// number reads a number. One that does not fit is noted, as anything else is, and 0.
func (r *reader) number(member, right string, fits func(v float64) bool) (float64, bool) {
	if !jsonx.IsNumber(r.JSON[r.At:]) {
		return 0, r.instead(member, "write "+right+", as a number")
	}
	raw, ok := r.Number()
	v, err := strconv.ParseFloat(raw, 64)
	if ok && (err != nil || !fits(v)) {
		r.note(member, "is %s; write %s", cut(raw), right)
		v = 0
	}
	return v, ok
}

func positive(v float64) bool { return v > 0 }

func (r *reader) whole(member string, least, most int64, right string) (int64, bool) {
	v, ok := r.number(member, right, func(v float64) bool {
		return v == math.Trunc(v) && float64(least) <= v && v <= float64(most)
	})
	return int64(v), ok
}

// amount reads ATD's numbers in strings.
func (r *reader) amount(member string) (string, bool) {
	const right = `write a number as a string, like "2" or "0.5"`
	if r.Peek() != '"' {
		return "", r.instead(member, right)
	}
	v, ok := r.Text()
	if ok && !decimal.MatchString(v) {
		r.note(member, "is %q; %s", cut(v), right)
		v = ""
	}
	return v, ok
}

// cut shortens what is shown of a text, to at most 64 characters.
func cut(text string) string {
	const most = 60
	if len(text) <= most {
		return text
	}
	end := most
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}

// connect finds the nodes by their ids, joins them with the edges, and orders them.
func (r *reader) connect() {
	d := r.plan
	d.index = make(map[string]int, len(d.Nodes))
	for i := range d.Nodes {
		id := d.Nodes[i].ID
		problem := Problem{Member: "id"}
		first, twice := d.index[id]
		switch {
		case id == "" && r.noted("nodes", i, "id"):
			continue
		case id == "":
			problem.Text = "is missing or empty"
		case twice:
			problem.Text = fmt.Sprintf("nodes[%d] and nodes[%d] have the same; give each its own", first, i)
		default:
			d.index[id] = i
			continue
		}
		r.add(finding{problem, "nodes", i})
	}
	find := func(id string) int {
		if place, ok := d.index[id]; ok {
			return place
		}
		return -1
	}
	met := make(map[[2]int]bool, len(r.edges))
	for i, e := range r.edges {
		r.work++
		from, to := find(e[0]), find(e[1])
		problem := Problem{}
		switch {
		case e[0] == "" && r.noted("edges", i, "from"), e[1] == "" && r.noted("edges", i, "to"):
			continue
		case e[0] == "":
			problem.Member, problem.Text = "from", "is missing or empty; name the node that comes before"
		case e[1] == "":
			problem.Member, problem.Text = "to", "is missing or empty; name the node that comes after"
		case from < 0:
			problem.Member, problem.Text = "from", fmt.Sprintf("there is no node %q", cut(e[0]))
		case to < 0:
			problem.Member, problem.Text = "to", fmt.Sprintf("there is no node %q", cut(e[1]))
		case from == to:
			problem.Text = fmt.Sprintf("leads from %s to itself", cut(e[0]))
		case met[[2]int{from, to}]:
			problem.Text = fmt.Sprintf("%s -> %s stands twice", cut(e[0]), cut(e[1]))
		default:
			met[[2]int{from, to}] = true
			d.Edges++
			d.Nodes[from].After = append(d.Nodes[from].After, to)
			d.Nodes[to].Before = append(d.Nodes[to].Before, from)
			continue
		}
		r.add(finding{problem, "edges", i})
	}
	r.sort()
}

// sort orders the nodes, and names a cycle of every knot of nodes that follow from one another
// (Tarjan's strongly connected components, which come in reverse topological order).
func (r *reader) sort() {
	nodes := r.plan.Nodes
	number, low, knot := make([]int, len(nodes)), make([]int, len(nodes)), make([]int, len(nodes))
	var stack []int
	visited, knots := 0, 0
	var visit func(i int)
	visit = func(i int) {
		visited++
		number[i], low[i] = visited, visited
		stack = append(stack, i)
		for _, j := range nodes[i].After {
			r.work++
			if number[j] == 0 {
				visit(j)
			}
			if knot[j] == 0 {
				low[i] = min(low[i], low[j])
			}
		}
		if low[i] < number[i] {
			return
		}
		begin := len(stack)
		knots++
		for more := true; more; {
			begin--
			knot[stack[begin]] = knots
			more = stack[begin] != i
		}
		if len(stack)-begin > 1 {
			r.cycle(slices.Min(stack[begin:]), knot)
		}
		r.plan.order = append(r.plan.order, stack[begin:]...)
		stack = stack[:begin]
	}
	for i := range nodes {
		r.work++
		if number[i] == 0 {
			visit(i)
		}
	}
	slices.Reverse(r.plan.order)
	for _, i := range r.plan.order {
		for _, j := range nodes[i].After {
			r.work++
			nodes[j].Level = max(nodes[j].Level, nodes[i].Level+1)
		}
	}
}

// cycle notes a shortest cycle through a node, which lies within its knot.
func (r *reader) cycle(first int, knot []int) {
	nodes := r.plan.Nodes
	from := map[int]int{} // the node before, on a shortest way from the first
	last := -1
	for next := []int{first}; last < 0; next = next[1:] {
		for _, j := range nodes[next[0]].After {
			r.work++
			if j == first {
				last = next[0]
				break
			}
			if _, seen := from[j]; !seen && knot[j] == knot[first] {
				from[j] = next[0]
				next = append(next, j)
			}
		}
	}
	var ids []string
	for i := last; i != first; i = from[i] {
		ids = append(ids, cut(nodes[i].ID))
	}
	ids = append(ids, cut(nodes[first].ID))
	slices.Reverse(ids)
	shown := append(slices.Clone(ids), ids[0])
	if left := len(shown) - 12; left > 0 {
		shown = slices.Concat(shown[:6], []string{fmt.Sprintf("%d more", left)}, shown[len(shown)-6:])
	}
	r.add(finding{Problem: Problem{Node: ids[0], Text: "lies on a cycle: " + strings.Join(shown, " -> "), Cycle: ids}})
}
