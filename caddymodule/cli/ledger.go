package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

func ledgerCommands(o *options) *cobra.Command {
	return group(&cobra.Command{
		Use:   "ledger",
		Short: "Shows, exports and verifies the ledger",
		Long: `Shows, exports and verifies the ledger: the log of what the gateway has decided.

verify and list work on an export, without a server and on any machine. They
need the log's public key, which ` + "`ledger head`" + ` shows. Note it when the
gateway is set up, and keep heads from time to time elsewhere: who can
change the log can change what the server says too, but not what you have kept.`,
	}, ledgerHead(o), ledgerExport(o), ledgerCheck(o), ledgerVerify(o), ledgerList(o))
}

// proofFlags are the flags that say what an export is verified with.
type proofFlags struct {
	origin string
	keys   []string
	heads  []string // files
	named  bool     // origin was given
}

func (e *proofFlags) flags(cmd *cobra.Command) {
	stringFlag(cmd, &e.origin, "origin", "Name of the log, where it is not that of its key")
	stringsFlag(cmd, &e.keys, "key", "Public key of its heads, as 'ledger head' shows it; may stand several times")
	cmd.Flags().StringArrayVar(&e.heads, "head", nil, "File with an earlier head, as 'ledger head --note' prints it; may be repeated")
	require(cmd, "key")
}

// read parses the keys and the kept heads.
func (e *proofFlags) read() (keys []note.Verifier, heads []ledger.Head, err error) {
	for _, text := range e.keys {
		key, err := note.NewVerifier(text)
		if err != nil {
			return nil, nil, fmt.Errorf("--key: %q is no public key of a ledger; `ledger head` shows it, and it looks like agent-guard/node-4c1f+8b3c1a7e+AVq0…", text)
		}
		keys = append(keys, key)
	}
	if e.named = e.origin != ""; !e.named {
		e.origin = keys[0].Name() // the gateway's keys are called like their log
	}
	for _, file := range e.heads {
		text, err := readAtMost(nil, file, ledger.MaxHead)
		if err != nil {
			return nil, nil, fmt.Errorf("--head: %w", err)
		}
		origin, _, _ := strings.Cut(string(text), "\n")
		if e.named || !has(keys, origin) {
			origin = e.origin
		}
		head, err := ledger.ParseHead(text, origin, note.VerifierList(keys...))
		if err != nil {
			return nil, nil, fmt.Errorf("--head: %s: %s", file, plain(err))
		}
		heads = append(heads, head)
	}
	return keys, heads, nil
}

// has reports whether one of the keys is that of a log.
func has(keys []note.Verifier, origin string) bool {
	return slices.ContainsFunc(keys, func(k note.Verifier) bool { return k.Name() == origin })
}

// proof is an open export with what it is verified with.
type proof struct {
	file  io.ReadCloser
	text  *bufio.Reader // of file
	keys  []note.Verifier
	known []ledger.Head
}

// open reads the flags, and opens a file that may be an export. The caller closes it.
func (e *proofFlags) open(cmd *cobra.Command, file string) (p proof, err error) {
	if p.keys, p.known, err = e.read(); err != nil {
		return p, err
	}
	if p.file, err = openInput(cmd.InOrStdin(), file); err != nil {
		return p, err
	}
	p.text = bufio.NewReaderSize(p.file, ledger.MaxHead*2)
	if err = checkBeginning(p.text, file); err != nil {
		p.file.Close()
	}
	return p, err
}

// exportTitle begins the first line of every export.
const exportTitle = "agent-guard ledger export"

// errNoExport is the error of a file that never was an export. It has its own exit code: a wrong
// file is no alarm.
type errNoExport struct{ file string }

func (e errNoExport) Error() string { return e.file + " is no export of a ledger" }

// checkBeginning rejects a file that is no export at all. A truncated export and one with a changed
// first line pass: verification then names the fault.
func checkBeginning(from *bufio.Reader, file string) error {
	head, err := from.Peek(256)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	first, rest, _ := bytes.Cut(head, []byte("\n"))
	switch {
	case bytes.HasPrefix(first, []byte(exportTitle)), strings.HasPrefix(exportTitle, string(first)):
		return nil // an empty file is one of which nothing is left
	case bytes.HasPrefix(rest, []byte("head ")):
		return nil
	}
	return errNoExport{inputName(file)}
}

// exitNoExport is the exit code for a file that is no export.
const exitNoExport = 2

// exitOf gives an error its exit code.
func exitOf(cmd *cobra.Command, err error) error {
	if !errors.As(err, new(errNoExport)) {
		return err
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "Error:", err) // a code of its own silences cobra
	return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return exitNoExport, err })(cmd, nil)
}

// verifyError is the error of an export that fails verification or cannot be read.
func verifyError(file string, err error) error {
	if errors.Is(err, ledger.ErrProof) {
		return fmt.Errorf("%s DOES NOT HOLD: %s", inputName(file), plain(err))
	}
	return err
}

func inputName(file string) string {
	if file == "-" {
		return "the export"
	}
	return file
}

// logFlag is the flag that chooses a log of the server's store.
func logFlag(cmd *cobra.Command, query url.Values) {
	filterFlag(cmd, query, "log", "Name of the log, as 'ledger head' lists them; that of the node that is asked if empty")
}

func ledgerHead(o *options) *cobra.Command {
	only, log := false, url.Values{}
	cmd := &cobra.Command{
		Use:   "head",
		Short: "Shows the signed head of a server's ledger, and its key",
		Long: `Shows the signed head of a server's ledger, and the public key that verifies
exports and receipts. A store with several nodes has a log for each: those of the
others are listed, too.

Keep the head elsewhere from time to time: the log must have grown out of it
ever after, and ` + "`ledger verify --head`" + ` finds out.`,
		Example: `  caddy agent-guard ledger head
  caddy agent-guard ledger head --note > head-2026-11.txt`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			describe := describeHead
			if only {
				describe = func(head *evidence.LedgerHead, _ time.Time) string { return head.Note }
			}
			return showing(o, question{path: "ledger/head", query: log}, describe)(cmd, nil)
		},
	}
	logFlag(cmd, log)
	cmd.Flags().BoolVar(&only, "note", false, "Print the signed head alone, to keep it")
	return o.server(cmd)
}

func describeHead(head *evidence.LedgerHead, now time.Time) string {
	text := lines(now, 7, "log", head.Origin, "key", head.Key, "size", head.Size, "root", head.Root.String())
	for i := range head.Logs {
		other := &head.Logs[i]
		pairs := []any{"key", other.Key, "size", other.Size, "root", other.Root.String()}
		if other.Altered {
			pairs = []any{"head", "does not verify: the log was altered"}
		}
		text += "\n" + lines(now, 7, append([]any{"log", other.Origin}, pairs...)...)
	}
	return text
}

func ledgerExport(o *options) *cobra.Command {
	out, log := "", url.Values{}
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Exports a server's ledger, for `ledger verify`",
		Long: `Exports a server's ledger with its newest signed head, which proves it. The
export has every token: who called what, and when. With --out it is written into
a new file that nobody else can read (0600).

A store with several nodes has a log for each; --log all writes the exports of all,
one behind the other, and ` + "`ledger verify`" + ` takes them so.`,
		Example: `  caddy agent-guard ledger export --out ledger.export
  caddy agent-guard ledger export --log all --out fleet.export`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.export(cmd, out, log.Get("log")) },
	}
	logFlag(cmd, log)
	cmd.Flags().StringVar(&out, "out", "", "File to write, which must not exist; - is the standard output, also on a terminal")
	return o.server(cmd)
}

// isTerminal is replaced by tests.
var isTerminal = onTerminal

// onTerminal reports whether out is a terminal.
func onTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// allLogs stands for all logs of a store.
const allLogs = "all"

func (o *options) export(cmd *cobra.Command, out, log string) error {
	origins := []string{log}
	if log == allLogs {
		head, _, err := ask[evidence.LedgerHead](cmd.Context(), o, question{path: "ledger/head"})
		if err != nil {
			return err
		}
		origins[0] = head.Origin
		for i := range head.Logs {
			origins = append(origins, head.Logs[i].Origin)
		}
	}
	write := func(to io.Writer) error {
		for _, origin := range origins {
			query := url.Values{"log": {origin}}
			if err := o.stream(cmd.Context(), question{path: "ledger/export", query: query, slow: true}, to); err != nil {
				return err
			}
		}
		return nil
	}
	if out == "" && isTerminal(cmd.OutOrStdout()) {
		return errors.New("whoever sees the export can read every token in it: give --out FILE, or --out - for the terminal")
	}
	if out == "" || out == "-" {
		return write(cmd.OutOrStdout())
	}
	return writeNew("--out", out, write)
}

func ledgerCheck(o *options) *cobra.Command {
	log := url.Values{}
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Makes a server verify its whole ledger, and shows the faults",
		Long: `Makes a server compare its whole ledger with its signed head: every entry, every
stored hash, every index. It names what was changed, is missing or misplaced,
and then exits with 1. It takes a while; calls go on.

It finds what was done to the store. Whoever has the server has this answer
too: ` + "`ledger verify`" + `, elsewhere and with a head that was kept, does without trust.`,
		Example: `  caddy agent-guard ledger check`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := show(cmd, o, question{path: "ledger/verify", query: log, slow: true}, describeCheck)
			if err == nil && report.Count > 0 {
				err = fmt.Errorf("the ledger is not as it was written: %d faults", report.Count)
			}
			return err
		},
	}
	logFlag(cmd, log)
	return o.server(cmd)
}

// describePruned says how many entries were pruned and who vouched for it.
func describePruned(n int64, vouchers []ledger.Voucher) string {
	said := strconv.FormatInt(n, 10)
	for i, v := range vouchers {
		said += [2]string{", vouched for by ", ", "}[min(i, 1)] + printable(v.Key)
		if len(vouchers) > 1 {
			said += fmt.Sprintf(" (%d)", v.Entries)
		}
	}
	return said
}

func describeCheck(r *ledger.Report, now time.Time) string {
	pairs := []any{
		"log", r.Origin, "size", r.Size, "root", r.Root.String(), "entries", r.Entries, "pruned", describePruned(r.Pruned, r.Vouchers),
	}
	if r.Count == 0 {
		pairs = append(pairs, "faults", "none")
	}
	for _, fault := range r.Faults {
		what := printable(fault.What)
		if fault.Index != nil {
			what = fmt.Sprintf("entry %d: %s", *fault.Index, what)
		}
		pairs = append(pairs, "fault", what)
	}
	if more := r.Count - len(r.Faults); more > 0 {
		pairs = append(pairs, "fault", fmt.Sprintf("and %d more", more))
	}
	return lines(now, 7, pairs...)
}

// verifyFlags are the flags of `ledger verify`.
type verifyFlags struct {
	*options
	proofFlags
	jwks string
}

func ledgerVerify(o *options) *cobra.Command {
	v := verifyFlags{options: o}
	cmd := &cobra.Command{
		Use:   "verify FILE --key KEY",
		Short: "Verifies an export of the ledger, without a server",
		Long: `Verifies an export of the ledger: that every entry has the content and the
place that it had when the gateway signed the head of the export, and that none
is missing: of what was pruned by age the hash is left, and a note that the
gateway has signed says which entries these are. - reads the standard input.

An export is only as trustworthy as its head. With --head it is compared with
earlier heads: the log must be an extension of each.

With --jwks, a file of public keys like the one that the gateway publishes at
/.well-known/cascade/jwks, the signatures of the tokens are verified too. Tokens
under other keys, such as those of agents, are only counted.

A file with the exports of several logs, as ` + "`ledger export --log all`" + ` writes it, is
verified whole: give the key of each log. One that is missing in FILE is an error.

It exits with 1 and names the first invalid entry, if there is one, and with 2 if
FILE is no export.`,
		Example: `  caddy agent-guard ledger verify ledger.export \
      --key agent-guard/node-4c1f+8b3c1a7e+AVq0… --head head-2026-11.txt`,
		Args: nArgs(1, "one FILE with an export"),
		RunE: func(cmd *cobra.Command, args []string) error { return exitOf(cmd, v.run(cmd, args[0])) },
	}
	v.flags(cmd)
	cmd.Flags().StringVar(&v.jwks, "jwks", "", "File with public keys to verify the tokens with")
	return cmd
}

// proved is the JSON form of a verified export.
type proved struct {
	Holds bool `json:"holds"`
	ledger.Contents
	// Heads counts the kept heads that the log has grown out of.
	Heads int `json:"heads"`
	// Newest is when the last entry was recorded.
	Newest     time.Time   `json:"newest,omitzero"`
	Signatures *signatures `json:"signatures,omitempty"`
}

func (v *verifyFlags) run(cmd *cobra.Command, file string) error {
	p, err := v.open(cmd, file)
	if err != nil {
		return err
	}
	defer p.file.Close()
	var all []proved
	for more := true; more; {
		if origin := originOf(p.text); !v.named && has(p.keys, origin) {
			v.origin = origin
		}
		doc, err := v.one(cmd, file, p)
		if err != nil {
			return err
		}
		next, err := p.text.Peek(len(exportTitle))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if more = len(next) > 0; more && string(next) != exportTitle {
			return fmt.Errorf("%s DOES NOT HOLD: something follows the end", inputName(file))
		}
		if slices.ContainsFunc(all, func(p proved) bool { return p.Origin == doc.Origin }) {
			return fmt.Errorf("%s DOES NOT HOLD: it has the log %s twice", inputName(file), printable(doc.Origin))
		}
		all = append(all, doc)
	}
	for _, key := range p.keys {
		if !v.named && !slices.ContainsFunc(all, func(p proved) bool { return p.Origin == key.Name() }) {
			return fmt.Errorf("%s DOES NOT HOLD: the log %s is missing, whose key is given", inputName(file), printable(key.Name()))
		}
	}
	text, document := inputName(file)+" holds.\n", any(all[0])
	if len(all) > 1 {
		text, document = fmt.Sprintf("%s holds, with the exports of %d logs.\n", inputName(file), len(all)), all
	}
	return v.print(cmd, document, func(now time.Time) string {
		for i := range all {
			text += "\n" + all[i].describe(now)
		}
		return text
	})
}

// originOf is the log of the next export, as its head says; empty if there is no head.
func originOf(export *bufio.Reader) string {
	start, _ := export.Peek(export.Size())
	_, rest, _ := bytes.Cut(start, []byte("\n"))
	head, _, _ := bytes.Cut(rest, []byte("\n"))
	text, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(string(head), "head "))
	if err != nil {
		return ""
	}
	origin, _, _ := strings.Cut(string(text), "\n")
	return origin
}

// oneExport reads one of several exports in a file: up to the line with its number of entries.
type oneExport struct {
	from  *bufio.Reader
	line  []byte // what is left of the line that was read
	begun bool   // the line goes on
	over  bool
}

// Read implements io.Reader.
func (r *oneExport) Read(p []byte) (int, error) {
	if len(r.line) == 0 {
		if r.over {
			return 0, io.EOF
		}
		line, err := r.from.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) && len(line) == 0 {
			return 0, err
		}
		r.over = !r.begun && err == nil && bytes.HasPrefix(line, []byte("end "))
		r.line, r.begun = line, err != nil
	}
	n := copy(p, r.line)
	r.line = r.line[n:]
	return n, nil
}

// one verifies the next export in a file.
func (v *verifyFlags) one(cmd *cobra.Command, file string, p proof) (doc proved, err error) {
	if v.jwks != "" {
		if doc.Signatures, err = newSignatures(v.jwks); err != nil {
			return doc, err
		}
	}
	known := slices.DeleteFunc(slices.Clone(p.known), func(h ledger.Head) bool { return h.Origin != v.origin })
	found, err := ledger.VerifyExport(&oneExport{from: p.text}, v.origin, note.VerifierList(p.keys...), func(e ledger.Entry) error {
		doc.Newest = e.Recorded
		if doc.Signatures == nil {
			return nil
		}
		if err := doc.Signatures.add(cmd.Context(), &e); err != nil {
			return fmt.Errorf("%s DOES NOT HOLD: %w", inputName(file), err)
		}
		return nil
	}, known...)
	if err != nil {
		return doc, verifyError(file, err)
	}
	doc.Holds, doc.Contents, doc.Heads = true, found, len(known)
	return doc, nil
}

func (doc *proved) describe(now time.Time) string {
	heads, tokens := "none to compare with: --head gives those that were kept", ""
	if doc.Heads > 0 {
		heads = fmt.Sprintf("it has grown out of all %d that are known", doc.Heads)
	}
	if doc.Signatures != nil {
		tokens = doc.Signatures.describe()
	}
	return lines(now, 7, "log", doc.Origin, "size", doc.Size, "root", doc.Root.String(), "entries", doc.Entries,
		"pruned", describePruned(doc.Pruned, doc.Vouchers), "newest", doc.Newest, "heads", heads, "tokens", tokens)
}

// signatures verifies the tokens of entries.
type signatures struct {
	keys ect.Source
	// Verified and Unsigned count valid signatures and entries without a signed token.
	Verified int64 `json:"verified"`
	Unsigned int64 `json:"unsigned"`
	// Lacking counts those of Unsigned whose key is known: the gateway has lost its private
	// part, or somebody has taken the signatures out of the export.
	Lacking int64 `json:"lacking"`
	// Unknown counts tokens under unknown keys by their claimed issuer.
	Unknown map[string]int64 `json:"unknown"`
}

func newSignatures(jwks string) (*signatures, error) {
	keys, err := ect.NewFileSource(ect.FileOptions{Path: jwks})
	if err != nil {
		return nil, fmt.Errorf("--jwks: %s", plain(err))
	}
	return &signatures{keys: keys, Unknown: map[string]int64{}}, nil
}

// add verifies the token of an entry, and that its id and issuer are those of the entry.
func (s *signatures) add(ctx context.Context, e *ledger.Entry) error {
	if e.Header != nil { // of a key that is gone
		s.Unsigned++
		known, err := s.keys.Keys(ctx, ect.HeaderKeyID(e.Header))
		if err == nil && len(known) > 0 {
			s.Lacking++
		}
		return err
	}
	raw := string(e.Payload)
	seen, err := ect.ParseInsecure(raw)
	if err != nil {
		return fmt.Errorf("entry %d: its token cannot be read: %s", e.Index, plain(err))
	}
	if seen.Level() < ect.L2 {
		s.Unsigned++
		return nil
	}
	token, err := s.verify(ctx, raw, seen)
	if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
		if refusal.Code == ect.CodeKeyID {
			s.Unknown[seen.Issuer()]++
			return nil
		}
		if refusal.Code == ect.CodeSignature && !bytes.Contains(e.Leaf, e.Payload) {
			return fmt.Errorf("entry %d: the signature beside it does not hold: only the entry is in the tree", e.Index)
		}
		return fmt.Errorf("entry %d: its token does not hold: %s (%s)", e.Index, refusal.Detail(), refusal.Code)
	}
	if err != nil {
		return err
	}
	if token.ID() != e.ID || token.Issuer() != e.Issuer {
		return fmt.Errorf("entry %d: its id and issuer are not those of its token", e.Index)
	}
	s.Verified++
	return nil
}

// verify verifies a stored token for any audience. The gateway applied its other rules when it
// accepted the token.
func (s *signatures) verify(ctx context.Context, raw string, seen *ect.Unverified) (*ect.Token, error) {
	v, err := ect.NewVerifier(ect.Policy{
		Audience: append(seen.Audience(), "nobody"), Sources: []ect.Source{s.keys}, Algorithms: ect.Algorithms(),
		AnyID: true,
	})
	if err != nil {
		return nil, err
	}
	return v.VerifyStored(ctx, raw)
}

// describe summarises the counts.
func (s *signatures) describe() string {
	text := fmt.Sprintf("%d signatures hold, %d entries are not signed", s.Verified, s.Unsigned)
	if s.Lacking > 0 {
		text += fmt.Sprintf(", %d of these LACK THEIR SIGNATURE though --jwks has the key", s.Lacking)
	}
	if len(s.Unknown) == 0 {
		return text
	}
	var sum int64
	var issuers []string
	for _, issuer := range slices.Sorted(maps.Keys(s.Unknown)) {
		sum += s.Unknown[issuer]
		if issuers = append(issuers, printable(issuer)); len(issuers) > 5 {
			issuers[5] = "and others"
			issuers = issuers[:6]
		}
	}
	return fmt.Sprintf("%s, %d NOT LOOKED AT for want of the keys of %s", text, sum, strings.Join(issuers, ", "))
}

// entryFlags are the flags of `ledger list`.
type entryFlags struct {
	*options
	proofFlags
	workflow, action, id string
}

func ledgerList(o *options) *cobra.Command {
	l := entryFlags{options: o}
	cmd := &cobra.Command{
		Use:   "list FILE --key KEY",
		Short: "Lists the entries of an export, after verifying it",
		Long: `Verifies an export as ` + "`ledger verify`" + ` does, and then lists its entries in their
order. Entries that were pruned have no content and are left out. With --output
json an entry has its token.

The file is read twice, so that only verified entries are printed.`,
		Example: `  caddy agent-guard ledger list ledger.export \
      --key agent-guard/node-4c1f+8b3c1a7e+AVq0… --workflow 1f0c9a52-6d3e-4b8a-9c44-0d6a7e5b2f10`,
		Args: nArgs(1, "one FILE with an export"),
		RunE: func(cmd *cobra.Command, args []string) error { return exitOf(cmd, l.run(cmd, args[0])) },
	}
	l.flags(cmd)
	stringFlag(cmd, &l.workflow, "workflow", "Only those of this workflow: its UUID, or its caller's name")
	stringFlag(cmd, &l.action, "action", "Only those of this action")
	stringFlag(cmd, &l.id, "id", "Only those with this id")
	return cmd
}

// matches reports whether an entry passes the filters. Tokens name a workflow by a UUID that may be
// derived from the caller's name.
func (l *entryFlags) matches(e *ledger.Entry) bool {
	if l.workflow != "" && !slices.Contains([]string{l.workflow, evidence.WorkflowID(l.workflow), evidence.NamedWorkflowID(l.workflow)}, e.Workflow) {
		return false
	}
	return (l.action == "" || e.Action == l.action) && (l.id == "" || e.ID == l.id)
}

type listedEntry struct {
	Index    int64     `json:"index"`
	Recorded time.Time `json:"recorded"`
	ID       string    `json:"id"`
	Workflow string    `json:"workflow,omitempty"`
	Action   string    `json:"action"`
	Issuer   string    `json:"issuer"`
	Parents  []string  `json:"parents"`
	Time     time.Time `json:"time"`
	// Unsigned says that there is no signature: Token is the payload that it would have had.
	Unsigned bool   `json:"unsigned,omitempty"`
	Token    string `json:"token"`
}

func (l *entryFlags) run(cmd *cobra.Command, file string) error {
	if file == "-" {
		return errors.New("list reads twice; give it a file")
	}
	p, err := l.open(cmd, file)
	if err != nil {
		return err
	}
	defer p.file.Close()
	keys := note.VerifierList(p.keys...)
	if _, err := ledger.VerifyExport(p.text, l.origin, keys, nil, p.known...); err != nil {
		return verifyError(file, err)
	}
	again, is := p.file.(io.Seeker)
	if is {
		_, err = again.Seek(0, io.SeekStart)
	}
	if !is || err != nil {
		return fmt.Errorf("%s cannot be read twice; give a file", file)
	}
	out := newList(cmd, l.options, "entries", entryRow)
	var documents []json.RawMessage
	_, err = ledger.VerifyExport(p.file, l.origin, keys, func(e ledger.Entry) error {
		if !l.matches(&e) {
			return nil
		}
		text, err := json.Marshal(entryDocument(&e))
		if err != nil {
			return err
		}
		if documents = append(documents, text); len(documents) < rowsPerPage {
			return nil
		}
		err = out.add(documents...)
		documents = documents[:0]
		return err
	}, p.known...)
	if errors.Is(err, ledger.ErrProof) {
		return fmt.Errorf("%s has changed meanwhile: believe nothing of this list", file)
	}
	if err == nil {
		err = out.add(documents...)
	}
	if err != nil {
		return err
	}
	return out.end(0, "")
}

// rowsPerPage is how many rows are aligned together.
const rowsPerPage = 1000

func entryDocument(e *ledger.Entry) listedEntry {
	return listedEntry{
		Index: e.Index, Recorded: e.Recorded.UTC(), ID: e.ID, Workflow: e.Workflow, Action: e.Action, Issuer: e.Issuer,
		Parents: append([]string{}, e.Parents...), Time: e.Time.UTC(), Unsigned: e.Header != nil, Token: string(e.Payload),
	}
}

func entryRow(e *listedEntry) []any {
	return []any{
		"INDEX", e.Index, "RECORDED", e.Recorded.Format(time.RFC3339), "ACTION", e.Action, "ISSUER", e.Issuer,
		"WORKFLOW", e.Workflow, "ID", e.ID,
	}
}

// plain is the text of an error without the names of our packages, which do not help operators.
func plain(err error) string {
	text := err.Error()
	for _, name := range []string{"ect: ", "ledger: "} {
		text = strings.ReplaceAll(strings.TrimPrefix(text, name), ": "+name, ": ")
	}
	return text
}
