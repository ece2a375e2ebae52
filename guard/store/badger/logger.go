package badger

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
)

// logger brings Badger's messages to ours. What Badger calls info is of use only
// to somebody who looks for a fault.
type logger struct {
	to *slog.Logger
	// failed is told of a write or sync of a table or of the manifest that failed.
	// Badger tries again, but a file whose sync has failed tells nobody a second
	// time, so that a later success proves nothing.
	failed func(error)
}

// flushFailed is what Badger says then, and says in no other way.
const flushFailed = "error flushing memtable to disk"

func (l logger) Errorf(format string, args ...any) {
	if strings.HasPrefix(format, flushFailed) {
		l.failed(fmt.Errorf("badger: "+format, args...))
	}
	l.log(slog.LevelError, format, args)
}
func (l logger) Warningf(format string, args ...any) { l.log(slog.LevelWarn, format, args) }
func (l logger) Infof(format string, args ...any)    { l.log(slog.LevelDebug, format, args) }

// Debugf drops the message: Badger writes several for every commit.
func (l logger) Debugf(string, ...any) {}

func (l logger) log(level slog.Level, format string, args []any) {
	if l.to.Enabled(context.Background(), level) {
		l.to.Log(context.Background(), level, strings.TrimSpace(fmt.Sprintf(format, args...)), "component", "badger")
	}
}
