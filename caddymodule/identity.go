package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Identity is who the gateway is in the tokens that it issues. With an identity, every
// decision about a guarded call becomes a signed Execution Context Token in the ledger
// of the store: a checkpoint before the call leaves, a node that tells what came of it,
// and an error where it failed.
type Identity struct {
	// The issuer (`iss`) of the gateway's tokens, a URI, usually a SPIFFE ID like
	// `spiffe://example.com/gateway`. It is also what callers name in the `aud` of
	// theirs.
	Name string `json:"name"`

	// The file with the keys that tokens are signed with: a JSON Web Key, a set of
	// them, or PEM. It is made, with mode 0600, when a ledger begins, and never for
	// a ledger that holds anything. Default: the store's path with `.identity`
	// appended. It is read again with every configuration.
	KeyFile string `json:"key_file,omitempty"`

	// The algorithm of a key that is made: `ES256`, `ES384` or `EdDSA`. Default:
	// `ES256`.
	Algorithm string `json:"algorithm,omitempty"`

	// How tokens are written: `00` with the names of draft 00 (`par`, `ext`), `01`
	// with those of the drafts after it (`pred`, `ect_ext`). Both are read. Default:
	// `00`.
	Spelling string `json:"spelling,omitempty"`

	// For how long an issued token is accepted by others, at most 24h. Records do
	// not expire by it. Default: 10m.
	Life caddy.Duration `json:"life,omitempty"`

	// Where others reach this gateway, like `https://gateway.example.com`. Checkpoints
	// name it as the place where a rollback is asked for; without it they name the
	// path alone. It is never taken from a request.
	PublicURL string `json:"public_url,omitempty"`

	// How long the ledger keeps what its entries say. Their hashes stay, so that it
	// can be verified as before. Default: 90d.
	Retain caddy.Duration `json:"retain,omitempty"`

	algorithm ect.Algorithm
	spelling  ect.Spelling
}

const defaultRetain = 90 * 24 * time.Hour

// provision checks the options and completes them.
func (i *Identity) provision(store string) error {
	if i.Name == "" {
		return errors.New("name it with a URI like spiffe://example.com/gateway")
	}
	if err := checkIdentity(i.Name); err != nil {
		return err
	}
	inherit(&i.Algorithm, ect.ES256.String())
	inherit(&i.Spelling, ect.Draft00.String())
	inherit(&i.Life, caddy.Duration(ect.DefaultLife))
	inherit(&i.Retain, caddy.Duration(defaultRetain))
	var err error
	if i.algorithm, err = ect.ParseAlgorithm(i.Algorithm); err != nil {
		return fmt.Errorf("algorithm: %w", oneOf(i.Algorithm, algorithmNames()...))
	}
	if err := oneOf(i.Spelling, ect.Draft00.String(), ect.Draft01.String()); err != nil {
		return fmt.Errorf("spelling: %w", err)
	}
	if i.Spelling == ect.Draft01.String() {
		i.spelling = ect.Draft01
	}
	if life := time.Duration(i.Life); life < time.Second || life > ect.MaxLife {
		return fmt.Errorf("life: %v; it must be between 1s and 24h", life)
	}
	if err := checkDuration(i.Retain); err != nil {
		return fmt.Errorf("retain: %w", err)
	}
	if err := checkPublicURL(i.PublicURL); err != nil {
		return fmt.Errorf("public_url: %w", err)
	}
	if i.KeyFile == "" {
		i.KeyFile = store + ".identity"
		return nil
	}
	path, err := caddy.NewReplacer().ReplaceOrErr(i.KeyFile, true, true)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return fmt.Errorf("key_file %q: %w", i.KeyFile, err)
	}
	i.KeyFile = path
	return nil
}

// checkPublicURL checks where the gateway is reached; empty is not known.
func checkPublicURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case text == "":
		return nil
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("%q is no address of a gateway; use one like https://gateway.example.com", text)
	case len(text) > maxPublicURL:
		return fmt.Errorf("it is longer than %d bytes", maxPublicURL)
	}
	return nil
}

// maxPublicURL leaves room in the extensions of a token.
const maxPublicURL = 512

// rollbackURI is where a rollback is asked for.
func (i *Identity) rollbackURI() string {
	return strings.TrimRight(i.PublicURL, "/") + wellKnown + "rollback"
}

func algorithmNames() []string {
	var names []string
	for _, a := range ect.Algorithms() {
		names = append(names, a.String())
	}
	return names
}

// loadRing reads the keys of the identity, or makes the first one where fresh says that
// nothing was signed yet: without the keys before, nobody could verify what was.
func (i *Identity) loadRing(fresh bool, logger *slog.Logger) (*ect.Ring, error) {
	ring, err := ect.LoadRing(i.KeyFile)
	if info, statErr := os.Stat(i.KeyFile); statErr == nil && info.Mode().Perm()&0o077 != 0 {
		logger.Warn("others than the owner may use the identity's key file; give it the mode 0600",
			slog.String("file", i.KeyFile), slog.String("mode", info.Mode().String()))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	if !fresh {
		return nil, fmt.Errorf("the key file %s is missing, and the ledger holds tokens that were signed with it: put it back from "+
			"your backup, or correct its path; if it is lost for good, make another with `caddy agent-guard ect keygen`, "+
			"knowing that earlier tokens can then not be verified any more", i.KeyFile)
	}
	return ect.CreateRing(i.KeyFile, i.algorithm)
}

// named notes under which name and key tokens are signed from now on, and tells of keys
// that are gone: another file may have been put in the place of the right one.
func (i *Identity) named(ctx context.Context, told *evidence.Evidence, ring *ect.Ring, logger *slog.Logger) error {
	if lacks := told.Lacks(ring); len(lacks) > 0 {
		logger.Warn("the key file lacks keys that the gateway has signed with: what they have signed cannot be verified; "+
			"if the file was exchanged by mistake, put the right one back and load the configuration again",
			slog.String("file", i.KeyFile), slog.Any("keys", lacks))
	}
	return told.Named(ctx, i.Name, ring)
}

// parseIdentity reads
//
//	identity <uri> {
//		key_file  <path>
//		algorithm ES256 | ES384 | EdDSA
//		spelling  00 | 01
//		life      <duration>
//		retain    <duration>
//		public_url <url>
//	}
func parseIdentity(d *caddyfile.Dispenser, a *App) error {
	a.Identity = new(Identity)
	at := originOf(d)
	if err := parseWord(d, &a.Identity.Name); err != nil {
		return err
	}
	if err := checkIdentity(a.Identity.Name); err != nil {
		return err
	}
	if d.NextArg() {
		return errSyntax
	}
	if err := identityOptions().readBlock(d, "identity", a.Identity, at); err != nil {
		return err
	}
	return nil
}

func identityOptions() options[*Identity] {
	type dispenser = *caddyfile.Dispenser
	return options[*Identity]{
		"key_file": {usage: "key_file <path>", parse: func(d dispenser, i *Identity) error {
			return parseWord(d, &i.KeyFile)
		}},
		"algorithm": {usage: "algorithm ES256 | ES384 | EdDSA", parse: func(d dispenser, i *Identity) (err error) {
			if err = parseChoice(d, &i.Algorithm, algorithmNames()...); err == nil {
				i.algorithm, err = ect.ParseAlgorithm(i.Algorithm)
			}
			return err
		}},
		"spelling": {usage: "spelling 00 | 01", parse: func(d dispenser, i *Identity) error {
			return parseChoice(d, &i.Spelling, ect.Draft00.String(), ect.Draft01.String())
		}},
		"life": {usage: "life <duration>", parse: func(d dispenser, i *Identity) error {
			if err := parseDuration(d, &i.Life); err != nil {
				return err
			}
			if life := time.Duration(i.Life); life < time.Second || life > ect.MaxLife {
				return fmt.Errorf("%v is out of range; it must be between 1s and 24h", life)
			}
			return nil
		}},
		"public_url": {usage: "public_url <url>", parse: func(d dispenser, i *Identity) error {
			if err := parseWord(d, &i.PublicURL); err != nil {
				return err
			}
			return checkPublicURL(i.PublicURL)
		}},
		"retain": {usage: "retain <duration>", parse: func(d dispenser, i *Identity) error {
			return parseDuration(d, &i.Retain)
		}},
	}
}

// checkIdentity checks who somebody is said to be.
func checkIdentity(name string) error {
	u, err := url.Parse(name)
	if err != nil || u.Scheme == "" {
		return fmt.Errorf("%q is no URI; use one like spiffe://example.com/gateway", name)
	}
	if u.Scheme == "spiffe" && strings.Trim(u.Path, "/") == "" {
		return fmt.Errorf("%q is a whole trust domain; use an identity in it, like %s/gateway", name, strings.TrimRight(name, "/"))
	}
	_, err = ect.ParseOwner(name)
	return err
}
