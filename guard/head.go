package guard

// Head is an answer without its body: what a replay needs besides the bytes.
type Head struct {
	Status int
	// Header is the difference that the execution made to the answer's header: a
	// name with values was set, a name without was removed. Names are canonical.
	Header map[string][]string
	// Trailer holds what came after the body.
	Trailer map[string][]string
	// Size is the body's length in bytes.
	Size int64
}

const (
	tagHeadStatus = 1 + iota
	tagHeadSize
	tagHeadName
	tagHeadValue
	tagHeadTrailerName
	tagHeadTrailerValue
)

// valueMark stands before each value: an empty value is a value, which the encoder
// would leave out.
const valueMark = '='

func (h *Head) encode(dst []byte) []byte {
	e := encoder{dst}
	e.int(tagHeadStatus, int64(h.Status))
	e.int(tagHeadSize, h.Size)
	fields := func(fields map[string][]string, name, value byte) {
		for k, values := range fields {
			e.string(name, k)
			for _, v := range values {
				e.marked(value, v)
			}
		}
	}
	fields(h.Header, tagHeadName, tagHeadValue)
	fields(h.Trailer, tagHeadTrailerName, tagHeadTrailerValue)
	return e.b
}

func decodeHead(b []byte) (*Head, error) {
	h := &Head{Header: map[string][]string{}, Trailer: map[string][]string{}}
	var name string
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagHeadStatus:
			h.Status = int(d.int())
		case tagHeadSize:
			h.Size = d.int()
		case tagHeadName:
			name = d.string()
			h.Header[name] = nil
		case tagHeadTrailerName:
			name = d.string()
			h.Trailer[name] = nil
		case tagHeadValue:
			h.Header[name] = append(h.Header[name], d.marked())
		case tagHeadTrailerValue:
			h.Trailer[name] = append(h.Trailer[name], d.marked())
		}
	}
	return h, d.err
}
