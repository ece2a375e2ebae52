package rollbackapi

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Path is where rollbacks are asked for, and below it each is looked at. The other paths
// are those of the older drafts.
const (
	Path     = "/.well-known/cascade/rollback"
	ATDPath  = "/.well-known/atd/rollback"
	AERRPath = "/aerr/rollback"

	wellKnownAERR = "/.well-known/aerr/rollback"
)

// route is a path that was read.
type route struct {
	// name is the id of the rollback that is looked at, still percent-encoded; empty
	// where one is asked for.
	name string
	// dialect is the draft in whose words it is asked.
	dialect ect.Vocabulary
}

func parseRoute(u *url.URL) (route, bool) {
	switch path := u.EscapedPath(); path {
	case Path:
		return route{dialect: ect.Cascade}, true
	case ATDPath:
		return route{dialect: ect.ATD}, true
	case AERRPath, wellKnownAERR:
		return route{dialect: ect.AERR}, true
	default:
		name, ok := strings.CutPrefix(path, Path+"/")
		return route{name: name}, ok && name != "" && !strings.Contains(name, "/")
	}
}

func (t route) methods() []string {
	if t.name == "" {
		return []string{http.MethodPost}
	}
	return []string{http.MethodGet, http.MethodHead}
}

// URL is where a rollback is looked at.
func URL(id string) string { return Path + "/" + url.PathEscape(id) }
