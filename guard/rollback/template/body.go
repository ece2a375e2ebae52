package template

import "strings"

func parseBody(text string, k kind) ([]piece, *ParseError) {
	if k == noBody {
		return nil, nil
	}
	pieces, err := scan(text)
	if err != nil {
		return nil, err
	}
	switch k {
	case jsonBody:
		if err := placeInJSON(pieces); err != nil {
			return nil, err
		}
		return pieces, checkJSON(pieces)
	case formBody:
		return pieces, parsePairs(pieces, "")
	}
	for _, p := range pieces {
		if p.name != nil {
			return nil, bad(p.offset, "{%s}: only JSON and form bodies can hold placeholders; set the content type to application/json or application/x-www-form-urlencoded", p.name.text)
		}
	}
	return pieces, nil
}

// placeInJSON tells which placeholders stand between quotes. What it takes for a string
// is one if the whole is valid, which checkJSON sees to.
func placeInJSON(pieces []piece) *ParseError {
	quoted, escaped := false, false
	var inString, inName *piece // in the string that is open; in the one that was closed last
	for i := range pieces {
		p := &pieces[i]
		if p.name != nil {
			if p.place = jsonValue; quoted {
				p.place, inString = jsonText, p
			}
			continue
		}
		for j := range len(p.text) {
			switch c := p.text[j]; {
			case escaped:
				escaped = false
			case quoted && c == '\\':
				escaped = true
			case c == '"':
				if quoted = !quoted; !quoted {
					inName, inString = inString, nil
				}
			case quoted || strings.IndexByte(" \t\r\n", c) >= 0:
			case c == ':' && inName != nil:
				return bad(inName.offset, "the name of a JSON member can hold no placeholder; write it out")
			default:
				inName = nil
			}
		}
	}
	return nil
}

// checkJSON wants that the body is JSON with a sample for each value.
func checkJSON(pieces []piece) *ParseError {
	var sample []byte
	starts := make([]int, len(pieces)) // of the pieces in the sample
	for i, p := range pieces {
		starts[i] = len(sample)
		if p.name == nil {
			sample = append(sample, p.text...)
		} else {
			sample = append(sample, p.place.sample()...)
		}
	}
	problem := checkDocument(sample)
	if problem == nil {
		return nil
	}
	offset := problem.Offset
	for i, p := range pieces {
		if starts[i] <= problem.Offset {
			offset = p.offset
			if p.name == nil {
				offset += min(problem.Offset-starts[i], len(p.text))
			}
		}
	}
	return bad(offset, "with values in place the body is no JSON: %s", problem.Problem)
}
