//go:build unix

package harness

import (
	"net/http"
	"time"
)

// ReleasedAt waits until a gateway has been told that what it has reserved is released: b can be prepared there.
func (c *Star) ReleasedAt(i int, b RollbackBody) {
	c.T.Helper()
	at := *c.Saga
	at.G = c.Sites[i].Gateway(c.T)
	eventuallyEvery(c.T, time.Second, ProcBound, "the release arrives", func() bool {
		r := at.Asking(b)
		r.Path += "/prepare"
		return at.G.Call(r).Status == http.StatusOK
	})
	b.Phase = "release"
	at.Prepare(b, http.StatusOK)
}
