package caddymodule

import (
	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
)

// traceCall writes what came of the call into the span of Caddy's `tracing` directive. No
// value is the caller's own (P8). Without a span that records, it does nothing.
func (x *exchange) traceCall() {
	span := oteltrace.SpanFromContext(x.r.Context())
	if !span.IsRecording() {
		return
	}
	attributes := []attribute.KeyValue{
		attribute.String("agent_guard.execution.guard", x.h.Name),
		attribute.String("agent_guard.execution.action", x.action.Name),
		attribute.String("agent_guard.execution.status", x.noted.status),
	}
	if x.identified() {
		attributes = append(attributes, attribute.String("agent_guard.execution.key", x.call.Key.String()))
	}
	if x.noted.outcome != 0 {
		attributes = append(attributes, attribute.String("agent_guard.execution.outcome", x.noted.outcome.String()))
	}
	if x.noted.problem != "" {
		attributes = append(attributes, attribute.String("agent_guard.execution.problem", x.noted.problem))
	}
	span.SetAttributes(attributes...)
}
