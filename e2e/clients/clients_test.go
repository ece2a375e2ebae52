// Package clients measures what real clients make of the gateway's answers: how many
// effects the upstream has, what the calling code sees, and how often the client tries.
// docs/clients.md has what was measured; `go test ./... -update` writes it anew.
package clients

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

var write = flag.Bool("update", false, "write the tables of docs/clients.md anew")

// retries is how often each client may try again.
const retries = 2

// client is a client as its users have it, on a site of the gateway.
type client struct {
	title string
	name  string
	site  string
	open  string // the site whose circuit is open
	plain bool   // before an upstream that lets no page call it
	keeps bool   // before an upstream that keeps keys
	call  func(*testing.T, task) sight
}

// situation is a row of a client's table.
type situation struct {
	title  string
	before []deed // a first call of the same key, which is not measured, meets this
	other  bool   // and asks for another amount
	do     []deed
	open   bool // at the site whose circuit is open
	direct bool // it can be measured without a gateway
}

var situations = []situation{
	{title: "all is well", direct: true},
	{title: "the answer is lost", do: []deed{drops}, direct: true},
	{title: "409, not executed", do: []deed{refuses409}, direct: true},
	{title: "429, not executed", do: []deed{refuses429}, direct: true},
	{title: "500, executed", do: []deed{fails500}, direct: true},
	{title: "502, executed", do: []deed{fails502}, direct: true},
	{title: "503, executed", do: []deed{fails503}, direct: true},
	{title: "circuit open", open: true},
	{title: "in progress", before: []deed{holds}},
	{title: "in doubt", before: []deed{drops}},
	{title: "mismatch", before: []deed{executes}, other: true},
}

// measured is a cell of a table.
type measured struct {
	effects, tries int
	sight
}

func (m measured) String() string { return fmt.Sprintf("%d | %d | %s", m.effects, m.tries, m.Seen) }

// bench is what the cells are measured on.
type bench struct {
	upstream *upstream
	taps     map[string]*tap
}

func TestClients(t *testing.T) {
	u := newUpstream(t)
	b := &bench{u, taps(t, startGateway(t, u), u)}
	node, browser := startNode(t), startBrowser(t)
	clients := []client{
		{title: "stripe-node 23.1.0, `preset stripe`, an upstream that keeps keys", name: "stripe", site: "stripe", open: "open", keeps: true, call: node.call},
		{title: "stripe-node 23.1.0, the default preset", name: "stripe", site: "default", open: "open", call: node.call},
		{title: "stripe-go 85.0.0, `preset stripe`, an upstream that keeps keys", name: "stripe-go", site: "stripe", open: "open", keeps: true, call: callStripeGo},
		{title: "stripe-go 85.0.0, the default preset", name: "stripe-go", site: "default", open: "open", call: callStripeGo},
		{title: "openai 6.49.0", name: "openai", site: "default", open: "open", call: node.call},
		{title: "@anthropic-ai/sdk 1.12.0", name: "anthropic", site: "default", open: "open", call: node.call},
		{title: "curl `--retry 2 --fail-with-body`", name: "curl", site: "default", open: "open", call: callCurl},
		{title: "grpc-go 1.83.2, `grpc unary`", name: "grpc", site: "grpc", open: "open-grpc", call: callGRPC},
		{title: "fetch in Chromium, from another origin, which the upstream allows", name: "fetch", site: "default", open: "open", call: browser.call},
		{title: "fetch in Chromium, from another origin, which Caddy allows", name: "fetch", site: "cors", open: "open-cors", plain: true, call: browser.call},
	}
	var mu sync.Mutex
	tables := map[string]string{}
	t.Run("cells", func(t *testing.T) {
		for _, c := range clients {
			for _, s := range situations {
				t.Run(c.title+"/"+s.title, func(t *testing.T) {
					t.Parallel()
					site := c.site
					if s.open {
						site = c.open
					}
					row := fmt.Sprintf("| %s | %s |", s.title, b.measure(t, c, s, site))
					if s.direct {
						direct := "direct"
						if c.plain {
							direct = "direct-plain"
						}
						row += fmt.Sprintf(" %s |", b.measure(t, c, s, direct))
					} else {
						row += " | | |"
					}
					mu.Lock()
					tables[c.title+"/"+s.title] = row
					mu.Unlock()
				})
			}
		}
	})
	if t.Failed() {
		return
	}
	var text strings.Builder
	for _, c := range clients {
		fmt.Fprintf(&text, "\n### %s\n\n", c.title)
		text.WriteString("| | effects | tries | the code | direct: effects | tries | the code |\n|---|---|---|---|---|---|---|\n")
		for _, s := range situations {
			text.WriteString(tables[c.title+"/"+s.title] + "\n")
		}
	}
	compare(t, "measured", text.String()+"\n")
}

// measure makes one call of a client where the situation holds.
func (b *bench) measure(t *testing.T, c client, s situation, site string) measured {
	t.Helper()
	tap := b.taps[site]
	cell := &cell{
		key: fmt.Sprintf("key-%x", sha256.Sum256([]byte(t.Name()+site))), keeps: c.keeps,
		do: append(append([]deed(nil), s.before...), s.do...), arrived: make(chan struct{}), letGo: make(chan struct{}),
	}
	b.upstream.cells.Store(cell.key, cell)
	call := task{Client: c.name, Base: tap.URL, Key: cell.key, Amount: 1200, Retries: retries}
	earlier := 0
	if len(s.before) > 0 {
		first := call
		first.Retries = 0
		if s.other {
			first.Amount = 9900
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c.call(t, first)
		}()
		if s.before[0] == holds {
			<-cell.arrived
			// The first answer that passes is the measured call's: what it meets has
			// ended when its client hears of it.
			tap.onPass(cell.key, func() {
				tap.onPass(cell.key, nil)
				close(cell.letGo)
				<-ended
			})
		} else {
			<-ended
		}
		earlier = tap.tried(cell.key)
	}
	m := measured{sight: c.call(t, call)}
	m.tries, m.effects = tap.tried(cell.key)-earlier, cell.had()
	if m.OK && !strings.HasPrefix(m.ID, "effect-") {
		t.Errorf("at %s the client takes a problem for a success: %q", site, m.ID)
	}
	if m.effects > 1 && !strings.HasPrefix(site, "direct") {
		t.Errorf("%d effects behind the gateway", m.effects)
	}
	return m
}

// compare holds the measured tables against the documentation, where they stand after a line
// `<!-- PLACE -->`.
func compare(t *testing.T, place, got string) {
	t.Helper()
	begin, end := "<!-- "+place+" -->\n", "<!-- end of "+place+" -->\n"
	file := filepath.Join("..", "..", "docs", "clients.md")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begin)
	want, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the tables", file)
	}
	if got == want {
		return
	}
	if *write {
		if err := os.WriteFile(file, []byte(head+begin+got+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	for line := range strings.SplitSeq(got, "\n") {
		if !strings.Contains(want, line+"\n") {
			t.Errorf("%s does not have: %s", file, line)
		}
	}
	t.Errorf("%s is not what was measured; look why, then run with -update", file)
}
