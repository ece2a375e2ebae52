//go:build unix

package e2e

import (
	"bufio"
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
