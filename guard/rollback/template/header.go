package template

import (
	"net/http"
	"slices"
	"strings"
)

// ofConnection are fields that are not the template's to set: they frame the message,
// belong to one connection, or name the host.
var ofConnection = []string{
	"Connection", "Content-Length", "Expect", "Host", "Keep-Alive", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func (t *Template) parseHeader(fields []Field) error {
	for _, f := range fields {
		value, err := t.parseField(f)
		if err != nil {
			return err.in("header " + f.Name)
		}
		t.header = append(t.header, field{http.CanonicalHeaderKey(f.Name), value})
	}
	return nil
}

func (t *Template) parseField(f Field) ([]piece, *ParseError) {
	canonical := http.CanonicalHeaderKey(f.Name)
	switch {
	case strings.ContainsAny(f.Name, "{}"):
		return nil, bad(0, "a field's name can hold no placeholder; write it out")
	case !isToken(f.Name):
		return nil, bad(0, "%q is no name of a header field; write one like If-Match", f.Name)
	case slices.Contains(ofConnection, canonical):
		return nil, bad(0, "%s belongs to the connection; leave it away", canonical)
	case canonical == "Content-Type":
		return nil, bad(0, "the type of the body has a setting of its own; leave the field away")
	case slices.ContainsFunc(t.header, func(have field) bool { return have.name == canonical }):
		return nil, bad(0, "the field is set twice; write it once")
	}
	pieces, err := scan(f.Value)
	if err != nil {
		return nil, err
	}
	if strings.Trim(f.Value, " \t") != f.Value {
		return nil, bad(0, "a value has no space at its ends; leave it away")
	}
	for i := range pieces {
		p := &pieces[i]
		p.place = headerValue
		if at := strings.IndexFunc(p.text, isControl); at >= 0 {
			return nil, bad(p.offset+at, "a value holds no control characters; leave it away")
		}
	}
	return pieces, nil
}
