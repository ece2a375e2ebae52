package ect

import (
	"mime"
	"strings"
)

// FieldName is the header field that carries tokens.
const FieldName = "Execution-Context"

// Limits of the header field.
const (
	// MaxField is the size of one field, which has one token.
	MaxField = 8 << 10
	// MaxFields is the size of all of them together.
	MaxFields = 16 << 10
)

// maxBody is the size of a body that is tokens.
const maxBody = 1 << 20

// ParseFields gives the tokens of the lines of the header field, in their order. Lines
// that something on the way has joined with commas are taken apart (RFC 9110, section
// 5.3): no token has a comma. No token at all is none, and no error.
func ParseFields(lines []string) ([]string, error) {
	var tokens []string
	size := 0
	for _, line := range lines {
		if size += len(line); size > MaxFields {
			return nil, refuse(CodeTooLarge)
		}
		for token := range strings.SplitSeq(line, ",") {
			token = strings.Trim(token, " \t")
			if len(token) > MaxField {
				return nil, refuse(CodeTooLarge)
			}
			if token != "" {
				tokens = append(tokens, token)
			}
		}
	}
	return tokens, nil
}

// ParseBody gives the tokens of a body: one, under the media type of either spelling,
// or a JSON array of them. ours is false for bodies of other types.
func ParseBody(contentType string, body []byte) (tokens []string, ours bool, err error) {
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return nil, false, nil
	}
	switch media {
	case Draft00.MediaType(), Draft01.MediaType():
		token := strings.Trim(string(body[:min(len(body), maxBody)]), " \t\r\n")
		if len(token) > MaxToken {
			return nil, true, refuse(CodeTooLarge)
		}
		if token == "" {
			return nil, true, refuse(CodeMissing)
		}
		return []string{token}, true, nil
	case "application/json":
		tokens, err = parseTokenArray(body)
		return tokens, true, err
	}
	return nil, false, nil
}

func parseTokenArray(body []byte) ([]string, error) {
	if len(body) > maxBody {
		return nil, refuse(CodeTooLarge)
	}
	s := scanner{s: string(body)}
	s.space()
	var tokens []string
	ok := s.elements(func() bool {
		token, ok := s.text()
		tokens = append(tokens, token)
		return ok && token != "" && len(tokens) <= MaxParents
	})
	s.space()
	if !ok || s.i != len(s.s) {
		return nil, refuse(CodeMalformed)
	}
	if len(tokens) == 0 {
		return nil, refuse(CodeMissing)
	}
	return tokens, nil
}
