package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// restLab is a REST service whose state changes, so that a test can see whether it was
// put back. Whatever happens there is in its ledger, on disk, before it is answered: the
// ledger is the only truth about what was done, whatever gateways say.
//
//	GET, PUT, PATCH, DELETE /docs/{name}   documents, with ETags and conditions
//	the same at /plain/{name}              without ETags
//	the same at /versions/{name}           with the number of the change as the ETag
//	POST /charges, GET /charges/{id}       money taken
//	POST /refunds, GET /refunds/{charge}   money given back, once for each Idempotency-Key
//	POST /agents/{name}                    an agent that does something
//	POST /agents/{name}/rollback           and undoes it, once for each Idempotency-Key
//	POST /mail                             what nobody can undo
type restLab struct {
	t    *testing.T
	addr string
	path string // of the ledger

	mu       sync.Mutex
	server   *http.Server
	ledger   *os.File
	effects  int
	docs     map[string]string
	versions map[string]int // of documents: how often each was changed
	charges  map[string]*restCharge
	done     map[string]restAnswer // what an Idempotency-Key has led to
	scripts  []*restScript
	arrivals []*restArrival
	seen     func(restEffect)
}

// restCharge is money that was taken.
type restCharge struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
	State  string `json:"state"` // open or refunded
}

// restArrival is a request as it came.
type restArrival struct {
	route  string // method and path
	header http.Header
	body   string
}

// restAnswer is what the service answers.
type restAnswer struct {
	status int
	header http.Header
	body   string
}

// restCall is a request that is being answered.
type restCall struct {
	lab *restLab
	w   http.ResponseWriter
	*restArrival
	method, path string
}

// restScript answers some requests instead of the service.
type restScript struct {
	pattern string // of a method and a path, as path.Match reads it
	of      string // what the path's end or the body must name; empty is anything
	times   int    // negative is for ever
	answer  func(*restCall)
}

func newRestLab(t *testing.T) *restLab {
	t.Helper()
	l := &restLab{
		t: t, addr: freeAddress(t), path: filepath.Join(t.TempDir(), "ledger"),
		docs: map[string]string{}, versions: map[string]int{}, charges: map[string]*restCharge{}, done: map[string]restAnswer{},
	}
	var err error
	if l.ledger, err = os.OpenFile(l.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		t.Fatal(err)
	}
	l.up()
	t.Cleanup(func() {
		l.down()
		_ = l.ledger.Close()
		l.audit()
	})
	return l
}

// up lets the service listen, again after it was down.
func (l *restLab) up() {
	l.t.Helper()
	var listener net.Listener
	eventually(l.t, "the port of the service is free", func() (ok bool) { // see freeAddress
		var err error
		listener, err = net.Listen("tcp", l.addr)
		return err == nil
	})
	server := &http.Server{Handler: l}
	l.mu.Lock()
	l.server = server
	l.mu.Unlock()
	go func() { _ = server.Serve(listener) }()
}

// down lets the service refuse all connections. Its state stays.
func (l *restLab) down() {
	l.mu.Lock()
	server := l.server
	l.mu.Unlock()
	_ = server.Close()
}

// on answers the next requests that match by a script.
func (l *restLab) on(pattern string, times int, answer func(*restCall)) {
	l.onFor(pattern, "", times, answer)
}

// onFor is on for requests that name something.
func (l *restLab) onFor(pattern, of string, times int, answer func(*restCall)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.scripts = append(l.scripts, &restScript{pattern, of, times, answer})
}

// matches reports whether a request has a method and a path, and names something; empty
// is anything.
func (a *restArrival) matches(pattern, of string) bool {
	is, _ := path.Match(pattern, a.route)
	return is && (of == "" || path.Base(a.route) == of || strings.Contains(a.body, strconv.Quote(of)))
}

// watch has f called at each effect, once it is in the ledger.
func (l *restLab) watch(f func(restEffect)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = f
}

// all are the requests that match and name something; empty is anything.
func (l *restLab) all(pattern, of string) (all []*restArrival) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.arrivals {
		if a.matches(pattern, of) {
			all = append(all, a)
		}
	}
	return all
}

// last is the last request for a path.
func (l *restLab) last(path string) *restArrival {
	all := l.all("* "+path, "")
	if len(all) == 0 {
		return new(restArrival)
	}
	return all[len(all)-1]
}

// arrived checks how many requests came that match.
func (l *restLab) arrived(pattern string, want int) {
	l.t.Helper()
	if got := len(l.all(pattern, "")); got != want {
		l.t.Errorf("%s arrived %d times, want %d", pattern, got, want)
	}
}

// doc is a document as it stands there; empty is none.
func (l *restLab) doc(path string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.docs[path]
}

// write changes a document past the gateway; empty deletes it.
func (l *restLab) write(path, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change(path, text, text != "")
}

// change changes a document, also to what it was. Under the lab's lock.
func (l *restLab) change(path, text string, exists bool) {
	l.versions[path]++
	if !exists {
		delete(l.docs, path)
		return
	}
	l.docs[path] = text
}

// tag is the ETag of a document that exists; empty is none. Under the lab's lock.
func (l *restLab) tag(path string) string {
	switch {
	case strings.HasPrefix(path, "/docs/"):
		return restTag(l.docs[path])
	case strings.HasPrefix(path, "/versions/"):
		return fmt.Sprintf(`"v%d"`, l.versions[path])
	}
	return ""
}

// wantDoc checks a document; empty is none.
func (l *restLab) wantDoc(path, want string) {
	l.t.Helper()
	if got := l.doc(path); got != want {
		l.t.Errorf("%s is %q, want %q", path, got, want)
	}
}

// wantCharge checks the state of a charge.
func (l *restLab) wantCharge(id, want string) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.charges[id]; c == nil || c.State != want {
		l.t.Errorf("the charge %s is %+v, want it %s", id, c, want)
	}
}

func (l *restLab) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // not a whole request: nothing is done
	}
	c := &restCall{
		lab: l, w: w, method: r.Method, path: r.URL.Path,
		restArrival: &restArrival{r.Method + " " + r.URL.Path, r.Header.Clone(), string(body)},
	}
	answer := (*restCall).usual
	l.mu.Lock()
	l.arrivals = append(l.arrivals, c.restArrival)
	for _, s := range l.scripts {
		if s.times != 0 && c.matches(s.pattern, s.of) {
			s.times--
			answer = s.answer
			break
		}
	}
	l.mu.Unlock()
	answer(c)
}

// usual does what is asked for and answers.
func (c *restCall) usual() { c.say(c.act()) }

// say answers.
func (c *restCall) say(a restAnswer) {
	for name, values := range a.header {
		c.w.Header()[name] = values
	}
	if a.body != "" && c.w.Header().Get("Content-Type") == "" {
		c.w.Header().Set("Content-Type", "application/json")
	}
	c.w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	c.w.WriteHeader(a.status)
	if a.body != "" {
		_, _ = io.WriteString(c.w, a.body)
	}
}

// act does what is asked for, once it is in the ledger.
func (c *restCall) act() restAnswer {
	c.lab.mu.Lock()
	defer c.lab.mu.Unlock()
	switch place, name := path.Split(c.path); {
	case place == "/docs/" || place == "/plain/" || place == "/versions/":
		return c.document()
	case c.route == "POST /charges":
		return c.charge()
	case place == "/charges/" && c.lab.charges[name] != nil:
		return restJSON(http.StatusOK, c.lab.charges[name])
	case c.route == "POST /refunds":
		return c.refund()
	case place == "/refunds/":
		return c.refunded(name)
	case c.method == "POST" && (place == "/agents/" || c.path == "/mail"):
		c.lab.record(c, "asked", c.path)
		return restAnswer{status: http.StatusOK, body: `{"done":true}`}
	case c.method == "POST" && strings.HasPrefix(place, "/agents/"):
		return c.once("undone", path.Dir(c.path), func() restAnswer {
			return restAnswer{status: http.StatusOK, body: `{"status":"completed"}`}
		})
	default:
		return restAnswer{status: http.StatusNotFound}
	}
}

// document is a request for a document. Under the lab's lock.
func (c *restCall) document() restAnswer {
	was, exists := c.lab.docs[c.path]
	tag := c.lab.tag(c.path)
	if !holds(c.header.Get("If-Match"), tag, exists, true) || !holds(c.header.Get("If-None-Match"), tag, exists, false) {
		if c.method == "GET" {
			return restAnswer{status: http.StatusNotModified}
		}
		return restAnswer{status: http.StatusPreconditionFailed}
	}
	switch {
	case c.method == "GET" && exists:
		return c.shown(http.StatusOK, was)
	case c.method == "PUT":
		status, what := http.StatusOK, "changed"
		if !exists {
			status, what = http.StatusCreated, "created"
		}
		c.lab.record(c, what, c.path)
		c.lab.change(c.path, c.body, true)
		return c.shown(status, c.body)
	case c.method == "PATCH" && exists:
		now, err := restMerge(was, c.body)
		if err != nil {
			return restAnswer{status: http.StatusBadRequest}
		}
		c.lab.record(c, "changed", c.path)
		c.lab.change(c.path, now, true)
		return c.shown(http.StatusOK, now)
	case c.method == "DELETE" && exists:
		c.lab.record(c, "deleted", c.path)
		c.lab.change(c.path, "", false)
		return restAnswer{status: http.StatusNoContent}
	default:
		return restAnswer{status: http.StatusNotFound}
	}
}

// shown is a document as it is answered.
func (c *restCall) shown(status int, text string) restAnswer {
	a := restAnswer{status: status, header: http.Header{}, body: text}
	if tag := c.lab.tag(c.path); tag != "" {
		a.header.Set("Etag", tag)
	}
	return a
}

// holds reports whether a condition holds of a document with this tag; empty is none.
func holds(condition, tag string, exists, wanted bool) bool {
	if condition == "" {
		return true
	}
	return wanted == (exists && (condition == "*" || condition == tag))
}

func restTag(text string) string {
	sum := sha256.Sum256([]byte(text))
	return `"` + hex.EncodeToString(sum[:6]) + `"`
}

// restMerge is a merge of two flat objects.
func restMerge(text, patch string) (string, error) {
	var object, changes map[string]any
	if err := json.Unmarshal([]byte(text), &object); err != nil {
		return "", err
	}
	if err := json.Unmarshal([]byte(patch), &changes); err != nil {
		return "", err
	}
	for name, value := range changes {
		object[name] = value
	}
	merged, err := json.Marshal(object)
	return string(merged), err
}
