package plan

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
)

// Schema is the JSON schema (2020-12) of a descriptor, indented. What a schema cannot say, Parse
// checks besides: that ids are unique, edges have ends, and nothing lies on a cycle.
func Schema() []byte {
	type object = map[string]any
	text := func(most int) object {
		return object{"type": "string", "maxLength": most, "pattern": `^[^\u0000-\u001f\u007f-\u009f]*$`}
	}
	end := object{"type": "string", "minLength": 1, "maxLength": maxID}
	members := func(properties object, required ...string) object {
		o := object{"type": "object", "properties": properties, "additionalProperties": false}
		if len(required) > 0 {
			o["required"] = required
		}
		return o
	}
	whole := func(least, most int) object { return object{"type": "integer", "minimum": least, "maximum": most} }
	priorities := slices.Clone(bulkhead.Classes())
	slices.Reverse(priorities)
	amount := object{"type": "string", "pattern": decimal.String()}
	hints := object{
		"priority":     object{"enum": priorities},
		"timeout_s":    whole(1, maxTimeoutS),
		"memory_mb":    whole(0, maxWhole),
		"network_mbps": whole(0, maxWhole),
		"cpu":          amount,
		"gpu":          amount,
	}
	constraints := object{
		circuitThreshold: object{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
		circuitWindow:    object{"type": "number", "minimum": 1},
	}
	for name, hint := range hints {
		constraints[resourcePrefix+name] = hint
	}
	known := slices.Sorted(maps.Keys(constraints))
	id := text(maxID)
	id["minLength"], id["pattern"] = 1, "^[!-~]+$"
	name := text(maxText)
	name["minLength"] = 1
	schema := members(object{
		"wf_id":       name,
		"description": text(maxDescription),
		"nodes": object{"type": "array", "minItems": 1, "maxItems": MaxNodes, "items": members(object{
			"id":              id,
			"label":           text(maxText),
			"reversible":      object{"type": "boolean"},
			"hitl_required":   object{"type": "boolean", "default": false},
			memberHints:       members(hints),
			memberConstraints: object{"type": "object", "properties": constraints, "propertyNames": object{"anyOf": []object{{"enum": known}, {"not": object{"pattern": `^atd\.`}}}}},
		}, "id")},
		"edges": object{"type": "array", "maxItems": maxEdges, "items": members(object{"from": end, "to": end}, "from", "to")},
	}, "wf_id", "nodes")
	schema["$schema"], schema["title"] = "https://json-schema.org/draft/2020-12/schema", MediaType
	out, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		panic(err) // only values of JSON are in it
	}
	return append(out, '\n')
}
