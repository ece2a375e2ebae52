package ect

import (
	"slices"
	"time"
)

// content is what a token says. Its methods are those of Token, Draft and Unverified:
// only these types say how far it can be believed.
type content struct {
	spelling          Spelling
	issuer            string
	audience          []string
	issuedAt, expires int64
	id, workflow      string
	action            string
	event             Event
	parents           []string
	input, output     Hash
	ext               string
	payload           string
}

// Spelling is how the token writes the names that the drafts have changed.
func (c *content) Spelling() Spelling { return c.spelling }

// Issuer is the claim iss.
func (c *content) Issuer() string { return c.issuer }

// Audience is the claim aud, as a list.
func (c *content) Audience() []string { return slices.Clone(c.audience) }

// IssuedAt is the claim iat: when what it tells of was done.
func (c *content) IssuedAt() time.Time { return seconds(c.issuedAt) }

// Expires is the claim exp: until when the token is accepted from a caller. As a record
// and as a parent it stays valid.
func (c *content) Expires() time.Time { return seconds(c.expires) }

// ID is the claim jti, a UUID in lower case: of the token and of the task in one.
func (c *content) ID() string { return c.id }

// Workflow is the claim wid, a UUID in lower case; empty where there is none.
func (c *content) Workflow() string { return c.workflow }

// Action is the claim exec_act as it is written.
func (c *content) Action() string { return c.action }

// Event is what the action means, in whatever vocabulary; empty for an agent's own.
func (c *content) Event() Event { return c.event }

// Vocabulary is the one that the action is named in.
func (c *content) Vocabulary() Vocabulary { return vocabularyOf(c.action) }

// Parents are the ids of the tokens that this one follows from, in lower case.
func (c *content) Parents() []string { return slices.Clone(c.parents) }

// InputHash is the claim inp_hash.
func (c *content) InputHash() Hash { return c.input }

// OutputHash is the claim out_hash.
func (c *content) OutputHash() Hash { return c.output }

// Ext are the extension members.
func (c *content) Ext() Ext { return Ext{c.ext, c.event} }

// Lacks names the members that a token of this event must have by the draft of its
// vocabulary, and that are missing or have another type.
func (c *content) Lacks() []Member { return c.Ext().lacks(c.Vocabulary()) }

// Payload is the JSON of all claims, those that mean nothing here included.
func (c *content) Payload() string { return c.payload }

// seconds is a NumericDate as a time; zero for a claim that is not there.
func seconds(v int64) time.Time {
	if v == 0 {
		return time.Time{}
	}
	return time.Unix(v, 0).UTC()
}
