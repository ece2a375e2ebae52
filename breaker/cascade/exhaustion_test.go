package cascade_test

import (
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// C-3.4.1-e: each resource is exhausted where its own measure says so, from one reading to the next: a share in use
// (permits, connections, memory), refusals (queue), its owner (disk), slow operations (store).
func TestExhaustion(t *testing.T) {
	level := func(used float64) cascade.Reading { return cascade.Reading{Used: used, Limit: 10} }
	refused := func(n uint64) cascade.Reading { return cascade.Reading{Refused: n} }
	took := func(n uint64, all time.Duration) cascade.Reading { return cascade.Reading{Ops: n, Took: all} }
	for name, c := range map[string]struct {
		reads []cascade.Reading
		full  []bool // after each of them
	}{
		"permits":                {[]cascade.Reading{level(8.9), level(9), level(10), level(8)}, []bool{false, true, true, false}},
		"connections, unlimited": {[]cascade.Reading{{Used: 1000}, {Used: 1e9}}, []bool{false, false}},
		"queue":                  {[]cascade.Reading{refused(5), refused(6), refused(6), refused(9), refused(10), refused(0)}, []bool{false, true, false, true, true, false}},
		"disk":                   {[]cascade.Reading{{}, {Full: true}, {Full: true}, {}}, []bool{false, true, true, false}},
		"store": {
			[]cascade.Reading{took(9, time.Hour), took(11, time.Hour+time.Second), took(11, time.Hour+time.Second), took(111, time.Hour+50*time.Second), took(113, time.Hour+51*time.Second-1)},
			[]bool{false, true, false, false, false},
		},
	} {
		var e cascade.Exhaustion
		active := false
		for i, r := range c.reads {
			r.Pool, r.Resource = "guard", name
			begun, ended := e.Update([]cascade.Reading{{Pool: "other", Resource: name}, r})
			s := cascade.Resource{Pool: "guard", Name: name}
			if slices.Contains(begun, s) != (c.full[i] && !active) || slices.Contains(ended, s) != (active && !c.full[i]) || len(begun)+len(ended) > 1 {
				t.Errorf("%s: reading %d begins %v, ends %v", name, i, begun, ended)
			}
			active = c.full[i]
			if all := e.Exhausted(); slices.Contains(all, s) != active || len(all) > 1 {
				t.Errorf("%s: after reading %d: %v", name, i, all)
			}
		}
	}
}

// What is not read any more, such as the guard of an earlier configuration, is not exhausted.
func TestExhaustionOfWhatIsGone(t *testing.T) {
	var e cascade.Exhaustion
	e.Update([]cascade.Reading{{Pool: "a", Resource: "permits", Used: 1, Limit: 1}, {Resource: "disk", Full: true}})
	want := []cascade.Resource{{Pool: "a", Name: "permits"}}
	if begun, ended := e.Update([]cascade.Reading{{Resource: "disk", Full: true}}); len(begun) > 0 || !slices.Equal(ended, want) {
		t.Errorf("begun %v, ended %v", begun, ended)
	}
}
