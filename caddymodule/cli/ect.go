package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// tokenCommands is the group of commands for people without a token service.
func tokenCommands(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ect",
		Short: "Makes keys and execution context tokens, and shows tokens",
		Long: `Makes keys and execution context tokens, and shows tokens, for people without
a token service. It works on files, and asks no server.`,
		Example: `  # A key for an agent, and its public half among those that the gateway trusts
  caddy agent-guard ect keygen --owner spiffe://example.com/agent/a \
      --out agent.key --public trusted.json

  # A call with a token
  curl https://gateway.example/v1/charges --data-binary @body.json \
      -H "Execution-Context: $(caddy agent-guard ect issue --key agent.key \
          --iss spiffe://example.com/agent/a --aud spiffe://example.com/gateway \
          --action charge --wid new --body body.json)"`,
	}
	return group(cmd, tokenKeygen(o), tokenPublic(o), tokenIssue(o), tokenShow(o))
}

// maxToken bounds the input that is read as a token.
const maxToken = ect.MaxToken + 1<<10

// readToken returns the token that an argument gives: directly, as @FILE, or as - for the standard
// input. It may begin with the name of the header field.
func readToken(cmd *cobra.Command, arg string) (string, error) {
	text := arg
	if file, ok := strings.CutPrefix(arg, "@"); ok || arg == "-" {
		if arg == "-" {
			file = arg
			if in, ok := cmd.InOrStdin().(*os.File); ok && term.IsTerminal(int(in.Fd())) {
				return "", errors.New("give a TOKEN, or @FILE, or the token on the standard input")
			}
		}
		b, err := readAtMost(cmd.InOrStdin(), file, maxToken)
		if err != nil {
			return "", err
		}
		text = string(b)
	}
	text = strings.TrimSpace(text)
	if name, value, ok := strings.Cut(text, ":"); ok && strings.EqualFold(name, ect.FieldName) {
		text = strings.TrimSpace(value)
	}
	switch {
	case text == "":
		return "", errors.New("there is no token")
	case strings.ContainsAny(text, ", \t\r\n"):
		return "", errors.New("there is more than one token; give one at a time")
	}
	return text, nil
}

// plain is the text of an error without the names of our packages, which do not help operators.
func plain(err error) string {
	text := err.Error()
	for _, name := range []string{"ect: ", "ledger: "} {
		text = strings.ReplaceAll(strings.TrimPrefix(text, name), ": "+name, ": ")
	}
	return text
}

// trusted reads the file of public keys of --jwks.
func trusted(file string) (ect.Source, error) {
	source, err := ect.NewFileSource(ect.FileOptions{Path: file})
	if err != nil {
		return nil, fmt.Errorf("--jwks: %s", plain(err))
	}
	return source, nil
}

// issueFlags are the flags of `ect issue`.
type issueFlags struct {
	*options
	key, iss, action, wid, jti  string
	aud, parents                []string
	body, outHash, ext, spelled string
	life                        lifetime
}

func tokenIssue(o *options) *cobra.Command {
	i := issueFlags{options: o, spelled: ect.Draft00.String(), life: lifetime{ect.DefaultLife, ""}}
	cmd := &cobra.Command{
		Use:   "issue --key FILE --iss URI --aud URI --action NAME",
		Short: "Makes a token, and prints it",
		Long: `Makes a token, and prints nothing else, for use in a command line.
With --output json it is printed with its ids.

--wid new begins a workflow and prints its id on stderr. A --parent is the id of
a token, or a token, whose workflow the new token takes unless --wid names one.
Without a parent the token is a root.

--body is the exact body of the request: inp_hash is its SHA-256. curl sends a
file unchanged with --data-binary. --out-hash is a hash in the form of the
tokens, or @FILE for the SHA-256 of that file.

An --action that is an event, like checkpoint, atd:error or
aerr:circuit_open, is written in the vocabulary of its name, and so are the
members of --ext.

A gateway accepts a token until its --life is over, for 15 minutes at most, and
for one request and its retries.`,
		Example: `  # The first call of a workflow
  TOKEN=$(caddy agent-guard ect issue --key agent.key --iss spiffe://example.com/agent/a \
      --aud spiffe://example.com/gateway --action charge --wid new --body body.json)

  # The next one, which follows from it
  caddy agent-guard ect issue --key agent.key --iss spiffe://example.com/agent/a \
      --aud spiffe://example.com/gateway --action mail --parent "$TOKEN"

  # Ask for the rollback of a checkpoint, and of what followed from it (ATD)
  caddy agent-guard ect issue --key agent.key --iss spiffe://example.com/agent/a \
      --aud spiffe://example.com/gateway --action atd:rollback_request \
      --wid "$WORKFLOW" --parent "$CHECKPOINT" \
      --ext '{"atd.reason": "wrong price list", "atd.cascade": true}'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return i.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&i.key, "key", "", "File with the key, as 'ect keygen' makes it")
	stringFlag(cmd, &i.iss, "iss", "Issuer: the owner of the key, or an identity in the owner's trust domain")
	stringsFlag(cmd, &i.aud, "aud", "Audience: the gateway's identity; may be repeated")
	stringFlag(cmd, &i.action, "action", "The action (exec_act)")
	stringFlag(cmd, &i.wid, "wid", "The workflow: a UUID, or new", newWorkflow)
	stringFlag(cmd, &i.jti, "jti", "The token's id, a UUID (default: a new one)")
	stringsFlag(cmd, &i.parents, "parent", "A token that it follows from, or that token's id; may be repeated")
	f.StringVar(&i.body, "body", "", "File with the request's body; - is the standard input")
	stringFlag(cmd, &i.outHash, "out-hash", "Hash of the output, or @FILE")
	stringFlag(cmd, &i.ext, "ext", "Extension members, a JSON object")
	f.Var(&i.life, "life", "How long it is accepted, from 1s to 24h")
	complete(cmd, "life")
	wordFlag(cmd, &i.spelled, "spelling", "Draft whose names are used: 00 or 01", []string{ect.Draft00.String(), ect.Draft01.String()})
	require(cmd, "key", "iss", "aud", "action")
	return cmd
}

// lifetime is a flag with a duration, written as in the other commands.
type lifetime struct {
	time.Duration
	given string
}

func (l *lifetime) String() string {
	if l.given != "" {
		return l.given
	}
	return l.Duration.String()
}

func (l *lifetime) Type() string { return "duration" }

func (l *lifetime) Set(text string) error {
	d, err := caddy.ParseDuration(text)
	if err != nil {
		return errors.New("it is no duration; write one like 90s, 10m or 4h")
	}
	l.Duration, l.given = d, text
	return nil
}

// newWorkflow asks for a fresh id.
const newWorkflow = "new"

// issued is a token with its ids, as JSON.
type issued struct {
	Token    string    `json:"token"`
	ID       string    `json:"jti"`
	Workflow string    `json:"wid,omitempty"`
	Expires  time.Time `json:"expires"`
}

func (i *issueFlags) run(cmd *cobra.Command) error {
	claims, err := i.claims(cmd.InOrStdin())
	if err != nil {
		return err
	}
	ring, err := loadKey(i.key)
	if err != nil {
		return err
	}
	spelling := ect.Draft00
	if i.spelled == ect.Draft01.String() {
		spelling = ect.Draft01
	}
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: i.iss, Ring: ring, Spelling: spelling})
	if err != nil {
		return fmt.Errorf("--iss: %s", plain(err))
	}
	token, err := issuer.Issue(time.Now(), claims)
	if err == nil { // extensions can be written that contradict each other
		err = verifyIssued(cmd.Context(), ring, token)
	}
	if err != nil {
		return flagError(err)
	}
	if i.json() {
		return encode(cmd.OutOrStdout(), issued{token.Raw(), token.ID(), token.Workflow(), token.Expires()})
	}
	if i.wid == newWorkflow {
		fmt.Fprintln(cmd.ErrOrStderr(), "workflow", token.Workflow())
	}
	if lacks := token.Lacks(); len(lacks) > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "A %s should have more members in --ext: %s.\n", token.Action(), memberList(lacks, token.Vocabulary()))
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), token.Raw())
	return err
}

// verifyIssued verifies a new token as its receivers will.
func verifyIssued(ctx context.Context, ring *ect.Ring, token *ect.Token) error {
	v, err := ect.NewVerifier(ect.Policy{
		Audience: token.Audience(), Sources: []ect.Source{ring.Source(ect.Anyone())}, Algorithms: ect.Algorithms(),
	})
	if err != nil {
		return err
	}
	_, err = v.VerifyStored(ctx, token.Raw())
	return err
}

// flagErrors maps a refused claim to its flag and how to correct it.
var flagErrors = map[ect.Code]string{
	ect.CodeAudience:        "--aud: name one to 100 who verify the token, none of them empty",
	ect.CodeID:              "--jti: it is no UUID; leave it out for a fresh one",
	ect.CodeWorkflow:        "--wid: it is no UUID; write new for a fresh one",
	ect.CodeAction:          "--action: write a name of 1 to 256 bytes without control characters",
	ect.CodeParents:         "--parent: it is no UUID",
	ect.CodeTooManyParents:  "--parent: there are more than 100",
	ect.CodeDuplicateParent: "--parent: one stands twice",
	ect.CodeCycle:           "--parent: a token is not its own parent",
	ect.CodeExt:             "--ext: the members contradict each other",
}

// flagError names the flag that an error of the issuer comes from.
func flagError(err error) error {
	if refused := (*ect.Error)(nil); errors.As(err, &refused) {
		if text, ok := flagErrors[refused.Code]; ok {
			return errors.New(text)
		}
		return err
	}
	return fmt.Errorf("--ext: %s", plain(err)) // all else was looked at before
}

// memberList lists members by their names in a vocabulary.
func memberList(members []ect.Member, v ect.Vocabulary) string {
	names := make([]string, 0, len(members))
	for _, m := range members {
		names = append(names, v.Member(m))
	}
	return strings.Join(names, ", ")
}

// claims returns the claims that the flags give.
func (i *issueFlags) claims(stdin io.Reader) (ect.Claims, error) {
	c := ect.Claims{Audience: i.aud, ID: i.jti, Workflow: i.wid, Action: i.action, Life: i.life.Duration}
	if c.Life < time.Second || c.Life > ect.MaxLife {
		return c, fmt.Errorf("--life: %s is not from 1s to 24h", &i.life)
	}
	if i.wid != "" && i.wid != newWorkflow && !isUUID(i.wid) {
		return c, fmt.Errorf("--wid: %q is no UUID; write new for a fresh one", i.wid)
	}
	var err error
	if c.Vocabulary, err = vocabularyOf(i.action); err != nil {
		return c, err
	}
	inherited, err := i.parentIDs(&c)
	if err != nil {
		return c, err
	}
	switch c.Workflow {
	case "":
		c.Workflow = inherited
	case newWorkflow:
		c.Workflow = uuid.NewString()
	}
	if i.body != "" {
		if c.Input, err = hashFile(stdin, i.body); err != nil {
			return c, fmt.Errorf("--body: %w", err)
		}
	}
	if c.Output, err = i.output(stdin); err != nil {
		return c, err
	}
	if i.ext != "" {
		if c.Ext, err = parseExt(i.ext); err != nil {
			return c, fmt.Errorf("--ext: %w", err)
		}
	}
	return c, nil
}

// isUUID reports whether an id is a UUID in its usual form.
func isUUID(text string) bool {
	id, err := uuid.Parse(text)
	return err == nil && len(text) == len(id.String())
}

// vocabularyOf returns the vocabulary that has an action under this name.
func vocabularyOf(action string) (ect.Vocabulary, error) {
	event, ok := ect.ParseEvent(action)
	if !ok {
		return ect.Cascade, nil
	}
	for _, v := range vocabularies {
		if v.Event(event) == action {
			return v, nil
		}
	}
	return 0, fmt.Errorf("--action: %s is an old name, which is only read; write %s", action, ect.AERR.Event(event))
}

// vocabularies begin with the one that names of the others are explained in.
var vocabularies = []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR}

// parentIDs adds the parents to the claims and returns the workflow of those given as tokens.
func (i *issueFlags) parentIDs(c *ect.Claims) (workflow string, err error) {
	for _, parent := range i.parents {
		if len(parent) <= len(uuid.UUID{}.String()) {
			if !isUUID(parent) {
				return "", fmt.Errorf("--parent: %q is neither a UUID nor a token", parent)
			}
			c.Parents = append(c.Parents, parent)
			continue
		}
		token, err := ect.ParseInsecure(parent)
		if err != nil {
			return "", fmt.Errorf("--parent: neither an id nor a token: %s", plain(err))
		}
		if i.wid == "" && workflow != "" && token.Workflow() != "" && token.Workflow() != workflow {
			return "", errors.New("--parent: the parents belong to different workflows; say with --wid which one this is")
		}
		if token.Workflow() != "" {
			workflow = token.Workflow()
		}
		c.Parents = append(c.Parents, token.ID())
	}
	return workflow, nil
}

// output returns the hash of the output.
func (i *issueFlags) output(stdin io.Reader) (ect.Hash, error) {
	if i.outHash == "" {
		return ect.Hash{}, nil
	}
	if file, ok := strings.CutPrefix(i.outHash, "@"); ok {
		h, err := hashFile(stdin, file)
		if err != nil {
			return h, fmt.Errorf("--out-hash: %w", err)
		}
		return h, nil
	}
	h, ok := ect.ParseHash(i.outHash)
	if !ok {
		return h, fmt.Errorf("--out-hash: %q is not the SHA-256 in 43 characters of base64url without padding; write that, or @FILE", i.outHash)
	}
	return h, nil
}

func hashFile(stdin io.Reader, file string) (ect.Hash, error) {
	from, err := openInput(stdin, file)
	if err != nil {
		return ect.Hash{}, err
	}
	defer from.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, from); err != nil {
		return ect.Hash{}, err
	}
	return ect.HashOf([sha256.Size]byte(sum.Sum(nil))), nil
}

// parseExt keeps the order and the names of the members.
func parseExt(text string) (*ect.ExtBuilder, error) {
	wrong := errors.New(`write a JSON object, like {"cascade.ttl": 86400}`)
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, wrong
	}
	b := new(ect.ExtBuilder)
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, wrong
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, wrong
		}
		b.JSON(ect.Member(name.(string)), string(value)) // More lets only names through
	}
	if _, err := d.Token(); err != nil {
		return nil, wrong
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, wrong
	}
	return b, nil
}

// showFlags are the flags of `ect show`.
type showFlags struct {
	*options
	jwks   string
	aud    []string
	stored bool
}

func tokenShow(o *options) *cobra.Command {
	s := showFlags{options: o}
	cmd := &cobra.Command{
		Use:   "show [TOKEN|@FILE|-]",
		Short: "Shows the claims of a token, and verifies it",
		Long: `Shows the claims of a token. Without an argument it is read from the standard
input.

Anybody can write anything into a token. With --jwks, a file of the public keys
that you trust, it is verified: its form, its signature, whether its issuer is
the owner of the key, and its times; with --aud also its audience. --stored
verifies it as a record of the ledger, which stays valid after it has expired.
Only the gateway knows whether it was used before and whether its parents exist.

An invalid token is shown all the same; the exit code is 1.`,
		Example: `  caddy agent-guard ect show "$TOKEN"
  curl -s https://gateway.example/.well-known/cascade/jwks > gateway.json
  caddy agent-guard ect show @checkpoint.jwt --jwks gateway.json --stored`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			arg := "-"
			if len(args) > 0 {
				arg = args[0]
			}
			return s.run(cmd, arg)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f := cmd.Flags()
	f.StringVar(&s.jwks, "jwks", "", "File with the public keys to verify it with")
	stringsFlag(cmd, &s.aud, "aud", "Your identity: the token must be meant for one of these; may be repeated")
	f.BoolVar(&s.stored, "stored", false, "Verify it as a record: its age does not matter")
	return cmd
}

// shown is the JSON form of a token.
type shown struct {
	// Verified is false without keys and for a refused token.
	Verified bool `json:"verified"`
	// Refused is why verification failed.
	Refused *refused `json:"refused,omitempty"`
	// Key is the one that verified it.
	Key        *signedBy       `json:"key,omitempty"`
	Level      string          `json:"level"`
	Expired    bool            `json:"expired"`
	Event      string          `json:"event,omitempty"`
	Vocabulary string          `json:"vocabulary"`
	Lacks      []string        `json:"lacks,omitempty"`
	Header     json.RawMessage `json:"header,omitempty"`
	Claims     json.RawMessage `json:"claims"`
}

type refused struct {
	Code   ect.Code `json:"code"`
	Detail string   `json:"detail"`
}

type signedBy struct {
	ID        string `json:"kid"`
	Algorithm string `json:"alg"`
	Owner     string `json:"owner"`
}

func (s *showFlags) run(cmd *cobra.Command, arg string) error {
	if s.jwks == "" {
		for _, flag := range []string{"aud", "stored"} {
			if cmd.Flags().Changed(flag) {
				return fmt.Errorf("--%s needs --jwks: without keys nothing is verified", flag)
			}
		}
	}
	raw, err := readToken(cmd, arg)
	if err != nil {
		return err
	}
	now := time.Now()
	seen, err := ect.ParseInsecure(raw)
	if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
		return fmt.Errorf("this is no token that can be shown: %s (%s)", refusal.Detail(), refusal.Code)
	}
	if err != nil {
		return err
	}
	doc := shown{
		Level: seen.Level().String(), Expired: !seen.Expires().IsZero() && now.After(seen.Expires()),
		Event: string(seen.Event()), Vocabulary: seen.Vocabulary().String(),
		Header: headerOf(raw), Claims: json.RawMessage(seen.Payload()),
	}
	for _, m := range seen.Lacks() {
		doc.Lacks = append(doc.Lacks, seen.Vocabulary().Member(m))
	}
	if err := s.verify(cmd, raw, seen, now, &doc); err != nil {
		return err
	}
	err = s.print(cmd, doc, func(time.Time) string { return s.verdict(&doc) + describeToken(seen, doc.Header, now) })
	if err == nil && doc.Refused != nil {
		err = fmt.Errorf("the token does not hold: %s", doc.Refused.Code)
	}
	return err
}

// verify verifies the token if there are keys, and records the outcome in doc.
func (s *showFlags) verify(cmd *cobra.Command, raw string, seen *ect.Unverified, now time.Time, doc *shown) error {
	if s.jwks == "" {
		return nil
	}
	source, err := trusted(s.jwks)
	if err != nil {
		return err
	}
	v, err := verifierOf(source, s.aud, seen)
	if err != nil {
		return fmt.Errorf("--aud: %s", plain(err))
	}
	var token *ect.Token
	if s.stored {
		token, err = v.VerifyStored(cmd.Context(), raw)
	} else {
		token, err = v.Verify(cmd.Context(), raw, ect.Presentation{Now: now})
	}
	if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
		doc.Refused = &refused{refusal.Code, refusal.Detail()}
		return nil
	}
	if err != nil {
		return err
	}
	key := token.Key()
	doc.Verified, doc.Key = true, &signedBy{key.ID(), key.Algorithm().String(), key.Owner().String()}
	return nil
}

// verifierOf makes a verifier for an audience; without names it accepts any. The key file decides
// which algorithm a key may use.
func verifierOf(source ect.Source, names []string, seen *ect.Unverified) (*ect.Verifier, error) {
	if len(names) == 0 {
		names = append(seen.Audience(), "nobody") // a token without aud is refused for that
	}
	return ect.NewVerifier(ect.Policy{Audience: names, Sources: []ect.Source{source}, Algorithms: ect.Algorithms()})
}

// verdict states how far the token can be trusted.
func (s *showFlags) verdict(doc *shown) string {
	switch {
	case doc.Refused != nil:
		text := fmt.Sprintf("DOES NOT HOLD: %s (%s). Believe nothing of what follows.\n", doc.Refused.Detail, doc.Refused.Code)
		switch doc.Refused.Code {
		case ect.CodeExpired, ect.CodeTooOld, ect.CodeKeyRevoked: // the last for a key that has ended too
			text += "As a record it may hold all the same: --stored looks.\n"
		}
		return text + "\n"
	case doc.Verified:
		text := fmt.Sprintf("VERIFIED: signed with the key %s of %s.\n", printable(doc.Key.ID), printable(doc.Key.Owner))
		if len(s.aud) == 0 {
			text += "Whether it is meant for you was not looked at: --aud says who you are.\n"
		}
		return text + "\n"
	default:
		return "NOT VERIFIED: anybody can have written this. --jwks FILE verifies it.\n\n"
	}
}

// headerOf returns the protected header of a parsed token, nil without a signature.
func headerOf(raw string) json.RawMessage {
	encoded, _, signed := strings.Cut(raw, ".")
	if !signed {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return nil
	}
	return text
}

// ownLines are the claims with a line of their own.
var ownLines = []string{
	"iss", "aud", "iat", "exp", "jti", "wid", "exec_act", "par", "pred", "inp_hash", "out_hash", "ext", "ect_ext",
}

// describeToken shows a token line by line.
func describeToken(t *ect.Unverified, header json.RawMessage, now time.Time) string {
	s := sheet{width: 11}
	level := "L1, without a signature"
	if t.Level() > ect.L1 {
		var head struct{ Typ string }
		_ = json.Unmarshal(header, &head) // it was parsed before
		s.line("typ", printable(head.Typ))
		s.line("alg", missing(printable(t.Algorithm())))
		s.line("kid", missing(printable(t.KeyID())))
		level = t.Level().String() + ", with a signature"
	}
	s.line("level", level)
	s.line("issuer", missing(printable(t.Issuer())))
	s.line("audience", missing(listed(t.Audience())))
	s.line("issued", missing(moment(t.IssuedAt(), now)))
	s.line("expires", missing(expiry(t.Expires(), now)))
	s.line("id", missing(printable(t.ID())))
	s.line("workflow", dash(printable(t.Workflow())))
	parents := missing(listed(t.Parents()))
	if t.Parents() != nil && len(t.Parents()) == 0 {
		parents = "none: it is a root"
	}
	s.line("parents", parents)
	s.line("action", missing(printable(t.Action())))
	s.line("event", describeEvent(t))
	s.line("lacks", memberList(t.Lacks(), t.Vocabulary()))
	s.line("input hash", t.InputHash().String())
	s.line("output hash", t.OutputHash().String())
	for _, line := range describeMembers(t) {
		s.line("extension", line)
	}
	var claims map[string]json.RawMessage
	_ = json.Unmarshal([]byte(t.Payload()), &claims) // it was parsed before
	for _, name := range slices.Sorted(maps.Keys(claims)) {
		if !slices.Contains(ownLines, name) {
			s.line("other claim", printable(name)+" = "+printable(string(claims[name])))
		}
	}
	return s.b.String()
}

// missing marks the absence of a claim that should be there.
func missing(text string) string {
	if text == "" {
		return "(missing)"
	}
	return text
}

func listed(all []string) string {
	shown := make([]string, 0, len(all))
	for _, one := range all {
		shown = append(shown, printable(one))
	}
	return strings.Join(shown, ", ")
}

// expiry formats the time at which a token expires.
func expiry(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	text := t.UTC().Format(time.RFC3339)
	if left := t.Sub(now); left >= 0 {
		return text + " (expires in " + ago(int64(left/time.Second)) + ")"
	}
	return text + " (EXPIRED " + ago(int64(now.Sub(t)/time.Second)) + " ago)"
}

// describeEvent shows the names of the event in all vocabularies.
func describeEvent(t *ect.Unverified) string {
	if t.Event() == "" {
		return "none: an action of the issuer's own"
	}
	var names []string
	for _, v := range vocabularies {
		name := v.Event(t.Event())
		if v != ect.Cascade && name == string(t.Event()) {
			name = "has no name for it"
		}
		names = append(names, v.String()+": "+name)
	}
	return strings.Join(names, ", ")
}

// describeMembers lists the extension members, with their names in the cascade vocabulary if those
// differ.
func describeMembers(t *ect.Unverified) (lines []string) {
	if t.Ext().JSON() == "" {
		return nil
	}
	var members map[string]json.RawMessage
	_ = json.Unmarshal([]byte(t.Ext().JSON()), &members) // it was parsed before
	for _, name := range slices.Sorted(maps.Keys(members)) {
		line := fmt.Sprintf("%s = %s", printable(name), printable(string(members[name])))
		if m := ect.ParseMember(name, t.Event()); string(m) != name {
			line += " (" + string(m) + ")"
		}
		lines = append(lines, line)
	}
	return lines
}
