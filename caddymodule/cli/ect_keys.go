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
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// publishFlags are the flags of `ect keygen` and `ect public`.
type publishFlags struct {
	*options
	alg           string
	private       string // the key file
	owner, public string
	replaced      bool // keys that are not published any more too
	former        []string
}

const publicHelp = `The key may sign tokens of its owner only: an identity, which is the iss of its
tokens, or a SPIFFE trust domain for all identities in it. The set names the
owner of each key: the gateway accepts a token only if its iss matches the owner
of its key, and ignores keys without an owner.

The set is what ` + "`trust jwks_file`" + ` reads. With --public the key is added to the
set in that file, which is made if it does not exist (0644); other keys stay.
Without, a set with this key alone is printed.`

func tokenKeygen(o *options) *cobra.Command {
	p := publishFlags{options: o, alg: ect.ES256.String()}
	cmd := &cobra.Command{
		Use:   "keygen --out FILE --owner URI",
		Short: "Makes a key that signs tokens, and publishes its public half",
		Long: `Makes a key that signs tokens and writes it into a new file that nobody else can
read (0600). The file must not exist; its directory must.

` + publicHelp,
		Example: `  caddy agent-guard ect keygen --owner spiffe://example.com/agent/a --out agent.key --public trusted.json`,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return p.keygen(cmd) },
	}
	wordFlag(cmd, &p.alg, "alg", "Algorithm of the key: ES256, ES384 or EdDSA; gateways accept ES256 by default", names(ect.Algorithms()))
	cmd.Flags().StringVar(&p.private, "out", "", "File for the private key")
	p.flags(cmd)
	require(cmd, "out")
	return cmd
}

func tokenPublic(o *options) *cobra.Command {
	p := publishFlags{options: o}
	cmd := &cobra.Command{
		Use:   "public --key FILE --owner URI",
		Short: "Publishes the public half of an existing key",
		Long: `Publishes the public half of a key file.

With --replaced the set also has the replaced keys that are still in the file.
They verify records, such as those of a ledger. With --former they also verify
what they signed under an earlier name of the owner.

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
			p.warnOwner(cmd)
			return p.publish(cmd, ring, set)
		},
	}
	cmd.Flags().StringVar(&p.private, "key", "", "File with the key")
	cmd.Flags().BoolVar(&p.replaced, "replaced", false, "Also replaced keys that are not published any more")
	stringsFlag(cmd, &p.former, "former", "An earlier name of the owner; may be repeated")
	p.flags(cmd)
	require(cmd, "key")
	return cmd
}

func (p *publishFlags) flags(cmd *cobra.Command) {
	stringFlag(cmd, &p.owner, "owner", "Owner of the tokens that the key may sign, like spiffe://example.com/agent/a")
	cmd.Flags().StringVar(&p.public, "public", "", "File with the set of public keys that the key is added to")
}

func loadKey(file string) (*ect.Ring, error) {
	ring, err := ect.LoadRing(file)
	if err != nil {
		return nil, fmt.Errorf("--key: %s", plain(err))
	}
	return ring, nil
}

// prepare checks the flags and reads the key set before a key is made. Without --public the set
// is nil.
func (p *publishFlags) prepare() (*keySet, error) {
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

func (p *publishFlags) keygen(cmd *cobra.Command) error {
	alg, err := ect.ParseAlgorithm(p.alg)
	if err != nil {
		return err
	}
	set, err := p.prepare()
	if err != nil {
		return err
	}
	if err := checkDirectory(p.private); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	p.warnOwner(cmd)
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

// checkDirectory requires the directory of a file to exist: creating it for a mistyped path would
// leave a key where nobody looks for it.
func checkDirectory(file string) error {
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

// warnOwner warns of an owner that is no URI: it is valid, but likely a mistake.
func (p *publishFlags) warnOwner(cmd *cobra.Command) {
	if u, err := url.Parse(p.owner); err != nil || u.Scheme == "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "Warning: the owner %q is no URI like spiffe://example.com/agent/a. The key counts for tokens with exactly this iss only.\n", p.owner)
	}
}

// published is the JSON form of what was published.
type published struct {
	KeyID     string `json:"kid"`
	Algorithm string `json:"alg"`
	Owner     string `json:"owner"`
	Private   string `json:"private"`
	Public    string `json:"public"`
	Keys      int    `json:"keys"` // in the public set
}

// publish adds the ring's public keys to set, or prints them if set is nil.
func (p *publishFlags) publish(cmd *cobra.Command, ring *ect.Ring, set *keySet) error {
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
	document, err := json.Marshal(done)
	if err != nil {
		return err
	}
	return p.print(cmd, json.RawMessage(document), func(time.Time) string {
		s := sheet{width: 7}
		s.line("key", done.KeyID+", "+done.Algorithm)
		s.line("owner", done.Owner)
		s.line("private", printable(done.Private)+" (keep it)")
		s.line("public", printable(done.Public)+" (keys in it: "+strconv.Itoa(done.Keys)+")")
		return s.b.String()
	})
}

// keySet is a file with a JSON Web Key Set to which keys are added. Its content may belong to
// others and is kept.
type keySet struct {
	path    string
	was     []byte // nil where there is no file yet
	mode    fs.FileMode
	members map[string]json.RawMessage // besides the keys
	keys    []json.RawMessage
}

// readKeySet reads the file, which need not exist.
func readKeySet(path string) (*keySet, error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // a link stays a link
	}
	s := &keySet{path: path, mode: 0o644, members: map[string]json.RawMessage{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	s.was, s.mode = text, info.Mode().Perm()
	if s.members, s.keys, err = parseKeySet(text); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func parseKeySet(text []byte) (members map[string]json.RawMessage, keys []json.RawMessage, err error) {
	if _, err := ect.ParseSet(text, ect.Owner{}); err != nil {
		return nil, nil, errors.New(plain(err))
	}
	if err := json.Unmarshal(text, &members); err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal(members["keys"], &keys); err != nil {
		return nil, nil, err
	}
	for _, key := range keys {
		var secret struct {
			D any `json:"d"`
			K any `json:"k"`
		}
		if err := json.Unmarshal(key, &secret); err != nil {
			return nil, nil, err
		}
		if secret.D != nil || secret.K != nil {
			return nil, nil, errors.New("it holds a private key, and a set that others read must not")
		}
	}
	return members, keys, nil
}

// add adds the keys of a set. A key with the same id and owner is replaced.
func (s *keySet) add(set []byte) error {
	_, keys, err := parseKeySet(set)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := s.put(key); err != nil {
			return err
		}
	}
	return nil
}

func (s *keySet) put(key json.RawMessage) error {
	type named struct{ Kid, Sub string }
	var added named
	if err := json.Unmarshal(key, &added); err != nil {
		return err
	}
	for i := range s.keys {
		var there named
		if json.Unmarshal(s.keys[i], &there) != nil || there.Kid != added.Kid {
			continue
		}
		if there.Sub != added.Sub {
			return fmt.Errorf("%s has the key %s of %q already; one key must not speak for two", s.path, added.Kid, there.Sub)
		}
		s.keys[i] = key
		return nil
	}
	s.keys = append(s.keys, key)
	return nil
}

// write replaces the file atomically.
func (s *keySet) write() error {
	keys, err := json.Marshal(s.keys)
	if err != nil {
		return err
	}
	s.members["keys"] = keys
	text, err := json.MarshalIndent(s.members, "", "  ")
	if err != nil {
		return err
	}
	if _, err := ect.ParseSet(text, ect.Owner{}); err != nil {
		return errors.New(plain(err)) // it has become too large
	}
	err = durable.Swap(s.path, s.was, append(text, '\n'), s.mode)
	if errors.Is(err, durable.ErrChanged) {
		return fmt.Errorf("%s: %w", s.path, err)
	}
	return err
}
