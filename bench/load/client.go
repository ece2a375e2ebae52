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

func dial(ctx context.Context, j *Job, number int) (*client, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", j.Addr)
	if err != nil {
		return nil, err
	}
	return &client{job: j, conn: conn, in: bufio.NewReaderSize(conn, 4<<10), out: j.Request.wire(j.Addr, number)}, nil
}

// first makes the request that is not measured.
func (c *client) first() error {
	if err := c.conn.SetDeadline(time.Now().Add(patience + c.job.longest())); err != nil {
		return err
	}
	_, err := c.call(c.job.Line)
	return err
}

// repeat makes requests until the round is over. begun counts those of all connections.
func (c *client) repeat(start time.Time, begun *atomic.Int64) error {
	begin := time.Now()
	for !c.job.over(begin.Sub(start), int(begun.Add(1))) {
		answered, err := c.call("")
		if err != nil {
			return err
		}
		c.took = append(c.took, answered.Sub(begin))
		begin = time.Now()
	}
	return nil
}

// call makes one request and reads its answer, which must have the line, if any. It returns when that
// had come as far as the job asks.
func (c *client) call(line string) (answered time.Time, err error) {
	if _, err := c.conn.Write(c.out.next()); err != nil {
		return answered, err
	}
	status, length, found, err := c.head(line)
	switch {
	case err != nil:
		return answered, err
	case status != c.job.Status:
		body, _ := io.ReadAll(io.LimitReader(c.in, max(min(length, 500), 0)))
		return answered, fmt.Errorf("answered %d instead of %d: %s", status, c.job.Status, body)
	case !found:
		return answered, fmt.Errorf("the answer has no line %q", line)
	case c.job.First:
		return c.events()
	case length < 0:
		return answered, errors.New("the answer has no Content-Length")
	}
	_, err = c.in.Discard(int(length))
	return time.Now(), err
}

// events reads a stream of events in chunks. It returns when the first one had come.
func (c *client) events() (first time.Time, err error) {
	for ended := false; ; {
		l, err := c.in.ReadSlice('\n')
		switch {
		case err != nil:
			return first, err
		case ended && first.IsZero():
			return first, errors.New("the stream has no event")
		case ended:
			return first, nil
		case first.IsZero() && bytes.HasPrefix(l, []byte("data:")):
			first = time.Now()
		}
		ended = string(l) == "0\r\n"
	}
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
