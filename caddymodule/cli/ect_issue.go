package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// issuing is what `ect issue` was asked for.
type issuing struct {
	*options
	key, iss, action, wid, jti  string
	aud, parents                []string
	body, outHash, ext, spelled string
	life                        lifetime
}

func issue(o *options) *cobra.Command {
	i := issuing{options: o, spelled: ect.Draft00.String(), life: lifetime{ect.DefaultLife, ""}}
	cmd := &cobra.Command{
		Use:   "issue --key FILE --iss URI --aud URI --action NAME",
		Short: "Makes a token, and prints it",
		Long: `Makes a token, and prints it alone, so that it can stand in a command line.
With --output json it is printed with its ids.

--wid new begins a workflow; its id is told on stderr. A --parent is the id of
a token, or a token itself: then its workflow is that of the new token too,
unless --wid names one. Without any parent the token is a root.

--body is the body that the request will have, byte by byte: inp_hash is its
SHA-256. curl sends a file so with --data-binary. --out-hash is a hash as the
tokens have it, or @FILE for the SHA-256 of what that file holds.

An --action that is an event, like checkpoint, atd:error or
aerr:circuit_open, is written in the vocabulary of its name, and so are the
members of --ext.

A gateway accepts a token until its --life is over, and for 15 minutes at
most, and each for one request and its retries.`,
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
	f.StringVar(&i.iss, "iss", "", "Who says it: the owner of the key, or an identity in the owner's trust domain")
	f.StringArrayVar(&i.aud, "aud", nil, "Who is to verify it: the gateway's identity; may stand several times")
	f.StringVar(&i.action, "action", "", "What is done (exec_act)")
	f.StringVar(&i.wid, "wid", "", "The workflow: a UUID, or new")
	f.StringVar(&i.jti, "jti", "", "The token's id, a UUID (default: a fresh one)")
	f.StringArrayVar(&i.parents, "parent", nil, "A token that it follows from, or that token's id; may stand several times")
	f.StringVar(&i.body, "body", "", "File with the request's body; - is the standard input")
	f.StringVar(&i.outHash, "out-hash", "", "Hash of what came out, or @FILE")
	f.StringVar(&i.ext, "ext", "", "Extension members, a JSON object")
	f.Var(&i.life, "life", "How long it is accepted, from 1s to 24h")
	f.Var(&word{&i.spelled, []string{ect.Draft00.String(), ect.Draft01.String()}}, "spelling", "Draft whose names are written: 00 or 01")
	require(cmd, "key", "iss", "aud", "action")
	for _, flag := range []string{"iss", "aud", "action", "jti", "parent", "out-hash", "ext", "life"} {
		complete(cmd, flag)
	}
	complete(cmd, "wid", newWorkflow)
	complete(cmd, "spelling", ect.Draft00.String(), ect.Draft01.String())
	return cmd
}

// lifetime is a flag with a duration, written as in the other commands.
type lifetime struct {
	time.Duration
	given string
}

// String implements pflag.Value.
func (l *lifetime) String() string {
	if l.given != "" {
		return l.given
	}
	return l.Duration.String()
}

// Type implements pflag.Value.
func (l *lifetime) Type() string { return "duration" }

// Set implements pflag.Value.
func (l *lifetime) Set(text string) error {
	d, err := caddy.ParseDuration(text)
	if err != nil {
		return errors.New("it is no duration; write one like 90s, 10m or 4h")
	}
	l.Duration, l.given = d, text
	return nil
}

// newWorkflow stands for a fresh id.
const newWorkflow = "new"

// issued is a token with its ids, as JSON.
type issued struct {
	Token    string    `json:"token"`
	ID       string    `json:"jti"`
	Workflow string    `json:"wid,omitempty"`
	Expires  time.Time `json:"expires"`
}

func (i *issuing) run(cmd *cobra.Command) error {
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
		err = holds(cmd.Context(), ring, token)
	}
	if err != nil {
		return flagged(err)
	}
	if i.json() {
		return encode(cmd.OutOrStdout(), issued{token.Raw(), token.ID(), token.Workflow(), token.Expires()})
	}
	if i.wid == newWorkflow {
		fmt.Fprintln(cmd.ErrOrStderr(), "workflow", token.Workflow())
	}
	if lacks := token.Lacks(); len(lacks) > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "A %s should have more members in --ext: %s.\n", token.Action(), joined(lacks, token.Vocabulary()))
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), token.Raw())
	return err
}

// holds looks at a token as those will who get it.
func holds(ctx context.Context, ring *ect.Ring, token *ect.Token) error {
	v, err := ect.NewVerifier(ect.Policy{
		Audience: token.Audience(), Sources: []ect.Source{ring.Source(ect.Anyone())}, Algorithms: ect.Algorithms(),
	})
	if err != nil {
		return err
	}
	_, err = v.VerifyStored(ctx, token.Raw())
	return err
}

// causes says which flag a claim comes from, and what would be right.
var causes = map[ect.Code]string{
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

// flagged names the flag that an error of the issuer comes from.
func flagged(err error) error {
	if refused := (*ect.Error)(nil); errors.As(err, &refused) {
		if text, ok := causes[refused.Code]; ok {
			return errors.New(text)
		}
		return err
	}
	return fmt.Errorf("--ext: %s", plain(err)) // all else was looked at before
}

// joined lists members by their names in a vocabulary.
func joined(members []ect.Member, v ect.Vocabulary) string {
	names := make([]string, 0, len(members))
	for _, m := range members {
		names = append(names, v.Member(m))
	}
	return strings.Join(names, ", ")
}
