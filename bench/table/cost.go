package table

import (
	"context"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// Cost is what calls cost the process that served them. What the system or the process
// does not say is left out.
type Cost struct {
	// Calls are all that the rest is of.
	Calls int `json:"calls"`
	// Work is the processor time of a call, in µs: unlike requests per second it says
	// nearly the same on a machine that has others to serve.
	Work *stat.Spread `json:"processor_us,omitempty"`
	// Allocs are the allocations of a call, AllocBytes their bytes.
	Allocs     *float64 `json:"allocs,omitempty"`
	AllocBytes *float64 `json:"alloc_bytes,omitempty"`
	// Written are the bytes of a call that the system counts as written by the process.
	Written *float64 `json:"written_bytes,omitempty"`
	// Device are the bytes of a call that reached the store's device, those of others
	// included; measured where load is sustained.
	Device *float64 `json:"device_bytes,omitempty"`
	// Memory is the anonymous memory at the end, in bytes.
	Memory *float64 `json:"anonymous_bytes,omitempty"`
	// Collections of garbage for 1000 calls.
	Collections *float64 `json:"collections,omitempty"`
}

// reading is what a server has used up to a moment.
type reading struct {
	work               time.Duration
	allocs, allocBytes int64 // 0 is not known, as are collections without these
	collections        int64
	written            int64 // -1 is not known
	memory             int64
}

// read asks the system and the server.
func (s *server) read(ctx context.Context) (reading, error) {
	u, err := proc.UsageOf(s.proc.Pid())
	if err != nil {
		return reading{}, err
	}
	r := reading{work: u.Work, written: u.Written, memory: u.RssAnon}
	if s.gateway == nil {
		return r, nil
	}
	stats, err := s.gateway.Stats(ctx)
	if err != nil {
		return reading{}, err
	}
	r.allocs, r.allocBytes, r.collections = stats.Allocs, stats.AllocBytes, stats.GCs
	if stats.Work > 0 { // finer than the system's clock ticks
		r.work = stats.Work
	}
	return r, nil
}

// spent sums up what rounds took of a server.
type spent struct {
	calls         int
	works         []float64 // µs per call, a round each
	allocs, bytes int64
	collections   int64
	written       int64
	device        int64
	memory        int64
	known         reading // of the last round: which of these are known
	deviceKnown   bool
}

func (s *spent) add(before, after reading, calls int) {
	s.calls += calls
	s.works = append(s.works, float64((after.work-before.work).Nanoseconds())/1e3/float64(calls))
	s.allocs += after.allocs - before.allocs
	s.bytes += after.allocBytes - before.allocBytes
	s.collections += after.collections - before.collections
	s.written += after.written - before.written
	s.memory, s.known = after.memory, after
}

func (s *spent) cost() Cost {
	c := Cost{Calls: s.calls}
	if s.calls == 0 {
		return c
	}
	perCall := func(sum int64, known bool) *float64 {
		if !known {
			return nil
		}
		v := float64(sum) / float64(s.calls)
		return &v
	}
	if s.known.work > 0 {
		works := stat.Of(s.works)
		c.Work = &works
	}
	c.Allocs = perCall(s.allocs, s.known.allocs > 0)
	c.AllocBytes = perCall(s.bytes, s.known.allocs > 0)
	c.Collections = perCall(1000*s.collections, s.known.allocs > 0)
	c.Written = perCall(s.written, s.known.written >= 0)
	c.Device = perCall(s.device, s.deviceKnown)
	if s.known.memory > 0 {
		memory := float64(s.memory)
		c.Memory = &memory
	}
	return c
}

// onDevice measures what reaches the store's device while do runs.
func (s *scene) onDevice(do func() error) (bytes int64, known bool, err error) {
	if s.device == nil {
		return 0, false, do()
	}
	before, err := s.device.Written()
	if err != nil {
		return 0, false, err
	}
	if err := do(); err != nil {
		return 0, false, err
	}
	after, err := s.device.Written()
	return after - before, true, err
}
