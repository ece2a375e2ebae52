package guard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// maxMessage is the longest body that is read as a message, in bytes. Longer ones are guarded by
// the rules of HTTP.
const maxMessage = 4 << 20

// message reads the body of x as a message (ADR 0072), and finds the action that it belongs to.
// harmless says that it changes nothing. A batch that changes something is guarded as a whole, by
// the rules of HTTP, so all that change something in it must belong to one action.
func (h *Handler) message(x *Call) (harmless bool, err error) {
	if err := x.readBody(); err != nil || x.body.Size() > maxMessage {
		return false, err
	}
	from := x.body.NewReader()
	defer func() { _ = from.Close() }()
	body, err := io.ReadAll(from)
	if err != nil {
		return false, x.unkept(err)
	}
	q, ok := h.Protocol.Parse(x.r.Header, x.r.URL.Path, body)
	if !ok {
		return false, nil
	}
	harmless = true
	var chosen *Action
	for i := range q.Messages {
		m := &q.Messages[i]
		if !h.Protocol.Changes(m, h.tools.ReadOnly(h.server(x.r), m.Tool)) {
			continue
		}
		if harmless = false; !h.byMessage {
			continue
		}
		action, err := h.action(x.r, m)
		if err != nil {
			return false, err
		}
		if chosen != nil && chosen != action {
			return false, api.NewProblem(api.BatchMixed, fmt.Sprintf("One belongs to the action %s, another to %s.", chosen.Name, action.Name))
		}
		chosen, x.action = action, action
	}
	if harmless || !q.Batch {
		x.message = &q.Messages[0]
	}
	return harmless, nil
}

// unread answers a request whose body could not be read.
func (h *Handler) unread(w http.ResponseWriter, x *Call, err error) error {
	if x.body != nil {
		defer func() { _ = x.body.Close() }()
	}
	if x.release != nil {
		defer x.release()
	}
	p := (*api.Problem)(nil)
	if !errors.As(err, &p) {
		return err
	}
	x.w.begin(w, x.r, &h.alarms)
	x.refuse(w, p)
	return nil
}

// server names what r is sent to, for what is learned of its tools.
func (h *Handler) server(r *http.Request) string {
	_, target := h.Host.Original(r)
	return r.Host + target.Path
}

// passMessage forwards a message that changes nothing, and learns the tools that it asks for.
func (h *Handler) passMessage(w http.ResponseWriter, x *Call, next Next) error {
	r := x.r
	if x.release != nil {
		x.release()
	}
	context.AfterFunc(r.Context(), func() { _ = x.body.Close() })
	x.giveBack()
	r.ContentLength, r.TransferEncoding = x.body.Size(), nil
	r.Header.Del("Expect") // the body is here
	if x.message.Method == "tools/list" {
		server := h.server(r)
		w = &listener{ResponseWriter: w, learn: func(tool string, readOnly bool) { h.tools.Learn(server, tool, readOnly) }}
	}
	return h.pass(w, r.WithContext(context.WithValue(r.Context(), MessageKey{}, x.message)), x.message, next)
}

// listener reads the tools in an answer that passes by.
type listener struct {
	http.ResponseWriter
	learn  func(tool string, readOnly bool)
	answer *protocol.Answer
}

func (l *listener) Write(p []byte) (int, error) {
	if l.answer == nil {
		l.answer = protocol.NewAnswer(protocol.MCP, l.Header().Get("Content-Type"), l.learn)
	}
	if l.Header().Get("Content-Encoding") == "" {
		_, _ = l.answer.Write(p) // never fails
	}
	return l.ResponseWriter.Write(p)
}

func (l *listener) Unwrap() http.ResponseWriter { return l.ResponseWriter }

// messageKey is the id that the message of x names itself.
func messageKey(x *Call) (string, error) {
	if x.message == nil {
		return "", errNoID
	}
	key, err := x.h.Protocol.Key(x.message)
	if err != nil {
		return "", invalidID(err)
	}
	if key == "" {
		return "", errNoID
	}
	return key, nil
}

// understand judges a whole answer by what it says, where HTTP says no more than that it came.
func understand(x *Call, o execution.Outcome) execution.Outcome {
	if x.heard == nil || o.Verdict == execution.InDoubt {
		return o
	}
	switch protocol.Judge(x.message, o.Status, x.heard.End()).Meaning {
	case protocol.NotExecuted:
		o.Verdict = execution.Released
	case protocol.Failed:
		if o.Verdict == execution.Released {
			return o // its status says more, such as 401 or 429
		}
		o.Verdict = x.action.Rules.Judge(execution.Answer{Status: http.StatusInternalServerError})
	case protocol.Doubtful:
		o.Verdict = execution.InDoubt
	case protocol.Unanswered:
		if o.Status == http.StatusOK && x.message.ID != nil { // the stream ended before its answer
			o.Verdict, o.Cause = execution.InDoubt, execution.CauseTruncated
		}
	}
	return o
}

// replyTo is what a repeated answer takes from the message of x; nil for plain requests.
func replyTo(x *Call, live bool) *protocol.Reply {
	if x.message == nil || x.message.REST {
		return nil
	}
	r := x.message.Reply()
	r.Live = live
	return &r
}

// documentWriter keeps the document of a problem.
type documentWriter struct {
	header http.Header
	body   []byte
}

func (d *documentWriter) Header() http.Header { return d.header }

func (d *documentWriter) WriteHeader(int) {}

func (d *documentWriter) Write(p []byte) (int, error) {
	d.body = append(d.body, p...)
	return len(p), nil
}
