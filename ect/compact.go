package ect

import (
	"encoding/base64"
	"strings"
)

// strict64 refuses bits that no octet uses: one signature must not have two spellings.
var strict64 = base64.RawURLEncoding.Strict()

// decode64 reads base64url without padding. The standard decoder skips line breaks.
func decode64(v string) ([]byte, bool) {
	if strings.ContainsAny(v, "\r\n") {
		return nil, false
	}
	b, err := strict64.DecodeString(v)
	return b, err == nil
}

// compact is a JWS in its compact form, split but not decoded.
type compact struct {
	signed                     string // header and payload with the dot between them
	header, payload, signature string
}

func split(raw string) (compact, bool) {
	if strings.Count(raw, ".") != 2 {
		return compact{}, false
	}
	first, last := strings.IndexByte(raw, '.'), strings.LastIndexByte(raw, '.')
	return compact{raw[:last], raw[:first], raw[first+1 : last], raw[last+1:]}, true
}

// header is the protected header of a token.
type header struct {
	typ, alg, kid string
	spelling      Spelling
	critical      bool
}

func parseHeader(encoded string) (header, bool) {
	var h header
	text, ok := decode64(encoded)
	if !ok {
		return h, false
	}
	s := scanner{s: string(text)}
	ok = s.document(func(name string) bool {
		var ok bool
		switch name {
		case "typ":
			h.typ, ok = s.text()
		case "alg":
			h.alg, ok = s.text()
		case "kid":
			h.kid, ok = s.text()
		case "crit":
			h.critical = true
			_, ok = s.value()
		default:
			// Keys that a token brings along are not looked at: only ours count.
			_, ok = s.value()
		}
		return ok
	})
	return h, ok
}

// check holds steps 2 and 3 of the order of verification, before any key is looked up.
func (h *header) check(allowed algorithms) (Algorithm, error) {
	var ok bool
	if h.spelling, ok = spellingOf(h.typ); !ok {
		return 0, refuse(CodeType)
	}
	alg, ok := algorithmNamed(h.alg)
	if !ok || !allowed.has(alg) {
		return 0, refuse(CodeAlgorithm)
	}
	if h.critical {
		return 0, refuse(CodeCritical)
	}
	if h.kid == "" || len(h.kid) > maxURI || !printable(h.kid) {
		return 0, refuse(CodeKeyID)
	}
	return alg, nil
}
