//go:build unix

package database

import (
	"errors"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// quotas are the shares of processors that were asked for: with them, gateways and database are small machines of
// their own as long as the one that they share has time left.
type quotas struct {
	gateways []*proc.Quota // as many as the largest fleet has; none without a limit
	database *proc.Quota   // nil without a limit
	single   bool          // the database has one processor or a part of it
}

// newQuotas makes all of them at once, so that where there are none nothing else is begun.
func newQuotas(o *GatewaysOptions) (_ *quotas, err error) {
	q := &quotas{single: o.DatabaseCPU <= 1}
	defer func() {
		if err != nil {
			err = errors.Join(err, q.remove())
		}
	}()
	if o.GatewayCPU != 0 {
		for n := range slices.Max(o.Nodes) {
			one, err := proc.NewQuota(fmt.Sprint("gateway-", n), o.GatewayCPU)
			if err != nil {
				return nil, fmt.Errorf("gateway-cpu: %w", err)
			}
			q.gateways = append(q.gateways, one)
		}
	}
	if o.DatabaseCPU != 0 {
		if q.database, err = proc.NewQuota("database", o.DatabaseCPU); err != nil {
			return nil, fmt.Errorf("database-cpu: %w", err)
		}
	}
	return q, nil
}

func (q *quotas) limitGateway(n, pid int) error {
	if n >= len(q.gateways) {
		return nil
	}
	return q.gateways[n].Add(pid)
}

func (q *quotas) limitDatabase(pid int) error {
	if q.database == nil {
		return nil
	}
	if err := q.database.Add(pid); err != nil || !q.single {
		return err
	}
	return q.database.Pin(pid)
}

// throttling is that of the database.
func (q *quotas) throttling() (proc.Throttling, error) {
	if q.database == nil {
		return proc.Throttling{}, nil
	}
	return q.database.Throttling()
}

func (q *quotas) remove() error {
	var errs []error
	if q.database != nil {
		errs = append(errs, q.database.Remove())
	}
	for _, one := range q.gateways {
		errs = append(errs, one.Remove())
	}
	return errors.Join(errs...)
}
