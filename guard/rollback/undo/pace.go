package undo

import (
	"context"
	"net/http"
	"strconv"
	"time"
)

// pace says when something is tried again.
type pace struct {
	first, next, longest time.Duration
	due                  time.Time
	quit                 <-chan struct{}
}

func (j *job) pace(first time.Duration) *pace {
	return &pace{first: first, next: first, longest: max(first, j.o.Longest), due: j.task.Due, quit: j.task.Quit}
}

// wait waits for the next try, and for least at any rate. It returns false at once where
// that would be too late. What is left before the due time is used: the last waits are
// shorter.
func (p *pace) wait(ctx context.Context, least time.Duration) (bool, error) {
	d := p.next
	p.next = min(2*p.next, p.longest)
	if !p.due.IsZero() {
		left := time.Until(p.due)
		d = max(min(d, max(left/2, p.first)), least)
		if d >= left {
			return false, nil
		}
	}
	timer := time.NewTimer(max(d, least))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	case <-p.quit:
		return false, ErrQuit
	}
}

// retryAfter is what an answer asks to wait; 0 without a word about it.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if seconds, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}
