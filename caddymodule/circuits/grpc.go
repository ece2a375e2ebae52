package circuits

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// GRPC is the status of a gRPC call, as google.rpc.Code numbers them.
type GRPC uint32

// The statuses that are more than what they map to.
const (
	// GRPCCancelled says that somebody has called the work off.
	GRPCCancelled GRPC = 1
	// GRPCDeadline says that the time for it ran out, the caller's or the upstream's own.
	GRPCDeadline GRPC = 4
	// GRPCUnimplemented says that there is no such method, mostly before the upstream
	// knows who asks.
	GRPCUnimplemented GRPC = 12
)

// grpcUnknown is what a status that cannot be read is, as for gRPC's own clients.
const grpcUnknown GRPC = 2

// grpcStatuses are names, and the HTTP statuses that google.rpc.Code gives for them.
var grpcStatuses = []struct {
	name string
	http int
}{
	{"OK", 200}, {"CANCELLED", 499}, {"UNKNOWN", 500}, {"INVALID_ARGUMENT", 400}, {"DEADLINE_EXCEEDED", 504},
	{"NOT_FOUND", 404}, {"ALREADY_EXISTS", 409}, {"PERMISSION_DENIED", 403}, {"RESOURCE_EXHAUSTED", 429},
	{"FAILED_PRECONDITION", 400}, {"ABORTED", 409}, {"OUT_OF_RANGE", 400}, {"UNIMPLEMENTED", 501}, {"INTERNAL", 500},
	{"UNAVAILABLE", 503}, {"DATA_LOSS", 500}, {"UNAUTHENTICATED", 401},
}

// IsGRPC reports whether an answer is one of gRPC, by its Content-Type. web says that it
// is one of gRPC-Web, which has its status in the body unless that is empty.
func IsGRPC(header http.Header) (is, web bool) {
	kind, _, _ := strings.Cut(strings.ToLower(header.Get("Content-Type")), ";")
	rest, is := strings.CutPrefix(strings.TrimSpace(kind), "application/grpc")
	web = strings.HasPrefix(rest, "-web")
	return is && (web || rest == "" || rest[0] == '+'), web
}

// GRPCStatus reads the status of a gRPC call from the header or the trailer of its
// answer. It reports false where there is none.
func GRPCStatus(fields http.Header) (GRPC, bool) {
	values := fields["Grpc-Status"]
	if len(values) == 0 {
		return 0, false
	}
	code, err := strconv.ParseUint(values[0], 10, 32)
	if err != nil {
		return grpcUnknown, true
	}
	return GRPC(code), true
}

// HTTP is the status of HTTP that means the same: 500 for a number that is not defined.
func (s GRPC) HTTP() int {
	if int64(s) >= int64(len(grpcStatuses)) {
		return http.StatusInternalServerError
	}
	return grpcStatuses[s].http
}

// String is the status as a cause, such as "grpc-status 14 (UNAVAILABLE)".
func (s GRPC) String() string {
	if int64(s) >= int64(len(grpcStatuses)) {
		return fmt.Sprintf("grpc-status %d", uint32(s))
	}
	return fmt.Sprintf("grpc-status %d (%s)", uint32(s), grpcStatuses[s].name)
}

// ParseGRPCTimeout reads the field grpc-timeout: at most eight digits and a unit. It
// reports false for what says nothing: a malformed value, zero, or more than a Duration
// can be.
func ParseGRPCTimeout(text string) (time.Duration, bool) {
	if len(text) < 2 || len(text) > 9 {
		return 0, false
	}
	unit, known := map[byte]time.Duration{
		'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond,
	}[text[len(text)-1]]
	n, err := strconv.ParseUint(text[:len(text)-1], 10, 32)
	if !known || err != nil || n == 0 || n > uint64(math.MaxInt64/unit) {
		return 0, false
	}
	return time.Duration(n) * unit, true
}

// FailedGRPC reports whether a status of gRPC is a failure by itself. UNIMPLEMENTED is
// none as one of a class: anybody can ask for a method that there is not, and must not cut
// the upstream off from others by that.
func (c *Circuits) FailedGRPC(status GRPC) bool {
	if status == GRPCUnimplemented {
		return slices.Contains(c.checked.statuses, status.HTTP())
	}
	return c.Failed(status.HTTP())
}
