package hitl_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// Counts follow what becomes of each escalation, and what is opened is heard of once.
func TestCountAndHear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.desk()
		heard := map[string]int{}
		d.Hear(func(e hitl.Escalation) { heard[e.ID]++ })
		refused := map[string]bool{}
		for i := range 12 {
			o := opening(fmt.Sprint(i))
			o.Level = hitl.Level(1 + i%3)
			e := open(t, d, o)
			open(t, d, o) // again
			refused[e.ID] = i%4 == 0
			if heard[e.ID] != 1 {
				t.Errorf("heard of %d times", heard[e.ID])
			}
		}
		count := func(want string) {
			t.Helper()
			c, err := d.Count(t.Context())
			if got := fmt.Sprint(c); err != nil || got != want {
				t.Errorf("%s, %v; want %s", got, err, want)
			}
		}
		count(fmt.Sprint(hitl.Counts{
			hitl.Pause:    {hitl.Open: 4, hitl.Notified: 0, hitl.Undeliverable: 0},
			hitl.Approval: {hitl.Open: 4, hitl.Notified: 0, hitl.Undeliverable: 0},
			hitl.Stop:     {hitl.Open: 4, hitl.Notified: 0, hitl.Undeliverable: 0},
		}))
		d.SetKeep(time.Hour)
		end := run(t, d, hitl.NotifierFunc(func(_ context.Context, e hitl.Escalation) error {
			if refused[e.ID] {
				return hitl.ErrRefused
			}
			return nil
		}), hitl.CourierOptions{})
		synctest.Wait()
		end()
		count(fmt.Sprint(hitl.Counts{
			hitl.Pause:    {hitl.Open: 0, hitl.Notified: 3, hitl.Undeliverable: 1},
			hitl.Approval: {hitl.Open: 0, hitl.Notified: 3, hitl.Undeliverable: 1},
			hitl.Stop:     {hitl.Open: 0, hitl.Notified: 3, hitl.Undeliverable: 1},
		}))
		time.Sleep(time.Hour + time.Second) // what is kept follows the latest SetKeep
		count(fmt.Sprint(hitl.Counts{
			hitl.Pause:    {hitl.Open: 0, hitl.Notified: 0, hitl.Undeliverable: 0},
			hitl.Approval: {hitl.Open: 0, hitl.Notified: 0, hitl.Undeliverable: 0},
			hitl.Stop:     {hitl.Open: 0, hitl.Notified: 0, hitl.Undeliverable: 0},
		}))
	})
}
