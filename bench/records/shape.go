// Package records measures a store with many records: how fast it opens, and what
// it costs in memory.
package records

import (
	"bytes"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// keyPrefix begins the ids of the records.
const keyPrefix = "f1110000-0000-4000-8000-"

func recordID(n uint64) string {
	return string(load.NumberedKey(make([]byte, 0, load.KeyLength), keyPrefix, n))
}

// request is the call of which every record is, with the id of any of them.
func request(records int) load.Request {
	r := load.Payment(200)
	r.Keys = load.AnyOf(keyPrefix, records)
	return r
}

// answer is what the upstream answers to it.
var answer = struct {
	header map[string][]string
	body   []byte
}{map[string][]string{"Content-Type": {"application/json"}, "Content-Length": {"1024"}}, []byte(upstream.Body)}

// shape makes the calls that a gateway at host would make of request: its replays
// find them.
type shape struct {
	host        string
	fingerprint body.Fingerprint
}

func newShape(host string) (*shape, error) {
	r := load.Payment(200)
	sum, _, err := new(body.Comparison).Read(body.Request{
		Method: r.Method, Host: strings.ToLower(host), Path: r.Path, ContentType: "application/json",
		Body: bytes.NewReader(r.Body), Size: int64(len(r.Body)),
	})
	return &shape{host: host, fingerprint: sum}, err
}

func (s *shape) call(g *execution.Guard, n uint64) *execution.Call {
	scope := execution.Scope{Caller: "anonymous", Guard: "default", Method: "POST", Path: "/v1/charges", ID: recordID(n)}
	return &execution.Call{
		Key: g.Key(scope), Fingerprint: s.fingerprint, Scope: scope, Origin: execution.OriginGiven, Action: "default",
		Deadline: 5 * time.Minute, KeepResult: 24 * time.Hour, KeepKey: 720 * time.Hour, ResultCap: 8 << 20,
	}
}
