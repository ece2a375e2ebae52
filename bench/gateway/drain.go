package gateway

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
)

const (
	drainPath = "/bench/drain"

	// backlogMetric is what the product itself says of the ledger. Reading it costs
	// the gateway a little, which is why it is asked at this distance.
	backlogMetric = "agent_guard_ledger_backlog"
	backlogEvery  = 2 * time.Millisecond
)

// serveDrain answers once nothing waits for its place in the ledger's tree.
func serveDrain(w http.ResponseWriter, r *http.Request) error {
	if err := drain(r.Context()); err != nil {
		return caddy.APIError{HTTPStatus: http.StatusInternalServerError, Err: err}
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func drain(ctx context.Context) error {
	tick := time.NewTicker(backlogEvery)
	defer tick.Stop()
	for {
		waiting, err := metric(backlogMetric)
		if err != nil || waiting == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// metric is the value of a gauge of the product without labels, or the sum of a histogram.
func metric(name string) (float64, error) {
	active := caddy.ActiveContext()
	families, err := active.GetMetricsRegistry().Gather()
	if err != nil {
		return 0, err
	}
	for _, f := range families {
		if f.GetName() == name && len(f.GetMetric()) == 1 {
			return f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetHistogram().GetSampleSum(), nil
		}
	}
	return 0, errors.New("the gateway has no " + name)
}
