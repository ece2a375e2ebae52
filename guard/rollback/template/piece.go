package template

import "strings"

// piece is a stretch of text, or a placeholder.
type piece struct {
	text   string
	offset int // in the field as it is written
	name   *name
	place  place
}

// scan splits text at its placeholders. No piece of text goes on after a doubled brace,
// so that offset plus an index into text is the place in the field.
func scan(text string) ([]piece, *ParseError) {
	var all []piece
	from := 0
	for i := 0; i < len(text); {
		c := text[i]
		switch {
		case c != '{' && c != '}':
			i++
			continue
		case strings.HasPrefix(text[i+1:], text[i:i+1]):
			all = append(all, piece{text: text[from : i+1], offset: from})
			i += 2
			from = i
			continue
		case c == '}':
			return nil, bad(i, "this brace closes nothing; write }} for a brace")
		}
		length := strings.IndexAny(text[i+1:], "{}")
		if length < 0 || text[i+1+length] == '{' {
			return nil, bad(i, "the placeholder is not closed; close it with }, or write {{ for a brace")
		}
		n, err := parseName(text[i+1 : i+1+length])
		if err != nil {
			err.Offset = i
			return nil, err
		}
		if from < i {
			all = append(all, piece{text: text[from:i], offset: from})
		}
		all = append(all, piece{offset: i, name: n})
		i += length + 2
		from = i
	}
	if from < len(text) {
		all = append(all, piece{text: text[from:], offset: from})
	}
	return all, nil
}

// cut splits pieces at the first sep that is text.
func cut(pieces []piece, sep byte) (before, after []piece, found bool) {
	for i, p := range pieces {
		at := strings.IndexByte(p.text, sep)
		if at < 0 {
			continue
		}
		before = append(before, pieces[:i]...)
		before = append(before, piece{text: p.text[:at], offset: p.offset})
		after = append(after, piece{text: p.text[at+1:], offset: p.offset + at + 1})
		return before, append(after, pieces[i+1:]...), true
	}
	return pieces, nil, false
}
