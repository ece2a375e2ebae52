package template

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

func (t *Template) parseURL(text string) *ParseError {
	rest, err := t.parseOrigin(text)
	if err != nil {
		return err
	}
	start := len(text) - len(rest)
	pieces, err := scan(rest)
	if err == nil {
		err = t.parseTarget(pieces)
	}
	if err != nil {
		err.Offset += start
	}
	return err
}

// parseOrigin takes scheme and host, if there are any. What is left begins with a slash.
func (t *Template) parseOrigin(text string) (rest string, err *ParseError) {
	authority := ""
	switch scheme, after, ok := strings.Cut(text, "://"); {
	case strings.HasPrefix(text, "/"):
		rest = text
	case ok && (scheme == "https" || scheme == "http"):
		end := strings.IndexAny(after, "/?#")
		if end < 0 {
			end = len(after)
		}
		authority, rest = after[:end], after[end:]
		if err := checkAuthority(authority); err != nil {
			err.Offset += len(scheme) + len("://")
			return "", err
		}
		t.origin = scheme + "://" + authority
	case strings.ContainsAny(scheme, "{}"):
		return "", bad(0, "scheme and host can hold no placeholder; begin with /, or with https:// and a host")
	default:
		return "", bad(0, "%q is no URL to send to; begin with / for the upstream of the call, or with https:// or http://", text)
	}
	switch start := len(text) - len(rest); {
	case !strings.HasPrefix(rest, "/"):
		return "", bad(start, "the path is missing; write a slash after the host")
	case strings.HasPrefix(rest, "//"):
		return "", bad(start, "the path begins with two slashes, which some read as a host; write one")
	}
	return rest, nil
}

// checkAuthority wants a plain host, and a port or none.
func checkAuthority(authority string) *ParseError {
	if i := strings.IndexAny(authority, "{}"); i >= 0 {
		return bad(i, "host and port can hold no placeholder; write them out")
	}
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		return bad(0, "a URL must not hold a user or a password; leave everything before the host away and set a header field")
	}
	host, port := authority, ""
	if i := strings.LastIndexByte(authority, ':'); i > strings.LastIndexByte(authority, ']') {
		host, port = authority[:i], authority[i+1:]
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return bad(i+1, "%q is no port; write one between 1 and 65535, or leave the colon away", port)
		}
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if addr, err := netip.ParseAddr(inner); !ok || err != nil || !addr.Is6() || addr.Zone() != "" {
			return bad(0, "%q is no address; write an IPv6 address without a zone in brackets", host)
		}
		return nil
	}
	for i := range len(host) {
		if c := host[i]; !isAlphanumeric(c) && strings.IndexByte("-._", c) < 0 {
			return bad(i, "a host holds letters of ASCII, digits, dots and hyphens; write others as punycode (xn--)")
		}
	}
	if host == "" {
		return bad(0, "the host is missing; write one after //")
	}
	return nil
}

// parseTarget reads path and query.
func (t *Template) parseTarget(pieces []piece) *ParseError {
	path, query, asked := cut(pieces, '?')
	if err := parsePath(path); err != nil {
		return err
	}
	t.url = path
	if !asked {
		return nil
	}
	if err := parsePairs(query, "?/"); err != nil {
		return err
	}
	t.url = append(append(t.url, piece{text: "?"}), query...)
	return nil
}

// subDelims and the like may stand in a path as they are (RFC 3986, section 3.3).
const inPath = "-._~!$&'()*+,;=:@/"

func parsePath(pieces []piece) *ParseError {
	var sample strings.Builder
	for i := range pieces {
		p := &pieces[i]
		if p.name == nil {
			if err := checkEscaped(p, inPath); err != nil {
				return err
			}
			sample.WriteString(p.text)
			continue
		}
		if p.name.what == requestPath {
			return bad(p.offset, "{request.path} is more than one segment; write the path out with {request.path.N} in it")
		}
		p.place = pathSegment
		sample.WriteString(p.place.sample())
	}
	for segment := range strings.SplitSeq(sample.String(), "/") {
		if plain, err := url.PathUnescape(segment); err != nil || plain == "." || plain == ".." {
			return bad(0, "the path's segment %q would be resolved on the way; write the path that is meant", segment)
		}
	}
	return nil
}

// parsePairs reads name=value&name=value. extra are characters that may stand as they
// are besides those of names and values.
func parsePairs(pieces []piece, extra string) *ParseError {
	inValue := false
	for i := range pieces {
		p := &pieces[i]
		if p.name != nil {
			if !inValue {
				return bad(p.offset, "a name in a query or form can hold no placeholder; write name={%s}", p.name.text)
			}
			p.place = pairValue
			continue
		}
		if err := checkEscaped(p, "-._~!$&'()*+,=:@"+extra); err != nil {
			return err
		}
		for j := range len(p.text) {
			switch p.text[j] {
			case '&':
				inValue = false
			case '=':
				inValue = true
			}
		}
	}
	return nil
}

// checkEscaped wants what is in allowed, letters, digits, and whole percent-encodings.
func checkEscaped(p *piece, allowed string) *ParseError {
	for i := 0; i < len(p.text); i++ {
		c := p.text[i]
		switch {
		case c == '#':
			return bad(p.offset+i, "a URL that is sent has no fragment; leave # and what follows away, or write %%23")
		case c == '%':
			if !isHex(p.text, i+1) || !isHex(p.text, i+2) {
				return bad(p.offset+i, "two hexadecimal digits must follow the percent sign; write %%25 for the sign itself")
			}
			i += 2
		case !isAlphanumeric(c) && strings.IndexByte(allowed, c) < 0:
			return bad(p.offset+i, "%q cannot stand here as it is; write it percent-encoded, %%%02X", p.text[i:i+1], c)
		}
	}
	return nil
}

func isHex(s string, i int) bool {
	return i < len(s) && strings.IndexByte("0123456789abcdefABCDEF", s[i]) >= 0
}
