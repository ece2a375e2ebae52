package e2e

import "testing"

func TestTwice(t *testing.T) {
	if waiting("e2e.waiting")+waiting("guard.(*Gone).wait") > 0 {
		t.Error("somebody waits")
	}
}

func waiting(function string) int { return len(function) }
