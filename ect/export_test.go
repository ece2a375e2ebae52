package ect

// What the tests look into.

var (
	ErrOtherWorkflow = errOtherWorkflow
	ParseRing        = parseRing
	ParseHash        = parseHash
)

func (k *Key) Algorithm() Algorithm { return k.algorithm }

func (s *FileSource) Retired(kid string) []*Key { return s.replaced(kid) }

func (s *URLSource) Retired(kid string) []*Key { return s.replaced(kid) }

// MaxToken is the size of a token, in bytes.
const MaxToken = maxToken

// ParseMember reads the name of an extension member in any vocabulary, with the meaning
// that it has in a token of this event. Unknown names stay as they are.
func ParseMember(name string, event Event) Member {
	if i := memberRow(name, event); i >= 0 {
		return memberTable[i].member
	}
	return Member(name)
}
