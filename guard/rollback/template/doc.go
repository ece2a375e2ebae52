// Package template makes the request that compensates a call out of what was recorded
// of the call: its request and its response (DESIGN, "Checkpoints and rollback"). What
// an agent or an upstream sent is hostile here: a value fills the place that it was
// given and can change nothing else of the request.
//
// A template is read once, when the configuration is, by [Parse]. [Template.Fill] then
// makes a [Request], without I/O and always the same one for the same [Source].
//
// # Placeholders
//
//	{request.path}            the path as it was sent, percent-encoding kept
//	{request.path.N}          its Nth segment, from 0, decoded: 1 is "ch_7" in /charges/ch_7
//	{request.query.NAME}      a value of the query, decoded
//	{request.header.NAME}     a header field
//	{request.json./POINTER}   a value in the JSON body, by JSON pointer (RFC 6901)
//	{response.status}         the status code
//	{response.header.NAME}    a header field of the answer
//	{response.json./POINTER}  a value in the answer's JSON body
//	{execution.id}            the execution id of the call
//	{workflow.id}             its workflow
//	{rollback.id}             the rollback that asks
//	{checkpoint.id}           the checkpoint of the call's first attempt
//
// Any other name is an error of [Parse]. A brace that is meant as such is written twice:
// {{ and }}, in a JSON body too. A name ends at the first closing brace, so a member
// whose name holds a brace cannot be asked for.
//
// The fields that callers prove themselves with (Authorization, Proxy-Authorization,
// Cookie, X-Api-Key, Api-Key) cannot be asked for: a template must not be able to hand
// them to another host. Which credentials an undo carries is a setting of its own.
//
// # Places
//
// Where a placeholder stands says how its value is written and what it cannot be:
//
//   - In the path it is one segment or a part of one. Everything outside RFC 3986's
//     unreserved characters is percent-encoded. Empty, ".", "..", a slash, a backslash
//     and control characters are refused: some server on the way would resolve them,
//     encoded or not. {request.path} has slashes and cannot stand here.
//   - In the query it is the value, or a part of it, of a name that is written out.
//     Percent-encoded likewise.
//   - In a header field it is the value or a part of it. Empty, control characters, and
//     spaces at its ends are refused.
//   - In a JSON body between quotes it is text, escaped. Outside of quotes it is the
//     whole value: a number is written as it was, digit by digit; a string in quotes;
//     true and false as such.
//   - In a form body it is as in a query.
//
// Method, scheme, host, port, field names, names in queries and forms, and names of
// JSON members cannot hold placeholders. The URL is a path, which means the upstream of
// the call, or begins with http:// or https:// and a fixed host. Bodies of other types
// than JSON and forms can hold no placeholder, because nobody knows how to escape there.
//
// [JSONObject] and [Form] make a body of names and values, for settings that list them.
//
// # Errors
//
// [Parse] gives a [*ParseError], with the place and what would be right. [Template.Fill]
// gives a [*FillError], which names the placeholder and never its value, since that may
// be a secret (P8). A call whose template cannot be filled cannot be compensated: its
// checkpoint is irreversible, and says so. The rollback's id is not known when this is
// first found out; any id in its place tells.
package template
