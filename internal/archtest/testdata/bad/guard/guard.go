// Package guard may import its store and the leaves, not what stands above or beside.
package guard

import (
	_ "example.com/house/breaker"
	_ "example.com/house/guard/rollback"
	_ "example.com/house/guard/seal"
	_ "example.com/house/guard/store"
	_ "example.com/house/guard/store/badger"
	_ "github.com/caddyserver/caddy/v2"
	_ "go.uber.org/zap/zapcore"
)
