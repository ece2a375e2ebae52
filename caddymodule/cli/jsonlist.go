package cli

import (
	"encoding/json"
	"fmt"
	"io"
)

// jsonList writes one document that is a list of others, part by part.
type jsonList struct {
	out   io.Writer
	name  string // of the list
	begun bool
}

// add writes documents of the list as they are.
func (l *jsonList) add(all ...json.RawMessage) error {
	for _, text := range all {
		if _, err := fmt.Fprintf(l.out, "%s\n  %s", l.mark(","), text); err != nil {
			return err
		}
	}
	return nil
}

// mark is what stands before the next part: the beginning of the list once, and then
// what parts it from the one before.
func (l *jsonList) mark(next string) string {
	if l.begun {
		return next
	}
	l.begun = true
	return fmt.Sprintf("{%q:[", l.name)
}

// end ends the document; next, if any, says where the list goes on.
func (l *jsonList) end(next string) error {
	if next != "" {
		next = fmt.Sprintf(",\n\"next\":%q", next)
	}
	_, err := fmt.Fprintf(l.out, "%s]%s}\n", l.mark(""), next)
	return err
}
