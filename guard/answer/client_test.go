package answer_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// client is the client's end of an answer: it notes what leaves, in order.
type client struct {
	header http.Header
	// log has "status 200", "write ..." and "flush".
	log       []string
	body      []byte
	deadlines []time.Time
	gone      bool // writes fail
}

func newClient() *client { return &client{header: http.Header{}} }

func (c *client) Header() http.Header { return c.header }

func (c *client) WriteHeader(status int) { c.log = append(c.log, "status "+strconv.Itoa(status)) }

func (c *client) Write(p []byte) (int, error) {
	if c.gone {
		return 0, errors.New("the client has left")
	}
	if len(p) <= 16 {
		c.log = append(c.log, "write "+string(p))
	}
	c.body = append(c.body, p...)
	return len(p), nil
}

func (c *client) FlushError() error {
	if c.gone {
		return errors.New("the client has left")
	}
	c.log = append(c.log, "flush")
	return nil
}

func (c *client) SetWriteDeadline(t time.Time) error {
	c.deadlines = append(c.deadlines, t)
	return nil
}

// plainClient can neither flush nor set deadlines.
type plainClient struct{ c *client }

func (p plainClient) Header() http.Header         { return p.c.Header() }
func (p plainClient) WriteHeader(status int)      { p.c.WriteHeader(status) }
func (p plainClient) Write(b []byte) (int, error) { return p.c.Write(b) }

func post() *http.Request { return httptest.NewRequest(http.MethodPost, "/", nil) }

func head() *http.Request { return httptest.NewRequest(http.MethodHead, "/", nil) }

func newWriter(w http.ResponseWriter, r *http.Request) *answer.Writer {
	to := answer.NewWriter(w, r)
	return &to
}

func newRecorder(w *answer.Writer, sink answer.Sink, marks ...answer.Field) *answer.Recorder {
	rec := answer.NewRecorder(w, sink, marks)
	return &rec
}
