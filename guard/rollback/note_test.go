package rollback

import "testing"

// What is recorded of an undo's answer is read as it was: an entity tag may have any bytes but controls (RFC 9110,
// section 8.8.3).
func TestNoteIsReadAsItWas(t *testing.T) {
	n := note{Reading: done, Location: taskAt("s\xe9", "t"), Unknown: true, Attempts: 3, Before: Hash{1}, Tag: "\"\xff<&\"", Completion: "c"}
	var read note
	if !read.read(n.header()) || read != n {
		t.Errorf("%+v, want %+v", read, n)
	}
}
