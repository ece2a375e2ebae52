package template

import "slices"

// Needs tells what a template reads, so that nothing else has to be recorded. Lists are
// sorted and name each thing once.
type Needs struct {
	// Path: the request's path.
	Path bool
	// Query are names in the request's query, decoded.
	Query []string
	// RequestHeader and ResponseHeader are names of fields, in canonical form.
	RequestHeader, ResponseHeader []string
	// RequestBody and ResponseBody are JSON pointers.
	RequestBody, ResponseBody []string
	// Status: the status of the response.
	Status bool
}

// Response reports that something of the response is read: the template cannot be
// filled before there is one, nor ever for a call whose answer was lost.
func (n Needs) Response() bool {
	return n.Status || len(n.ResponseHeader) > 0 || len(n.ResponseBody) > 0
}

// Needs tells what the template reads.
func (t *Template) Needs() Needs {
	var n Needs
	n.add(t.url)
	for _, f := range t.header {
		n.add(f.value)
	}
	n.add(t.body)
	for _, list := range []*[]string{&n.Query, &n.RequestHeader, &n.ResponseHeader, &n.RequestBody, &n.ResponseBody} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return n
}

func (n *Needs) add(pieces []piece) {
	for _, p := range pieces {
		if p.name == nil {
			continue
		}
		switch arg := p.name.arg; p.name.what {
		case requestPath, requestSegment:
			n.Path = true
		case requestQuery:
			n.Query = append(n.Query, arg)
		case requestHeader:
			n.RequestHeader = append(n.RequestHeader, arg)
		case requestBody:
			n.RequestBody = append(n.RequestBody, arg)
		case responseStatus:
			n.Status = true
		case responseHeader:
			n.ResponseHeader = append(n.ResponseHeader, arg)
		case responseBody:
			n.ResponseBody = append(n.ResponseBody, arg)
		}
	}
}
