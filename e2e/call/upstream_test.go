package call

import (
	"fmt"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// first answers the first arrival with one, the others with "arrival n".
func first(one func(http.ResponseWriter, *harness.Arrival)) func(http.ResponseWriter, *harness.Arrival) {
	return sequence(one)
}

// sequence answers the arrivals in their order, and those that come after them with
// "arrival n".
func sequence(answers ...func(http.ResponseWriter, *harness.Arrival)) func(http.ResponseWriter, *harness.Arrival) {
	return func(w http.ResponseWriter, a *harness.Arrival) {
		if a.N <= len(answers) {
			answers[a.N-1](w, a)
			return
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "arrival %d", a.N)
	}
}
