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

// wait waits for the next try, and for least at any rate, but not for more than half of what
// is left: who asks for more time than there is does not end the undo. What is left before
// the due time is used: the last waits are shorter. It returns false when it is due.
func (p *pace) wait(ctx context.Context, least time.Duration) (bool, error) {
	d, due := max(p.next, least), false
	p.next = min(2*p.next, p.longest)
	if !p.due.IsZero() {
		left := time.Until(p.due)
		if d = min(d, max(left/2, p.first)); d >= left {
			d, due = left, true
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return !due, nil
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
