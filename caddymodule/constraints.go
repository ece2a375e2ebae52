package caddymodule

import (
	"container/list"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The constraints of a workflow that breakers heed (ATD "Circuit Breaker Policy
// Configuration"): members of a token's extensions, or of the object there that ATD's
// figure has.
const (
	constraintThreshold = "atd.circuit_threshold" // a share, over 0 and under 1
	constraintWindow    = "atd.circuit_window_s"  // seconds, 1 or more

	constraintObject = "constraints"
)

// maxConstrained is how many askers' constraints are remembered.
const maxConstrained = 4096

// asker is who asks breakers for more care: the issuer of tokens, in one workflow. A
// token names any workflow that its issuer likes, so that the workflow alone would let
// one agent make the calls of others stricter.
type asker struct {
	workflow string // its UUID
	issuer   string
}

// constraints remembers what the tokens of askers have asked of breakers, so that it
// holds for their later calls too. When it is full, the asker that was not seen for
// longest is forgotten. The zero value is empty.
type constraints struct {
	mu     sync.Mutex
	of     map[asker]*list.Element
	recent list.List // of *constrained, the latest first
}

type constrained struct {
	by   asker
	view *breaker.View
}

// add remembers what is asked, beside what was asked before: what was strict once stays
// so.
func (c *constraints) add(by asker, asked *breaker.View) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.of[by]; at != nil {
		c.recent.MoveToFront(at)
		known := at.Value.(*constrained)
		known.view = known.view.And(asked)
		return
	}
	if c.of == nil {
		c.of = map[asker]*list.Element{}
	}
	if len(c.of) >= maxConstrained {
		oldest := c.recent.Back()
		delete(c.of, c.recent.Remove(oldest).(*constrained).by)
	}
	c.of[by] = c.recent.PushFront(&constrained{by, asked})
}

// find is what was asked; nil if nothing was, or is remembered.
func (c *constraints) find(by asker) *breaker.View {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.of[by]
	if at == nil {
		return nil
	}
	c.recent.MoveToFront(at)
	return at.Value.(*constrained).view
}

// constrain lets breakers refuse a request as its tokens ask, and as those have asked
// that its caller has brought in this workflow before.
func (t *testimony) constrain(r *http.Request, p *presented) {
	if t == nil || len(p.all) == 0 {
		return
	}
	if workflow, issuer := p.workflow(), p.issuer(); p.asked != nil && workflow != "" && issuer != "" {
		t.constraints.add(asker{evidence.WorkflowID(workflow), issuer}, p.asked)
	}
	circuits.SetView(r.Context(), p.asked.And(t.asked(p.workflow(), p.issuer())))
}

// asked is what an issuer has asked of breakers in a workflow; nil if nothing is known
// of it.
func (t *testimony) asked(workflow, issuer string) *breaker.View {
	if t == nil || workflow == "" || issuer == "" {
		return nil
	}
	return t.constraints.find(asker{evidence.WorkflowID(workflow), issuer})
}

// askedBy is what a token asks of breakers; nil if it asks for nothing. A value that
// cannot be meant refuses the token: who asks for care and is misread must not go on
// without.
func askedBy(t *ect.Token) (*breaker.View, error) {
	ext := t.Ext()
	if ext.JSON() == "" {
		return nil, nil
	}
	asked, err := readConstraints(func(name string) (string, bool) { return ext.Raw(ect.Member(name)) })
	if err != nil {
		return nil, err
	}
	var object map[string]json.RawMessage
	raw, ok := ext.Raw(constraintObject)
	if !ok || json.Unmarshal([]byte(raw), &object) != nil {
		return asked, nil // what else goes by this name is somebody else's
	}
	inner, err := readConstraints(func(name string) (string, bool) { raw, ok := object[name]; return string(raw), ok })
	return asked.And(inner), err
}

func readConstraints(member func(name string) (raw string, ok bool)) (*breaker.View, error) {
	threshold, hasThreshold := member(constraintThreshold)
	window, hasWindow := member(constraintWindow)
	if !hasThreshold && !hasWindow {
		return nil, nil
	}
	var share, seconds float64
	var err error
	// A zero would stand for the breaker's own value.
	if hasThreshold {
		if share, err = strconv.ParseFloat(threshold, 64); err != nil || share == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	if hasWindow {
		if seconds, err = strconv.ParseFloat(window, 64); err != nil || seconds == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	// Beyond an hour no breaker looks.
	view, err := breaker.NewView(share, time.Duration(min(seconds, time.Hour.Seconds())*float64(time.Second)))
	if err != nil {
		return nil, &ect.Error{Code: ect.CodeExt}
	}
	return view, nil
}
