package undoing

import (
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Decision is how one call will be undone.
type Decision struct {
	// Way is as in checkpoint.Snapshot.
	Way checkpoint.Way
	// Reason is as in checkpoint.Snapshot.
	Reason checkpoint.Reason
	// Request is what of the request's message is recorded.
	Request checkpoint.Message
	// Undo is how it is undone, as it is recorded.
	Undo []byte

	plan *Plan
}

// Restores reports whether what a call with this method changes can be read with GET, so
// that an image of it is wanted.
func (p *Plan) Restores(method string) bool {
	switch method {
	case http.MethodPut, http.MethodPatch, http.MethodDelete:
		return p.ways.Restore != nil
	}
	return false
}

// Compensates says that there is a way without an image.
func (p *Plan) Compensates() bool { return p.compensate != nil }

// ReadsRequestBody says that the request's body has to be in the source of Decide.
func (p *Plan) ReadsRequestBody() bool { return len(p.needs.RequestBody) > 0 }

// Decide says how a call is undone, before it leaves. src has all that is known of the
// call then; imaged says that what stood there was read.
func (p *Plan) Decide(method string, src *template.Source, imaged bool) Decision {
	d := Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonDeclared, plan: p}
	spec := undo.Spec{Guard: p.spec.Guard, ExecutionID: src.ExecutionID, OnLost: p.spec.OnLost, Auth: p.spec.Auth}
	switch {
	case imaged && p.Restores(method):
		d.Way, d.Request = checkpoint.Restore, chosen(&src.Request, undo.LookFields, false)
		spec.OnChanged = p.ways.onChanged(&p.terms)
		spec.Verify = p.ways.Restore.Verify != verifyOff
	case p.compensate != nil:
		if reason := p.unfit(src); reason != "" {
			d.Reason = reason
			return d
		}
		d.Way, d.Request = checkpoint.Compensate, chosen(&src.Request, p.needs.RequestHeader, p.ReadsRequestBody())
		spec.Compensate, spec.Status = p.spec.Compensate, p.spec.Status
	case p.ways.Delegate != "":
		d.Way, spec.Delegate = checkpoint.Delegate, p.ways.Delegate
	case p.Restores(method):
		d.Reason = checkpoint.ReasonNoImage
		return d
	case p.ways.Restore != nil:
		d.Reason = checkpoint.ReasonMethod
		return d
	default:
		return d
	}
	d.Reason = ""
	d.Undo = spec.Encode()
	return d
}

// unfit says why the requests of a compensation cannot be made, whatever the answer will
// be; it is empty where they can.
func (p *Plan) unfit(src *template.Source) checkpoint.Reason {
	full := *src
	full.Status = http.StatusOK
	full.Response = stand(&p.needs)
	return p.filled(&full)
}

// Answered is what of an answer is recorded, or why the call cannot be undone although
// its checkpoint says that it can. src is that of Decide with the answer.
func (d *Decision) Answered(src *template.Source) (checkpoint.Message, checkpoint.Reason) {
	if d.Way != checkpoint.Compensate {
		return checkpoint.Message{}, ""
	}
	if reason := d.plan.filled(src); reason != "" {
		return checkpoint.Message{}, reason
	}
	return chosen(&src.Response, d.plan.needs.ResponseHeader, d.ReadsAnswer()), ""
}

// ReadsAnswer says that the answer's body has to be in the source of Answered.
func (d *Decision) ReadsAnswer() bool {
	return d.Way == checkpoint.Compensate && len(d.plan.needs.ResponseBody) > 0
}

func (p *Plan) filled(src *template.Source) checkpoint.Reason {
	full := *src
	full.RollbackID = "00000000-0000-4000-8000-000000000000" // any tells
	for _, t := range []*template.Template{p.compensate, p.status} {
		if t == nil {
			continue
		}
		_, err := t.Fill(&full)
		switch {
		case errors.Is(err, template.ErrTooLarge):
			return checkpoint.ReasonTooLarge
		case err != nil:
			return checkpoint.ReasonAbsent
		}
	}
	return ""
}

// stand is an answer that has everything that is asked for.
func stand(n *template.Needs) template.Message {
	m := template.Message{Header: http.Header{}}
	for _, name := range n.ResponseHeader {
		m.Header[name] = []string{"x"}
	}
	var doc any
	for _, pointer := range n.ResponseBody {
		doc = grown(doc, strings.Split(pointer, "/")[1:])
	}
	if doc != nil {
		m.Body, _ = json.Marshal(doc) // maps and strings only
	}
	return m
}

var unescape = strings.NewReplacer("~1", "/", "~0", "~")

// grown is doc with a text at the end of a JSON pointer. An index is a name like others.
func grown(doc any, tokens []string) any {
	if len(tokens) == 0 {
		return "x"
	}
	members, _ := doc.(map[string]any)
	members = maps.Clone(members)
	if members == nil {
		members = map[string]any{}
	}
	name := unescape.Replace(tokens[0])
	members[name] = grown(members[name], tokens[1:])
	return members
}

// chosen is what is recorded of a message.
func chosen(m *template.Message, names []string, body bool) checkpoint.Message {
	var kept checkpoint.Message
	for _, name := range names {
		if kept.Header == nil {
			kept.Header = map[string][]string{}
		}
		kept.Header[name] = slices.Clone(m.Header[name])
	}
	if body {
		kept.ContentType, kept.Body = m.ContentType, m.Body
	}
	return kept
}
