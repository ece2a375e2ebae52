package guard

import (
	"compress/gzip"
	"errors"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Source is a recorded answer, whole or still growing.
type Source struct {
	Head *execution.Head
	Body io.Reader
	// Trailer is asked once Body has ended.
	Trailer func() map[string][]string
	// Live says that the answer is still growing: every read is flushed.
	Live bool
}

// Play sends src to the client of w, with marks as further header fields. The end
// of the answer is released when the body has ended with io.EOF. Any other error is
// returned: if w.Sent() then, the connection must be aborted, so that the client
// sees that the answer is not whole; else w is as it was, for another answer.
func Play(w *Writer, r *http.Request, src Source, marks http.Header) error {
	before := maps.Clone(w.Header())
	err := play(w, r, src, marks)
	if err != nil && !w.Sent() {
		w.takeBack(before)
	}
	return err
}

func play(w *Writer, r *http.Request, src Source, marks http.Header) error {
	h := w.Header()
	for name, values := range src.Head.Header {
		if values == nil {
			delete(h, name)
			continue
		}
		h[name] = slices.Clone(values)
	}
	for name, values := range marks {
		h[name] = values
	}
	body := src.Body
	if unasked(h, r) && bodyAllowed(src.Head.Status) {
		plain(h)
		body = &gunzip{from: body}
	}
	w.WriteHeader(src.Head.Status)
	if src.Live {
		w.Flush()
	}
	memory := buffers.Get().(*[32 << 10]byte)
	defer func() {
		// After a failed write an HTTP/2 connection may still read what it was given:
		// in its place would be another caller's answer (P3).
		if !w.gone {
			buffers.Put(memory)
		}
	}()
	buf := memory[:]
	for {
		n, err := body.Read(buf)
		if n > 0 {
			_, _ = w.Write(buf[:n]) // never fails
			if src.Live {
				w.Flush()
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if w.gone {
			return nil // nobody is left to play to
		}
	}
	w.Release()
	setTrailer(w, src.Trailer())
	return nil
}

// buffers are what bodies are played through.
var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

func setTrailer(w *Writer, trailer map[string][]string) {
	if len(trailer) == 0 {
		return
	}
	w.Flush() // without a length yet, so that the trailer has its chunked framing
	h := w.Header()
	names := announced(h)
	for name, values := range trailer {
		if !slices.Contains(names, name) {
			name = http.TrailerPrefix + name
		}
		h[name] = slices.Clone(values)
	}
}

// unasked reports whether the answer is gzipped and r does not accept that. The
// guarded request asked its upstream for nothing but gzip (NarrowEncoding), so
// other codings need no care.
func unasked(h http.Header, r *http.Request) bool {
	return isGzip(h.Get("Content-Encoding")) && !acceptsGzip(r.Header)
}

// plain makes the header that of the decoded body.
func plain(h http.Header) {
	h.Del("Content-Encoding")
	h.Del("Content-Length")
	if tag := h.Get("Etag"); tag != "" && !strings.HasPrefix(tag, "W/") {
		h.Set("Etag", "W/"+tag)
	}
}

// NarrowEncoding leaves of a forwarded request's Accept-Encoding what a replay can
// be decoded from: gzip where the client accepts it, else identity. A request
// without the field stays without.
func NarrowEncoding(h http.Header) {
	if len(h["Accept-Encoding"]) == 0 {
		return
	}
	if acceptsGzip(h) {
		h.Set("Accept-Encoding", "gzip")
		return
	}
	h.Set("Accept-Encoding", "identity")
}

// acceptsGzip reads Accept-Encoding (RFC 9110, section 12.5.3).
func acceptsGzip(h http.Header) bool {
	any := false
	for _, line := range h["Accept-Encoding"] {
		for item := range strings.SplitSeq(line, ",") {
			coding, params, _ := strings.Cut(item, ";")
			accepted := true
			if q, ok := strings.CutPrefix(strings.ToLower(strings.Join(strings.Fields(params), "")), "q="); ok {
				weight, err := strconv.ParseFloat(q, 64)
				accepted = err == nil && weight > 0
			}
			switch coding = strings.TrimSpace(coding); {
			case isGzip(coding):
				return accepted
			case coding == "*":
				any = accepted
			}
		}
	}
	return any
}

// isGzip recognises both names of the coding (RFC 9110, section 8.4.1.3).
func isGzip(coding string) bool {
	return strings.EqualFold(coding, "gzip") || strings.EqualFold(coding, "x-gzip")
}

// gunzip decodes when it is first read, so that the header can go before a live
// answer has its first byte.
type gunzip struct {
	from io.Reader
	z    *gzip.Reader
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.z == nil {
		z, err := gzip.NewReader(g.from)
		if err != nil {
			return 0, err
		}
		g.z = z
	}
	return g.z.Read(p)
}
