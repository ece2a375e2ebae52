package soak

import (
	"slices"
	"testing"
	"time"
)

// A seed says what happens when; another one says something else.
func TestPlan(t *testing.T) {
	o := Default
	first := plan(o)
	if !slices.Equal(first, plan(o)) {
		t.Error("the same seed gave another plan")
	}
	o.Seed++
	if slices.Equal(first, plan(o)) {
		t.Error("another seed gave the same plan")
	}
	var kills, reloads, last int
	for i, d := range first {
		switch {
		case i > 0 && d.at < first[i-1].at:
			t.Errorf("%v comes after %v", d, first[i-1])
		case d.at >= o.For:
			t.Errorf("%v comes after the load", d)
		}
		if d.kill {
			kills++
			last = i
		} else {
			reloads++
		}
	}
	if kills < 2 || reloads < 2 {
		t.Errorf("%d kills and %d reloads in %s", kills, reloads, o.For)
	}
	if at := first[last].at; at > time.Duration(float64(o.For)*(1-calm)) {
		t.Errorf("a kill at %s, where it should be calm", at)
	}
}

// The shortest run has a kill and a reload too.
func TestShortPlan(t *testing.T) {
	got := plan(Options{For: 2 * time.Second, Every: time.Minute, Seed: 1})
	if len(got) != 2 || !got[0].kill || got[1].kill {
		t.Errorf("got %v", got)
	}
}
