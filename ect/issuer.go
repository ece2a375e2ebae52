package ect

import (
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// Limits of what is issued.
const (
	// DefaultLife is how long a token is accepted where nothing else is said.
	DefaultLife = 10 * time.Minute
	// MaxLife is the longest life that is issued.
	MaxLife = 24 * time.Hour
)

// Claims are what a token to be issued says. An action is all that must be there.
type Claims struct {
	// Audience is everybody who will verify the token.
	Audience []string
	// ID is the jti; a fresh one is made where it is empty.
	ID string
	// Workflow is the wid.
	Workflow string
	// Action is the exec_act. An event is given by its name in the cascade vocabulary, or by
	// the second one that Vocabulary has for it (aerr:rollback_escalated).
	Action string
	// Parents are the ids of the tokens that this one follows from.
	Parents []string
	// Input and Output are the hashes of what went in and came out.
	Input, Output Hash
	// Ext are the extension members, by their names in the cascade vocabulary.
	Ext *ExtBuilder
	// Life is the time between iat and exp; the issuer's if zero.
	Life time.Duration
	// Vocabulary is the one that event and members are written in.
	Vocabulary Vocabulary
}

// IssuerOptions are the settings of an Issuer.
type IssuerOptions struct {
	// Identity is the iss of all tokens.
	Identity string
	// Ring has the keys.
	Ring *Ring
	// Spelling is how they are written.
	Spelling Spelling
	// Life is DefaultLife if zero.
	Life time.Duration
}

// Issuer makes tokens. It is safe for concurrent use.
type Issuer struct {
	o IssuerOptions
}

// NewIssuer checks the settings.
func NewIssuer(o IssuerOptions) (*Issuer, error) {
	if !validIdentity(o.Identity) {
		return nil, fmt.Errorf("ect: %q is not an identity; use a URI like spiffe://example.com/gateway", o.Identity)
	}
	if o.Ring == nil {
		return nil, errors.New("ect: an issuer needs a ring of keys")
	}
	if o.Life == 0 {
		o.Life = DefaultLife
	}
	if o.Life < time.Second || o.Life > MaxLife {
		return nil, fmt.Errorf("ect: the life of tokens is between a second and %s", MaxLife)
	}
	return &Issuer{o}, nil
}

// Identity is the iss of all tokens.
func (i *Issuer) Identity() string { return i.o.Identity }

// Draft is a token without its signature: its id is settled, so that others can name
// it as their parent, and its payload can be kept until somebody signs it.
type Draft struct {
	content
	cut bool
}

// Cut reports that a list in the extensions was too long and lost its end.
func (d *Draft) Cut() bool { return d.cut }

// Draft makes the claims of a token of this second.
func (i *Issuer) Draft(now time.Time, claims Claims) (*Draft, error) {
	c := content{
		spelling: i.o.Spelling, issuer: i.o.Identity, audience: claims.Audience,
		issuedAt: now.Unix(), id: claims.ID, workflow: claims.Workflow, action: claims.Action,
		parents: claims.Parents, input: claims.Input, output: claims.Output,
	}
	life := claims.Life
	if life == 0 {
		life = i.o.Life
	}
	if life < time.Second || life > MaxLife {
		return nil, fmt.Errorf("ect: the life of tokens is between a second and %s", MaxLife)
	}
	c.expires = c.issuedAt + int64(life/time.Second)
	if c.id == "" {
		c.id = uuid.NewString()
	}
	if len(c.audience) == 0 || len(c.audience) > maxAudience || slices.Contains(c.audience, "") {
		return nil, refuse(CodeAudience)
	}
	if event, ok := ParseEvent(claims.Action); ok {
		c.event, c.action = event, claims.Vocabulary.action(claims.Action, event)
	}
	set := claimSet{content: c, hasAction: true, hasWorkflow: c.workflow != ""}
	if err := set.issuable(); err != nil {
		return nil, err
	}
	d := &Draft{content: set.content}
	if err := d.encode(claims.Ext, claims.Vocabulary); err != nil {
		return nil, err
	}
	return d, nil
}

// issuable holds the form of claims that are about to be written, and brings ids into
// lower case.
func (c *claimSet) issuable() error {
	f := forms{maxParents: MaxParents}
	if !validAction(c.action) {
		return refuse(CodeAction)
	}
	if !f.canonical(&c.id) {
		return refuse(CodeID)
	}
	if c.hasWorkflow && !f.canonical(&c.workflow) {
		return refuse(CodeWorkflow)
	}
	parents := make([]string, len(c.parents))
	for i, id := range c.parents {
		if !f.canonical(&id) {
			return refuse(CodeParents)
		}
		parents[i] = id
	}
	c.parents = parents
	return c.checkParents(f)
}

// encode writes the payload: the claims in the order of the draft's figure.
func (d *Draft) encode(ext *ExtBuilder, v Vocabulary) error {
	names := spellings[d.spelling]
	b := make([]byte, 0, 1024)
	b = appendText(append(b, `{"iss":`...), d.issuer)
	b = append(b, `,"aud":`...)
	if len(d.audience) == 1 {
		b = appendText(b, d.audience[0])
	} else {
		b = appendTexts(b, d.audience)
	}
	b = strconv.AppendInt(append(b, `,"iat":`...), d.issuedAt, 10)
	b = strconv.AppendInt(append(b, `,"exp":`...), d.expires, 10)
	b = appendText(append(b, `,"jti":`...), d.id)
	if d.workflow != "" {
		b = appendText(append(b, `,"wid":`...), d.workflow)
	}
	b = appendText(append(b, `,"exec_act":`...), d.action)
	b = append(append(append(b, `,"`...), names.parents...), `":`...)
	b = appendTexts(b, d.parents)
	if !d.input.IsZero() {
		b = appendText(append(b, `,"inp_hash":`...), d.input.String())
	}
	if !d.output.IsZero() {
		b = appendText(append(b, `,"out_hash":`...), d.output.String())
	}
	from := len(b)
	if ext != nil && len(ext.members) > 0 {
		b = append(append(append(b, `,"`...), names.ext...), `":`...)
		from = len(b)
		var err error
		if b, d.cut, err = ext.encode(b, v); err != nil {
			return err
		}
	}
	d.payload = string(append(b, '}'))
	d.ext = d.payload[from:len(b)]
	return nil
}

// ParseDraft reads the payload of a Draft that was kept.
func ParseDraft(payload string) (*Draft, error) {
	var set claimSet
	if err := set.decode(payload, Draft00); err != nil {
		return nil, err
	}
	if err := set.check(forms{maxParents: MaxParents}); err != nil {
		return nil, err
	}
	return &Draft{content: set.content}, nil
}

// Sign makes the token of a draft with the key that signs now.
func (i *Issuer) Sign(d *Draft) (*Token, error) {
	signer := i.o.Ring.keys.Load().signer
	head := signer.heads[d.spelling]
	enc := base64.RawURLEncoding
	size := signer.key.algorithm.signatureSize()
	b := make([]byte, 0, len(head)+enc.EncodedLen(len(d.payload))+1+enc.EncodedLen(size))
	b = append(b, head...)
	b = enc.AppendEncode(b, []byte(d.payload))
	var room [96]byte
	signature, err := signer.key.algorithm.sign(room[:0], signer.private, b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	b = enc.AppendEncode(append(b, '.'), signature)
	return &Token{content: d.content, raw: string(b), level: L2, key: signer.key, proven: true}, nil
}

// Issue makes the draft and signs it.
func (i *Issuer) Issue(now time.Time, claims Claims) (*Token, error) {
	d, err := i.Draft(now, claims)
	if err != nil {
		return nil, err
	}
	return i.Sign(d)
}
