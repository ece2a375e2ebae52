package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

func identity(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "identity",
		Short: "Shows who a server is in its tokens, and rotates the key that signs them",
		Long: `Shows who a server is in its tokens, and rotates the key that signs them. No
private key is ever shown.`,
	}
	group(cmd)
	o.server(cmd)
	cmd.AddCommand(identityShow(o), identityRotate(o))
	return cmd
}

func identityShow(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Shows the identity and its keys",
		Long: `Shows the identity and its keys. One signs. Those before it are published until
the last token that they have signed has expired, and stay in the key file
after that: what is recorded is verified with them.`,
		Example: "  caddy agent-guard identity show",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.identity(cmd, func(c *client, status *admin.Identity) (json.RawMessage, error) {
				return c.get(cmd.Context(), "identity", url.Values{}, status)
			})
		},
	}
}

func identityRotate(o *options) *cobra.Command {
	var rotation admin.IdentityRotation
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Makes a new signing key and signs with it from now on",
		Long: `Makes a new signing key of the configured algorithm, writes it into the key
file, and signs with it from now on. The private part of the key before is gone;
its public part is published for a day, in which its last tokens expire.

With --stolen no older key is published any more: others who ask for the
server's keys refuse what is signed with it, tokens that have not expired
included. Those who have copied the keys must drop it themselves.

Make a new copy of the key file afterwards: without it the server does not
start.`,
		Example: `  caddy agent-guard identity rotate
  caddy agent-guard identity rotate --stolen`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := o.identity(cmd, func(c *client, status *admin.Identity) (json.RawMessage, error) {
				return c.post(cmd.Context(), "identity/rotate", &rotation, status)
			})
			if err == nil {
				fmt.Fprintln(cmd.ErrOrStderr(), "Copy the key file anew. Who has copied the public keys needs the new one before the next token.")
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&rotation.Stolen, "stolen", false, "An older key is in wrong hands: publish none of them any more")
	return cmd
}

// identity asks for the identity, and prints it.
func (o *options) identity(cmd *cobra.Command, ask func(*client, *admin.Identity) (json.RawMessage, error)) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	var status admin.Identity
	text, err := ask(c, &status)
	if err != nil {
		return err
	}
	if o.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	return printIdentity(cmd.OutOrStdout(), &status, time.Now())
}

func printIdentity(out io.Writer, status *admin.Identity, now time.Time) error {
	_, err := fmt.Fprintf(out, "The gateway is %s, and makes keys for %s.\nThe keys are in %s.\n",
		printable(status.Name), printable(status.Algorithm), printable(status.File))
	if err != nil {
		return err
	}
	var rows [][]string
	for i := range status.Keys {
		key := &status.Keys[i]
		rows = append(rows, []string{
			printable(key.ID), printable(key.Algorithm), identityUse(key, now), dash(moment(key.Created, now)), dash(moment(key.Until, now)),
		})
	}
	table := table{out: out}
	return table.print([]string{"KEY", "ALG", "USE", "CREATED", "PUBLISHED UNTIL"}, rows)
}

// identityUse says what a key is for.
func identityUse(key *admin.IdentityKey, now time.Time) string {
	switch {
	case key.Revoked:
		return "revoked"
	case key.Signs:
		return "signs"
	case key.Until.IsZero() || !now.After(key.Until):
		return "verifies"
	default:
		return "records"
	}
}
