package hitl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// Every filter, in pages of every size, gives what a look at everything gives.
func TestListAgainstBruteForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.desk()
		rnd := rand.New(rand.NewPCG(1, 2))
		var all []hitl.Escalation // the newest first
		answers := map[string]error{}
		for i := range 400 {
			o := opening(fmt.Sprint(i))
			o.Level = hitl.Level(1 + rnd.IntN(3))
			o.Workflow = []string{"", "a", "b"}[rnd.IntN(3)]
			e := open(t, d, o)
			answers[e.ID] = []error{nil, hitl.ErrRefused, errDown}[rnd.IntN(3)]
			all = append([]hitl.Escalation{e}, all...)
			time.Sleep(time.Second)
		}
		end := run(t, d, hitl.NotifierFunc(func(_ context.Context, e hitl.Escalation) error { return answers[e.ID] }), hitl.CourierOptions{})
		synctest.Wait()
		end()
		for i := range all {
			all[i] = get(t, d, all[i].ID)
		}
		for _, f := range filters() {
			var want []string
			for _, e := range all {
				if (f.Workflow == "" || f.Workflow == e.Workflow) && (f.Level == 0 || f.Level == e.Level) && (f.State == 0 || f.State == e.State) {
					want = append(want, e.ID)
				}
			}
			for _, limit := range []int{1, 7, 100, 1000} {
				if got := listed(t, d, f, limit); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%+v by %d: %d instead of %d, or another order", f, limit, len(got), len(want))
				}
			}
		}
	})
}

func filters() (all []hitl.Filter) {
	for _, w := range []string{"", "a", "nobody's"} {
		for l := range hitl.Stop + 1 {
			for _, s := range append(hitl.States(), 0) {
				all = append(all, hitl.Filter{Workflow: w, Level: l, State: s})
			}
		}
	}
	return all
}

// listed goes through all pages.
func listed(t *testing.T, d *hitl.Desk, f hitl.Filter, limit int) (ids []string) {
	t.Helper()
	for cursor := ""; ; {
		page, err := d.List(t.Context(), f, cursor, limit)
		if err != nil {
			t.Fatal(err)
		}
		if len(page.Escalations) > limit {
			t.Fatalf("%d on a page of %d", len(page.Escalations), limit)
		}
		for _, e := range page.Escalations {
			ids = append(ids, e.ID)
		}
		if cursor = page.Next; cursor == "" {
			return ids
		}
	}
}

// A filter that hardly any pass gives short pages that go on, instead of a long wait.
func TestListOfRareOnesGoesOn(t *testing.T) {
	p := newPlace()
	d := p.desk()
	rare := opening("rare")
	rare.Level = hitl.Stop
	e := open(t, d, rare)
	flood(t, p, 5_200)
	page, err := d.List(t.Context(), hitl.Filter{Level: hitl.Stop}, "", 1)
	if err != nil || len(page.Escalations) != 0 || page.Next == "" {
		t.Fatalf("%+v, %v", page, err)
	}
	page, err = d.List(t.Context(), hitl.Filter{Level: hitl.Stop}, page.Next, 2)
	if err != nil || len(page.Escalations) != 1 || page.Escalations[0].ID != e.ID || page.Next != "" {
		t.Fatalf("%+v, %v", page, err)
	}
}

// One that changes between the look at the index and at the record is judged by the record.
func TestListShowsOnlyWhatPassesStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		open(t, p.desk(), opening("k"))
		between := &faulty{Store: p.Store}
		between.beforeGet = func() {
			end := run(t, p.desk(), &receiver{}, hitl.CourierOptions{})
			synctest.Wait()
			end()
		}
		page, err := hitl.NewDesk(between, p.ring, 0).List(t.Context(), hitl.Filter{State: hitl.Open}, "", 10)
		if err != nil || len(page.Escalations) != 0 {
			t.Errorf("%+v, %v", page, err)
		}
	})
}

func TestCursorOfSomebodyElse(t *testing.T) {
	for _, cursor := range []string{"x", "!", "AAAA"} {
		if _, err := newPlace().desk().List(t.Context(), hitl.Filter{}, cursor, 1); !errors.Is(err, hitl.ErrCursor) {
			t.Errorf("%q: %v", cursor, err)
		}
	}
}
