package guard_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// batching is a guard of MCP, whose upstream answers by the tool that is called.
func batching(t *testing.T, answer func(n int64, id, tool string, w http.ResponseWriter)) *bed {
	b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
		var m struct {
			ID     json.RawMessage
			Params struct{ Name string }
		}
		if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
			t.Errorf("the upstream has got no single message: %v", err)
		}
		w.Header().Set("Content-Type", "application/json")
		answer(n, string(m.ID), m.Params.Name, w)
	})
	b.config.Protocol = &protocol.Rules{Protocol: protocol.MCP}
	b.config.MissingID = guard.MissingRecognize
	b.start()
	return b
}

// batch makes a batch of calls of these tools, with the index as id. A key follows after a space.
func batch(accept string, tools ...string) *http.Request {
	var all []string
	for id, tool := range tools {
		tool, key, keyed := strings.Cut(tool, " ")
		meta := ""
		if keyed {
			meta = `,"_meta":{"execution-id":"` + key + `"}`
		}
		all = append(all, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":%q%s}}`, id, tool, meta))
	}
	r := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader("["+strings.Join(all, ",")+"]"))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", accept)
	r.Header.Set("Authorization", "Bearer ada")
	return r
}

// one makes one such call.
func one(tool string) *http.Request {
	r := batch(arrays)
	r.Body = io.NopCloser(strings.NewReader(fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q}}`, tool)))
	return r
}

const (
	arrays = "application/json"
	events = "application/json, text/event-stream"
)

// answers reads the responses of a batch by their ids.
func (b *bed) answers(r *http.Request) map[int]string {
	b.Helper()
	w := httptest.NewRecorder()
	b.serve(w, r)
	texts := strings.Split(strings.TrimSuffix(strings.TrimPrefix(w.Body.String(), "event: message\ndata: "), "\n\n"), "\n\nevent: message\ndata: ")
	if w.Header().Get("Content-Type") == "application/json" {
		var elements []json.RawMessage
		if err := json.Unmarshal(w.Body.Bytes(), &elements); err != nil || fmt.Sprint(w.Body.Len()) != w.Header().Get("Content-Length") {
			b.Fatalf("%v: %d %s", err, w.Code, w.Body)
		}
		texts = nil
		for _, text := range elements {
			texts = append(texts, string(text))
		}
	}
	all := map[int]string{}
	for _, text := range texts {
		m := struct {
			ID     *int
			Method string
		}{}
		err := json.Unmarshal([]byte(text), &m)
		if m.Method != "" { // an event for whom it may concern
			continue
		}
		if err != nil || m.ID == nil || all[*m.ID] != "" {
			b.Fatalf("%d, %v: %.100q", w.Code, err, text)
		}
		all[*m.ID] = text
	}
	return all
}

// P1: of hundreds of calls each is executed once, 16 of them at once.
func TestBatchIsWorkedOnSideBySide(t *testing.T) {
	for _, accept := range []string{arrays, events} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			running, most := 0, 0
			b := batching(t, func(_ int64, id, tool string, w http.ResponseWriter) {
				mu.Lock()
				running++
				most = max(most, running)
				mu.Unlock()
				time.Sleep(time.Second)
				mu.Lock()
				running--
				mu.Unlock()
				_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%q}`, id, tool)
			})
			var tools []string
			for i := range 320 {
				tools = append(tools, fmt.Sprintf("tool%d k%d", i, i))
			}
			for range 2 {
				began := time.Now()
				got := b.answers(batch(accept, tools...))
				for i := range tools {
					if !strings.Contains(got[i], fmt.Sprintf(`"result":"tool%d"`, i)) {
						t.Errorf("%d: %s", i, got[i])
					}
				}
				if took := time.Since(began); len(got) != 320 || took > 21*time.Second {
					t.Errorf("%d answers after %v", len(got), took)
				}
			}
			b.was(320)
			if most != 16 {
				t.Errorf("%d at once", most)
			}
		})
	}
}

// P7: a handler that panics, or says what is no message, concerns its own message. Answers of any size are whole.
func TestBatchAnswersOfEachKind(t *testing.T) {
	large := strings.Repeat(strings.Repeat("ä", 1000)+"\\n\",\"", 700)
	b := batching(t, func(n int64, id, tool string, w http.ResponseWriter) {
		const response = "{\n\t\"jsonrpc\": \"2.0\", \"id\": %s,\r\n\t\"result\": [\"%s\", %d]}"
		kind, size, _ := strings.Cut(tool, "-")
		text := fmt.Sprintf(response, id, "", n)
		if size == "large" {
			text = fmt.Sprintf(response, id, large, n)
		}
		switch kind {
		case "events":
			w.Header().Set("Content-Type", "text/event-stream")
			text = ": alive\n\ndata: " + strings.ReplaceAll(text, "\n", "\ndata: ") + "\n\nid: 7\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\"}\n\n"
		case "panics":
			panic("of the handler")
		case "half":
			text = text[:len(text)-1]
		case "two":
			text += text
		case "nobody's":
			text = strings.Replace(text, `"id": `+id, `"id": null`, 1)
		case "another's":
			text = "[" + text + "]"
		case "coded":
			w.Header().Set("Content-Encoding", "br")
		case "nothing":
			w.WriteHeader(http.StatusNoContent)
			return
		}
		_, _ = io.WriteString(w, text)
	})
	tools := []string{"json", "json-large", "events-large", "panics", "half", "half-large", "two-large", "nobody's", "another's", "coded", "nothing"}
	for _, accept := range []string{arrays, events} {
		got := b.answers(batch(accept, tools...))
		for i, tool := range tools {
			var m struct {
				Result []any
				Error  struct {
					Code    int
					Message string
					Data    json.RawMessage
				}
			}
			if err := json.Unmarshal([]byte(got[i]), &m); err != nil {
				t.Errorf("%s of %s: %v: %.100s", tool, accept, err, got[i])
				continue
			}
			switch tool {
			case "json":
				if len(m.Result) != 2 {
					t.Errorf("%s of %s: %.200s", tool, accept, got[i])
				}
			case "json-large", "events-large":
				if len(m.Result) != 702 {
					t.Errorf("%s of %s: %d, %.200s", tool, accept, len(m.Result), got[i])
				}
			default:
				if m.Error.Code != -32090 || m.Error.Message == "" {
					t.Errorf("%s of %s: %.200s", tool, accept, got[i])
				}
			}
		}
	}
}

// deaf is a client's connection that fails at a write.
type deaf struct {
	*httptest.ResponseRecorder
	at   func(text string) bool
	gone bool
}

var errDeaf = errors.New("broken pipe")

func (d *deaf) Write(p []byte) (int, error) {
	if d.gone = d.gone || d.at(string(p)); d.gone {
		return 0, errDeaf
	}
	return d.ResponseRecorder.Write(p)
}

func (d *deaf) FlushError() error {
	if d.gone {
		return errDeaf
	}
	return nil
}

// P1 without keys (ADR 0070): in an array all calls are unanswered where its end cannot be written, in a
// stream those whose event cannot.
func TestBatchIsUnansweredWhereItIsNotWritten(t *testing.T) {
	for _, c := range []struct {
		accept, at string // what cannot be written
		runs       int64  // how many calls an equal batch makes
	}{
		{arrays, "]", 0}, {arrays, "never", 2}, {events, `"b `, 1}, {events, "never", 2},
	} {
		first := make(chan struct{}) // a has been answered, or nothing is before the end
		b := batching(t, func(n int64, id, tool string, w http.ResponseWriter) {
			if tool == "b" && c.accept == events {
				<-first
			}
			_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":"%s %d"}`, id, tool, n)
		})
		var once sync.Once
		b.serve(&deaf{ResponseRecorder: httptest.NewRecorder(), at: func(text string) bool {
			if strings.Contains(text, `"a `) {
				once.Do(func() { close(first) })
			}
			return strings.HasSuffix(text, c.at) || c.accept == events && strings.Contains(text, c.at)
		}}, batch(c.accept, "a", "b"))
		b.was(2)
		if got := b.answers(batch(c.accept, "a", "b")); len(got) != 2 {
			t.Errorf("%v", got)
		}
		b.was(2 + c.runs)
	}
}

// A notification is answered by the end of the answer to its batch: an equal one afterwards is meant.
func TestBatchNotificationsAreAnswered(t *testing.T) {
	for _, accept := range []string{arrays, events} {
		for _, more := range []string{"", `,{"jsonrpc":"2.0","id":0,"method":"tools/call","params":{"name":"a"}}`} {
			b := batching(t, func(_ int64, id, _ string, w http.ResponseWriter) {
				if id == "" {
					w.WriteHeader(http.StatusAccepted)
					return
				}
				_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{}}`, id)
			})
			for n := range 2 {
				r := batch(accept)
				r.Body = io.NopCloser(strings.NewReader(`[{"jsonrpc":"2.0","method":"notify"}` + more + "]"))
				w := httptest.NewRecorder()
				if b.serve(w, r); w.Code != http.StatusAccepted && (more == "" || w.Code != http.StatusOK) {
					t.Errorf("%s, %d: %d %s", accept, n, w.Code, w.Body)
				}
			}
			b.was(int64(2 + 2*strings.Count(more, "jsonrpc")))
		}
	}
}

// cascade 3.3.1: the time that the client waits is that of all messages, from when the batch came: what runs
// then is in doubt, what has not begun does not begin, and nobody waits longer for what others run.
func TestBatchHasOneTime(t *testing.T) {
	for _, accept := range []string{arrays, events} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			effects, left := map[string]int{}, map[string]string{}
			other := make(chan struct{})
			b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
				var m struct {
					ID     json.RawMessage
					Method string
					Params struct{ Name string }
				}
				if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
					t.Error(err)
				}
				mu.Lock()
				effects[m.Params.Name]++
				left[m.Params.Name+m.Method] = r.Header.Get("Request-Timeout")
				mu.Unlock()
				takes := 4 * time.Second
				if m.Params.Name == "long" {
					takes = time.Hour
				}
				select {
				case <-other:
				case <-time.After(takes):
				case <-r.Context().Done():
					panic(http.ErrAbortHandler)
				}
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%q}`, m.ID, m.Params.Name)
			})
			b.config.Protocol = &protocol.Rules{Protocol: protocol.MCP}
			b.config.AttachWait = time.Hour
			b.start()
			first := make(chan struct{})
			go func() {
				defer close(first)
				b.serve(httptest.NewRecorder(), batch(arrays, "long long"))
			}()
			synctest.Wait()

			var tools []string
			for i := range 63 {
				tools = append(tools, fmt.Sprintf("tool%d k%d", i, i))
			}
			tools[0] = "long long"
			r := batch(accept, tools...)
			body, _ := io.ReadAll(r.Body)
			text := strings.TrimSuffix(string(body), "]") + `,{"jsonrpc":"2.0","id":63,"method":"ping"}]`
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
			r.Header.Set("Request-Timeout", "10")
			began := time.Now()
			got := b.answers(r)
			if took := time.Since(began); took != 9*time.Second || len(got) != 64 {
				t.Errorf("%s: %d answers after %v, want 64 after 9s", accept, len(got), took)
			}
			count := map[string]int{}
			for i, answer := range got {
				switch {
				case strings.Contains(answer, `"result":"tool`):
					count["done"]++
				case strings.Contains(answer, "problems/in-doubt"):
					count["doubt"]++
				case strings.Contains(answer, "The time of the batch was over") && strings.Contains(answer, `"status":504`):
					count["not begun"]++
				case i == 0 && strings.Contains(answer, "problems/in-progress"):
					count["attached"]++
				case i == 63 && strings.Contains(answer, "-32090"): // whose request has ended before it began
					count["ping"]++
				default:
					t.Errorf("%d: %s", i, answer)
				}
			}
			if want := map[string]int{"done": 30, "doubt": 15, "not begun": 17, "attached": 1, "ping": 1}; !maps.Equal(count, want) {
				t.Errorf("%s: %v, want %v", accept, count, want)
			}
			for at, want := range map[string]string{"tool1tools/call": "10.000000000", "tool40tools/call": "1.111111111"} {
				if left[at] != want {
					t.Errorf("%s was left %s, want %s", at, left[at], want)
				}
			}
			close(other)
			<-first
			r = batch(accept, tools...)
			b.answers(r)
			for tool, n := range effects { // P1
				if n != 1 && tool != "" {
					t.Errorf("%s has run %d times", tool, n)
				}
			}
			if len(effects) != 63+1 {
				t.Errorf("%d tools have run", len(effects)-1)
			}
		})
	}
}

// stuck is a client's connection that takes nothing from a text on, until it is given up.
type stuck struct {
	*httptest.ResponseRecorder
	at      string
	reached chan struct{} // closed when it takes nothing any more
	free    chan struct{}
	once    sync.Once
	given   atomic.Bool // its write deadline has passed
}

func (s *stuck) Write(p []byte) (int, error) {
	if strings.Contains(string(p), s.at) {
		s.once.Do(func() { close(s.reached) })
		<-s.free
	}
	return s.ResponseRecorder.Write(p)
}

func (s *stuck) SetWriteDeadline(time.Time) error {
	if s.given.CompareAndSwap(false, true) {
		close(s.free)
	}
	return nil
}

// P7: a client that does not read the stream of its batch holds up none of its calls, nor who waits for them.
func TestBatchOfASlowClientHoldsUpNobody(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream %v", stream), func(t *testing.T) { batchOfASlowClient(t, stream) })
	}
}

func batchOfASlowClient(t *testing.T, stream bool) {
	others, come := make(chan struct{}), make(chan struct{})
	b := batching(t, func(_ int64, id, tool string, w http.ResponseWriter) {
		if tool == "b" {
			close(come)
			<-others
		}
		text := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%q}`, id, tool+strings.Repeat("x", 1<<20))
		if stream {
			w.Header().Set("Content-Type", "text/event-stream")
			text = "data: " + text + "\n\n"
		}
		_, _ = io.WriteString(w, text)
	})
	w := &stuck{ResponseRecorder: httptest.NewRecorder(), at: `"id":0`, reached: make(chan struct{}), free: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.serve(w, batch(events, "a k", "b l"))
	}()
	<-w.reached
	<-come
	close(others)
	one := batch(arrays, "b l")
	got := b.answers(one)[0]
	if stream {
		got = strings.TrimPrefix(got, "\n")
	}
	if !strings.Contains(got, `"result":"bxxx`) || w.given.Load() {
		t.Errorf("%.100s, after the other client was given up: %v", got, w.given.Load())
	}
	b.was(2)
	if w.given.CompareAndSwap(false, true) {
		close(w.free)
	}
	<-ended
	if all := w.Body.String(); strings.Count(all, "event: message") != 2 {
		t.Errorf("%d bytes have come", len(all))
	}
}

// ADR 0070: with settle async, too, -32603 is evidence before the outcome is recorded.
func TestInternalErrorsAreEvidenceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := batching(t, func(_ int64, id, _ string, w http.ResponseWriter) {
			_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"Internal"}}`, id)
		})
		b.config.Actions = []*guard.Action{{Name: "default", Async: true}}
		b.start()
		b.disk.takes = time.Second
		for range 2 {
			w := httptest.NewRecorder()
			b.serve(w, one("pay"))
			if !strings.Contains(w.Body.String(), "-32603") {
				t.Error(w.Body)
			}
		}
		b.was(1)
		time.Sleep(time.Minute) // for the marks of what was answered
	})
}

// ADR 0070: -32603 is evidence from its event on, before the outcome is recorded.
func TestBatchAnswersAreEvidenceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := batching(t, func(_ int64, id, _ string, w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"error\":{\"code\":-32603,\"message\":\"Internal\"}}\n\n", id)
		})
		b.disk.takes = time.Second
		go b.serve(httptest.NewRecorder(), batch(events, "pay", "mail"))
		time.Sleep(1500 * time.Millisecond) // the claims are recorded, the outcomes are not
		if got := b.answers(batch(events, "pay", "mail")); !strings.Contains(got[0], "-32603") || !strings.Contains(got[1], "-32603") {
			t.Error(got)
		}
		b.was(2)
		time.Sleep(time.Minute) // for the marks of what was answered
	})
}
