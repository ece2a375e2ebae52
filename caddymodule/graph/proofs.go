package graph

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// headDocument is the newest signed head. Its members are an API.
type headDocument struct {
	Origin string    `json:"origin"`
	Size   int64     `json:"size"`
	Root   tlog.Hash `json:"root"`
	// Key is the public key that the note is verified with.
	Key string `json:"key,omitempty"`
	// Note is the signed note, which says the same and is what counts.
	Note string `json:"note"`
}

// head answers with the newest head: as JSON, or the signed note itself.
func (q *question) head() error {
	head := q.Log.Head()
	q.w.Header().Set("Vary", "Accept")
	if strings.Contains(q.r.Header.Get("Accept"), "text/plain") {
		q.write(http.StatusOK, "text/plain; charset=utf-8", head.Note)
		return nil
	}
	return q.writeJSON(http.StatusOK, headDocument{head.Origin, head.Size, head.Root, q.HeadKey, string(head.Note)})
}

// proofDocument is an inclusion proof. Its members are an API.
type proofDocument struct {
	Log   string           `json:"log"`
	Index int64            `json:"index"`
	Size  int64            `json:"size"`
	Proof tlog.RecordProof `json:"proof"`
}

// proof answers that the tree of a size, the newest if none is given, has the entry at
// an index.
func (q *question) proof() error {
	p, err := parseParams(q.r.URL, "index", "size")
	if err != nil {
		return err
	}
	index, err := p.required("index")
	if err != nil {
		return err
	}
	size, err := q.size(p, "size")
	if err != nil {
		return err
	}
	proof, err := q.Log.Prove(q.r.Context(), index, size)
	if err != nil {
		return q.beyond(err)
	}
	return q.writeJSON(http.StatusOK, proofDocument{q.Log.Origin(), index, size, append(tlog.RecordProof{}, proof...)})
}

// consistencyDocument is a consistency proof. Its members are an API.
type consistencyDocument struct {
	Log   string         `json:"log"`
	Old   int64          `json:"old"`
	New   int64          `json:"new"`
	Proof tlog.TreeProof `json:"proof"`
}

// consistency answers that the tree of size new, the newest if none is given, begins
// with all entries of the tree of size old.
func (q *question) consistency() error {
	p, err := parseParams(q.r.URL, "old", "new")
	if err != nil {
		return err
	}
	older, err := p.required("old")
	if err != nil {
		return err
	}
	newer, err := q.size(p, "new")
	if err != nil {
		return err
	}
	if older > newer {
		return badParameter("old is larger than new.")
	}
	proof, err := q.Log.ProveConsistency(q.r.Context(), older, newer)
	if err != nil {
		return q.beyond(err)
	}
	return q.writeJSON(http.StatusOK, consistencyDocument{q.Log.Origin(), older, newer, append(tlog.TreeProof{}, proof...)})
}

// size reads the size of a tree; the newest head's where there is none.
func (q *question) size(p params, name string) (int64, error) {
	size, there, err := p.number(name)
	if !there {
		size = q.Log.Head().Size
	}
	return size, err
}

// beyond makes the problem of a size that the tree does not have. How large it is
// every reader may know.
func (q *question) beyond(err error) error {
	if errors.Is(err, ledger.ErrNotFound) {
		return problem.New(problem.EntryUnknown, fmt.Sprintf("The tree has %d entries.", q.Log.Head().Size))
	}
	return err
}
