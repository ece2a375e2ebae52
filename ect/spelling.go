package ect

import "strings"

// Spelling is one of the two ways in which the drafts have written the same token.
type Spelling uint8

const (
	// Draft00 writes par, ext and the type wimse-exec+jwt, as the figures of the
	// companion drafts do.
	Draft00 Spelling = iota
	// Draft01 writes pred, ect_ext and the type exec+jwt.
	Draft01
)

// spellings are the names that differ. Both are read everywhere.
var spellings = [...]struct{ typ, parents, ext string }{
	Draft00: {"wimse-exec+jwt", "par", "ext"},
	Draft01: {"exec+jwt", "pred", "ect_ext"},
}

func (s Spelling) String() string {
	if s == Draft01 {
		return "01"
	}
	return "00"
}

// Type is the header parameter typ of a token that is written so.
func (s Spelling) Type() string { return spellings[s].typ }

// MediaType is the type of a body that is one token.
func (s Spelling) MediaType() string { return "application/" + spellings[s].typ }

// spellingOf reads typ: in any case, with or without "application/" (RFC 7515, section
// 4.1.9). Other types of tokens are not ours, whatever their claims.
func spellingOf(typ string) (Spelling, bool) {
	const prefix = "application/"
	if len(typ) > len(prefix) && strings.EqualFold(typ[:len(prefix)], prefix) {
		typ = typ[len(prefix):]
	}
	for s, names := range spellings {
		if strings.EqualFold(typ, names.typ) {
			return Spelling(s), true
		}
	}
	return 0, false
}
