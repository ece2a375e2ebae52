package guard

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// "Settled here": unary gRPC calls are judged by grpc-status.
func TestJudgeGRPC(t *testing.T) {
	want := map[string]execution.Verdict{
		"": execution.InDoubt, "x": execution.InDoubt, "-7": execution.InDoubt, "+7": execution.InDoubt, "0x7": execution.InDoubt,
	}
	for code := range 17 {
		verdict := execution.Completed
		switch code {
		case 7, 8, 16:
			verdict = execution.Released
		case 2, 4, 13, 14:
			verdict = execution.InDoubt
		}
		want[fmt.Sprint(code)] = verdict
	}
	a := &Action{Policy: Policy{GRPC: GRPCUnary, Preset: execution.PresetDefault}}
	for text, verdict := range want {
		trailer := map[string][]string{"Grpc-Status": {text}}
		if got, _ := a.judge(200, http.Header{}, trailer); got != verdict {
			t.Errorf("grpc-status %q in the trailer is %v, want %v", text, got, verdict)
		}
		if got, _ := a.judge(200, http.Header{"Grpc-Status": {text}}, nil); got != verdict {
			t.Errorf("grpc-status %q in the header is %v, want %v", text, got, verdict)
		}
	}
	if got, _ := a.judge(200, http.Header{}, nil); got != execution.InDoubt {
		t.Errorf("no grpc-status is %v, want in_doubt", got)
	}
	if got, _ := a.judge(200, http.Header{"Grpc-Status": {"0"}}, map[string][]string{"Grpc-Status": {"14"}}); got != execution.InDoubt {
		t.Errorf("the trailer's status does not go before the header's: %v", got)
	}
	if got, _ := a.judge(503, http.Header{"Retry-After": {"1"}}, map[string][]string{"Grpc-Status": {"0"}}); got != execution.Released {
		t.Errorf("an answer that is not gRPC's is %v, want released by its HTTP status", got)
	}
	if got, _ := (&Action{Policy: Policy{Preset: execution.PresetDefault}}).judge(200, http.Header{}, map[string][]string{"Grpc-Status": {"14"}}); got != execution.Completed {
		t.Errorf("grpc-status counts where no action says so: %v", got)
	}
	a.Rule = func(status int, _ http.Header) (execution.Verdict, bool) { return execution.Completed, status == 200 }
	if got, _ := a.judge(200, http.Header{}, map[string][]string{"Grpc-Status": {"14"}}); got != execution.Completed {
		t.Errorf("rules do not go before grpc-status: %v", got)
	}
}

// MCP's 404 says that nothing was executed, unless the configuration says otherwise.
func TestOutcomeOfUnknownSession(t *testing.T) {
	for rule, want := range map[int]execution.Verdict{0: execution.Released, 403: execution.Released, 404: execution.Completed} {
		x := &roundTrip{
			q: &Request{guardedRequest: guardedRequest{
				h:       &Handler{rules: &protocol.Rules{Protocol: protocol.MCP}},
				message: &protocol.Message{Protocol: protocol.MCP, ID: []byte("1")},
				action:  new(Action),
			}},
			heard: protocol.NewAnswer(protocol.MCP, "application/json", nil),
		}
		if rule != 0 {
			x.q.action.Rule = func(status int, _ http.Header) (execution.Verdict, bool) { return execution.Completed, status == rule }
		}
		if o := x.understand(execution.Outcome{Status: 404, Verdict: execution.Completed, Whole: true}); o.Verdict != want {
			t.Errorf("with a rule for %d: %v", rule, o.Verdict)
		}
	}
}

// ADR 0147: what an outcome keeps that waits for the store counts with the texts that are kept for its evidence.
func TestSizeOfAnOutcomeThatWaits(t *testing.T) {
	x := &Call{Request: Request{guardedRequest: guardedRequest{message: &protocol.Message{Whole: make([]byte, 1000)}}}}
	x.capture.source.Request.Body = make([]byte, 200)
	x.capture.answer = make([]byte, 30)
	plain := &carried{x: new(Call)}
	if got := (&carried{x: x}).Size() - plain.Size(); got != 1230 {
		t.Errorf("%d bytes", got)
	}
}
