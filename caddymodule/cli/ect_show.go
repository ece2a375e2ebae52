package cli

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// showing is what `ect show` was asked for.
type showing struct {
	*options
	jwks   string
	aud    []string
	stored bool
}

func showToken(o *options) *cobra.Command {
	s := showing{options: o}
	cmd := &cobra.Command{
		Use:   "show [TOKEN|@FILE|-]",
		Short: "Shows what a token says, and verifies it",
		Long: `Shows what a token says. Without an argument it is read from the standard
input.

Anybody can write anything into a token. With --jwks, a file of the public keys
that you trust, it is verified: its form, its signature, whether its issuer is
the owner of the key, and its times; with --aud also that it is meant for one
of these. --stored takes it for a record, as the ledger has them, which stays
valid when it has expired. Whether it was used before, and whether its parents
exist, only the gateway knows.

A token that does not hold is shown all the same; the exit code is 1.`,
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
	f.StringArrayVar(&s.aud, "aud", nil, "Who you are: the token must be meant for one of these; may stand several times")
	f.BoolVar(&s.stored, "stored", false, "Take it for a record: its age does not matter")
	complete(cmd, "aud")
	return cmd
}

// shown is a token as it is shown, as JSON.
type shown struct {
	// Verified says that it was verified, and holds.
	Verified bool `json:"verified"`
	// Refused is why it does not.
	Refused *refused `json:"refused,omitempty"`
	// Key is the one under which it was verified.
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

func (s *showing) run(cmd *cobra.Command, arg string) error {
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
	if s.json() {
		err = encode(cmd.OutOrStdout(), doc)
	} else {
		_, err = fmt.Fprint(cmd.OutOrStdout(), s.verdict(&doc)+describeToken(seen, doc.Header, now))
	}
	if err == nil && doc.Refused != nil {
		err = fmt.Errorf("the token does not hold: %s", doc.Refused.Code)
	}
	return err
}

// verify verifies the token where there are keys to do it with.
func (s *showing) verify(cmd *cobra.Command, raw string, seen *ect.Unverified, now time.Time, doc *shown) error {
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

// verifierOf makes a verifier that is called names; without any, it takes every token
// for its own. What keys may sign with is decided by the file that they stand in.
func verifierOf(source ect.Source, names []string, seen *ect.Unverified) (*ect.Verifier, error) {
	if len(names) == 0 {
		names = append(seen.Audience(), "nobody") // a token without aud is refused for that
	}
	return ect.NewVerifier(ect.Policy{Audience: names, Sources: []ect.Source{source}, Algorithms: ect.Algorithms()})
}

// verdict says first how far what follows can be believed.
func (s *showing) verdict(doc *shown) string {
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

// headerOf is the protected header of a token that was parsed; nil for one that is not
// signed.
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
