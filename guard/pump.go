package guard

import (
	"context"
	"io"
	"sync"
	"time"
)

// directSize is how much of a body that nobody flushes is written without a goroutine:
// net/http keeps that much in memory, so that the write cannot wait for the client.
const directSize = 2 << 10

// pump gives an answer to its client at the client's pace, so that the upstream is read
// at its own (P7). What the client is too slow for waits in two buffers of 32 KiB, and
// beyond that is read back from the recording.
type pump struct {
	w    *Writer
	sink Sink
	done chan struct{} // closed when nothing more will be written
	wake chan struct{} // says that there is something to do

	mu      sync.Mutex
	size    int64         // of what was given
	queue   []byte        // what the client gets next
	back    io.ReadCloser // gives what comes after queue; nil where nothing does
	lag     int64         // bytes to be read back
	adding  bool          // lag is about to grow
	flush   bool
	ended   bool          // no more will be given
	cutOff  bool          // the client gets nothing more
	room    chan struct{} // closed when queue was taken or the lag made up for; nil while nobody waits
	broken  bool          // bytes are missing that the client would have taken
	buffers [2]*[32 << 10]byte
}

func newPump(w *Writer, sink Sink, size int64) *pump {
	p := &pump{w: w, sink: sink, size: size, done: make(chan struct{}), wake: make(chan struct{}, 1)}
	p.buffers[0] = buffers.Get().(*[32 << 10]byte)
	p.queue = p.buffers[0][:0]
	go p.run()
	return p
}

// write records b and leaves it for the client. It waits for the client only where b
// cannot be read back later.
func (p *pump) write(b []byte) {
	p.mu.Lock()
	from := p.size
	p.size += int64(len(b))
	switch {
	case p.cutOff:
		p.mu.Unlock()
		p.sink.Write(b, false)
		return
	case p.back == nil && len(b) <= cap(p.queue)-len(p.queue):
		p.queue = append(p.queue, b...)
		p.mu.Unlock()
		p.signal()
		p.sink.Write(b, false)
		return
	case p.back == nil:
		p.back = p.sink.ReadBack(from)
	}
	p.adding = true
	p.mu.Unlock()
	recorded := p.sink.Write(b, true)
	p.mu.Lock()
	p.adding = false
	if recorded {
		p.lag += int64(len(b))
	}
	p.mu.Unlock()
	p.signal()
	if !recorded {
		p.insist(b)
	}
}

// insist waits until the client takes b, which cannot be read back.
func (p *pump) insist(b []byte) {
	for len(b) > 0 {
		p.mu.Lock()
		if p.cutOff {
			p.mu.Unlock()
			return
		}
		if n := min(cap(p.queue)-len(p.queue), len(b)); n > 0 && p.lag == 0 {
			p.queue = append(p.queue, b[:n]...)
			b = b[n:]
			p.mu.Unlock()
			p.signal()
			continue
		}
		if p.room == nil {
			p.room = make(chan struct{})
		}
		room := p.room
		p.mu.Unlock()
		if !p.sink.Wait(room) {
			p.mu.Lock()
			p.broken = true
			p.mu.Unlock()
			p.cut()
			return
		}
	}
}

// flushed says that the client is to get everything that was written so far.
func (p *pump) flushed() {
	p.mu.Lock()
	p.flush = true
	p.mu.Unlock()
	p.signal()
}

func (p *pump) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// cut gives the client nothing more, and ends the write that is under way.
func (p *pump) cut() {
	p.mu.Lock()
	p.cutOff = true
	p.mu.Unlock()
	p.signal()
	_ = p.w.control.SetWriteDeadline(time.Now())
}

// end waits until the client has got all that was written, or ctx is over. It reports
// whether bytes are missing that the client would have taken.
func (p *pump) end(ctx context.Context) (broken bool) {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.signal()
	select {
	case <-p.done:
	default:
		select {
		case <-p.done:
		case <-ctx.Done():
			p.cut()
			<-p.done
			return true
		}
	}
	return p.broken
}

// run writes to the client until the answer has ended or the client has gone.
func (p *pump) run() {
	defer close(p.done)
	defer p.free()
	var spare []byte // the buffer that is not the queue's
	for {
		p.mu.Lock()
		if spare == nil && (len(p.queue) > 0 || p.lag > 0) {
			p.buffers[1] = buffers.Get().(*[32 << 10]byte)
			spare = p.buffers[1][:0]
		}
		switch {
		case p.cutOff:
			p.mu.Unlock()
			return
		case len(p.queue) > 0:
			next := p.queue
			p.queue = spare
			p.roomMade()
			p.mu.Unlock()
			_, _ = p.w.Write(next) // never fails
			spare = next[:0]
		case p.lag > 0:
			b, from := spare[:min(int64(cap(spare)), p.lag)], p.back
			p.mu.Unlock()
			n, err := from.Read(b)
			if n == 0 || err != nil {
				p.lost()
				return
			}
			_, _ = p.w.Write(b[:n]) // never fails
			p.mu.Lock()
			if p.lag -= int64(n); p.lag == 0 {
				p.roomMade()
			}
			p.mu.Unlock()
		case p.back != nil && !p.adding:
			_ = p.back.Close()
			p.back = nil
			p.mu.Unlock()
		case p.flush:
			p.flush = false
			p.mu.Unlock()
			p.w.Flush()
		case p.ended:
			p.mu.Unlock()
			return
		default:
			p.mu.Unlock()
			<-p.wake
		}
		if p.w.gone {
			return
		}
	}
}

// lost notes that what the client is to get next can no longer be read back.
func (p *pump) lost() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = true
}

// roomMade tells who waits in insist. The caller holds mu.
func (p *pump) roomMade() {
	if p.room != nil {
		close(p.room)
		p.room = nil
	}
}

// free ends the pump's side: from here on nothing is kept for the client.
func (p *pump) free() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutOff = true
	p.roomMade()
	if p.back != nil {
		_ = p.back.Close()
		p.back = nil
	}
	p.queue = nil
	for _, b := range p.buffers {
		// After a failed write an HTTP/2 connection may still read what it was given:
		// in its place would be another caller's answer (P3).
		if b != nil && !p.w.gone {
			buffers.Put(b)
		}
	}
}
