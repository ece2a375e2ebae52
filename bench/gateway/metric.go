package gateway

import (
	"errors"

	"github.com/caddyserver/caddy/v2"
)

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
