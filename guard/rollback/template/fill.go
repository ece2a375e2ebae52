package template

import "net/http"

// Request is a request to send.
type Request struct {
	Method string
	// URL is a path and a query for the upstream of the call, or begins with
	// [Template.Origin]. It is escaped as it is to be sent.
	URL string
	// Header has one value per name, Content-Type included. It is never nil.
	Header http.Header
	// Body is nil if there is none.
	Body []byte
}

// Fill makes the request. The error is a *FillError.
func (t *Template) Fill(src *Source) (Request, error) {
	f := filler{values: reader{src: src}, room: MaxRequest}
	req := Request{Method: t.method, Header: make(http.Header, len(t.header)+1)}
	f.spend(len(t.origin))
	req.URL = t.origin + string(f.fill(t.url))
	for _, field := range t.header {
		f.spend(len(field.name))
		req.Header[field.name] = []string{string(f.fill(field.value))}
	}
	if t.body != nil {
		f.spend(len(t.contentType))
		req.Header["Content-Type"] = []string{t.contentType}
		req.Body = f.fill(t.body)
	}
	if f.err != nil {
		return Request{}, f.err
	}
	return req, nil
}

// filler writes pieces until something is wrong.
type filler struct {
	values reader
	room   int    // bytes that the request may still grow by
	last   *piece // the placeholder that was filled last
	err    error
}

func (f *filler) fill(pieces []piece) (dst []byte) {
	for i := 0; i < len(pieces) && f.err == nil; i++ {
		was := len(dst)
		if p := &pieces[i]; p.name == nil {
			dst = append(dst, p.text...)
		} else {
			dst = f.appendValue(dst, p)
		}
		f.spend(len(dst) - was)
	}
	return dst
}

func (f *filler) appendValue(dst []byte, p *piece) []byte {
	f.last = p
	v, err := f.values.value(p.name)
	if err == nil && len(v.text) > MaxValue {
		err = ErrTooLarge
	}
	if err == nil {
		dst, err = p.place.appendValue(dst, v)
	}
	if err != nil {
		f.fail(err)
	}
	return dst
}

// spend takes n bytes of the room. Text alone cannot use it up: Parse saw to that.
func (f *filler) spend(n int) {
	if f.room -= n; f.room < 0 && f.err == nil {
		f.fail(ErrTooLarge)
	}
}

func (f *filler) fail(err error) {
	f.err = &FillError{f.last.name.text, f.last.place.String(), err}
}
