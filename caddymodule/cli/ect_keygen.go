package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// publishing is what `ect keygen` and `ect public` were asked for.
type publishing struct {
	*options
	alg           string
	private       string // the key file
	owner, public string
	replaced      bool // keys that are not published any more too
	former        []string
}

const publicHelp = `The owner is whose tokens the key may sign: an identity, which is the iss of
its tokens, or a SPIFFE trust domain for all identities in it. It stands with
the key in the set: the gateway believes a token only where its iss fits the
owner of its key, and does not use a key that belongs to nobody.

The set is what ` + "`trust jwks_file`" + ` reads. With --public the key is added to the
one in that file, which is made where it is not there (0644); keys of others in
it stay. Without, a set with this key alone is printed.`

func keygen(o *options) *cobra.Command {
	p := publishing{options: o, alg: ect.ES256.String()}
	cmd := &cobra.Command{
		Use:   "keygen --out FILE --owner URI",
		Short: "Makes a key that signs tokens, and publishes its public half",
		Long: `Makes a key that signs tokens, writes it into a file that nobody else can read
(0600), and never over one that is there. Its directory must be there.

` + publicHelp,
		Example: `  caddy agent-guard ect keygen --owner spiffe://example.com/agent/a --out agent.key --public trusted.json`,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return p.keygen(cmd) },
	}
	f := cmd.Flags()
	f.Var(&word{&p.alg, algorithmNames()}, "alg", "What the key signs with: ES256, ES384 or EdDSA; gateways accept ES256 unless told otherwise")
	f.StringVar(&p.private, "out", "", "File for the private key")
	p.flags(cmd)
	complete(cmd, "alg", algorithmNames()...)
	require(cmd, "out")
	return cmd
}

func public(o *options) *cobra.Command {
	p := publishing{options: o}
	cmd := &cobra.Command{
		Use:   "public --key FILE --owner URI",
		Short: "Publishes the public half of a key that is there",
		Long: `Publishes the public half of a key file.

With --replaced, keys that were replaced are in the set for as long as the file
has them. They verify records, such as those of a ledger. With --former they
verify what they have signed under an earlier name of the owner's too.

` + publicHelp,
		Example: `  caddy agent-guard ect public --key agent.key --owner spiffe://example.com/agent/a > set.json`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := p.prepare()
			if err != nil {
				return err
			}
			ring, err := loadKey(p.private)
			if err != nil {
				return err
			}
			p.wonder(cmd)
			return p.publish(cmd, ring, set)
		},
	}
	cmd.Flags().StringVar(&p.private, "key", "", "File with the key")
	cmd.Flags().BoolVar(&p.replaced, "replaced", false, "Also keys that were replaced and are not published any more")
	cmd.Flags().StringArrayVar(&p.former, "former", nil, "A name that the owner had before; may stand several times")
	p.flags(cmd)
	complete(cmd, "former")
	require(cmd, "key")
	return cmd
}

func (p *publishing) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&p.owner, "owner", "", "Whose tokens the key may sign, like spiffe://example.com/agent/a")
	f.StringVar(&p.public, "public", "", "File with the set of public keys that the key is added to")
	complete(cmd, "owner")
}

// require makes flags required.
func require(cmd *cobra.Command, flags ...string) {
	for _, flag := range flags {
		if err := cmd.MarkFlagRequired(flag); err != nil {
			panic(err) // the flag is not there: a mistake in this package
		}
	}
}

func algorithmNames() (names []string) {
	for _, alg := range ect.Algorithms() {
		names = append(names, alg.String())
	}
	return names
}

func loadKey(file string) (*ect.Ring, error) {
	ring, err := ect.LoadRing(file)
	if err != nil {
		return nil, fmt.Errorf("--key: %s", plain(err))
	}
	return ring, nil
}

// prepare checks all that can be checked before a key is made. The set is nil where it
// is to be printed.
func (p *publishing) prepare() (*keySet, error) {
	if p.owner == "" {
		return nil, errors.New("--owner: say whose tokens the key signs, like spiffe://example.com/agent/a: " +
			"a gateway uses no key that belongs to nobody")
	}
	if _, err := ect.ParseOwner(p.owner); err != nil {
		return nil, fmt.Errorf("--owner: %s", plain(err))
	}
	for _, name := range p.former {
		if _, err := ect.ParseOwner(name); err != nil {
			return nil, fmt.Errorf("--former: %s", plain(err))
		}
	}
	if p.public == "" {
		return nil, nil
	}
	if filepath.Clean(p.public) == filepath.Clean(p.private) {
		return nil, errors.New("--public: it is the file of the private key; name another")
	}
	set, err := readKeySet(p.public)
	if err != nil {
		return nil, fmt.Errorf("--public: %w", err)
	}
	return set, nil
}

func (p *publishing) keygen(cmd *cobra.Command) error {
	alg, err := ect.ParseAlgorithm(p.alg)
	if err != nil {
		return err
	}
	set, err := p.prepare()
	if err != nil {
		return err
	}
	if err := inDirectory(p.private); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	p.wonder(cmd)
	ring, err := ect.CreateRing(p.private, alg)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("--out: %s is there, and a key is never overwritten; name another file, or publish that key with `ect public`", p.private)
	}
	if err != nil {
		return fmt.Errorf("--out: %s", plain(err))
	}
	if err := p.publish(cmd, ring, set); err != nil {
		return fmt.Errorf("%w; the key was made: publish it with `ect public --key %s`", err, p.private)
	}
	return nil
}

// inDirectory holds that a file can stand where its path says: the directory is not made,
// since a path that was mistyped would leave a key where nobody looks for it.
func inDirectory(file string) error {
	dir := filepath.Dir(file)
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the directory %s is not there: make it, or correct the path", dir)
	case err == nil && !info.IsDir():
		return fmt.Errorf("%s is no directory: name a file in one", dir)
	}
	return err
}

// wonder points out an owner that is likely to be a slip: any name counts, but for itself
// alone.
func (p *publishing) wonder(cmd *cobra.Command) {
	if u, err := url.Parse(p.owner); err != nil || u.Scheme == "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "Warning: the owner %q is no URI like spiffe://example.com/agent/a. The key counts for tokens with exactly this iss only.\n", p.owner)
	}
}

// published is what was done, as JSON.
type published struct {
	KeyID     string `json:"kid"`
	Algorithm string `json:"alg"`
	Owner     string `json:"owner"`
	Private   string `json:"private"`
	Public    string `json:"public"`
	Keys      int    `json:"keys"` // in the public set
}

// publish adds the ring's public keys to set, or prints them where that is nil.
func (p *publishing) publish(cmd *cobra.Command, ring *ect.Ring, set *keySet) error {
	at := time.Now()
	if p.replaced {
		at = time.Time{}
	}
	former := make([]ect.Former, len(p.former))
	for i, name := range p.former {
		former[i].Name = name
	}
	text, err := ring.PublicSet(at, p.owner, former...)
	if err != nil {
		return err
	}
	if set == nil {
		_, err := cmd.OutOrStdout().Write(text)
		return err
	}
	if err := set.add(text); err != nil {
		return fmt.Errorf("--public: %w", err)
	}
	if err := set.write(); err != nil {
		return fmt.Errorf("--public: %w", err)
	}
	list := ring.List()
	signing := list[len(list)-1]
	done := published{signing.ID, signing.Algorithm.String(), p.owner, p.private, p.public, len(set.keys)}
	if p.json() {
		text, err := json.Marshal(done)
		if err != nil {
			return err
		}
		return encode(cmd.OutOrStdout(), json.RawMessage(text))
	}
	s := sheet{width: 7}
	s.line("key", done.KeyID+", "+done.Algorithm)
	s.line("owner", done.Owner)
	s.line("private", printable(done.Private)+" (keep it)")
	s.line("public", printable(done.Public)+" (keys in it: "+strconv.Itoa(done.Keys)+")")
	_, err = fmt.Fprint(cmd.OutOrStdout(), s.b.String())
	return err
}
