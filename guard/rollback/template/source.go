package template

import (
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Source is what was recorded of a call. Only what [Template.Needs] tells has to be in
// it. The zero value of a field is what is absent.
type Source struct {
	// Path of the request as it was sent: percent-encoded, with its first slash.
	Path string
	// Query of the request as it was sent, without the question mark.
	Query string
	// Request is the message of the call.
	Request Message
	// Status of the answer. Without one there was no answer, whatever Response holds.
	Status int
	// Response is the message of the answer.
	Response Message

	// The ids that belong to the call and to its rollback.
	ExecutionID, WorkflowID, RollbackID, CheckpointID string
}

// Message is the content of a request or a response. Fill does not change it.
type Message struct {
	Header http.Header // names in canonical form
	// ContentType is the media type of Body. Empty means that it was not said: then
	// the body may be JSON.
	ContentType string
	// Body is decoded: of a compressed one nothing can be read.
	Body []byte
}

// reader gives the values of placeholders and checks each body once.
type reader struct {
	src               *Source
	request, response document
}

type document struct {
	read, valid bool
}

// value gives the value of n. The error is one of this package.
func (r *reader) value(n *name) (value, error) {
	switch n.what {
	case responseStatus, responseHeader, responseBody:
		if r.src.Status == 0 {
			return value{}, ErrAbsent
		}
	}
	switch n.what {
	case requestPath:
		return given(r.src.Path)
	case requestSegment:
		return segment(r.src.Path, n.segment)
	case requestQuery:
		values, err := url.ParseQuery(r.src.Query)
		if err != nil {
			return value{}, ErrMalformed
		}
		return single(values[n.arg])
	case requestHeader:
		return single(r.src.Request.Header[n.arg])
	case requestBody:
		return r.request.value(&r.src.Request, n.tokens)
	case responseStatus:
		return value{text: strconv.Itoa(r.src.Status)}, nil
	case responseHeader:
		return single(r.src.Response.Header[n.arg])
	case responseBody:
		return r.response.value(&r.src.Response, n.tokens)
	case executionID:
		return given(r.src.ExecutionID)
	case workflowID:
		return given(r.src.WorkflowID)
	case rollbackID:
		return given(r.src.RollbackID)
	default:
		return given(r.src.CheckpointID)
	}
}

// given is a value that is absent if it is empty.
func given(s string) (value, error) {
	if s == "" {
		return value{}, ErrAbsent
	}
	return value{text: s, quoted: true}, nil
}

// single is a value that may have come more than once.
func single(values []string) (value, error) {
	switch len(values) {
	case 0:
		return value{}, ErrAbsent
	case 1:
		return value{text: values[0], quoted: true}, nil
	}
	return value{}, ErrAmbiguous
}

func segment(path string, i int) (value, error) {
	rest, ok := strings.CutPrefix(path, "/")
	if !ok {
		return value{}, ErrAbsent
	}
	segments := strings.Split(rest, "/")
	if i >= len(segments) {
		return value{}, ErrAbsent
	}
	plain, err := url.PathUnescape(segments[i])
	if err != nil {
		return value{}, ErrMalformed
	}
	return value{text: plain, quoted: true}, nil
}

func (d *document) value(m *Message, tokens []string) (value, error) {
	if len(m.Body) == 0 {
		return value{}, ErrAbsent
	}
	if !d.read {
		media, _, err := mime.ParseMediaType(m.ContentType)
		typed := m.ContentType == "" || err == nil && isJSON(media)
		d.read, d.valid = true, typed && isDocument(m.Body)
	}
	if !d.valid {
		return value{}, ErrNotJSON
	}
	return find(m.Body, tokens)
}
