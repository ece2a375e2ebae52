package harness

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// The recording of the wire holds what the gateways of the tests answer, in-process and as
// processes of their own, on their sites and on their admin endpoints:
//
//   - testdata/wire/tests: for each test the answers that it got: method, endpoint, status, slug
//     of the problem, and the names of the header fields;
//   - testdata/wire/answers: for each kind of answer the values of its header fields, the members
//     of each object of its body, and their values. Ids, times, tokens and numbers are left out.
//
// An answer that is not recorded fails its test; a recorded answer need not come. No recording has
// all that races may bring: a kind of answer that is new in a test may be one of another test, one
// of a process is compared with all tests, and so are values. What a test is about, it asserts.
//
// Left out: bodies that upstreams wrote and that are no JSON, bodies of more than 64 KiB, texts
// of more than 1 KiB, gRPC over grpc-go, raw connections read as bytes, the output of commands,
// and what upstreams receive.
//
// Answers are compared with -wire only: which of several right answers comes is up to races, and the
// recording does not have all of them yet. A change that must leave the wire as it is runs with it.
var compareWire = flag.Bool("wire", false, "compare the answers of gateways with the recording in testdata/wire")

var recordWire = flag.Bool("record", false, "add the answers of gateways to the recording in testdata/wire")

// wireUnstable are tests whose answers no recording holds, with the reason.
var wireUnstable = map[string]string{
	"TestCrashAtRandomMoments":             "kills at random moments",
	"TestCrashFleet":                       "kills at random moments",
	"TestCrashParticipantsAtRandomMoments": "kills at random moments",
	"TestCrashRollbackAtRandomMoments":     "kills at random moments",
}

const (
	wireDir    = "../testdata/wire"
	wireBody   = 64 << 10 // bytes of a body that are read
	wireText   = 1 << 10  // bytes of a text that are compared
	wireValues = 4        // values of one member; where there are more, each is right
)

func init() {
	http.DefaultClient = &http.Client{Transport: Recorded{http.DefaultTransport.(*http.Transport)}}
}

// Recorded is a transport whose answers are compared with the recording.
type Recorded struct{ *http.Transport }

// RoundTrip implements http.RoundTripper.
func (r Recorded) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := r.Transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	theWire.mu.Lock()
	w := theWire.watches[req.URL.Host]
	theWire.mu.Unlock()
	return w.watch(req.Method, req.URL.Path, res), nil
}

// wireSet are values by a name and a key: of a kind of answer its header fields and the members of
// its body, of a test the kinds of answers that it got. A value is a string in quotes, another
// value of JSON, or a list of names in braces, with a question mark where not all had them.
type wireSet map[string]map[string]map[string]bool

func (s wireSet) add(name, key, value string) {
	if s[name] == nil {
		s[name] = map[string]map[string]bool{}
	}
	values := s[name][key]
	if values == nil {
		values = map[string]bool{}
		s[name][key] = values
	}
	if names := wireNames(values); names != "" && value[0] == '{' {
		delete(values, names)
		value = wireUnion(names, value)
	}
	values[value] = true
}

func (s wireSet) merge(other wireSet) {
	for name, keys := range other {
		for key, values := range keys {
			for value := range values {
				s.add(name, key, value)
			}
		}
	}
}

// has reports whether a value is right.
func (s wireSet) has(name, key, value string) bool {
	values := s[name][key]
	names := wireNames(values)
	// Of a list, what all had must be there, and nothing that none had.
	return values[value] || value[0] == '"' && values[`"*"`] ||
		value[0] == '{' && names != "" && wireUnion(names, value) == names
}

// wireNames is the list among some values, if any.
func wireNames(values map[string]bool) string {
	for value := range values {
		if value[0] == '{' {
			return value
		}
	}
	return ""
}

// wireUnion is the list of what is in one of two.
func wireUnion(a, b string) string {
	count := map[string]int{}
	for _, list := range []string{a, b} {
		for _, name := range strings.Fields(strings.Trim(list, "{}")) {
			if name, optional := strings.CutSuffix(name, "?"); optional {
				count[name] += 0
			} else {
				count[name]++
			}
		}
	}
	var names []string
	for _, name := range slices.Sorted(maps.Keys(count)) {
		if count[name] < 2 {
			name += "?"
		}
		names = append(names, name)
	}
	return "{" + strings.Join(names, " ") + "}"
}

// theWire is the recording, and who is answered now.
var theWire struct {
	mu      sync.Mutex
	watches map[string]*wireWatch // by the gateway's address

	load           func() // reads the recording, once
	tests, answers wireSet
	all            wireSet // of "" the answers of all tests, also without method and endpoint
}

func init() {
	theWire.watches, theWire.all = map[string]*wireWatch{}, wireSet{}
	theWire.load = sync.OnceFunc(func() {
		theWire.tests, theWire.answers = readWire("tests"), readWire("answers")
		for _, answers := range theWire.tests {
			for kind, fields := range answers {
				for list := range fields {
					theWire.all.add("", kind, list)
					theWire.all.add("", wireAnywhere(kind), list)
				}
			}
		}
	})
}

// wireWatch collects the answers that one test gets from one address.
type wireWatch struct {
	test    string
	process bool // the gateway is a process of its own
	mu      sync.Mutex
	got     wireSet // kinds of answers, with their facts; "" has the answers
}

// watchWire compares what the address answers until the end of the test.
func watchWire(t *testing.T, address string) *wireWatch {
	test, _, _ := strings.Cut(t.Name(), "/")
	w := &wireWatch{test: test, got: wireSet{}}
	if wireUnstable[test] != "" || !*compareWire && !*recordWire {
		return w
	}
	theWire.mu.Lock()
	theWire.watches[address] = w
	theWire.mu.Unlock()
	t.Cleanup(func() {
		theWire.mu.Lock()
		defer theWire.mu.Unlock()
		if theWire.watches[address] == w {
			delete(theWire.watches, address)
		}
		if !t.Failed() || !*recordWire {
			theWire.load()
			w.compare(t)
		}
	})
	return w
}

// watchProcess says that a process answers at these addresses.
func watchProcess(addresses ...string) {
	theWire.mu.Lock()
	defer theWire.mu.Unlock()
	for _, address := range addresses {
		if w := theWire.watches[address]; w != nil {
			w.process = true
		}
	}
}

// watch reads the answer's body beside its reader.
func (w *wireWatch) watch(method, path string, res *http.Response) *http.Response {
	if w == nil || res.StatusCode == http.StatusSwitchingProtocols {
		return res
	}
	a := &wireAnswer{ReadCloser: res.Body, watch: w, method: method, path: wirePath(path), res: res}
	if res.Header.Get("Content-Type") == "application/problem+json" {
		// The slug belongs to the kind of the answer, also where nobody reads it.
		text, _ := io.ReadAll(a)
		res.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(text), a), a} // the error, if any, comes again
		return res
	}
	res.Body = a
	return res
}

// wireAnswer is the body of an answer.
type wireAnswer struct {
	io.ReadCloser
	watch        *wireWatch
	method, path string
	res          *http.Response
	body         []byte
	once         sync.Once
}

func (a *wireAnswer) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	if room := wireBody + 1 - len(a.body); room > 0 {
		a.body = append(a.body, p[:min(n, room)]...)
	}
	if err != nil {
		a.once.Do(func() { a.end(err == io.EOF) })
	}
	return n, err
}

func (a *wireAnswer) Close() error {
	a.once.Do(func() { a.end(false) })
	return a.ReadCloser.Close()
}

// end adds the answer to those of the test.
func (a *wireAnswer) end(whole bool) {
	kind := fmt.Sprint(a.method, " ", a.path, " ", a.res.StatusCode)
	var problem struct{ Type string }
	if json.Unmarshal(a.body, &problem) == nil && strings.Contains(problem.Type, "/problems/") {
		kind += " " + problem.Type[strings.LastIndexByte(problem.Type, '/')+1:]
	}
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	fact := func(key, value string) { a.watch.got.add(kind, key, value) }
	names := slices.Sorted(maps.Keys(a.res.Header))
	names = slices.DeleteFunc(names, func(name string) bool {
		// Go's server adds these as it ends the connection, and for how the body was written.
		return name == "Date" || name == "Content-Length" || name == "Connection"
	})
	a.watch.got.add("", kind, "{"+strings.Join(names, " ")+"}")
	for _, name := range names {
		for _, value := range a.res.Header[name] {
			wireString(name, value, fact)
		}
	}
	for name, values := range a.res.Trailer {
		for _, value := range values {
			wireString("Trailer "+name, value, fact)
		}
	}
	wireBodyFacts(a.path, a.res, a.body, whole, fact)
}

func wireBodyFacts(path string, res *http.Response, body []byte, whole bool, fact func(key, value string)) {
	kind := res.Header.Get("Content-Type")
	var document any
	switch {
	case len(body) == 0 || len(body) > wireBody:
	case strings.HasPrefix(kind, "text/event-stream"):
		for line := range strings.Lines(string(body)) {
			name, data, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
			switch {
			case !strings.HasSuffix(line, "\n"):
			case name == "data" && json.Unmarshal([]byte(data), &document) == nil:
				wireMembers("data", document, fact)
			case name == "event":
				wireString(name, strings.TrimSpace(data), fact)
			}
		}
	case path == "/metrics":
		for _, m := range wireMetric.FindAllStringSubmatch(string(body), -1) {
			fact(m[1], "{"+strings.Join(wireLabel.FindAllString(m[2], -1), " ")+"}")
		}
	case json.Unmarshal(body, &document) == nil:
		wireMembers("$", document, fact)
	case whole && len(body) <= wireText && (path != "*" || res.StatusCode >= 400):
		wireString("text", string(body), fact)
	}
}

// wireMembers gives the members of a document's objects, and the values of the others.
func wireMembers(at string, v any, fact func(key, value string)) {
	switch v := v.(type) {
	case map[string]any:
		var names []string
		for _, name := range slices.Sorted(maps.Keys(v)) {
			known := wireNormal(name)
			names = append(names, known)
			wireMembers(at+"."+known, v[name], fact)
		}
		fact(at, "{"+strings.Join(slices.Compact(names), " ")+"}")
	case []any:
		for _, element := range v {
			wireMembers(at+"[]", element, fact)
		}
		if len(v) == 0 {
			fact(at, "[]")
		}
	case string:
		wireString(at, v, fact)
	case float64:
		fact(at, "0")
	default:
		fact(at, fmt.Sprint(v)) // true, false, <nil>
	}
}

var (
	wireToken    = regexp.MustCompile(`^eyJ[\w-]+\.eyJ[\w-]+\.[\w-]*$`)
	wireRandom   = regexp.MustCompile(`[\w+/=-]{16,}`)
	wireName     = regexp.MustCompile(`^[A-Z]?[a-z]+(?:[-/_][A-Z]?[a-z]+)*$`)
	wireChanging = regexp.MustCompile(`[\w+=.:%-]*[0-9][\w+=.:%-]*`)
	wireMetric   = regexp.MustCompile(`(?m)^(agent_guard_\w+)(?:\{(.*)\})? `)
	wireLabel    = regexp.MustCompile(`\b\w+=`)
	wireOurs     = regexp.MustCompile(`^(?:/\.well-known/(?:cascade|atd|aerr)|/aerr|/agent_guard)(?:/[a-z_]+)?`)
	wireFile     = regexp.MustCompile(`[a-z_]+`)
	wireWord     = regexp.MustCompile(`^[A-Z]+[a-z]*`)
	wireWords    = regexp.MustCompile(`^(?:output|proof|head|entries|consistency|decision|page|form|prepare)$`)
)

// wireString gives a string, and the members of a token.
func wireString(key, value string, fact func(key, value string)) {
	if wireToken.MatchString(value) {
		for i, part := range strings.SplitN(value, ".", 3)[:2] {
			var document any
			text, _ := base64.RawURLEncoding.DecodeString(part)
			if json.Unmarshal(text, &document) == nil {
				wireMembers(key+[]string{" header", " claims"}[i], document, fact)
			}
		}
		value = "(token)"
	}
	fact(key, strconv.Quote(wireNormal(value)))
}

// wireNormal takes out of a text what differs from run to run: words with digits, and keys.
func wireNormal(text string) string {
	if len(text) > wireText {
		return "(long)"
	}
	text = wireRandom.ReplaceAllStringFunc(text, func(word string) string {
		if strings.ToLower(word) == word || strings.ToUpper(word) == word || wireName.MatchString(word) {
			return word
		}
		return "0"
	})
	return wireChanging.ReplaceAllString(text, "0")
}

// wirePath is the endpoint of a path; what belongs to upstreams is *.
func wirePath(path string) string {
	if path == "/metrics" || path == "/load" {
		return path
	}
	endpoint := wireOurs.FindString(path)
	if endpoint == "" {
		return "*"
	}
	for part := range strings.SplitSeq(strings.TrimPrefix(path[len(endpoint):], "/"), "/") {
		switch {
		case part == "":
		case wireWords.MatchString(part):
			endpoint += "/" + part
		default:
			endpoint += "/*"
		}
	}
	return endpoint
}

// wireAnywhere is a kind of answer without its method and endpoint.
func wireAnywhere(kind string) string { return strings.SplitN(kind, " ", 3)[2] }

// compare holds the answers to the recording, or adds them to it.
func (w *wireWatch) compare(t *testing.T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if *recordWire {
		if w.got[""] != nil {
			theWire.tests.merge(wireSet{w.test: w.got[""]})
		}
		delete(w.got, "")
		theWire.answers.merge(w.got)
		return
	}
	unknown := 0
	fails := func(what, key, value string, recorded map[string]map[string]bool) {
		if unknown++; unknown <= 8 {
			t.Errorf("%s is not in the recording (%s):\n    %s: %s\nrecorded is\n    %s\nWhere clients shall notice this, add it: "+
				"go test ./e2e/... -run '^%s$' -record", what, wireDir, key, value, wireNearest(key, recorded), w.test)
		}
	}
	for kind, fields := range w.got[""] {
		own := theWire.tests[w.test][kind]
		for list := range fields {
			switch {
			case theWire.tests.has(w.test, kind, list):
			case own != nil && !w.process:
				fails("An answer", kind, list, map[string]map[string]bool{kind: own})
			case !theWire.all.has("", kind, list) && !(w.process && theWire.all.has("", wireAnywhere(kind), list)):
				fails("An answer", kind, list, theWire.all[""])
			}
		}
	}
	delete(w.got, "")
	for kind, keys := range w.got {
		for key, values := range keys {
			for value := range values {
				if !wireKnown(kind, key, value) {
					fails("What is in a "+kind, key, value, theWire.answers[kind])
				}
			}
		}
	}
}

// wireKnown reports whether a value is recorded of a kind of answer, or of another kind: what one
// test sees, another may see under load.
func wireKnown(kind, key, value string) bool {
	if theWire.answers[kind] == nil || theWire.answers.has(kind, key, value) {
		return true // an answer of an unknown kind fails as such
	}
	for other := range theWire.answers {
		if theWire.answers.has(other, key, value) {
			return true
		}
	}
	return false
}

// wireNearest is what is recorded under the key that is most like this one.
func wireNearest(key string, recorded map[string]map[string]bool) string {
	nearest, most := "", -1
	for _, other := range slices.Sorted(maps.Keys(recorded)) {
		common := 0
		for common < min(len(key), len(other)) && key[common] == other[common] {
			common++
		}
		if other == key {
			common++
		}
		if common > most {
			nearest, most = other, common
		}
	}
	return nearest + ": " + strings.Join(slices.Sorted(maps.Keys(recorded[nearest])), "\n    "+nearest+": ")
}

// readWire reads the files of a folder: names, and indented under each its keys and values.
func readWire(folder string) wireSet {
	s, name := wireSet{}, ""
	files, _ := filepath.Glob(filepath.Join(wireDir, folder, "*.golden"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			panic(err)
		}
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSuffix(line, "\n")
			if fact, ok := strings.CutPrefix(line, "\t"); ok {
				key, value, _ := strings.Cut(fact, ": ")
				s.add(name, key, value)
			} else {
				name = line
			}
		}
	}
	return s
}

// saveWire adds what was recorded to the files.
func saveWire() error {
	theWire.mu.Lock()
	defer theWire.mu.Unlock()
	theWire.load()
	theWire.tests.merge(readWire("tests"))
	theWire.answers.merge(readWire("answers"))
	for _, keys := range theWire.answers {
		for _, values := range keys {
			text := func(value string, _ bool) bool { return value[0] == '"' }
			others := maps.Clone(values)
			maps.DeleteFunc(others, text)
			if values[`"*"`] || len(values)-len(others) > wireValues {
				maps.DeleteFunc(values, text)
				values[`"*"`] = true
			}
		}
	}
	return errors.Join(
		writeWire("tests", theWire.tests, func(test string) string {
			return strings.ToLower(wireWord.FindString(strings.TrimPrefix(test, "Test")))
		}),
		writeWire("answers", theWire.answers, func(kind string) string {
			parts := wireFile.FindAllString(strings.TrimPrefix(strings.Fields(kind)[1], "/.well-known/"), 2)
			return cmp.Or(strings.Join(parts, "-"), "upstream")
		}))
}

// writeWire writes a set to files.
func writeWire(folder string, s wireSet, file func(name string) string) error {
	texts := map[string]*strings.Builder{}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		f := file(name)
		if texts[f] == nil {
			texts[f] = new(strings.Builder)
		}
		fmt.Fprintf(texts[f], "%s\n", name)
		for _, key := range slices.Sorted(maps.Keys(s[name])) {
			for _, value := range slices.Sorted(maps.Keys(s[name][key])) {
				fmt.Fprintf(texts[f], "\t%s: %s\n", key, value)
			}
		}
	}
	for f, text := range texts {
		path := filepath.Join(wireDir, folder, f+".golden")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
