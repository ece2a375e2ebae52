package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// keySet is a file with a JSON Web Key Set to which keys are added. What it holds
// already may belong to others, and stays as it is.
type keySet struct {
	path    string
	was     []byte // nil where there is no file yet
	mode    fs.FileMode
	members map[string]json.RawMessage // besides the keys
	keys    []json.RawMessage
}

// readKeySet reads the file, which need not be there.
func readKeySet(path string) (*keySet, error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // a link stays a link
	}
	s := &keySet{path: path, mode: 0o644, members: map[string]json.RawMessage{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	s.was, s.mode = text, info.Mode().Perm()
	if s.members, s.keys, err = parseKeySet(text); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func parseKeySet(text []byte) (members map[string]json.RawMessage, keys []json.RawMessage, err error) {
	if _, err := ect.ParseSet(text, ect.Owner{}); err != nil {
		return nil, nil, errors.New(plain(err))
	}
	if err := json.Unmarshal(text, &members); err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal(members["keys"], &keys); err != nil {
		return nil, nil, err
	}
	for _, key := range keys {
		var secret struct {
			D any `json:"d"`
			K any `json:"k"`
		}
		if err := json.Unmarshal(key, &secret); err != nil {
			return nil, nil, err
		}
		if secret.D != nil || secret.K != nil {
			return nil, nil, errors.New("it holds a private key, and a set that others read must not")
		}
	}
	return members, keys, nil
}

// add adds the keys of a set. A key of the same name and owner is replaced.
func (s *keySet) add(set []byte) error {
	_, keys, err := parseKeySet(set)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := s.put(key); err != nil {
			return err
		}
	}
	return nil
}

func (s *keySet) put(key json.RawMessage) error {
	type named struct{ Kid, Sub string }
	var added named
	if err := json.Unmarshal(key, &added); err != nil {
		return err
	}
	for i := range s.keys {
		var there named
		if json.Unmarshal(s.keys[i], &there) != nil || there.Kid != added.Kid {
			continue
		}
		if there.Sub != added.Sub {
			return fmt.Errorf("%s has the key %s of %q already; one key must not speak for two", s.path, added.Kid, there.Sub)
		}
		s.keys[i] = key
		return nil
	}
	s.keys = append(s.keys, key)
	return nil
}

// write replaces the file as a whole.
func (s *keySet) write() error {
	keys, err := json.Marshal(s.keys)
	if err != nil {
		return err
	}
	s.members["keys"] = keys
	text, err := json.MarshalIndent(s.members, "", "  ")
	if err != nil {
		return err
	}
	if _, err := ect.ParseSet(text, ect.Owner{}); err != nil {
		return errors.New(plain(err)) // it has become too large
	}
	err = durable.Swap(s.path, s.was, append(text, '\n'), s.mode)
	if errors.Is(err, durable.ErrChanged) {
		return fmt.Errorf("%s: %w", s.path, err)
	}
	return err
}
