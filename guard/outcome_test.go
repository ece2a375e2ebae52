package guard_test

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// The outcome table: what a whole answer's status says, by preset.
func TestOutcomeTable(t *testing.T) {
	const done, free, doubt = guard.Completed, guard.Released, guard.InDoubt
	for _, row := range []struct {
		status                     int
		retryAfter                 bool
		plain, stripe, acp, strict guard.Verdict
	}{
		{200, false, done, done, done, done},
		{201, false, done, done, done, done},
		{204, false, done, done, done, done},
		{302, false, done, done, done, done},
		{400, false, done, done, done, done},
		{401, false, free, free, free, free},
		{402, false, done, done, done, done},
		{403, false, free, free, free, free},
		{404, false, done, done, done, done},
		{407, false, free, free, free, free},
		{408, false, doubt, done, doubt, doubt},
		{409, false, done, done, done, done},
		{421, false, free, free, free, free},
		{422, false, done, done, done, done},
		{425, false, free, free, free, free},
		{429, false, free, free, free, free},
		{499, false, doubt, done, doubt, doubt},
		{500, false, done, done, free, doubt},
		{501, false, done, done, free, doubt},
		{502, false, doubt, done, free, doubt},
		{503, false, doubt, done, free, doubt},
		{503, true, free, free, free, doubt},
		{504, false, doubt, done, free, doubt},
	} {
		for preset, want := range map[guard.Preset]guard.Verdict{
			"": row.plain, guard.PresetDefault: row.plain, guard.PresetStripe: row.stripe,
			guard.PresetACP: row.acp, guard.PresetStrict: row.strict,
		} {
			t.Run(fmt.Sprint(preset, "/", row.status, row.retryAfter), func(t *testing.T) {
				if got := (guard.Rules{Preset: preset}).Judge(row.status, row.retryAfter); got != want {
					t.Errorf("%v, want %v", got, want)
				}
			})
		}
	}
	single := guard.Rules{Preset: guard.PresetStrict, Status: map[int]guard.Verdict{503: done}}
	if got := single.Judge(503, false); got != done {
		t.Errorf("a single status does not go before the preset: %v", got)
	}
}

func TestVerdictWords(t *testing.T) {
	for _, v := range []guard.Verdict{guard.Completed, guard.Released, guard.InDoubt} {
		if got, err := guard.ParseVerdict(v.String()); got != v || err != nil {
			t.Errorf("%v: %v, %v", v, got, err)
		}
	}
	if _, err := guard.ParseVerdict("maybe"); err == nil {
		t.Error("an unknown word was read")
	}
}
