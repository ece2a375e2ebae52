package proxy

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// Redial makes t dial with dial, so that a test can hand out connections that
// break in a way real ones cannot be made to at a given moment.
func Redial(t *Transport, dial func(ctx context.Context, network, addr string) (net.Conn, error)) error {
	t.Transport.DialContext = dial
	guarded, err := t.twin()
	t.guarded = guarded
	return err
}

// Guarded returns the transport of the guarded requests.
func Guarded(t *Transport) *http.Transport { return t.guarded }

// ShortenProbes gives the probes of t another lease.
func ShortenProbes(t *Transport, lease time.Duration) (err error) {
	s := t.circuits.checked.rules.Settings()
	s.ProbeLease = jsontime.Duration(lease)
	t.circuits.checked.rules, err = breaker.NewRules(s)
	return err
}

// Validate checks the settings.
func (s *Settings) Validate() error {
	_, err := s.checkAll()
	return err
}

// ParseBreaker reads the option breaker of a transport.
func ParseBreaker(d *caddyfile.Dispenser) (Settings, error) {
	t := new(Transport)
	err := Options().Read(d, "transport agent_guard", t, map[string]caddyfile.Segment{})
	return *cmp.Or(t.Breaker, new(Settings)), err
}

// VerifyWith lets t verify tokens in answers with verify.
func VerifyWith(t *Transport, verify AnswerVerifier) { t.verify = verify }

// SeeEvents looks for an error in an event stream that comes in pieces of step bytes.
func SeeEvents(stream []byte, step int) (fault string, good bool) {
	e := new(eventStream)
	for len(stream) > 0 && fault == "" {
		n := min(step, len(stream))
		var now bool
		fault, now = e.feed(stream[:n])
		good, stream = good || now, stream[n:]
	}
	return fault, good
}

// SeeFrames follows one side of a WebSocket that comes in pieces of step bytes, and
// returns the code of its close frame.
func SeeFrames(stream []byte, step int) int {
	f := new(frameReader)
	for len(stream) > 0 {
		n := min(step, len(stream))
		f.feed(stream[:n])
		stream = stream[n:]
	}
	return f.code
}

// Verdict's evidence, by its kinds.
type Reason = evidenceKind

const (
	Unknown        = noEvidence
	NoUpstream     = noUpstreamFound
	DialFailed     = dialFailed
	NothingWritten = nothingWritten
)

// What tests see of the surface that only this package uses.
const (
	DefaultKeepaliveGuarded = defaultKeepaliveGuarded
	UndoClass               = undoClass
)

var (
	IsGRPC     = isGRPC
	GRPCStatus = readGRPCStatus
)

func (c *Circuits) FailedStatus(status int) bool          { return c.failedStatus(status) }
func (c *Circuits) HeaderFault(header http.Header) string { return c.headerFault(header) }
func (c *Circuits) BodyFault(body []byte) string          { return c.bodyFault(body) }
func (c *Circuits) InspectedBodies() (json, events bool)  { return c.inspectedBodies() }

// Ours reports whether every connection that was asked for was asked for by our transport, so that
// Unframed can be relied on.
func (w *Watch) Ours() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempt != nil && !w.outside
}

func (a *Attempt) Begin() bool { return a.beginWrite() }
func (a *Attempt) Wrote(n int) { a.endWrite(n) }
func (a *Attempt) Unknown()    { a.noteUncounted() }
func (a *Attempt) Unframed()   { a.noteUnframed() }
