// Package caddymodule may know Caddy and every core package, but no command.
package caddymodule

import (
	_ "example.com/house/breaker"
	_ "example.com/house/cmd/caddy"
	_ "example.com/house/ect/ledger"
	_ "example.com/house/guard/store/badger"
	_ "github.com/caddyserver/caddy/v2"
	_ "go.uber.org/zap"
)

// Handler is explained; one of its fields is not.
type Handler struct {
	// Name is explained.
	Name string `json:"name,omitempty"`
	Key  string `json:"key,omitempty"`

	Live int `json:"-"`
}

type wire struct {
	State string `json:"state"`
}
