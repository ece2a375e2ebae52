package storetest

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// model is the contract as a sequential machine: every operation happens at one
// instant between its call and its return, on all keys together.
var model = porcupine.Model{
	Init: func() any { return [len(historyKeys)]cell{} },
	Step: func(state, input, output any) (bool, any) {
		cells, in, out := state.([len(historyKeys)]cell), input.(request), output.(answer)
		switch in.kind {
		case get:
			return out.cells[in.key] == cells[in.key], cells
		case scan:
			return out.cells == cells, cells
		default:
			return step(cells, in.batch, out)
		}
	},
	DescribeOperation: func(input, output any) string {
		return fmt.Sprintf("%+v -> %+v", input, output)
	},
}

func step(cells [len(historyKeys)]cell, batch []change, out answer) (bool, [len(historyKeys)]cell) {
	for i, w := range batch {
		if w.want == wantAny || w.want == cells[w.key].version {
			continue
		}
		// The first write that loses is the one that must be named.
		return out.lost == i && out.cells[w.key] == cells[w.key], cells
	}
	if out.lost != -1 || out.version == 0 {
		return false, cells
	}
	for _, w := range batch {
		if cells[w.key].version == out.version {
			return false, cells
		}
		if w.remove {
			cells[w.key] = cell{}
		} else {
			cells[w.key] = cell{out.version, w.value}
		}
	}
	return true, cells
}
