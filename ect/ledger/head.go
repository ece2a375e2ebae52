package ledger

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

const (
	// MaxHead is the longest signed head, in bytes.
	MaxHead = 16 << 10
	// MaxOrigin is the longest origin, in bytes.
	MaxOrigin = 255
)

// Head is the state of a log at one size, as its owner signed it.
type Head struct {
	// Origin names the log.
	Origin string
	// Size is the number of entries.
	Size int64
	// Root is the hash of the tree of that size.
	Root tlog.Hash
	// Note is the signed note that says so.
	Note []byte
}

// headText is a head without its signature: three lines, as in the checkpoints of
// other transparency logs.
func headText(origin string, size int64, root tlog.Hash) string {
	return fmt.Sprintf("%s\n%d\n%s\n", origin, size, root)
}

// ParseHead opens the signed head of the log called origin: one of keys must have
// signed it. Nothing but what the log's owner would write is accepted. The error is
// ErrProof.
func ParseHead(msg []byte, origin string, keys note.Verifiers) (Head, error) {
	if len(msg) > MaxHead {
		return Head{}, fmt.Errorf("%w: a head of %d bytes, at most %d", ErrProof, len(msg), MaxHead)
	}
	n, err := note.Open(msg, keys)
	if err != nil {
		return Head{}, fmt.Errorf("%w: %w", ErrProof, err)
	}
	if !strictSignatures(string(msg[len(n.Text):])) {
		return Head{}, fmt.Errorf("%w: malformed signatures", ErrProof)
	}
	h, err := parseHeadText(n.Text)
	if err != nil {
		return Head{}, err
	}
	if h.Origin != origin {
		return Head{}, fmt.Errorf("%w: a head of the log %q", ErrProof, h.Origin)
	}
	h.Note = append([]byte(nil), msg...)
	return h, nil
}

func parseHeadText(text string) (Head, error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 4 {
		return Head{}, fmt.Errorf("%w: not the text of a head", ErrProof)
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil || size < 0 {
		return Head{}, fmt.Errorf("%w: not a size", ErrProof)
	}
	root, err := tlog.ParseHash(lines[2])
	if err != nil {
		return Head{}, fmt.Errorf("%w: not a root", ErrProof)
	}
	if headText(lines[0], size, root) != text {
		return Head{}, fmt.Errorf("%w: a head spelt in another way", ErrProof)
	}
	return Head{Origin: lines[0], Size: size, Root: root}, nil
}

// strictSignatures reports whether the part of a note behind its text is spelt in the
// one way: package note accepts several spellings of one signature.
func strictSignatures(s string) bool {
	rest, ok := strings.CutPrefix(s, "\n")
	rest, whole := strings.CutSuffix(rest, "\n")
	if !ok || !whole {
		return false
	}
	for line := range strings.SplitSeq(rest, "\n") {
		at := strings.LastIndexByte(line, ' ')
		if at < 0 {
			return false
		}
		if _, err := base64.StdEncoding.Strict().DecodeString(line[at+1:]); err != nil {
			return false
		}
	}
	return true
}

// cutNote parts a note into its text and its signatures, unopened.
func cutNote(msg []byte) (text, signatures string, ok bool) {
	at := strings.LastIndex(string(msg), "\n\n")
	if at < 0 {
		return "", "", false
	}
	return string(msg[:at+1]), string(msg[at+1:]), true
}

func checkOrigin(origin string) error {
	if origin == "" || len(origin) > MaxOrigin || !utf8.ValidString(origin) || strings.ContainsFunc(origin, unicode.IsControl) {
		return fmt.Errorf("ledger: %q cannot be the origin of a log", origin)
	}
	return nil
}

// sign makes the head of a tree.
func (l *Log) sign(t *tree) (Head, error) {
	h := Head{Origin: l.origin, Size: t.size, Root: t.root()}
	msg, err := note.Sign(&note.Note{Text: headText(h.Origin, h.Size, h.Root)}, l.signer)
	if err != nil {
		return Head{}, fmt.Errorf("signing the head: %w", err)
	}
	h.Note = msg
	return h, nil
}
