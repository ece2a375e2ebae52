package plan

import "github.com/agent-guard/caddy-agent-guard/internal/strictjson"

// Work is how many steps with nodes and edges a text takes.
func Work(text []byte) int {
	r := &reader{Scanner: strictjson.Scanner{JSON: string(text)}, plan: &Descriptor{}}
	if r.document() {
		r.connect()
	}
	return r.work
}
