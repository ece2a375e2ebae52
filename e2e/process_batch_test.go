//go:build unix

package e2e

import (
	"bufio"
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// P1, P6: SIGKILL in the middle of a batch, with keys and without, where the protocol is configured and where it is
// not: what the server has shown is forgotten. What had ended is replayed, what ran is
// in doubt, in another batch and alone.
func TestCrashBatch(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) { crashBatch(t, protocol) })
	}
}

func crashBatch(t *testing.T, protocol string) {
	s, addr := newSingles(t)
	site := procNewSite(t, addr)
	site.guard = "protocol " + protocol + "\n missing_id recognize\n breaker off"
	gateway := site.start(t)
	for name, meta := range map[string]string{"keyed": `,"_meta":{"execution-id":"%"}`, "keyless": ""} {
		early, late := "early-"+name, "late-"+name
		of := func(id, tool string) string { return toolCall(id, tool, strings.Replace(meta, "%", tool, 1)) }
		post := func(body string) procCall { return procCall{path: "/mcp", body: body, header: message("").header} }
		if protocol == "auto" { // a proof, which the next process does not know
			gateway.post(t, procCall{path: "/mcp", body: initializes, header: hello("").header})
		}
		hold := s.hold(t, late)
		lost, err := procSend(t.Context(), procDial(), site.addr, post(batchOf(of("1", early), of("2", late))))
		if err != nil {
			t.Fatal(err)
		}
		for got, from := "", bufio.NewReader(lost.Body); !strings.Contains(got, early); {
			line, err := from.ReadString('\n')
			if got += line; err != nil {
				t.Fatalf("%v after %q", err, got)
			}
		}
		waitWithin(t, procBound, hold.arrived, "arrival")
		gateway.kill()
		_ = lost.Body.Close()
		gateway = site.start(t)
		again := gateway.post(t, post(batchOf(of("5", late), of("6", early), of("7", "fresh-"+name))))
		wantResponses(t, name, reply{status: again.status, header: again.header, body: again.body},
			map[string]string{"5": "problems/in-doubt", "6": early + `","n":1`, "7": `"n":1`})
		if alone := gateway.post(t, post(of("8", late))); !strings.Contains(alone.body, "problems/in-doubt") {
			t.Errorf("%s: alone: %v", name, alone)
		}
		if s.count(early) != 1 || s.count(late) != 1 {
			t.Errorf("P1: %s: %d and %d effects", name, s.count(early), s.count(late))
		}
	}
	gateway.end(t)
}

// Section "Exit", P1, P7: SIGTERM in the middle of a batch. What runs ends and is answered, what has not begun
// is refused such that it is sent again, and the batch that comes again runs nothing twice.
func TestProcessExitInABatch(t *testing.T) {
	t.Parallel() // its gateways are processes
	const width, all = 16, 20
	for _, form := range []string{"application/json", "application/json, text/event-stream"} {
		for _, slow := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/slow %v", form, slow), func(t *testing.T) {
				s, addr := newSingles(t)
				site := procNewSite(t, addr)
				site.guard = "breaker off"
				if slow { // than drain
					site.app = "drain 300ms"
				}
				gateway := site.start(t)
				var messages []string
				var holds []*gate
				for i := range all {
					tool := fmt.Sprint("tool", i)
					messages = append(messages, keyed(strconv.Itoa(i), tool, tool))
					if i < width {
						holds = append(holds, s.hold(t, tool))
					}
				}
				call := procCall{path: "/mcp", body: batchOf(messages...), header: message("").header}
				call.header["Accept"] = form
				client := procDial()
				owner := gateway.begin(t.Context(), client, call)
				for _, hold := range holds {
					waitWithin(t, procBound, hold.arrived, "arrival")
				}
				gateway.term(t)
				waitWithin(t, procBound, gateway.log.when("exiting; byeee"), "the gateway knows")
				if !slow {
					eventuallyWithin(t, procBound, "the gate is shut", func() bool {
						a, err := procPost(t.Context(), client, site.addr, procCall{id: strconv.Itoa(len(s.bodies())), path: "/mcp"})
						return err != nil || !a.executed()
					})
					for _, hold := range holds {
						hold.open()
					}
				}
				first := waitWithin(t, procBound, owner, "the batch ends")
				client.CloseIdleConnections()
				gateway.wait(t)
				if gateway.err != nil {
					t.Errorf("the gateway ended with %v", gateway.err)
				}
				if !slow && first.err != nil {
					t.Fatal(first.err)
				}
				if first.err == nil {
					got := responses(t, reply{status: first.answer.status, header: first.answer.header, body: first.answer.body})
					for i := range all {
						want := `"n":1`
						if i >= width {
							want = "shutting-down"
						} else if slow {
							want = "in-doubt"
						}
						if !strings.Contains(got[strconv.Itoa(i)], want) {
							t.Errorf("%d of the first: %s, want %s", i, got[strconv.Itoa(i)], want)
						}
					}
				}
				for _, hold := range holds {
					hold.open()
				}
				gateway = site.start(t)
				again := gateway.post(t, call)
				got := responses(t, reply{status: again.status, header: again.header, body: again.body})
				for i := range all {
					want := `"n":1`
					if slow && i < width {
						want = "in-doubt"
					}
					if !strings.Contains(got[strconv.Itoa(i)], want) || s.count(fmt.Sprint("tool", i)) != 1 {
						t.Errorf("%d again: %s, want %s; %d effects", i, got[strconv.Itoa(i)], want, s.count(fmt.Sprint("tool", i)))
					}
				}
				gateway.end(t)
			})
		}
	}
}
