package archtest

import (
	"go/ast"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// oldWord is a word of a private vocabulary that goes out of use. Its uses are counted
// where it has that meaning only: many of these words are honest English, or terms of the
// field, elsewhere.
type oldWord struct {
	name string

	// What is counted; words are lower case, and those of a name are its CamelCase parts.
	text  string // anywhere in Go files and documents
	code  string // in names in Go files, those of test functions left out
	types string // the whole name of a declared type
	funcs string // the whole name of a declared function or method

	only   string   // counted below this directory alone
	except []string // not counted below these directories
}

// oldWords are the words that do not come back. CONTRIBUTING.md says what replaces them.
var oldWords = []oldWord{
	{name: "archive", code: "archive"},
	{name: "audience", types: "audience"},
	{name: "bar", code: "bar bars barred", except: []string{"bench"}},
	{name: "borrowed", code: "borrow borrowed"},
	{name: "cargo", text: "cargo lade stow rider riders"},
	{name: "census", text: "census", code: "stock", except: []string{"guard/store/badger/tables.go"}}, // a stored member's name
	{name: "christen", text: "christen christened"},
	{name: "concern", code: "concern", types: "share parts"},
	{name: "courier", text: "courier couriers"},
	{name: "deaths", code: "death deaths"},
	{name: "desk", text: "desk desks"},
	{name: "errand", text: "errand errands"},
	{name: "exchange", text: "exchange exchanges"},
	{name: "foresee", text: "foresee foresees foreseen", except: []string{"breaker"}},
	{name: "frontier", text: "frontier frontiers"},
	{name: "insist", code: "insist insists"},
	{name: "meet", funcs: "meet", except: []string{"ect", "guard/workflow"}},
	{name: "mover", text: "mover movers"},
	{name: "overhear", text: "overhear overhears overheard"},
	{name: "rivals", text: "rival rivals", except: []string{"e2e"}},
	{name: "seal", types: "seal sealer", only: "guard/store/badger"},
	{name: "shelf", code: "shelf", except: []string{"e2e"}},
	{name: "sight", code: "sight glance", funcs: "look", except: []string{"bench", "e2e"}},
	{name: "standing", code: "standing standings"},
	{name: "story", code: "story stories", except: []string{"bench", "e2e"}},
	{name: "targets", types: "targets window"},
	{name: "telling", code: "tell tells told telling teller"},
	{name: "testimony", text: "testimony testimonies"},
	{name: "undone", types: "undone"},
	{name: "vault", text: "vault vaults"},
	{name: "vetting", text: "vetting vetted", code: "vet"},
	{name: "voice", text: "voice voices"},
	{name: "witness", text: "witness witnesses", except: []string{"ect/ledger"}}, // of a log: the field's term
}

// vocabularyFree are the files that have to name the old words.
var vocabularyFree = []string{"internal/archtest", "CONTRIBUTING.md", "CHANGELOG.md"}

// words are the files with uses of the old words, by word, and how many.
func (t *tree) words() map[string][]string {
	text, code := make(map[string][]*oldWord), make(map[string][]*oldWord)
	types, funcs := make(map[string][]*oldWord), make(map[string][]*oldWord)
	for i := range oldWords {
		w := &oldWords[i]
		for from, into := range map[string]map[string][]*oldWord{w.text: text, w.code: code, w.types: types, w.funcs: funcs} {
			for _, word := range strings.Fields(from) {
				into[word] = append(into[word], w)
			}
		}
	}
	uses := make(map[string]map[string]int)
	count := func(words []*oldWord, file string) {
		for _, w := range words {
			if within(file, w.except...) || w.only != "" && !within(file, w.only) {
				continue
			}
			if uses[w.name] == nil {
				uses[w.name] = make(map[string]int)
			}
			uses[w.name][file]++
		}
	}
	for _, f := range t.texts {
		if within(f.path, vocabularyFree...) || !strings.HasSuffix(f.path, ".go") && !strings.HasSuffix(f.path, ".md") {
			continue
		}
		for word := range strings.FieldsFuncSeq(f.body, notLetter) {
			for _, part := range camel(word) {
				count(text[part], f.path)
			}
		}
	}
	for i := range t.gos {
		f := &t.gos[i]
		if within(f.path, vocabularyFree...) {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				for _, part := range camel(n.Name) {
					if hit := code[part]; hit != nil && !testFunction.MatchString(n.Name) {
						count(hit, f.path)
					}
				}
			case *ast.TypeSpec:
				count(types[strings.ToLower(n.Name.Name)], f.path)
			case *ast.FuncDecl:
				count(funcs[strings.ToLower(n.Name.Name)], f.path)
			}
			return true
		})
	}
	all := make(map[string][]string)
	for name, in := range uses {
		all[name] = largest(in)
	}
	return all
}

// TestWordsOutOfUse: the words of a private vocabulary do not come back (CONTRIBUTING, "Words").
func TestWordsOutOfUse(t *testing.T) {
	project, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	for word, in := range project.words() {
		t.Errorf("%s is out of use; it is in %s", word, strings.Join(in, ", "))
	}
}

var testFunction = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)[A-Z]`)

func notLetter(r rune) bool { return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z') }

// camel are the words of a name, in lower case: "TLSConn_x" is tls, conn, x.
func camel(name string) []string {
	var words []string
	for part := range strings.SplitSeq(name, "_") {
		start := 0
		for i := 1; i < len(part); i++ {
			upper, after := unicode.IsUpper(rune(part[i])), unicode.IsUpper(rune(part[i-1]))
			last := i+1 < len(part) && unicode.IsLower(rune(part[i+1]))
			if upper && (!after || last) {
				words = append(words, strings.ToLower(part[start:i]))
				start = i
			}
		}
		words = append(words, strings.ToLower(part[start:]))
	}
	return slices.DeleteFunc(words, func(w string) bool { return w == "" })
}
