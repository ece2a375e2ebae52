package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// client is one connection.
type client struct {
	job  *Job
	conn net.Conn
	in   *bufio.Reader
	out  wire
	took []time.Duration
}

func dial(ctx context.Context, j *Job) (*client, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", j.Addr)
	if err != nil {
		return nil, err
	}
	return &client{job: j, conn: conn, in: bufio.NewReaderSize(conn, 4<<10), out: j.Request.wire(j.Addr)}, nil
}

// first makes the request that is not measured.
func (c *client) first() error {
	if err := c.conn.SetDeadline(time.Now().Add(patience + c.job.longest())); err != nil {
		return err
	}
	return c.call(c.job.Line)
}

// repeat makes requests until the round is over. begun counts those of all connections.
func (c *client) repeat(start time.Time, begun *atomic.Int64) error {
	begin := time.Now()
	for !c.job.over(begin.Sub(start), int(begun.Add(1))) {
		if err := c.call(""); err != nil {
			return err
		}
		now := time.Now()
		c.took = append(c.took, now.Sub(begin))
		begin = now
	}
	return nil
}

// call makes one request and reads its answer, which must have the line, if any.
func (c *client) call(line string) error {
	if _, err := c.conn.Write(c.out.next()); err != nil {
		return err
	}
	status, length, found, err := c.head(line)
	if err != nil {
		return err
	}
	if status != c.job.Status {
		body, _ := io.ReadAll(io.LimitReader(c.in, max(min(length, 500), 0)))
		return fmt.Errorf("answered %d instead of %d: %s", status, c.job.Status, body)
	}
	if !found {
		return fmt.Errorf("the answer has no line %q", line)
	}
	if length < 0 {
		return errors.New("the answer has no Content-Length")
	}
	_, err = c.in.Discard(int(length))
	return err
}

var contentLength = []byte("Content-Length: ")

// head reads the header of an answer.
func (c *client) head(line string) (status int, length int64, found bool, err error) {
	length, found = -1, line == ""
	for {
		l, err := c.in.ReadSlice('\n')
		if err != nil {
			return 0, 0, false, err
		}
		l = bytes.TrimRight(l, "\r\n")
		switch {
		case status == 0:
			if len(l) < 12 || !bytes.HasPrefix(l, []byte("HTTP/1.")) {
				return 0, 0, false, fmt.Errorf("not an answer: %q", l)
			}
			if status, err = strconv.Atoi(string(l[9:12])); err != nil {
				return 0, 0, false, err
			}
		case len(l) == 0:
			return status, length, found, nil
		case len(l) > len(contentLength) && bytes.EqualFold(l[:len(contentLength)], contentLength):
			if length, err = strconv.ParseInt(string(l[len(contentLength):]), 10, 64); err != nil {
				return 0, 0, false, err
			}
		case !found:
			found = bytes.EqualFold(l, []byte(line))
		}
	}
}
