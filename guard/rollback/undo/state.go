package undo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Look is the request that reads what stands at the target of a call. Images are made
// with it, before and after the call and when it is undone, so that they can be compared:
// never compressed, never from a cache, in the representation that the call asked for if
// its fields were recorded.
func Look(r *checkpoint.Request) *Outgoing {
	o := &Outgoing{Method: http.MethodGet, URL: target(r), Host: r.Host, Header: http.Header{
		"Accept-Encoding": {"identity"}, "Cache-Control": {"no-cache"},
	}}
	for _, name := range LookFields {
		if values := r.Header[name]; len(values) > 0 {
			o.Header[name] = slices.Clone(values)
		}
	}
	return o
}

// LookFields are the fields of a call's request that Look needs: to be recorded of a call
// that is restored.
var LookFields = []string{"Accept", "Accept-Language"}

// imageFields are the fields of an answer that belong to the state, besides its type.
var imageFields = []string{"Content-Encoding", "Content-Language", "Content-Disposition"}

// ImageOf is the image that an answer to Look shows; nil where the answer says nothing of
// what stands there, or not all of it.
func ImageOf(a *Answer) *checkpoint.Image {
	i := &checkpoint.Image{Status: a.Status}
	switch a.Status {
	case http.StatusOK, http.StatusNonAuthoritativeInfo, http.StatusNoContent:
	case http.StatusNotFound, http.StatusGone:
		return i
	default:
		return nil
	}
	if a.Cut {
		return nil
	}
	i.Exists, i.ETag = true, a.Header.Get("ETag")
	i.ContentType, i.Body = a.Header.Get("Content-Type"), a.Body
	for _, name := range imageFields {
		if values := a.Header[name]; len(values) > 0 {
			if i.Header == nil {
				i.Header = map[string][]string{}
			}
			i.Header[name] = slices.Clone(values)
		}
	}
	return i
}

func target(r *checkpoint.Request) string {
	if r.Query == "" {
		return r.Path
	}
	return r.Path + "?" + r.Query
}

// Same reports whether the images show the same state: whether something is there, its
// bytes, and the fields that are put back with them.
func Same(a, b *checkpoint.Image) bool {
	if a.Exists != b.Exists {
		return false
	}
	return !a.Exists || bytes.Equal(a.Body, b.Body) && a.ContentType == b.ContentType &&
		maps.EqualFunc(a.Header, b.Header, slices.Equal[[]string])
}

// hashOf is the hash of a state; zero where nothing is there, or not known.
func (j *job) hashOf(i *checkpoint.Image) [32]byte {
	if i == nil || !i.Exists {
		return [32]byte{}
	}
	return j.hash(j.task.Rollback, i.Body)
}

// saltedHash is the SHA-256 of a record of 64 bytes: a salt of the rollback's, which nobody
// but this gateway can make, and the SHA-256 of the state (ADR 0041). Equal states are
// equal within a rollback, and who reads the hash cannot try what it may be of (C-6.3-b).
func (u *Undoer) saltedHash(rollback string, state []byte) [32]byte {
	salt := u.o.Guard.Key(guard.Scope{Caller: undoCaller, Method: stateMethod, Path: undoPath, ID: rollback})
	sum := sha256.Sum256(state)
	return sha256.Sum256(append(salt[:], sum[:]...))
}

// strong is the entity tag if a condition can be made of it (RFC 9110, section 13.1.1).
func strong(etag string) string {
	if len(etag) < 2 || !strings.HasPrefix(etag, `"`) || !strings.HasSuffix(etag, `"`) {
		return ""
	}
	return etag
}

// sight is what was seen at the target: an image, or that what is there is too large to
// be one.
type sight struct {
	image *checkpoint.Image
}

func (s *sight) shows(i *checkpoint.Image) bool { return s.image != nil && Same(s.image, i) }

// look reads what stands there now, and tries again until it is told or there is no more
// time. It looks once however late it is. Without a sight the note says why.
func (j *job) look(ctx context.Context) (*sight, note, error) {
	pace := j.pace(j.o.First)
	for {
		out, err := j.dress(ctx, *Look(&j.call.Request))
		if err != nil {
			return nil, note{}, err
		}
		var seen *sight
		n, _ := j.send(ctx, out, func(a *Answer) note {
			if image := ImageOf(a); image != nil {
				seen = &sight{image}
			} else if a.Cut && a.Status == http.StatusOK {
				seen = &sight{} // larger than any image that was kept
			}
			return note{reading: common(a.Status)}
		})
		switch {
		case ctx.Err() != nil:
			return nil, n, ctx.Err()
		case seen != nil:
			return seen, n, nil
		case n.reason != "", n.reading.final():
			return nil, n, nil
		}
		again, err := pace.wait(ctx, n.after)
		if err != nil || !again {
			return nil, n, err
		}
	}
}
