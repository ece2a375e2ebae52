package admin

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// defaultPage is the size of a page if the request names none.
const defaultPage = 50

func listExecutions(q *request) (any, error) {
	ctx := q.Context()
	now, err := q.Now(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	filter, after, limit := q.filter(now), q.one("after"), q.limit()
	if err := q.done(); err != nil {
		return nil, err
	}
	if forms := (&names{st: q}).forms(ctx, filter.Workflow); len(forms) > 1 {
		filter.OrWorkflows = forms[1:]
	}
	if err := narrow(ctx, q, &filter); err != nil {
		return nil, err
	}
	found, err := q.Executions().List(ctx, filter, after, limit)
	if err != nil {
		return nil, err
	}
	page := Page{Executions: make([]Execution, 0, len(found.Executions)), Next: found.Next}
	for i := range found.Executions {
		page.Executions = append(page.Executions, view(&found.Executions[i], now))
	}
	return page, nil
}

// narrow limits the search for a checkpoint's execution to the time of its claim, if the
// checkpoint store knows it. Otherwise all records would be searched.
func narrow(ctx context.Context, st Store, f *execution.Filter) error {
	if f.Checkpoint == "" || f.Method == rollback.Method {
		return nil
	}
	f.NotMethod = rollback.Method // its undos have the checkpoint's id too
	_, _, record, err := callOf(ctx, st, f.Checkpoint)
	if errors.Is(err, execution.ErrUnknown) || err == nil && record == nil {
		return nil
	}
	if err != nil {
		return err
	}
	if at := record.Created; at.After(f.From) {
		f.From = at
	}
	if end := record.Created.Add(1); f.To.IsZero() || end.Before(f.To) {
		f.To = end
	}
	return nil
}

// showExecution answers GET executions/{key}, which may also be the id of a checkpoint or
// an execution.
func showExecution(q *request) (any, error) {
	key, err := find(q.Context(), q, q.name)
	if err != nil {
		return nil, err
	}
	return readExecution(q.Context(), q, key)
}

// readExecution reads what operators may see of an execution. A free key still has its
// resolutions.
func readExecution(ctx context.Context, st Store, key execution.Key) (*Execution, error) {
	now, err := st.Now(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	x := Execution{Shown: execution.Shown{Key: key.Hex(), State: StateFree}}
	found, err := st.Executions().Get(ctx, key)
	switch {
	case err == nil:
		x = view(&found, now)
		x.Workflow = workflowID(ctx, st, found.Record)
	case !errors.Is(err, execution.ErrUnknown):
		return nil, err
	}
	decided, decidedErr := st.Executions().Resolutions(ctx, key)
	if decidedErr != nil {
		return nil, decidedErr
	}
	if err != nil && len(decided) == 0 {
		return nil, err
	}
	for i := range decided {
		decided[i].At = decided[i].At.UTC()
	}
	x.Resolutions = decided
	return &x, nil
}

// workflowID returns the UUID of an execution's workflow; empty if the execution has no token.
func workflowID(ctx context.Context, st Store, record *execution.Record) string {
	if record.Checkpoint == "" {
		return "" // no token contains it
	}
	id := evidence.WorkflowID(record.Workflow)
	if call, _, _, err := callOf(ctx, st, record.Checkpoint); err == nil && call.Workflow != "" {
		id = call.Workflow
	}
	return id
}

// unavailable returns the answer to an error of the store itself.
func unavailable(err error) error {
	return refuse(http.StatusServiceUnavailable, "the store is unavailable: %v", err)
}

// StateFree is the state of a key without a record.
const StateFree = "free"

// Page is a page of executions. Its members are an API.
type Page struct {
	// Executions are sorted by age, the youngest first.
	Executions []Execution `json:"executions"`
	// Next is the value of `after` for the next page; empty after the last page. A page
	// that is not full, even an empty one, may have a next one.
	Next string `json:"next,omitempty"`
}

// Execution describes one execution to operators. Its members are an API.
type Execution struct {
	execution.Shown
	// Detail refines State: running_here, running_elsewhere, replayable, result_expired or
	// result_unavailable.
	Detail string `json:"detail,omitempty"`
	// ExecutionID is the caller's id for the execution, cut to 255 bytes.
	ExecutionID string `json:"execution_id,omitempty"`
	// Origin is the origin of the id: given, minted or derived.
	Origin string `json:"origin,omitempty"`
	// Guard is the guard's configured name.
	Guard string `json:"guard,omitempty"`
	// Host is the call's host.
	Host string `json:"host,omitempty"`
	// Caller is the keyed hash of the caller, in hexadecimal.
	Caller string `json:"caller,omitempty"`
	// Workflow is the UUID of the workflow in tokens, rollbacks and escalations. Lists leave it out.
	Workflow string `json:"workflow,omitempty"`
	// Checkpoint is the id of the call's checkpoint, with which it is rolled back; empty
	// without an identity.
	Checkpoint string `json:"checkpoint,omitempty"`
	// Age is the time since Created, in seconds.
	Age int64 `json:"age"`
	// Node is the gateway that executed the call.
	Node string `json:"node,omitempty"`
	// Result describes the recorded answer of a completed execution.
	Result *Result `json:"result,omitempty"`
	// KeyExpires is when the key of a completed execution becomes free.
	KeyExpires time.Time `json:"key_expires,omitzero"`
	// Resolutions are the decisions of operators, the oldest first. Lists leave them out.
	Resolutions []execution.Resolution `json:"resolutions,omitempty"`
}

// Result describes a recorded answer. Its members are an API.
type Result struct {
	execution.ShownResult
	// Size is the size in the store, in bytes.
	Size int64 `json:"size"`
	// Replayable says that a retry would get the answer now.
	Replayable bool `json:"replayable"`
}

// view describes r to operators.
func view(r *execution.Recorded, now time.Time) Execution {
	record := r.Record
	x := Execution{
		Shown: r.Show(), Detail: details[r.Status], ExecutionID: record.ID, Origin: origins[record.Origin],
		Guard: record.Guard, Host: record.Host, Caller: hex.EncodeToString(record.Caller[:]), Checkpoint: record.Checkpoint,
		Age: age(now, record.Created), Node: record.Node,
	}
	if shown := x.Shown.Result; shown != nil {
		kept := record.Result
		x.Result = &Result{*shown, kept.Size + int64(len(kept.Inline)), r.Status == execution.Replayable}
		x.Result.Expires = kept.Expires.UTC()
		x.KeyExpires = record.Settled.Add(record.KeepKey).UTC()
	}
	return x
}

// details are what statuses say beyond the state.
var details = map[execution.Status]string{
	execution.RunningHere: "running_here", execution.RunningElsewhere: "running_elsewhere", execution.Replayable: "replayable",
	execution.ResultExpired: "result_expired", execution.ResultUnavailable: "result_unavailable",
}

// origins are the origins of ids.
var origins = map[execution.Origin]string{
	execution.OriginGiven: "given", execution.OriginMinted: "minted", execution.OriginDerived: "derived",
}

// maxSought is how many pages are searched for an execution without an index. A page reads
// a few thousand records.
const maxSought = 20

// find returns the key of the execution that an operator names: by the key or its first
// digits, by its checkpoint, or by the caller's id if that is unique.
func find(ctx context.Context, st Store, name string) (execution.Key, error) {
	key, err := st.Executions().Expand(ctx, name)
	if err == nil || !errors.Is(err, execution.ErrUnknown) && !errors.Is(err, execution.ErrKeyForm) {
		return key, err
	}
	if id, ok := checkpointID(name); ok {
		if key, err = ofCheckpoint(ctx, st, id); errors.Is(err, execution.ErrUnknown) {
			key, err = sought(ctx, st, execution.Filter{Checkpoint: id, NotMethod: rollback.Method})
		}
		if !errors.Is(err, execution.ErrUnknown) {
			return key, err
		}
	}
	key, err = sought(ctx, st, execution.Filter{ID: name})
	if errors.Is(err, execution.ErrUnknown) {
		err = refuse(http.StatusNotFound,
			"no such execution: neither a key that begins like this, nor a whole checkpoint or execution id, is %.80q", name)
	}
	return key, err
}

// checkpointID returns the id of a checkpoint as recorded; false if the form is wrong.
func checkpointID(text string) (string, bool) {
	id, err := uuid.Parse(text)
	return id.String(), err == nil && len(text) == len(id.String())
}

// ofCheckpoint returns the key of a checkpoint's call, if the checkpoint store still has
// the checkpoint and the key still belongs to that call; else guard.ErrUnknown.
func ofCheckpoint(ctx context.Context, st Store, id string) (execution.Key, error) {
	call, _, record, err := callOf(ctx, st, id)
	switch {
	case err != nil:
		return execution.Key{}, err
	case record == nil:
		return execution.Key{}, execution.ErrUnknown
	}
	return call.Execution, nil
}

// callOf returns a checkpoint's stored data and the record of its execution, which is nil
// if the key is free or belongs to another call. The error is guard.ErrUnknown if the
// checkpoint cannot be read.
func callOf(ctx context.Context, st Store, id string) (*checkpoint.Snapshot, *checkpoint.Result, *execution.Record, error) {
	checkpoints := st.Checkpoints()
	if checkpoints == nil {
		return nil, nil, nil, execution.ErrUnknown
	}
	call, result, err := checkpoints.Peek(ctx, id)
	switch {
	case errors.Is(err, checkpoint.ErrStore):
		return nil, nil, nil, unavailable(err)
	case err != nil:
		return nil, nil, nil, execution.ErrUnknown
	}
	found, err := st.Executions().Get(ctx, call.Execution)
	switch {
	case errors.Is(err, execution.ErrUnknown):
	case err != nil:
		return nil, nil, nil, err
	case found.Record.Announced(id):
		return call, result, found.Record, nil
	}
	return call, result, nil, nil
}

// sought returns the key of the only execution that passes a filter without an index. The
// error says that there are too many executions to be sure that it is the only one.
func sought(ctx context.Context, st Store, f execution.Filter) (execution.Key, error) {
	var found []execution.Recorded
	after := ""
	for range maxSought {
		page, err := st.Executions().List(ctx, f, after, 2)
		if err != nil {
			return execution.Key{}, err
		}
		found = append(found, page.Executions...)
		if after = page.Next; after == "" || len(found) > 1 {
			break
		}
	}
	switch {
	case len(found) > 1:
		return execution.Key{}, refuse(http.StatusBadRequest, "several executions have this id, such as %s; give a key", describe(found))
	case after != "" && len(found) == 1:
		return execution.Key{}, refuse(http.StatusBadRequest,
			"there are too many executions to say that no older one has this id too; the youngest that has it is %s: give its key", describe(found))
	case after != "":
		return execution.Key{}, refuse(http.StatusBadRequest,
			"there are too many executions to look through here, and the youngest do not have it; executions?id= goes through all, page by page")
	case len(found) == 0:
		return execution.Key{}, execution.ErrUnknown
	}
	return found[0].Key, nil
}

// describe lists executions for an error message, so that one can be chosen.
func describe(all []execution.Recorded) string {
	var words []string
	for i := range all {
		record := all[i].Record
		words = append(words, fmt.Sprintf("%s (%s %s)", all[i].Key, record.Method, record.Path))
	}
	return strings.Join(words, " and ")
}

// Executions have the caller's name of a workflow. Tokens, rollbacks and escalations have a
// UUID, which is derived from a name that is no UUID. Operators may use either.

// maxNamed is how many checkpoints of a workflow are searched for its name.
const maxNamed = 20

// names looks up callers' names of workflows, each once.
type names struct {
	st    Store
	known map[string]string
}

// of returns the caller's name of the workflow with a UUID; empty if that is the name, or
// if no name is recorded any more. checkpoint belongs to the workflow and may be empty.
func (n *names) of(ctx context.Context, workflow, checkpoint string) string {
	if workflow == "" {
		return ""
	}
	name, looked := n.known[workflow]
	if name == "" && checkpoint != "" {
		name = n.by(ctx, workflow, checkpoint)
	}
	if name == "" && !looked {
		name = n.inLedger(ctx, workflow)
	}
	if n.known == nil {
		n.known = map[string]string{}
	}
	n.known[workflow] = name
	return name
}

// by reads the name from the execution of a checkpoint.
func (n *names) by(ctx context.Context, workflow, checkpoint string) string {
	_, _, record, err := callOf(ctx, n.st, checkpoint)
	if err != nil || record == nil || record.Workflow == workflow {
		return ""
	}
	if named := record.Workflow; evidence.WorkflowID(named) == workflow || evidence.NamedWorkflowID(named) == workflow {
		return named
	}
	return ""
}

// inLedger reads the name from the workflow's checkpoints in the ledger.
func (n *names) inLedger(ctx context.Context, workflow string) string {
	l := n.st.Ledger()
	if l == nil || l.Log == nil {
		return ""
	}
	page, err := l.Log.List(ctx, workflow, "", ledger.MaxPage)
	if err != nil {
		return "" // only the name would be missing
	}
	looked := 0
	for i := range page.Entries {
		e := &page.Entries[i]
		if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint {
			continue
		}
		if name := n.by(ctx, workflow, e.ID); name != "" {
			return name
		}
		if looked++; looked == maxNamed {
			break
		}
	}
	return ""
}

// forms returns the names under which a workflow may be recorded, the given one first.
func (n *names) forms(ctx context.Context, given string) []string {
	if given == "" {
		return nil
	}
	all := []string{given}
	for _, form := range []string{evidence.WorkflowID(given), evidence.NamedWorkflowID(given), n.of(ctx, given, "")} {
		if form != "" && form != all[len(all)-1] && form != given {
			all = append(all, form)
		}
	}
	return all
}

// The decisions about an execution in doubt.
const (
	// DecisionApplied: the call was executed.
	DecisionApplied = "applied"
	// DecisionNotApplied: the call was not executed, and cannot be any more.
	DecisionNotApplied = "not_applied"
)

// Decision is the body of POST executions/{key}/resolve.
type Decision struct {
	// Decision is applied or not_applied.
	Decision string `json:"decision"`
	// Operator is the name of the operator, at most 256 bytes. It is recorded and logged.
	Operator string `json:"operator"`
	// Reason is the operator's evidence, at most 1,024 bytes. It is recorded and logged.
	Reason string `json:"reason"`
	// Result is the answer that retries get from now on, with applied only. Without one
	// they learn that the call was executed and its answer is unavailable.
	Result *Answer `json:"result,omitempty"`
}

// maxDecision bounds a request, in bytes: a body of 256 KiB in its longest JSON encoding,
// and the rest.
const maxDecision = 2 << 20

func resolveExecution(q *request) (any, error) {
	ctx := q.Context()
	var d Decision
	if err := d.read(q.Body); err != nil {
		return nil, err
	}
	head, body, err := d.check()
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "%v", err)
	}
	key, err := find(ctx, q, q.name)
	if err != nil {
		return nil, err
	}
	found, err := q.Executions().Get(ctx, key)
	if err != nil {
		return nil, err
	}
	if found.Status != execution.Doubtful {
		return nil, refuse(http.StatusConflict, "the execution is not in doubt: it is %s", found.State())
	}
	decided := execution.Resolution{
		By: execution.ByOperator, Applied: d.Decision == DecisionApplied, Answer: head, Body: body,
		Operator: d.Operator, Reason: d.Reason,
	}
	evidence := q.Evidence(ctx, key, found.Record, decided)
	if err := q.Executions().SettleDoubt(ctx, found, decided, evidence); err != nil {
		return nil, err
	}
	q.Resolved(key, found.Record, decided)
	return readExecution(ctx, q, key)
}

// read decodes strictly: a misspelled member must not be ignored.
func (d *Decision) read(from io.Reader) error {
	text, err := io.ReadAll(io.LimitReader(from, maxDecision+1))
	switch {
	case err != nil:
		return refuse(http.StatusBadRequest, "reading the request: %v", err)
	case len(text) > maxDecision:
		return refuse(http.StatusRequestEntityTooLarge, "the request has more than %d bytes", maxDecision)
	case !utf8.Valid(text):
		return refuse(http.StatusBadRequest, "the request is not UTF-8; give a body that is none in body_base64")
	}
	switch err := decode(bytes.NewReader(text), maxDecision, d); {
	case errors.Is(err, jsonx.ErrTrailing):
		return refuse(http.StatusBadRequest, "something stands behind the decision")
	case err != nil:
		return refuse(http.StatusBadRequest, "the request is no decision: %v", err)
	}
	return nil
}

// check returns the answer in d, if there is one.
func (d *Decision) check() (*execution.Head, []byte, error) {
	switch {
	case d.Decision != DecisionApplied && d.Decision != DecisionNotApplied:
		return nil, nil, fmt.Errorf("decision: %q is unknown; use %s or %s", d.Decision, DecisionApplied, DecisionNotApplied)
	case d.Operator == "":
		return nil, nil, errors.New("operator: who decides must be named")
	case d.Reason == "":
		return nil, nil, errors.New("reason: say what you have found out, and where")
	case d.Result == nil:
		return nil, nil, nil
	case d.Decision == DecisionNotApplied:
		return nil, nil, errors.New("result: what was not applied has none; its key becomes free, and a retry runs")
	}
	head, body, err := d.Result.read()
	if err != nil {
		return nil, nil, fmt.Errorf("result: %w", err)
	}
	return head, body, nil
}

// Answer is an answer that an operator supplies for a lost one.
type Answer struct {
	// Status is from 200 to 599.
	Status int `json:"status"`
	// Header has the header fields with their values.
	Header map[string][]string `json:"header,omitempty"`
	// Body is the body as text: at most 256 KiB.
	Body string `json:"body,omitempty"`
	// BodyBase64 is the body in base64, if it is not text.
	BodyBase64 string `json:"body_base64,omitempty"`
}

// read checks that the answer can be sent.
func (a *Answer) read() (*execution.Head, []byte, error) {
	if a.Status < 200 || a.Status > 599 {
		return nil, nil, fmt.Errorf("status: %d is no final status; use 200 to 599", a.Status)
	}
	body := []byte(a.Body)
	if a.BodyBase64 != "" {
		if a.Body != "" {
			return nil, nil, errors.New("give either body or body_base64, not both")
		}
		var err error
		if body, err = base64.StdEncoding.DecodeString(a.BodyBase64); err != nil {
			return nil, nil, fmt.Errorf("body_base64: %w", err)
		}
	}
	if len(body) > 0 && (a.Status == http.StatusNoContent || a.Status == http.StatusNotModified) {
		return nil, nil, fmt.Errorf("body: an answer with the status %d has none", a.Status)
	}
	header, err := a.fields(len(body))
	if err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}
	return &execution.Head{Status: a.Status, Header: header}, body, nil
}

// fields returns the header with canonical names.
func (a *Answer) fields(length int) (map[string][]string, error) {
	header := make(http.Header, len(a.Header))
	for _, name := range slices.Sorted(maps.Keys(a.Header)) {
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("%q is no name of a header field", name)
		}
		canonical := textproto.CanonicalMIMEHeaderKey(name)
		if header[canonical] != nil {
			return nil, fmt.Errorf("%s stands twice; give one name all its values", canonical)
		}
		values := a.Header[name]
		if len(values) == 0 {
			return nil, fmt.Errorf("%s has no values; leave it out", canonical)
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) {
				return nil, fmt.Errorf("%s has a value with a control character", canonical)
			}
		}
		header[canonical] = values
	}
	for _, name := range []string{"Content-Encoding", "Trailer"} {
		if header[name] != nil {
			return nil, fmt.Errorf("%s: give the plain body, without it", name)
		}
	}
	if values := header["Content-Length"]; values != nil && !slices.Equal(values, []string{strconv.Itoa(length)}) {
		return nil, fmt.Errorf("Content-Length: the body has %d bytes; leave it out", length)
	}
	replayable := answer.Replayable(header)
	for _, name := range slices.Sorted(maps.Keys(header)) {
		if _, ok := replayable[name]; !ok {
			return nil, fmt.Errorf("%s is never replayed; leave it out", name)
		}
	}
	return replayable, nil
}
