package badger

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
)

// logger brings Badger's messages to ours. What Badger calls info is of use only
// to somebody who looks for a fault.
type logger struct{ to *slog.Logger }

func (l logger) Errorf(format string, args ...any)   { l.log(slog.LevelError, format, args) }
func (l logger) Warningf(format string, args ...any) { l.log(slog.LevelWarn, format, args) }
func (l logger) Infof(format string, args ...any)    { l.log(slog.LevelDebug, format, args) }

// Debugf drops the message: Badger writes several for every commit.
func (l logger) Debugf(string, ...any) {}

func (l logger) log(level slog.Level, format string, args []any) {
	if l.to.Enabled(context.Background(), level) {
		l.to.Log(context.Background(), level, strings.TrimSpace(fmt.Sprintf(format, args...)), "component", "badger")
	}
}
