// Command ect makes keys and execution context tokens (ECTs), and verifies tokens, for tests,
// tutorials, and people without a token service. It works on files and asks no server.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

const usage = `usage: ect keygen --owner URI --out FILE [--alg ES256] [--public FILE]
       ect public --owner URI --key FILE [--replaced] [--former URI]... [--public FILE]
       ect issue --key FILE --iss URI --aud URI... --action NAME [--wid UUID|new] [--parent TOKEN|UUID]...
                 [--body FILE] [--ext JSON] [--life 10m]
       ect show [--jwks FILE] [--aud URI]... [--stored] TOKEN|@FILE`

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "ect:", err)
		os.Exit(1)
	}
}

func run(args []string, out, errs io.Writer) error {
	commands := map[string]func(*flag.FlagSet, []string, io.Writer) error{
		"keygen": keygen, "public": public, "issue": issue, "show": show,
	}
	if len(args) == 0 || commands[args[0]] == nil {
		return errors.New(usage)
	}
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.SetOutput(errs)
	return commands[args[0]](f, args[1:], out)
}

// parse parses the flags, which n arguments follow.
func parse(f *flag.FlagSet, args []string, n int) error {
	err := f.Parse(args)
	if err == nil && f.NArg() != n {
		err = errors.New(usage)
	}
	return err
}

// list is a flag that may be repeated.
type list []string

func (l *list) String() string         { return strings.Join(*l, " ") }
func (l *list) Set(value string) error { *l = append(*l, value); return nil }

// keygen makes a key in a new file (0600) and publishes its public half.
func keygen(f *flag.FlagSet, args []string, out io.Writer) error {
	owner := f.String("owner", "", "identity or SPIFFE trust domain whose tokens the key signs")
	file := f.String("out", "", "new file for the private key")
	name := f.String("alg", ect.ES256.String(), "ES256, ES384 or EdDSA")
	set := f.String("public", "", "file with the key set that the public half is added to")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	alg, err := ect.ParseAlgorithm(*name)
	if err != nil {
		return err
	}
	if _, err := ect.ParseOwner(*owner); err != nil || *owner == "" {
		return fmt.Errorf("--owner: say whose tokens the key signs: %w", err)
	}
	ring, err := ect.CreateRing(*file, alg)
	if err != nil {
		return err
	}
	return publish(ring, *owner, *set, time.Now(), nil, out)
}

// public publishes the public half of an existing key. With --replaced, replaced keys are in the set too.
func public(f *flag.FlagSet, args []string, out io.Writer) error {
	var names list
	owner := f.String("owner", "", "identity or SPIFFE trust domain whose tokens the key signs")
	file := f.String("key", "", "file with the key")
	replaced := f.Bool("replaced", false, "also replaced keys that are still in the file")
	set := f.String("public", "", "file with the key set that the key is added to")
	f.Var(&names, "former", "earlier name of the owner")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	ring, err := ect.LoadRing(*file)
	if err != nil {
		return err
	}
	at := time.Now()
	if *replaced {
		at = time.Time{}
	}
	former := make([]ect.Former, len(names))
	for i, name := range names {
		former[i].Name = name
	}
	return publish(ring, *owner, *set, at, former, out)
}

// publish prints the ring's public keys, or adds them to the set in a file.
func publish(ring *ect.Ring, owner, file string, at time.Time, former []ect.Former, out io.Writer) error {
	text, err := ring.PublicSet(at, owner, former...)
	if err != nil {
		return err
	}
	if file == "" {
		_, err := out.Write(text)
		return err
	}
	type keySet struct {
		Keys []json.RawMessage `json:"keys"`
	}
	var set, added keySet
	before, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(before, &set)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := json.Unmarshal(text, &added); err != nil {
		return err
	}
	set.Keys = append(set.Keys, added.Keys...)
	after, err := json.MarshalIndent(set, "", "  ")
	if err != nil {
		return err
	}
	if _, err := ect.ParseSet(after, ect.Owner{}); err != nil {
		return err
	}
	return durable.Swap(file, before, append(after, '\n'), 0o644)
}

// issue prints a signed token.
func issue(f *flag.FlagSet, args []string, out io.Writer) error {
	var aud, parents list
	key, iss := f.String("key", "", "file with the key"), f.String("iss", "", "issuer: the key's owner")
	c := ect.Claims{}
	f.Var(&aud, "aud", "audience: the gateway's identity")
	f.StringVar(&c.Action, "action", "", "the action (exec_act)")
	f.StringVar(&c.Workflow, "wid", "", "workflow: a UUID, or new (default: that of the parents)")
	f.Var(&parents, "parent", "token, or its id, that this one follows from")
	body := f.String("body", "", "file with the request's body")
	ext := f.String("ext", "", "extension members, a JSON object")
	f.DurationVar(&c.Life, "life", ect.DefaultLife, "time for which it is accepted")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	c.Audience = aud
	for _, parent := range parents {
		if token, err := ect.ParseInsecure(parent); err == nil {
			parent = token.ID()
			if c.Workflow == "" {
				c.Workflow = token.Workflow()
			}
		}
		c.Parents = append(c.Parents, parent)
	}
	if c.Workflow == "new" {
		c.Workflow = uuid.NewString()
	}
	if event, ok := ect.ParseEvent(c.Action); ok {
		for _, v := range []ect.Vocabulary{ect.AERR, ect.ATD, ect.Cascade} {
			if v.Event(event) == c.Action {
				c.Vocabulary = v
			}
		}
	}
	if *body != "" {
		text, err := os.ReadFile(*body)
		if err != nil {
			return err
		}
		c.Input = ect.Sum(text)
	}
	if *ext != "" {
		var members map[string]json.RawMessage
		if err := json.Unmarshal([]byte(*ext), &members); err != nil {
			return fmt.Errorf("--ext: %w", err)
		}
		c.Ext = new(ect.ExtBuilder)
		for name, value := range members {
			c.Ext.JSON(ect.Member(name), string(value))
		}
	}
	ring, err := ect.LoadRing(*key)
	if err != nil {
		return err
	}
	issuer, err := ect.NewIssuer(*iss, ring)
	if err != nil {
		return err
	}
	token, err := issuer.Issue(time.Now(), c)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, token.Raw())
	return err
}

// show prints the claims of a token below a line that says whether it was verified.
func show(f *flag.FlagSet, args []string, out io.Writer) error {
	var aud list
	jwks := f.String("jwks", "", "file with the public keys that verify it")
	stored := f.Bool("stored", false, "verify it as a record: its age does not matter")
	f.Var(&aud, "aud", "identity that the token must be meant for (default: any)")
	if err := parse(f, args, 1); err != nil {
		return err
	}
	raw := f.Arg(0)
	if file, ok := strings.CutPrefix(raw, "@"); ok {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		raw = strings.TrimSpace(string(text))
	}
	seen, err := ect.ParseInsecure(raw)
	if err != nil {
		return err
	}
	verdict := "NOT VERIFIED: anybody can have written this. --jwks FILE verifies it."
	if *jwks != "" {
		if verdict, err = verify(raw, seen, *jwks, aud, *stored); err != nil {
			return err
		}
	}
	var claims any
	if err := json.Unmarshal([]byte(seen.Payload()), &claims); err != nil {
		return err
	}
	text, err := json.MarshalIndent(claims, "", "  ") // escapes what would control a terminal
	if err == nil {
		_, err = fmt.Fprintf(out, "%s\n%s\n", verdict, text)
	}
	return err
}

func verify(raw string, seen *ect.Unverified, jwks string, aud []string, stored bool) (string, error) {
	source, err := ect.NewFileSource(ect.FileOptions{Path: jwks})
	if err != nil {
		return "", err
	}
	if len(aud) == 0 {
		aud = append(seen.Audience(), "nobody") // a token without aud is refused for that
	}
	v, err := ect.NewVerifier(ect.Policy{Audience: aud, Sources: []ect.Source{source}, Algorithms: ect.Algorithms()})
	if err != nil {
		return "", err
	}
	var token *ect.Token
	if stored {
		token, err = v.VerifyStored(context.Background(), raw)
	} else {
		token, err = v.Verify(context.Background(), raw, ect.Presentation{Now: time.Now()})
	}
	if refused := (*ect.Error)(nil); errors.As(err, &refused) {
		return "", fmt.Errorf("the token does not hold: %s (%s)", refused.Detail(), refused.Code)
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("VERIFIED: signed with the key %q of %q.", token.Key().ID(), token.Key().Owner()), nil
}
