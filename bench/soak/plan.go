package soak

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"
)

// disturbance is what happens to the gateway at a time after the load's begin.
type disturbance struct {
	at   time.Duration
	kill bool // SIGKILL and a start; else a reload
}

// calm is the part of the load, at its end, without kills: in that life growth would
// be seen.
const calm = 0.4

// plan draws the disturbances from the seed: the first kill is sure to come, and so is
// a reload in the calm part.
func plan(o Options) []disturbance {
	random := rand.New(rand.NewPCG(o.Seed, 0))
	kills := time.Duration(float64(o.For) * (1 - calm))
	all := []disturbance{{at: kills / 2, kill: true}, {at: kills + (o.For-kills)/2}}
	for at := time.Duration(0); ; {
		at += time.Duration((0.5 + random.Float64()) * float64(o.Every))
		if at >= o.For {
			break
		}
		all = append(all, disturbance{at: at, kill: at < kills && random.IntN(2) == 0})
	}
	slices.SortFunc(all, func(a, b disturbance) int { return cmp.Compare(a.at, b.at) })
	return all
}
