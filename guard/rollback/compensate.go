package rollback

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// compensate undoes by a separate request, or by asking the agent.
func (j *job) compensate(ctx context.Context) (undoResult, error) {
	pace := j.pace(j.o.First)
	var last note // of the attempt before, in this life
	for {
		found, n, err := j.recorded(ctx, j.reads(nil))
		switch {
		case err != nil:
			return undoResult{}, err
		case n != nil:
			return j.conclude(ctx, *n)
		case found.Status == execution.RunningHere, found.Status == execution.RunningElsewhere:
			return j.result(reasonTimeout), nil
		case j.Unknown:
			cleared, err := j.clear(ctx, found, last)
			if cleared != nil || err != nil {
				return orEmpty(cleared), err
			}
		}
		if last.Reading != "" && last.Reading != taken {
			again, err := pace.wait(ctx, last.after)
			if err != nil {
				return undoResult{}, err
			}
			if !again {
				return j.late(last), nil
			}
		}
		if j.overdue() {
			return j.late(last), nil
		}
		if err := j.hashBefore(ctx, found); err != nil {
			return undoResult{}, err
		}
		out, err := j.undoing(ctx)
		if why := (requestError{}); errors.As(err, &why) {
			// P6: the effect of a call in doubt is in doubt, and no undo takes it back.
			j.Unknown = j.Unknown || why.why == reasonUnfilled && j.task.Checkpoint.Result == nil
			return j.result(why.why), nil
		}
		if err != nil {
			return undoResult{}, err
		}
		if last, err = j.attempt(ctx, found, out, j.reads(out)); err != nil {
			return undoResult{}, err
		}
		switch {
		case last.Reading.final():
			return j.conclude(ctx, last)
		case last.reason != "":
			return j.result(last.reason), nil
		}
	}
}

// hashTimeout bounds the reads of the state for its hash, before and after a compensation.
const hashTimeout = 5 * time.Second

// compensated is compensate, with the hash of the state after it (cascade Figure 12).
func (j *job) compensated(ctx context.Context) (undoResult, error) {
	r, err := j.compensate(ctx)
	if err != nil || !r.Done {
		return r, err
	}
	if r.After, err = j.hashState(ctx); err != nil {
		return undoResult{}, err // the next life finds what was done, and looks again
	}
	return r, nil
}

// hashBefore notes the hash of the state before the first attempt. It is recorded with the
// outcome; after an attempt it cannot be read any more.
func (j *job) hashBefore(ctx context.Context, found execution.Finding) (err error) {
	if j.Unknown || j.Attempts > 0 || found.Status != execution.Free || j.Before != [32]byte{} {
		return nil
	}
	j.Before, err = j.hashState(ctx)
	return err
}

// hashState is the hash of what `status` shows now, or of the target if the action restores it
// too: the state that a compensation changes, as far as it can be read; zero if it cannot. The
// error is that of ctx.
func (j *job) hashState(ctx context.Context) ([32]byte, error) {
	if j.noStateHash || j.delegated() {
		return [32]byte{}, nil
	}
	out, err := j.asking(ctx)
	if out == nil && err == nil && j.spec.Target {
		out, err = j.completeRequest(ctx, *ImageRequest(&j.call.Request))
	}
	if err != nil || out == nil {
		return [32]byte{}, ctx.Err() // what keeps it from being asked keeps no undo from being done
	}
	within, cancel := context.WithTimeout(ctx, min(hashTimeout, j.o.Timeout))
	defer cancel()
	var image *checkpoint.Image
	j.send(within, out, func(a *Answer) note {
		image = ImageOf(a)
		return note{Reading: common(a.Status)}
	})
	return j.hashOf(image), ctx.Err()
}

func orEmpty(r *undoResult) undoResult {
	if r == nil {
		return undoResult{}
	}
	return *r
}

func (j *job) delegated() bool { return j.call.Way == checkpoint.Delegate }

// reads reads answers to out by the contract.
func (j *job) reads(out *Outgoing) func(*Answer) note {
	var to Outgoing
	if out != nil {
		to = *out // the sender may change its own
	}
	read := j.proven(func(a *Answer) note { return byContract(a, j.delegated()) })
	if q, is := j.message(out); is {
		session := to.Header.Get(protocol.HeaderSession)
		read = func(a *Answer) note {
			n := byMessage(a, &q[0])
			if text, _ := q[0].TaskQuery(n.task); n.task != "" && text != nil {
				n.Reading, n.Location = pending, taskAt(session, n.task)
			}
			return n
		}
	}
	return func(a *Answer) note {
		n := read(a)
		if n.task != "" {
			return n
		}
		if n.Reading == pending {
			if n.Location = follow(&to, a.Header.Get("Location")); n.Location == "" {
				n.Reading = accepted
			}
		}
		return n
	}
}

// message reads an undo that is a message of the call's protocol.
func (j *job) message(out *Outgoing) (q []protocol.Message, is bool) {
	if j.spec.Protocol == "" || out == nil || j.delegated() {
		return q, false
	}
	path, _, _ := strings.Cut(out.URL, "?")
	return (&protocol.Rules{Protocol: j.spec.Protocol}).Parse(out.Header, path, out.Body)
}

// conclude makes the result of a final answer; for a pending one it asks.
func (j *job) conclude(ctx context.Context, n note) (undoResult, error) {
	j.take(n)
	switch n.Reading {
	case done:
		return j.done(), nil
	case pending:
	default:
		return j.result(reasonOf(n.Reading)), nil
	}
	j.Unknown = true // until it says how it has ended
	out, err := j.asking(ctx)
	read := j.proven(func(a *Answer) note { return byStatus(a, j.delegated()) })
	if session, task, is := taskIn(n.Location); is {
		out, read, err = j.askingTask(ctx, session, task)
	} else if n.Location != "" {
		out, err = j.completeRequest(ctx, Outgoing{
			Method: http.MethodGet, URL: n.Location, Delegated: j.delegated(), Participant: j.asked(PhaseExecute),
		})
	}
	if why := (requestError{}); errors.As(err, &why) {
		return j.result(why.why), nil
	}
	if err != nil {
		return undoResult{}, err
	}
	if out == nil {
		return j.result(reasonLost), nil // the store has lost where to ask
	}
	n, err = j.ask(ctx, out, n, read)
	if err != nil {
		return undoResult{}, err
	}
	return j.statusResult(n), nil
}

// statusResult is the result of a status request's answer.
func (j *job) statusResult(n note) undoResult {
	switch n.Reading {
	case done:
		j.Status = n.status
		return j.done()
	case refused, partial, undoEscalated:
		j.Unknown, j.Status = n.Unknown, n.status
		return j.result(reasonOf(n.Reading))
	case unauthorized, unexpected, absent:
		return j.result(reasonOf(n.Reading))
	}
	return j.late(n)
}

// clear asks for the outcome of an undo in doubt. Without a result it may be sent again.
func (j *job) clear(ctx context.Context, found execution.Finding, last note) (*undoResult, error) {
	out, err := j.asking(ctx)
	if why := (requestError{}); errors.As(err, &why) {
		r := j.result(why.why)
		return &r, nil
	}
	if err != nil {
		return nil, err
	}
	n := note{Reading: absent}
	if out != nil {
		if n, err = j.ask(ctx, out, last, j.proven(func(a *Answer) note { return byStatus(a, j.delegated()) })); err != nil {
			return nil, err
		}
	}
	switch n.Reading {
	case absent:
		if j.spec.OnLost == UndoEscalate {
			r := j.result(reasonLost) // nobody says that it never arrives
			return &r, nil
		}
		return nil, nil
	case done, refused, undoEscalated:
		if err := j.applied(ctx, found, n); err != nil {
			return nil, err
		}
	}
	r := j.statusResult(n)
	return &r, nil
}

// ask asks until an answer decides or the time is over, at least once. before is the note that
// made it ask.
func (j *job) ask(ctx context.Context, out *Outgoing, before note, read func(*Answer) note) (note, error) {
	pace := j.pace(j.o.Poll)
	n := before
	for asked := false; ; asked = true {
		if asked || before.underWay() {
			again, err := pace.wait(ctx, n.after)
			if err != nil || asked && !again {
				return n, err
			}
		}
		one := *out
		if one.Header = out.Header.Clone(); one.Method != http.MethodGet {
			one.Header.Set("Idempotency-Key", uuid.NewString()) // each question is another one
		}
		n, _ = j.send(ctx, &one, read)
		switch {
		case ctx.Err() != nil:
			return n, ctx.Err()
		case n.reason != "", n.Reading == absent, n.Reading.final() && n.Reading != pending:
			return n, nil
		}
	}
}

// follow is where the Location of an answer leads, in the form of Outgoing.URL; empty if that is
// another origin.
func follow(to *Outgoing, location string) string {
	at, err := url.Parse(location)
	if location == "" || strings.ContainsFunc(location, notVisible) || err != nil || at.User != nil || at.Opaque != "" {
		return ""
	}
	base, err := url.Parse(to.URL)
	if err != nil {
		return ""
	}
	next := base.ResolveReference(at)
	next.Fragment, next.RawFragment = "", ""
	if base.Host != "" {
		if next.Scheme != base.Scheme || !strings.EqualFold(next.Host, base.Host) {
			return ""
		}
		return next.String()
	}
	// The upstream of the call is known by the call's host only.
	if next.Host != "" && (!strings.EqualFold(next.Host, to.Host) || next.Scheme != "" && next.Scheme != "http" && next.Scheme != "https") {
		return ""
	}
	if next.Host == "" && next.Scheme != "" {
		return ""
	}
	uri := next.RequestURI()
	if !strings.HasPrefix(uri, "/") || strings.HasPrefix(uri, "//") {
		return ""
	}
	return uri
}

// notVisible matches what a request line must not have.
func notVisible(r rune) bool { return r <= ' ' || r > '~' }

// fieldToken is the field of an answer with its token.
const fieldToken = "Execution-Context"

// delegateSays reads a delegate's 2xx in the words of each draft: its body, and the token that
// comes with it. Done needs the word completed, or no word at all, as in the contract; an
// unreadable answer is unexpected (P6).
func delegateSays(a *Answer) note {
	if a.Cut {
		return noted(unexpected, a.Status) // what it says may stand behind the cut
	}
	body := bytes.TrimSpace(a.Body)
	var says saying
	var document report
	switch {
	case len(body) == 0:
	case repeats(body):
		says.add(unexpected) // two readers could take it for two results
	case json.Unmarshal(body, &document) == nil:
		says.hear(&document)
	case token(string(body), &document):
		says.hear(&document)
	case body[0] != '{':
		says.add(meaning(word(a)))
	}
	if says.worst == "" {
		says.worst = unexpected // it speaks, and not of this
		if len(body) == 0 {
			says.worst = done
		}
	}
	// An unverified token can make it worse, never better.
	var signed report
	if token(firstToken(a), &signed) {
		says.hear(&signed)
	}
	if document.ECT != "" && token(document.ECT, &signed) {
		says.hear(&signed)
	}
	return says.note(a.Status)
}

// signedResult reads the token of a participant that is proven, and nothing else of its answer.
func signedResult(a *Answer) note {
	var signed report
	says := saying{worst: unexpected}
	if token(firstToken(a), &signed) {
		says.worst = ""
		says.hear(&signed)
	}
	return says.note(http.StatusOK) // by its status the answer says nothing
}

// firstToken is the first token in the header of an answer.
func firstToken(a *Answer) string {
	first, _, _ := strings.Cut(a.Header.Get(fieldToken), ",")
	return strings.TrimSpace(first)
}

func (s *saying) note(status int) note {
	if s.worst == "" || s.doubt && s.worst == done {
		s.worst = unexpected // it says nothing, or contradicts itself
	}
	n := noted(s.worst, status)
	n.Unknown = n.Unknown || s.doubt
	return n
}

// report is a rollback's result in a document or token. Members that are no text are read as far
// as they exist.
type report struct {
	Action string                     `json:"exec_act"`
	ECT    string                     `json:"ect"`
	State  json.RawMessage            `json:"state"`
	Status json.RawMessage            `json:"status"`
	Effect json.RawMessage            `json:"effect"`
	Old    json.RawMessage            `json:"cascade.status"`
	Ext    map[string]json.RawMessage `json:"ext"`
	ECTExt map[string]json.RawMessage `json:"ect_ext"` // ext in the other spelling
}

// saying is what an answer has said so far.
type saying struct {
	worst reading
	doubt bool // the effect is mixed or unknown
}

func (s *saying) add(r reading) {
	if finals[r].badness > finals[s.worst].badness {
		s.worst = r
	}
}

func (s *saying) hear(r *report) {
	if string(r.State) == `"executing"` {
		s.add(pending)
	}
	switch _, act, prefixed := strings.Cut(r.Action, ":"); {
	case strings.HasSuffix(r.Action, "rollback_escalated"):
		s.add(undoEscalated)
	case r.Action == "error", prefixed && act == "error":
		s.add(unexpected)
	}
	statuses, effects := []json.RawMessage{r.Status, r.Old}, []json.RawMessage{r.Effect}
	for _, ext := range []map[string]json.RawMessage{r.Ext, r.ECTExt} {
		statuses = append(statuses, ext["cascade.status"], ext["atd.status"], ext["aerr.status"])
		effects = append(effects, ext["agent_guard.effect"])
	}
	for _, status := range statuses {
		if len(status) == 0 || string(status) == "null" {
			continue
		}
		var text string
		if json.Unmarshal(status, &text) != nil {
			s.add(unexpected)
			continue
		}
		s.add(meaning(strings.ToLower(text)))
	}
	for _, effect := range effects {
		s.doubt = s.doubt || string(effect) == `"mixed"` || string(effect) == `"unknown"`
	}
}

// meaning is the reading of a status word of the drafts (cascade 4.4.2) or of LRA.
func meaning(word string) reading {
	switch {
	case word == "completed", word == "compensated":
		return done
	case word == "executing", underWay(word):
		return pending
	case word == "escalated":
		return undoEscalated
	case word == "partial":
		return partial
	case undoFailed(word):
		return refused
	}
	return unexpected
}

// token reads the claims of a token into r, unverified.
func token(raw string, r *report) bool {
	claims := raw
	if parts := strings.Split(raw, "."); len(parts) == 3 {
		claims = parts[1]
	}
	b, err := base64.RawURLEncoding.DecodeString(claims)
	return err == nil && len(b) > 0 && json.Unmarshal(b, r) == nil
}

// repeats reports that a JSON object has a member twice, or in different case, which
// encoding/json takes for the same.
func repeats(body []byte) bool {
	if !json.Valid(body) {
		return false
	}
	object, _ := jsonx.ObjectOf(body)
	return !object.Distinct(strings.ToLower)
}

// reading is the meaning of an answer, or that there is none. Final readings are recorded with
// the answer, so that it means the same after a restart.
type reading string

// The readings.
const (
	done          reading = "done"
	pending       reading = "pending" // under way, and it can be asked for
	refused       reading = "refused"
	unauthorized  reading = "unauthorized"
	changed       reading = "changed"
	disturbed     reading = "disturbed"  // somebody else wrote there at the same time
	partial       reading = "partial"    // a delegate has undone a part
	undoEscalated reading = "escalated"  // a delegate has left it to a person
	unexpected    reading = "unexpected" // it says nothing that is known here

	// These are not final: nothing is recorded as an answer.
	accepted reading = "accepted" // under way, and no Location to ask at
	busy     reading = "busy"     // not executed, later perhaps
	unclear  reading = "unclear"  // it may have been executed
	lost     reading = "lost"     // no answer
	unsent   reading = "unsent"   // no answer, and proven that not a byte was sent
	absent   reading = "absent"   // to a question: nothing has arrived
	taken    reading = "taken"    // somebody else is at it: look again
)

// finals are the readings that decide, and are recorded: why the undo is not done, and how bad each is among the parts
// of an answer, of which the worst counts.
var finals = map[reading]struct {
	reason  Reason
	badness int
}{
	done: {"", 1}, pending: {"", 2}, undoEscalated: {reasonEscalated, 3}, refused: {ReasonRefused, 4},
	partial: {reasonPartial, 5}, unexpected: {reasonUnexpected, 6},
	unauthorized: {reason: ReasonUnauthorized}, changed: {reason: ReasonChanged}, disturbed: {reason: ReasonChanged},
}

// final reports that the answer decides.
func (r reading) final() bool { _, is := finals[r]; return is }

// doubtful reports that the request may have had its effect.
func (r reading) doubtful() bool { return r == unclear || r == lost || r == accepted }

// reasonOf is the reason for an undo that is not done, from its final answer.
func reasonOf(r reading) Reason { return cmp.Or(finals[r].reason, reasonUnexpected) }

// note is what is known after a request. What has a tag is recorded with a final answer.
type note struct {
	Reading reading `cbor:"reading"`
	status  int
	reason  Reason        // why trying again is no use, where that is so
	after   time.Duration // at least to be waited
	// Location is where to ask for what is pending.
	Location string `cbor:"location,omitempty"`
	// Unknown says that this or an earlier attempt may have had its effect.
	Unknown  bool `cbor:"unknown,omitempty"`
	Attempts int  `cbor:"attempts"`
	Before   Hash `cbor:"before,omitzero"`
	// Tag is the strong entity tag of the restored state, from the answer.
	Tag string `cbor:"tag,omitempty"`
	// fresh says that it was received now, not read from the store.
	fresh bool
	// task is the id of the task that goes on; empty without one.
	task string
	// Completion is the id of a participant's signed result in the ledger; empty without one.
	Completion string `cbor:"completion,omitempty"`
	// wantsSession says that it was not executed, and may be in a new session.
	wantsSession bool
}

// underWay reports that an upstream has just said that the undo is running, so that asking at
// once is useless.
func (n *note) underWay() bool { return n.fresh && (n.Reading == pending || n.Reading == accepted) }

// common is the reading of statuses that always mean the same.
func common(status int) reading {
	switch {
	case status == http.StatusAccepted:
		return pending
	case status >= 200 && status < 300:
		return done
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return unauthorized
	case status == http.StatusConflict:
		return refused
	case status == http.StatusTooEarly, status == http.StatusTooManyRequests:
		return busy
	case declined(status):
		return unexpected
	case status == http.StatusRequestTimeout, status >= 500 && status < 600:
		return unclear
	}
	return unexpected
}

// declined reports a status that turns a request away before anything was done for it (RFC 9110,
// sections 15.5 and 15.6; RFC 6585, section 5).
func declined(status int) bool {
	switch status {
	case http.StatusMethodNotAllowed, http.StatusLengthRequired, http.StatusRequestEntityTooLarge,
		http.StatusRequestURITooLong, http.StatusUnsupportedMediaType, http.StatusMisdirectedRequest,
		http.StatusUpgradeRequired, http.StatusRequestHeaderFieldsTooLarge, http.StatusNotImplemented:
		return true
	}
	return false
}

// noted is a note of an answer that was read. P6: an answer without a known meaning leaves the
// effect unknown, unless by its status nothing was done.
func noted(r reading, status int) note {
	return note{Reading: r, Unknown: r == partial || r == unexpected && !declined(status)}
}

// byContract reads the answer to a compensation or of a delegate (MicroProfile LRA).
func byContract(a *Answer, delegated bool) note {
	if a.Status == http.StatusGone {
		return note{Reading: done} // unknown there is as good as done
	}
	r := common(a.Status)
	switch {
	case r == done && delegated:
		return delegateSays(a)
	case r == done && undoFailed(word(a)):
		return note{Reading: refused} // P6: a refund that was made and has failed, say
	}
	return noted(r, a.Status)
}

// byMessage reads the answer to a compensation that is a message. P6: it is done only by a result that
// answers it for certain.
func byMessage(a *Answer, m *protocol.Message) note {
	if m.Batch || m.ID == nil && !m.REST {
		return noted(unexpected, a.Status) // nothing says what came of each, or of it
	}
	var o protocol.Outcome
	if coding := a.Header.Get("Content-Encoding"); coding == "" || strings.EqualFold(coding, "identity") {
		o = m.Outcome(a.Status, a.Header.Get("Content-Type"), a.Body)
	}
	switch {
	case a.Status/100 == 2:
		return said(o)
	case o.Meaning == protocol.NotExecuted:
		if r := common(a.Status); r != unexpected && r != unclear {
			return note{Reading: r}
		}
		n := turnedAway(o)
		n.wantsSession = wantsSession(m, a, o)
		return n
	case a.Status == http.StatusGone: // the address is, and not what the call did
		return noted(unexpected, a.Status)
	}
	return noted(common(a.Status), a.Status)
}

// said reads what a message of a good status says.
func said(o protocol.Outcome) note {
	switch {
	case o.Meaning == protocol.NotExecuted:
		return turnedAway(o)
	case o.Meaning != protocol.Executed:
		return note{Reading: unclear}
	case o.ToolError:
		return note{Reading: refused} // it has run, and says that it has failed
	case o.Code != 0, o.Step: // it may have done a part; nobody is here to be asked
		return note{Reading: unexpected, Unknown: true}
	}
	switch state := strings.ReplaceAll(o.State, "-", "_"); {
	case undoFailed(state), state == "rejected":
		return note{Reading: refused}
	case o.Task == "", state == "completed":
		return note{Reading: done}
	case state == "", state == "submitted", state == "working":
		return note{Reading: accepted, task: o.Task}
	}
	return note{Reading: unexpected, Unknown: true}
}

// taskAt is where a task is asked for, in the place of a Location.
func taskAt(session, task string) string { return "task:" + session + " " + task }

func taskIn(location string) (session, task string, is bool) {
	rest, is := strings.CutPrefix(location, "task:")
	session, task, _ = strings.Cut(rest, " ") // which no session has in it
	return session, task, is
}

// askingTask is the question for a task that the undo has begun, in the session where it was.
func (j *job) askingTask(ctx context.Context, session, task string) (*Outgoing, func(*Answer) note, error) {
	out, err := j.undoing(ctx)
	if err != nil {
		return nil, nil, err
	}
	q, is := j.message(out)
	if !is {
		return nil, nil, requestError{reasonUnfilled}
	}
	m := &q[0]
	text, header := m.TaskQuery(task)
	out.Body = text
	for name, value := range header {
		out.Header.Set(name, value)
	}
	if out.Header.Del(protocol.HeaderSession); session != "" {
		out.Header.Set(protocol.HeaderSession, session)
	}
	return out, func(a *Answer) note {
		switch o, known := m.TaskOutcome(task, a.Status, a.Header.Get("Content-Type"), a.Body); {
		case known:
			return said(o)
		case a.Status/100 == 2 && o.Meaning != protocol.Executed && o.Meaning != protocol.NotExecuted:
			return note{Reading: unclear}
		case a.Status/100 == 2, a.Status == http.StatusGone: // it has forgotten the task
			return note{Reading: unexpected, Unknown: true}
		}
		return noted(common(a.Status), a.Status)
	}, nil
}

// turnedAway is a message that was not executed. Another guard's refusal passes.
func turnedAway(o protocol.Outcome) note {
	if o.Status >= 500 || common(o.Status) == busy {
		return note{Reading: busy}
	}
	return note{Reading: unexpected}
}

// word is the body of an answer, or its member `status`, if that is a word, in lower case.
func word(a *Answer) string {
	var text string
	var object struct {
		Status json.RawMessage `json:"status"` // decoded only as far as it is a word
	}
	switch {
	case json.Unmarshal(a.Body, &text) == nil:
	case json.Unmarshal(a.Body, &object) == nil && json.Unmarshal(object.Status, &text) == nil:
	case len(a.Body) <= longestWord:
		text = string(a.Body)
	}
	if len(text) > longestWord {
		return ""
	}
	return strings.ToLower(strings.TrimSpace(text))
}

const longestWord = 64

// undoFailed reports a word for failure. Canceled and rejected may be the very purpose of a
// compensation.
func undoFailed(word string) bool {
	return word == "failedtocompensate" || word == "failed" || word == "error"
}

// byTarget reads the answer to a request that restores a state.
func byTarget(a *Answer, method string) note {
	switch a.Status {
	case http.StatusPreconditionFailed:
		return note{Reading: changed}
	case http.StatusNotFound, http.StatusGone:
		if method == http.MethodDelete {
			return note{Reading: done}
		}
	}
	n := noted(common(a.Status), a.Status)
	if n.Reading == done { // RFC 9110, section 8.8.3: of what it has made
		n.Tag = strong(a.Header.Get("ETag"))
	}
	return n
}

// byStatus reads the answer to a status request. A 200 means done, unless its body, or the member
// `status`, is a word that says otherwise.
func byStatus(a *Answer, delegated bool) note {
	if a.Status == http.StatusNotFound {
		return note{Reading: absent}
	}
	n := byContract(a, delegated)
	if a.Status == http.StatusGone || n.Reading != done && common(a.Status) != done {
		return n
	}
	// P6: the status of a refund, say, counts for more than that the upstream knows it.
	switch text := word(a); {
	case text == "active":
		return note{Reading: absent}
	case n.Reading != done:
	case underWay(text):
		return note{Reading: pending}
	case text == "completing", text == "failedtocomplete": // LRA's words for what is not being undone
		return noted(unexpected, a.Status)
	}
	return n
}

// underWay reports a word for something that has not ended.
func underWay(word string) bool {
	switch word {
	case "compensating", "pending", "processing", "in_progress", "queued", "running":
		return true
	}
	return false
}

// opening opens a session of MCP.
const opening = `{"jsonrpc":"2.0","id":"initialize","method":"initialize","params":{"protocolVersion":%q,"capabilities":{},` +
	`"clientInfo":{"name":"caddy-agent-guard","version":"1"}}}`

// Revisions of MCP: the newest one with sessions, which is offered, and the first one without.
const (
	withSessions    = "2025-11-25"
	withoutSessions = "2026-07-28"
)

// wantsSession reports that a server of MCP has turned a message away that it may take in another
// session: the one of the call that is undone has ended, or the configuration names none.
func wantsSession(m *protocol.Message, a *Answer, o protocol.Outcome) bool {
	return m.Protocol == protocol.MCP && m.Version < withoutSessions && m.Method != "initialize" &&
		o.Meaning == protocol.NotExecuted && (a.Status == http.StatusBadRequest || a.Status == http.StatusNotFound)
}

// inNewSession sends an undo in a session of its own, after it was turned away with before. P1: it was
// not executed then. What a busy server refuses here is tried later. end ends the session.
func (j *job) inNewSession(ctx context.Context, out *Outgoing, before note, read func(*Answer) note) (n note, cause execution.Cause, end func()) {
	own := *out
	own.Header = out.Header.Clone()
	own.Header.Del(protocol.HeaderSession)
	own.Header.Del(protocol.HeaderVersion)
	send := func(method, body string, limit time.Duration, read func(*Answer) note) reading {
		one := own
		one.Method, one.Body, one.Header = method, []byte(body), own.Header.Clone()
		one.Header.Set("Idempotency-Key", uuid.NewString()) // each session is another one
		within, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		n, _ := j.send(within, &one, read)
		return n.Reading
	}
	end = func() {}
	before.wantsSession = false
	later := note{Reading: busy, status: before.status, after: before.after}
	hello := fmt.Sprintf(opening, cmp.Or(out.Header.Get(protocol.HeaderVersion), withSessions))
	q, _ := (&protocol.Rules{Protocol: protocol.MCP}).Parse(own.Header, "/", []byte(hello)) // it is one
	begun := send(http.MethodPost, hello, j.o.Timeout/2, func(a *Answer) note {
		n := byMessage(a, &q[0])
		if n.Reading == done {
			if id := a.Header.Get(protocol.HeaderSession); id != "" {
				own.Header.Set(protocol.HeaderSession, id)
			}
			if v := q[0].Outcome(a.Status, a.Header.Get("Content-Type"), a.Body).Version; v != "" {
				own.Header.Set(protocol.HeaderVersion, v)
			}
		}
		return n
	})
	session := own.Header.Get(protocol.HeaderSession)
	switch {
	case begun != done && begun.final(), begun == done && session == out.Header.Get(protocol.HeaderSession):
		return before, execution.CauseStatus, end // there is no session to be had
	case begun != done:
		return later, execution.CauseStatus, end
	case session != "":
		end = func() { send(http.MethodDelete, "", hashTimeout, func(*Answer) note { return note{} }) }
	}
	ready := send(http.MethodPost, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, j.o.Timeout/2, func(a *Answer) note {
		return note{Reading: common(a.Status)}
	})
	if ready != done && ready != pending {
		return later, execution.CauseStatus, end
	}
	j.Attempts++ // the one before
	again := own
	again.Header = own.Header.Clone()
	n, cause = j.send(ctx, &again, read)
	if _, task, is := taskIn(n.Location); is {
		n.Location = taskAt(session, task)
	}
	return n, cause, end
}
