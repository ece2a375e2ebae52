package undo_test

import (
	"encoding/base64"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// signed is a token with these claims; nobody looks at what it is signed with.
func signed(claims string) string {
	return "eyJhbGciOiJFUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

func says(status int, body, token string) *undo.Answer {
	a := &undo.Answer{Status: status, Header: http.Header{}, Body: []byte(body)}
	if token != "" {
		a.Header.Set("Execution-Context", token)
	}
	return a
}

// P6: what a delegate does not call completed is not done, in the words of each draft and
// wherever it says them (cascade 4.4.2, ATD "Basic Rollback", AERR "Rollback Response").
func TestP6DelegateSaysOtherwise(t *testing.T) {
	completed := undo.Result{Done: true}
	failed := undo.Result{Reason: undo.ReasonRefused}
	escalated := undo.Result{Reason: undo.ReasonEscalated}
	partial := undo.Result{Reason: undo.ReasonPartial, Unknown: true}
	unreadable := undo.Result{Reason: undo.ReasonUnexpected, Unknown: true}
	type test struct {
		answer *undo.Answer
		want   undo.Result
	}
	tests := []test{
		// Nothing at all is the contract's own answer, but where a token says otherwise.
		{says(200, "", ""), completed},
		{says(204, "", ""), completed},
		{says(200, " \n", "no token"), completed},
		{says(200, "", signed(`{"exec_act":"rollback_complete","ext":{"cascade.status":"completed"}}`)), completed},
		{says(200, "", signed(`{"exec_act":"rollback_complete","ext":{"cascade.status":"failed"}}`)), failed},
		{says(204, "", signed(`{"exec_act":"aerr:rollback_escalated"}`)), escalated},
		{says(200, "", signed(`{"ext":{"atd.status":"partial"}}`)), partial},
		{says(200, "", signed(`{"ext":{"aerr.status":"what"}}`)), unreadable},
		{says(200, "", base64.RawURLEncoding.EncodeToString([]byte(`{"ext":{"cascade.status":"failed"}}`))), failed},
		{says(200, `{"status":"completed"}`, signed(`{"ext":{"cascade.status":"failed"}}`)), failed},
		{says(200, `{"status":"failed"}`, signed(`{"ext":{"cascade.status":"completed"}}`)), failed},
		{says(200, "<html>", signed(`{"ext":{"cascade.status":"completed"}}`)), unreadable},
		{says(200, signed(`{"ext":{"cascade.status":"completed"}}`), ""), completed},
		{says(200, signed(`{"ext":{"cascade.status":"escalated"}}`), ""), escalated},
		{says(201, `{"status":"completed"}`, ""), completed},
		{says(201, `{"id":7}`, ""), unreadable},
		{says(200, `{"status":"compl`, ""), unreadable},
		{&undo.Answer{Status: 200, Body: []byte(`{"x":"`), Cut: true}, unreadable}, // what it says may stand behind the cut
	}
	for body, want := range map[string]undo.Result{
		`{"status":"completed"}`:         completed,
		`{"cascade.status":"completed"}`: completed,
		`Compensated`:                    completed,
		` {"state":"finished","status":"completed","x":[{}]} `:                     completed,
		`{"exec_act":"aerr:rollback_complete","ext":{"aerr.status":"completed"}}`:  completed,
		`{"exec_act":"atd:rollback_result","ext":{"atd.status":"completed"}}`:      completed,
		`{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"escalated"}}`: escalated,
		`{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"completed"}}`: escalated,
		`{"exec_act":"aerr:rollback_complete","ext":{"aerr.status":"failed"}}`:     failed,
		`{"exec_act":"atd:rollback_result","ext":{"atd.status":"failed"}}`:         failed,
		`{"exec_act":"rollback_complete","ext":{"cascade.status":"partial"}}`:      partial,
		`{"status":"escalated"}`:                    escalated,
		`{"status":"escalated","effect":"unknown"}`: {Reason: undo.ReasonEscalated, Unknown: true},
		`{"status":"failed","effect":"mixed"}`:      {Reason: undo.ReasonRefused, Unknown: true},
		`{"exec_act":"rollback_complete","ext":{"cascade.status":"failed","agent_guard.effect":"unknown"}}`: {Reason: undo.ReasonRefused, Unknown: true},
		`{"status":"completed","effect":"unknown"}`:                                                         unreadable,
		`{"status":"partial"}`:                                                                    partial,
		`{"status":"failed","cascade.status":"completed"}`:                                        failed,
		`{"status":"completed","cascade.status":"failed"}`:                                        failed,
		`{"status":"completed","ect":"` + signed(`{"ext":{"cascade.status":"escalated"}}`) + `"}`: escalated,
		`{"status":"completed","ect":"` + signed(`{"exec_act":"rollback_complete","ect_ext":{"cascade.status":"failed"}}`) + `"}`: failed,
		`{"status":"completed","ect":"` + signed(`{"exec_act":"aerr:error"}`) + `"}`:                                              unreadable,
		`{"status":"failed","status":"completed"}`:                                                                                unreadable,
		`{"status":"failed","Status":"completed"}`:                                                                                unreadable,
		`FailedToCompensate`:                  failed,
		`{"status":7}`:                        unreadable,
		`{"status":""}`:                       unreadable,
		`{"status":"fine"}`:                   unreadable,
		`{"rollback_id":"x","status":null}`:   unreadable,
		`{"exec_act":7,"status":"completed"}`: unreadable,
		`{}`:                                  unreadable,
		`[]`:                                  unreadable,
		`<html>Welcome</html>`:                unreadable,
		`OK`:                                  unreadable,
	} {
		tests = append(tests, test{says(200, body, ""), want})
	}
	for _, c := range tests {
		t.Run(string(c.answer.Body), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(c.answer)
				c.want.Status, c.want.Attempts = c.answer.Status, 1
				r.wants(task(checkpoint.Delegate, undo.Spec{}), c.want)
				r.restart(-1)
				r.wants(task(checkpoint.Delegate, undo.Spec{}), c.want)
				if len(r.sent) != 1 {
					t.Errorf("sent %d times", len(r.sent))
				}
			})
		})
	}
}

// What a delegate is at is asked for, and what it says then is read in the same way.
func TestP6DelegateSaysLater(t *testing.T) {
	for body, want := range map[string]undo.Result{
		`{"state":"finished","status":"completed"}`: {Done: true},
		`{"state":"finished","status":"partial"}`:   {Reason: undo.ReasonPartial, Unknown: true},
		`{"state":"finished","status":"escalated"}`: {Reason: undo.ReasonEscalated},
		`{"state":"finished","status":"failed"}`:    {Reason: undo.ReasonRefused},
	} {
		bubble(t, func(t *testing.T, r *rig) {
			r.answers(&undo.Answer{Status: 200, Header: http.Header{"Location": {"/r/1"}}, Body: []byte(`{"state":"executing"}`)},
				`{"state":"executing"}`, body)
			want.Status, want.Attempts = 200, 1
			r.wants(task(checkpoint.Delegate, undo.Spec{}), want)
			if len(r.changing()) != 1 || !r.sent[1].Delegated || r.sent[1].URL != "https://agent.example/r/1" {
				t.Errorf("%d, %+v", len(r.changing()), r.sent[1])
			}
		})
	}
}
