package cli

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// claims is what the flags say.
func (i *issuing) claims(stdin io.Reader) (ect.Claims, error) {
	c := ect.Claims{Audience: i.aud, ID: i.jti, Workflow: i.wid, Action: i.action, Life: i.life.Duration}
	if c.Life < time.Second || c.Life > ect.MaxLife {
		return c, fmt.Errorf("--life: %s is not from 1s to 24h", &i.life)
	}
	if i.wid != "" && i.wid != newWorkflow && !isUUID(i.wid) {
		return c, fmt.Errorf("--wid: %q is no UUID; write new for a fresh one", i.wid)
	}
	var err error
	if c.Vocabulary, err = vocabularyOf(i.action); err != nil {
		return c, err
	}
	inherited, err := i.parentIDs(&c)
	if err != nil {
		return c, err
	}
	switch c.Workflow {
	case "":
		c.Workflow = inherited
	case newWorkflow:
		c.Workflow = uuid.NewString()
	}
	if i.body != "" {
		if c.Input, err = hashFile(stdin, i.body); err != nil {
			return c, fmt.Errorf("--body: %w", err)
		}
	}
	if c.Output, err = i.output(stdin); err != nil {
		return c, err
	}
	if i.ext != "" {
		if c.Ext, err = parseExt(i.ext); err != nil {
			return c, fmt.Errorf("--ext: %w", err)
		}
	}
	return c, nil
}

// isUUID holds that an id has the form in which ids are written.
func isUUID(text string) bool {
	id, err := uuid.Parse(text)
	return err == nil && len(text) == len(id.String())
}

// vocabularyOf is the vocabulary in which an action is written as it was typed.
func vocabularyOf(action string) (ect.Vocabulary, error) {
	event, ok := ect.ParseEvent(action)
	if !ok {
		return ect.Cascade, nil
	}
	for _, v := range vocabularies {
		if v.Event(event) == action {
			return v, nil
		}
	}
	return 0, fmt.Errorf("--action: %s is an old name, which is only read; write %s", action, ect.AERR.Event(event))
}

// vocabularies are all, the one that others are told in first.
var vocabularies = []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR}

// parentIDs puts the parents into the claims, and returns the workflow of those that
// are given as tokens.
func (i *issuing) parentIDs(c *ect.Claims) (workflow string, err error) {
	for _, parent := range i.parents {
		if len(parent) <= len(uuid.UUID{}.String()) {
			if !isUUID(parent) {
				return "", fmt.Errorf("--parent: %q is neither a UUID nor a token", parent)
			}
			c.Parents = append(c.Parents, parent)
			continue
		}
		token, err := ect.ParseInsecure(parent)
		if err != nil {
			return "", fmt.Errorf("--parent: neither an id nor a token: %s", plain(err))
		}
		if i.wid == "" && workflow != "" && token.Workflow() != "" && token.Workflow() != workflow {
			return "", errors.New("--parent: the parents belong to different workflows; say with --wid which one this is")
		}
		if token.Workflow() != "" {
			workflow = token.Workflow()
		}
		c.Parents = append(c.Parents, token.ID())
	}
	return workflow, nil
}

// output is the hash of what came out.
func (i *issuing) output(stdin io.Reader) (ect.Hash, error) {
	if i.outHash == "" {
		return ect.Hash{}, nil
	}
	if file, ok := strings.CutPrefix(i.outHash, "@"); ok {
		h, err := hashFile(stdin, file)
		if err != nil {
			return h, fmt.Errorf("--out-hash: %w", err)
		}
		return h, nil
	}
	h, ok := ect.ParseHash(i.outHash)
	if !ok {
		return h, fmt.Errorf("--out-hash: %q is not the SHA-256 in 43 characters of base64url without padding; write that, or @FILE", i.outHash)
	}
	return h, nil
}

func hashFile(stdin io.Reader, file string) (ect.Hash, error) {
	from, err := openInput(stdin, file)
	if err != nil {
		return ect.Hash{}, err
	}
	defer from.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, from); err != nil {
		return ect.Hash{}, err
	}
	return ect.HashOf([sha256.Size]byte(sum.Sum(nil))), nil
}

// parseExt takes over the members in their order, under the names that they have.
func parseExt(text string) (*ect.ExtBuilder, error) {
	wrong := errors.New(`write a JSON object, like {"cascade.ttl": 86400}`)
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, wrong
	}
	b := new(ect.ExtBuilder)
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, wrong
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, wrong
		}
		b.JSON(ect.Member(name.(string)), string(value)) // More lets only names through
	}
	if _, err := d.Token(); err != nil {
		return nil, wrong
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, wrong
	}
	return b, nil
}
