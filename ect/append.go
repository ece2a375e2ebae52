package ect

import "unicode/utf8"

const hexDigits = "0123456789abcdef"

// appendText writes a JSON string. What is not UTF-8 becomes U+FFFD.
func appendText(b []byte, v string) []byte {
	b = append(b, '"')
	from := 0
	for i := 0; i < len(v); {
		c := v[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			if r, size = utf8.DecodeRuneInString(v[i:]); r != utf8.RuneError || size > 1 {
				i += size
				continue
			}
		}
		b = append(b, v[from:i]...)
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c >= utf8.RuneSelf:
			b = utf8.AppendRune(b, utf8.RuneError)
		default:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
		i += size
		from = i
	}
	b = append(b, v[from:]...)
	return append(b, '"')
}

// appendTexts writes an array of strings.
func appendTexts(b []byte, vs []string) []byte {
	b = append(b, '[')
	for i, v := range vs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(b, v)
	}
	return append(b, ']')
}
