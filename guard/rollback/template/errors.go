package template

import (
	"errors"
	"fmt"
)

// ParseError says what is wrong with a template.
type ParseError struct {
	// Field is "method", "url", "header NAME", "content_type", "body", or "template"
	// for the whole.
	Field string
	// Offset is the place in the field as it is written, in bytes from 0.
	Offset int
	// Problem says what is wrong, and what would be right.
	Problem string
}

func (e *ParseError) Error() string {
	return fmt.Sprintf("%s, at byte %d: %s", e.Field, e.Offset, e.Problem)
}

func bad(offset int, format string, args ...any) *ParseError {
	return &ParseError{Offset: offset, Problem: fmt.Sprintf(format, args...)}
}

func (e *ParseError) in(field string) *ParseError {
	e.Field = field
	return e
}

// Why a template cannot be filled.
var (
	// ErrAbsent: there is no such value, or it is null, or no response was recorded.
	ErrAbsent = errors.New("the value is absent")
	// ErrEmpty: an empty value where a path segment or a header field needs one.
	ErrEmpty = errors.New("the value is empty")
	// ErrNotScalar: the value is an object or an array.
	ErrNotScalar = errors.New("the value is an object or an array; name a string, a number or a boolean in it")
	// ErrAmbiguous: the field or the name in the query came more than once, or a JSON
	// member's name occurs more than once in an object on the way to the value.
	ErrAmbiguous = errors.New("the value's name occurs more than once, so that nobody knows which is meant")
	// ErrNotJSON: the body is of another type, invalid as of RFC 8259, invalid UTF-8,
	// or has lone surrogates.
	ErrNotJSON = errors.New("the body is not valid JSON")
	// ErrMalformed: the recorded path or query has a bad percent-encoding, or the query
	// a semicolon, which some read as a separator.
	ErrMalformed = errors.New("the recorded path or query is malformed")
	// ErrUnfit: the value holds what its place cannot, escaped or not.
	ErrUnfit = errors.New("the value cannot stand in this place")
	// ErrTooLarge: the value is longer than MaxValue, or with it the request larger
	// than MaxRequest.
	ErrTooLarge = errors.New("the value, or with it the request, is too large")
)

// FillError says which placeholder has no usable value. It never holds the value.
type FillError struct {
	// Placeholder is the name without its braces.
	Placeholder string
	// Place is where it stands, in words.
	Place string
	// Err is one of the errors of this package.
	Err error
}

func (e *FillError) Error() string {
	return fmt.Sprintf("{%s} as %s: %v", e.Placeholder, e.Place, e.Err)
}

func (e *FillError) Unwrap() error { return e.Err }
