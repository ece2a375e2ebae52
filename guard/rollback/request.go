package rollback

import (
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Request asks for a rollback. Who asks was authenticated before; whether that one may
// ask is decided here.
type Request struct {
	// ID is the rollback's id, a UUID in its canonical form (without `urn:uuid:`). The
	// same id with the same content is the same rollback, for as long as it is kept (P5).
	ID string
	// Checkpoint is the id of the checkpoint or group to go back to.
	Checkpoint string
	// Scope is how far to go.
	Scope plan.Scope
	// Reason is a sentence for people, at most 512 bytes. Urgency is the requester's word.
	Reason, Urgency string
	// Token is the id of the token that asks, and Error that of the error that it names as
	// its cause (AERR): rollback_start follows from Error, else from Token. Both may be empty.
	Token, Error string
	// Unnamed says that the token itself does not name Checkpoint: then Error must follow
	// from it, or one token would be good for every checkpoint.
	Unnamed bool
	// By is the identity by which lineage is judged, the issuer of the token. Ignored for
	// operators.
	By string
	// Lineage is who of a workflow may ask.
	Lineage plan.Lineage
	// Coordinator says that By is a configured rollback coordinator.
	Coordinator bool
	// Operator is the name of an operator, who may ask for everything; empty for agents.
	Operator string
}
