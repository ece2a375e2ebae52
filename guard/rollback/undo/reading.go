package undo

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// reading is what an answer means, or that there is none. The words of those that are
// final are recorded with the answer, so that it means the same in every life.
type reading string

// The readings.
const (
	done         reading = "done"
	pending      reading = "pending" // under way, and it can be asked for
	refused      reading = "refused"
	unauthorized reading = "unauthorized"
	changed      reading = "changed"
	disturbed    reading = "disturbed"  // somebody else wrote there at the same time
	partial      reading = "partial"    // a delegate has undone a part
	escalated    reading = "escalated"  // a delegate has left it to a person
	unexpected   reading = "unexpected" // it says nothing that is known here

	// These are not final: nothing is recorded as an answer.
	accepted reading = "accepted" // under way, and nothing tells where to ask
	busy     reading = "busy"     // not executed, later perhaps
	unclear  reading = "unclear"  // it may have been executed
	lost     reading = "lost"     // no answer
	unsent   reading = "unsent"   // no answer, and proven that not a byte was sent
	absent   reading = "absent"   // to a question: nothing has arrived
	taken    reading = "taken"    // somebody else is at it: look again
)

// final reports that the answer decides, and is recorded.
func (r reading) final() bool {
	switch r {
	case done, pending, refused, unauthorized, changed, disturbed, partial, escalated, unexpected:
		return true
	}
	return false
}

// doubtful reports that the request may have had its effect.
func (r reading) doubtful() bool { return r == unclear || r == lost || r == accepted }

// reasonOf is why something is not done whose answer is final.
func reasonOf(r reading) Reason {
	switch r {
	case refused:
		return ReasonRefused
	case unauthorized:
		return ReasonUnauthorized
	case changed, disturbed:
		return ReasonChanged
	case partial:
		return ReasonPartial
	case escalated:
		return ReasonEscalated
	default:
		return ReasonUnexpected
	}
}

// note is what is known after a request.
type note struct {
	reading reading
	status  int
	reason  Reason        // why trying again is no use, where that is so
	after   time.Duration // at least to be waited
	// location is where to ask for what is pending.
	location string
	// unknown says that this or an earlier attempt may have had its effect.
	unknown  bool
	attempts int
	before   [32]byte
	// fresh says that it was received now, and not read from the store.
	fresh bool
}

// underWay reports that an upstream has just said that it is at it: asking at once is no
// use.
func (n *note) underWay() bool { return n.fresh && (n.reading == pending || n.reading == accepted) }

// common is the reading of statuses that mean the same everywhere.
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

// declined reports a status by which a request was turned away for what it is, before
// anything was done for it (RFC 9110, sections 15.5 and 15.6; RFC 6585, section 5).
func declined(status int) bool {
	switch status {
	case http.StatusMethodNotAllowed, http.StatusLengthRequired, http.StatusRequestEntityTooLarge,
		http.StatusRequestURITooLong, http.StatusUnsupportedMediaType, http.StatusMisdirectedRequest,
		http.StatusUpgradeRequired, http.StatusRequestHeaderFieldsTooLarge, http.StatusNotImplemented:
		return true
	}
	return false
}

// noted is a note of an answer that was read. P6: what says nothing that is known here says
// nothing of the effect either, unless by its status nothing was done.
func noted(r reading, status int) note {
	return note{reading: r, unknown: r == partial || r == unexpected && !declined(status)}
}

// byContract reads the answer to a compensation or of a delegate (MicroProfile LRA).
func byContract(a *Answer, delegated bool) note {
	if a.Status == http.StatusGone {
		return note{reading: done} // unknown there is as good as done
	}
	r := common(a.Status)
	switch {
	case r == done && delegated:
		return delegateSays(a)
	case r == done && failed(word(a)):
		return note{reading: refused} // P6: a refund that was made and has failed, say
	}
	return noted(r, a.Status)
}

// word is the body of an answer, or the member `status` of it, as far as it is a word, in
// lower case.
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

// failed reports a word by which upstreams say that what was asked for has failed. To be
// canceled or rejected may be the very purpose of a compensation.
func failed(word string) bool {
	return word == "failedtocompensate" || word == "failed" || word == "error"
}

// byTarget reads the answer to what puts a state back.
func byTarget(a *Answer, method string) note {
	switch a.Status {
	case http.StatusPreconditionFailed:
		return note{reading: changed}
	case http.StatusNotFound, http.StatusGone:
		if method == http.MethodDelete {
			return note{reading: done}
		}
	}
	return noted(common(a.Status), a.Status)
}

// byStatus reads the answer to a question for what became of an undo. A 200 means done,
// but where its body, or the member `status` of it, is a word that says otherwise.
func byStatus(a *Answer, delegated bool) note {
	if a.Status == http.StatusNotFound {
		return note{reading: absent}
	}
	n := byContract(a, delegated)
	if a.Status == http.StatusGone || n.reading != done && common(a.Status) != done {
		return n
	}
	// P6: what an upstream calls its refund, say, counts for more than that it knows it.
	switch text := word(a); {
	case text == "active":
		return note{reading: absent}
	case n.reading != done:
	case underWay(text):
		return note{reading: pending}
	case text == "completing", text == "failedtocomplete": // LRA's words for what is not being undone
		return noted(unexpected, a.Status)
	}
	return n
}

// underWay reports a word for what has not ended yet.
func underWay(word string) bool {
	switch word {
	case "compensating", "pending", "processing", "in_progress", "queued", "running":
		return true
	}
	return false
}
