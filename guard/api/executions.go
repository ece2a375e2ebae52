package api

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

const (
	headerExecutionID     = "Execution-Id"
	headerExecutionStatus = "Execution-Status"
	headerReplayed        = "Idempotent-Replayed"
)

// executionsRequest is a request about the executions that a caller has given one id. It
// executes nothing and claims no key.
type executionsRequest struct {
	*Endpoints
	*Gateway
	router.Responder
	question
	caller execution.CallerHash

	patience context.Context // ends with the time to wait, the client's disconnect, or a shutdown
}

// executions answers callers' requests about their executions. path is what follows
// problem.ExecutionsPath, still percent-encoded.
func (e *Endpoints) executions(a router.Responder, path string) error {
	q := &executionsRequest{Endpoints: e, Responder: a}
	err := q.serve(path)
	if err == nil || a.R.Context().Err() != nil {
		return err
	}
	var p *problem.Problem
	if errors.As(err, &p) {
		p.Cause = nil // only errors of the store are logged
	} else {
		p = problem.New(problem.StoreUnavailable, "The gateway's store does not answer.")
		p.Cause = err
	}
	p.Doubtful = true // the answer does not say whether the call was executed
	if p.ExecutionID = q.id; q.id != "" {
		a.W.Header().Set(headerExecutionID, q.id)
	}
	return p
}

// serve answers. Callers without a credential share their ids, and see nothing (P3).
func (q *executionsRequest) serve(path string) error {
	g, err := q.Open()
	if err != nil {
		return err
	}
	defer g.Close()
	q.Gateway = g
	who, err := q.Reader(q.R)
	if err != nil {
		return err
	}
	if who.Anonymous {
		return problem.New(router.Unauthenticated, "Send the credential that the call was made with.")
	}
	q.caller = who.Caller
	if q.question, err = parseQuestion(path, q.R.URL.RawQuery); err != nil {
		return err
	}
	var cancel context.CancelFunc
	q.patience, cancel = router.Until(q.R.Context(), q.Waits, q.wait)
	defer cancel()
	if q.output {
		return q.serveOutput()
	}
	all, err := q.settled()
	if err != nil {
		return err
	}
	return q.writeList(http.StatusOK, all)
}

// find returns the matching executions, the youngest first. It leaves out those that other
// guards or other sites recorded, because these may identify callers differently (P3).
func (q *executionsRequest) find() ([]execution.Recorded, error) {
	all, err := q.Executions.ByID(q.R.Context(), q.caller, q.id)
	if err != nil {
		return nil, err
	}
	host := strings.ToLower(q.R.Host)
	all = slices.DeleteFunc(all, func(e execution.Recorded) bool {
		return e.Record.Guard != q.Endpoints.Name || e.Record.Host != host || !q.concerns(&e)
	})
	if len(all) == 0 {
		return nil, problem.New(executionUnknown, "At this route and host, for the caller that asks.")
	}
	slices.SortFunc(all, func(a, b execution.Recorded) int {
		if c := b.Record.Created.Compare(a.Record.Created); c != 0 {
			return c
		}
		return slices.Compare(a.Key[:], b.Key[:])
	})
	return all, nil
}

// settled is find, but waits until none of the executions is running or the time is over.
func (q *executionsRequest) settled() ([]execution.Recorded, error) {
	for {
		all, err := q.find()
		if err != nil {
			return nil, err
		}
		running := slices.IndexFunc(all, func(e execution.Recorded) bool {
			return e.Status == execution.RunningHere || e.Status == execution.RunningElsewhere
		})
		if running < 0 || q.patience.Err() != nil {
			return all, nil
		}
		if err := q.await(all[running].Key); err != nil {
			return nil, err
		}
	}
}

// await waits for the end of an execution until the time is over.
func (q *executionsRequest) await(key execution.Key) error {
	err := q.Executions.Await(q.patience, key)
	if err != nil && q.patience.Err() != nil {
		return q.R.Context().Err()
	}
	return err
}

// question is the parsed request of a caller about its executions.
type question struct {
	id     string
	output bool // asks for the answer instead of the state
	wait   time.Duration

	// Filters, if the id was used more than once. Empty matches all.
	key, method, path string
}

// concerns reports whether an execution with the id matches the filters.
func (q *question) concerns(e *execution.Recorded) bool {
	return (q.key == "" || q.key == e.Key.Hex()) &&
		(q.method == "" || q.method == e.Record.Method) &&
		(q.path == "" || q.path == e.Record.Path)
}

// parseQuestion parses a path below problem.ExecutionsPath, percent-encoded, and the query.
func parseQuestion(path, query string) (question, error) {
	var q question
	name, rest, more := strings.Cut(path, "/")
	if more && rest != "output" {
		return q, router.Invalid("Below an id there is only /output. A slash that belongs to the id is written as %2F.")
	}
	q.output = more
	id, err := url.PathUnescape(name)
	if err != nil {
		return q, router.Invalid("The id is not percent-encoded correctly.")
	}
	// Quoted as in a header field, or bare. A comma does not separate ids here.
	if strings.HasPrefix(id, `"`) {
		id, err = execution.ParseID([]string{id})
	} else {
		err = execution.CheckID(id)
	}
	if err != nil {
		text := err.Error()
		return q, problem.New(problem.ExecutionIDInvalid, strings.ToUpper(text[:1])+text[1:]+".")
	}
	q.id = id
	values, err := url.ParseQuery(query)
	if err != nil {
		return q, router.Invalid("The query is not percent-encoded correctly.")
	}
	q.key, q.method, q.path = strings.ToLower(values.Get("key")), values.Get("method"), values.Get("path")
	q.wait, err = router.Params{Values: values}.Wait()
	return q, err
}

// executionsDocument lists the executions that a caller has given one id. Its members are
// an API.
type executionsDocument struct {
	ExecutionID string            `json:"execution_id"`
	Executions  []executionStatus `json:"executions"` // the youngest first
}

type executionStatus struct {
	execution.Shown
	Action string `json:"action"` // also where it is empty, and so the others
	Method string `json:"method"`
	Path   string `json:"path"`
	// Replayable says that a retry and OutputURL return the recorded answer.
	Replayable bool   `json:"replayable"`
	SafeNewKey bool   `json:"safe_new_key"`
	OutputURL  string `json:"output_url"`
}

func describeExecution(mount, id string, e *execution.Recorded) executionStatus {
	r := e.Record
	s := executionStatus{
		Shown: e.Show(), Action: r.Action, Method: r.Method, Path: r.Path,
		Replayable: e.Status == execution.Replayable, SafeNewKey: e.Status == execution.RolledBack,
		OutputURL: mount + problem.ExecutionPath(id) + "/output?key=" + e.Key.Hex(),
	}
	if e.Status != execution.RunningHere && e.Status != execution.RunningElsewhere {
		s.Deadline = time.Time{}
	}
	return s
}

// writeList answers with the states of the executions.
func (q *executionsRequest) writeList(status int, all []execution.Recorded) error {
	doc := executionsDocument{ExecutionID: q.id, Executions: make([]executionStatus, len(all))}
	mount := q.Mount(q.R)
	for i := range all {
		doc.Executions[i] = describeExecution(mount, q.id, &all[i])
	}
	return q.JSON(status, doc)
}

// serveOutput answers with the answer of the execution, as a retry of the call would; if
// several match, with their list.
func (q *executionsRequest) serveOutput() error {
	for {
		all, err := q.find()
		if err != nil {
			return err
		}
		if len(all) > 1 {
			return q.writeList(http.StatusMultipleChoices, all)
		}
		again, err := q.give(&all[0])
		if !again || err != nil {
			return err
		}
	}
}

// give answers with the result of an execution. again says that its state has changed in
// the meantime, so that the caller must look it up again.
func (q *executionsRequest) give(e *execution.Recorded) (again bool, err error) {
	switch e.Status {
	case execution.RunningHere, execution.RunningElsewhere:
		if q.patience.Err() != nil {
			return false, q.problem(problem.InProgress, "It has not answered yet.", execution.StateSending)
		}
		return q.follow(e)
	case execution.Replayable:
		return false, q.replay(e)
	case execution.ResultExpired:
		until := e.Record.Result.Expires.UTC().Format(time.RFC3339)
		return false, q.problem(problem.ResultExpired, "The result was kept until "+until+".", e.State())
	case execution.RolledBack:
		return false, q.problem(problem.RolledBack, "It was undone.", e.State())
	case execution.Doubtful:
		return false, q.problem(problem.InDoubt, "Cause: "+string(e.Record.Cause)+".", e.State())
	}
	return false, q.unavailable()
}

func (q *executionsRequest) unavailable() error {
	return q.problem(problem.ResultUnavailable, "The call was executed.", execution.StateCompleted)
}

func (q *executionsRequest) problem(k problem.Kind, detail string, state execution.State) error {
	p := problem.New(k, detail)
	p.State = state.String()
	if k == problem.InProgress || k == problem.InDoubt {
		p.StatusURL = problem.ExecutionPath(q.id)
	}
	return p
}

func (q *executionsRequest) replay(e *execution.Recorded) error {
	ctx := q.R.Context()
	result, err := q.Executions.Result(ctx, e.Key, e.Finding)
	if errors.Is(err, execution.ErrResultUnavailable) {
		return q.unavailable()
	}
	if err != nil {
		return err
	}
	sent, err := q.play(e, answer.Recorded(ctx, result),
		answer.Field{Name: headerExecutionStatus, Value: "replayed"}, answer.Field{Name: headerReplayed, Value: "true"})
	switch {
	case err == nil:
		return nil
	case sent:
		panic(http.ErrAbortHandler) // an aborted connection tells the client that the answer is incomplete
	}
	return q.unavailable()
}

// follow streams the answer of an execution that runs, here or on another node. The wait is for its
// first byte. If the answer breaks off before anything was sent, again is true and the
// caller answers with what is recorded then.
func (q *executionsRequest) follow(e *execution.Recorded) (again bool, err error) {
	flight, follower := q.Executions.Follow(e.Key, e.Finding)
	if flight == nil {
		return true, q.await(e.Key)
	}
	if follower == nil {
		select {
		case <-flight.Done():
			return true, nil
		default:
			return false, q.problem(problem.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", execution.StateSending)
		}
	}
	defer follower.Close()
	head, err := follower.Head(q.patience)
	if err != nil { // it ended without an answer, or the time is over
		return true, q.R.Context().Err()
	}
	sent, err := q.play(e, answer.Following(q.R.Context(), head, follower), answer.Field{Name: headerExecutionStatus, Value: "attached"})
	switch {
	case err == nil:
		return false, nil
	case sent:
		panic(http.ErrAbortHandler)
	}
	return true, nil
}

func (q *executionsRequest) play(e *execution.Recorded, a answer.Answer, marks ...answer.Field) (sent bool, err error) {
	a.Reader = q.Executions.Reader(q.R.Context(), e)
	w := answer.NewWriter(&outputWriter{ResponseWriter: q.W, bodiless: e.Record.Method == http.MethodHead}, q.R)
	err = answer.Play(&w, q.R, a, append(marks, answer.Field{Name: headerExecutionID, Value: q.id})...)
	return w.Sent(), err
}

// outputWriter sends an answer to a GET that was recorded for another method. It forbids
// caching (P3) and drops the Content-Length of a HEAD, whose body is not recorded.
type outputWriter struct {
	http.ResponseWriter
	bodiless bool
}

func (w *outputWriter) WriteHeader(status int) {
	h := w.Header()
	for name := range h {
		// Some caches prefer their own header field to Cache-Control.
		if strings.HasSuffix(name, "-Cache-Control") || name == "Surrogate-Control" {
			delete(h, name)
		}
	}
	router.Protect(h)
	if w.bodiless {
		h.Del("Content-Length")
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *outputWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
