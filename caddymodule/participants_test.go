package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// C-4.3.1-e: prepare_timeout is the silence of a participant that is asked for what it has. Many pages
// that each come in time are no silence, and one that does not is.
func TestPagesOfAParticipantThatIsNotSilent(t *testing.T) {
	const silence, whole = 10 * time.Second, time.Minute
	for name, test := range map[string]struct {
		pages  int
		each   time.Duration // what a page takes
		status int           // of the last page
		reason rollback.Reason
		took   time.Duration
	}{
		"many pages":       {6, 8 * time.Second, http.StatusOK, "", 48 * time.Second},
		"silent":           {1, time.Hour, http.StatusOK, rollback.ReasonUnreachable, silence},
		"silent later":     {3, 4 * time.Second, 0, rollback.ReasonUnreachable, 8*time.Second + silence},
		"busy":             {1, 0, http.StatusServiceUnavailable, rollback.ReasonUnreachable, silence},
		"without end":      {100, 8 * time.Second, http.StatusOK, rollback.ReasonUnreachable, whole},
		"not allowed":      {2, 0, http.StatusForbidden, rollback.ReasonUnauthorized, 0},
		"not understood":   {2, 0, http.StatusBadRequest, rollback.ReasonRefused, 0},
		"an older gateway": {1, 0, http.StatusNotFound, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), whole)
				defer cancel()
				began, came := time.Now(), 0
				raws, reason, _, _ := readPages(ctx, silence, func(ctx context.Context, after string) (page evidence.WorkflowTokens, _ int, _ error) {
					if want := map[bool]string{true: "", false: fmt.Sprint(came)}[came == 0]; after != want {
						t.Errorf("after %q, not %q", after, want)
					}
					last := came == test.pages-1
					if last && test.status == 0 {
						return page, 0, errors.New("no connection")
					}
					select {
					case <-time.After(test.each):
					case <-ctx.Done():
						return page, 0, ctx.Err()
					}
					if last && test.status != http.StatusOK {
						return page, test.status, nil
					}
					came++
					if page.Tokens = []string{fmt.Sprint("token ", came)}; !last {
						page.Next = fmt.Sprint(came)
					}
					return page, http.StatusOK, nil
				})
				if took := time.Since(began); reason != test.reason || took < test.took || took > test.took+2*time.Second {
					t.Errorf("%q after %v, not %q after %v", reason, took, test.reason, test.took)
				}
				if test.reason == "" && test.status == http.StatusOK && len(raws) != test.pages {
					t.Errorf("%q", raws)
				}
			})
		})
	}
}
