package rollback

import (
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// cargo is what rides in one commit, and who has to be told what came of it.
type cargo struct {
	writes []store.Write
	ends   []func(error) error
}

func (g *cargo) add(writes []store.Write, end func(error) error) {
	g.writes = append(g.writes, writes...)
	g.ends = append(g.ends, end)
}

// tell takes evidence along and returns the id of its token; none is nil.
func (g *cargo) tell(t Telling) string {
	if t == nil {
		return ""
	}
	g.add(t.Writes(), t.Done)
	return t.ID()
}

// done tells all what came of the commit. The error is what the last of them makes of it.
func (g *cargo) done(err error) error {
	for _, end := range g.ends {
		err = end(err)
	}
	g.ends = nil
	return err
}
