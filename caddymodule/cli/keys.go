package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

func keys(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Lists and rotates the sealing keys",
		Long: `Lists and rotates the keys with which records are sealed. No key is ever
shown. The index key, by which executions are found, is never rotated.`,
	}
	group(cmd)
	list := &cobra.Command{
		Use:   "list",
		Short: "Lists the sealing keys, and how far re-sealing has come",
		Long: `Lists the sealing keys. A key that is in use must stay in the key file:
something in the store can be read with nothing else.`,
		Example: "  caddy agent-guard keys list",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.keys(cmd, func(c *client, status *admin.KeyStatus) (json.RawMessage, error) {
				return c.get(cmd.Context(), "keys", url.Values{}, status)
			})
		},
	}
	rotate := &cobra.Command{
		Use:   "rotate",
		Short: "Makes a new sealing key and seals with it from now on",
		Long: `Makes a new sealing key, writes it into the key file, and seals with it from
now on. Records under older keys are sealed anew in the background; answers
under them expire. Calls go on meanwhile, and retries find their executions.

Make a new copy of the key file afterwards: older copies lack the key.`,
		Example: "  caddy agent-guard keys rotate",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := o.keys(cmd, func(c *client, status *admin.KeyStatus) (json.RawMessage, error) {
				return c.post(cmd.Context(), "keys/rotate", struct{}{}, status)
			})
			if err == nil {
				fmt.Fprintln(cmd.ErrOrStderr(), "Copy the key file anew: older copies cannot open what is sealed from now on.")
			}
			return err
		},
	}
	o.server(cmd)
	cmd.AddCommand(list, rotate)
	return cmd
}

// keys asks for the state of the keys, and prints it.
func (o *options) keys(cmd *cobra.Command, ask func(*client, *admin.KeyStatus) (json.RawMessage, error)) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	var status admin.KeyStatus
	text, err := ask(c, &status)
	if err != nil {
		return err
	}
	if o.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	return printKeys(cmd.OutOrStdout(), &status, time.Now())
}

func printKeys(out io.Writer, status *admin.KeyStatus, now time.Time) error {
	source := "given as a value"
	if status.Source == "file" {
		source = "in " + printable(status.File)
	}
	if _, err := fmt.Fprintln(out, "The key ring is "+source+"."); err != nil {
		return err
	}
	var rows [][]string
	for _, key := range status.Keys {
		rows = append(rows, []string{
			strconv.FormatUint(uint64(key.ID), 10), keyUse(key), dash(moment(key.Created, now)), dash(moment(key.Until, now)),
		})
	}
	table := table{out: out}
	if err := table.print([]string{"KEY", "USE", "CREATED", "NEEDED UNTIL"}, rows); err != nil {
		return err
	}
	if status.Resealing == nil {
		return nil
	}
	_, err := fmt.Fprintln(out, describeResealing(status.Resealing, now))
	return err
}

// keyUse says what a key is for.
func keyUse(key admin.Key) string {
	switch {
	case key.Newest:
		return "seals"
	case key.InUse:
		return "opens"
	default:
		return "unused"
	}
}

func describeResealing(r *admin.Resealing, now time.Time) string {
	state := "running"
	switch {
	case r.Error != "":
		state = "stopped, and will be tried again: " + printable(r.Error)
	case r.Done:
		state = "done, " + moment(r.Finished, now)
	}
	text := fmt.Sprintf("Re-sealing to key %d: %s; %d values seen, %d sealed anew, %d damaged.", r.Key, state, r.Seen, r.Resealed, r.Damaged)
	for _, left := range r.Left {
		text += fmt.Sprintf("\nKey %d still has %d records and %d parts of answers.", left.ID, left.Records, left.Results)
	}
	return text
}
