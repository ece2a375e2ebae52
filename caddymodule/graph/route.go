package graph

import (
	"net/http"
	"net/url"
	"strings"
)

// wellKnown is where the paths begin.
const wellKnown = "/.well-known/cascade/"

const (
	entriesPath   = wellKnown + "ledger/entries"
	workflowsPath = wellKnown + "workflows/"
)

// place is one of the paths.
type place uint8

const (
	placeHead place = iota + 1
	placeProof
	placeConsistency
	placeEntries
	placeEntry
	placeWorkflow
	placeErrors
	placeCheckpoint
)

var places = map[string]place{
	"ledger/head": placeHead, "ledger/proof": placeProof, "ledger/consistency": placeConsistency,
	"ledger/entries": placeEntries, "errors": placeErrors,
}

// route is a path that was read.
type route struct {
	place place
	name  string // the last segment, still percent-encoded, where it is a name
}

// parseRoute reads the path of a request. Names are one segment: a slash in one is
// written as %2F.
func parseRoute(u *url.URL) (route, bool) {
	rest, ok := strings.CutPrefix(u.EscapedPath(), wellKnown)
	if !ok {
		return route{}, false
	}
	if p, ok := places[rest]; ok {
		return route{place: p}, true
	}
	for prefix, p := range map[string]place{"ledger/entries/": placeEntry, "workflows/": placeWorkflow, "checkpoints/": placeCheckpoint} {
		if name, ok := strings.CutPrefix(rest, prefix); ok && name != "" && !strings.Contains(name, "/") {
			return route{p, name}, true
		}
	}
	return route{}, false
}

func (t route) methods() []string {
	if t.place == placeErrors {
		return []string{http.MethodPost}
	}
	return []string{http.MethodGet, http.MethodHead}
}

func refuseMethod(w http.ResponseWriter, allowed []string) {
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	w.WriteHeader(http.StatusMethodNotAllowed)
}
