package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
)

// restEffect is a line of the lab's ledger: something that has happened.
type restEffect struct {
	N    int    `json:"n"`
	What string `json:"what"` // created, changed, deleted, charged, refunded, asked, undone
	Of   string `json:"of"`   // a path, or the id of a charge
	Key  string `json:"key,omitempty"`
}

// record writes what is about to happen into the ledger: it is on disk when record returns.
// Under the lab's lock.
func (l *restLab) record(c *restCall, what, of string) {
	l.effects++
	e := restEffect{l.effects, what, of, c.header.Get("Idempotency-Key")}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = l.ledger.Write(append(line, '\n'))
	}
	if err == nil {
		err = l.ledger.Sync()
	}
	if err != nil {
		panic(err)
	}
	if l.seen != nil {
		l.seen(e)
	}
}

// ledgerEffects reads the ledger from its file.
func (l *restLab) ledgerEffects() (all []restEffect) {
	l.t.Helper()
	text, err := os.ReadFile(l.path)
	if err != nil {
		l.t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var e restEffect
		if err := json.Unmarshal(line, &e); err != nil || e.N != len(all)+1 {
			l.t.Fatalf("line %d of the ledger is %q (%v)", len(all)+1, line, err)
		}
		all = append(all, e)
	}
	return all
}

// audit fails where one key has led to two effects (P1).
func (l *restLab) audit() {
	l.t.Helper()
	seen := map[string]restEffect{}
	for _, e := range l.ledgerEffects() {
		if e.Key == "" {
			continue
		}
		if before, twice := seen[e.Key]; twice {
			l.t.Errorf("P1: %q has led to %+v and to %+v", e.Key, before, e)
		}
		seen[e.Key] = e
	}
}

// effectsOn is how often something has happened to a thing.
func (l *restLab) effectsOn(what, of string) (n int) {
	l.t.Helper()
	for _, e := range l.ledgerEffects() {
		if e.What == what && e.Of == of {
			n++
		}
	}
	return n
}

// wantEffects checks what has happened, in its order: "charged ch_1".
func (l *restLab) wantEffects(want ...string) {
	l.t.Helper()
	var got []string
	for _, e := range l.ledgerEffects() {
		got = append(got, e.What+" "+e.Of)
	}
	if !slices.Equal(got, want) {
		l.t.Errorf("the service has seen\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// charge takes money. Under the lab's lock.
func (c *restCall) charge() restAnswer {
	charge := &restCharge{ID: fmt.Sprintf("ch_%d", len(c.lab.charges)+1), State: "open"}
	if err := json.Unmarshal([]byte(c.body), charge); err != nil {
		return restAnswer{status: http.StatusBadRequest}
	}
	c.lab.record(c, "charged", charge.ID)
	c.lab.charges[charge.ID] = charge
	return restJSON(http.StatusCreated, charge)
}

// refund gives money back. Under the lab's lock.
func (c *restCall) refund() restAnswer {
	var asked struct{ Charge string }
	if err := json.Unmarshal([]byte(c.body), &asked); err != nil {
		return restAnswer{status: http.StatusBadRequest}
	}
	charge := c.lab.charges[asked.Charge]
	if charge == nil {
		return restAnswer{status: http.StatusUnprocessableEntity, body: `{"error":"no such charge"}`}
	}
	return c.once("refunded", charge.ID, func() restAnswer {
		if charge.State == "refunded" {
			return restAnswer{status: http.StatusConflict, body: `{"error":"refunded already"}`}
		}
		charge.State = "refunded"
		return restAnswer{status: http.StatusOK, body: `{"refunded":"` + charge.ID + `"}`}
	})
}

// refunded says whether a charge was refunded. Under the lab's lock.
func (c *restCall) refunded(charge string) restAnswer {
	if known := c.lab.charges[charge]; known != nil && known.State == "refunded" {
		return restAnswer{status: http.StatusOK, body: `{"refunded":"` + charge + `"}`}
	}
	return restAnswer{status: http.StatusNotFound, body: `{"error":"no such refund"}`}
}

// once does something for an Idempotency-Key; it repeats its answer. Under the lab's lock.
func (c *restCall) once(what, of string, do func() restAnswer) restAnswer {
	key := c.header.Get("Idempotency-Key")
	if key == "" {
		return restAnswer{status: http.StatusBadRequest, body: `{"error":"no Idempotency-Key"}`}
	}
	if done, ok := c.lab.done[key]; ok {
		return done
	}
	answer := do()
	if answer.status < 300 {
		c.lab.record(c, what, of)
		c.lab.done[key] = answer
	}
	return answer
}

func restJSON(status int, v any) restAnswer {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return restAnswer{status: status, body: string(text)}
}

// restSays answers and does nothing.
func restSays(status int, body string, header ...string) func(*restCall) {
	return func(c *restCall) { c.say(restAnswer{status, fields(header), body}) }
}

// restDoes does what is asked for and answers something else.
func restDoes(status int, body string, header ...string) func(*restCall) {
	return func(c *restCall) {
		c.act()
		c.say(restAnswer{status, fields(header), body})
	}
}

// restLoses does what is asked for and breaks the connection.
func restLoses(c *restCall) {
	c.act()
	reset(c.w, nil)
}

// restDrops breaks the connection and does nothing.
func restDrops(c *restCall) { reset(c.w, nil) }

// restWaits waits at the gate before it does anything.
func restWaits(g *gate) func(*restCall) {
	return func(c *restCall) {
		g.pass()
		c.usual()
	}
}

func fields(pairs []string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}
