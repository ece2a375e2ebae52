package evidence

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// readHead reads the head that was kept beside the store: a log that has not grown out
// of it was altered, or is an older copy. A file that is missing says nothing.
func readHead(file, origin string, key *headKey) ([]ledger.Head, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("evidence: the head of the ledger: %w", err)
	}
	head, err := ledger.ParseHead(text, origin, note.VerifierList(key.Verifier))
	if err != nil {
		return nil, fmt.Errorf("evidence: %s is no head of this store's ledger: %w", file, err)
	}
	return []ledger.Head{head}, nil
}

// KeepHead writes the newest head beside the store, where it has grown since. The file
// is whole at any time.
func (e *Evidence) KeepHead() error {
	head := e.log.Head()
	if e.headFile == "" || head.Size == e.kept.Load() {
		return nil
	}
	if err := durable.Write(e.headFile, head.Note, durable.Private); err != nil {
		return fmt.Errorf("evidence: keeping the head of the ledger: %w", err)
	}
	e.kept.Store(head.Size)
	return nil
}
