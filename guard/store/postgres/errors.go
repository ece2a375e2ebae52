package postgres

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// States of SQL that mean something here (PostgreSQL, appendix A).
const (
	stateDivision      = "22012" // see applyMadeSQL
	stateUnique        = "23505"
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
	stateReadOnly      = "25006"
	stateNoPrivilege   = "42501"
	stateDiskFull      = "53100"
	stateConnections   = "53300"
	stateLockTimeout   = "55P03"
	stateCanceled      = "57014"
	stateStarting      = "57P03"
	stateBadRole       = "28000"
	stateBadPassword   = "28P01"
	stateNoDatabase    = "3D000"
)

// hints say what the state means for whoever runs the gateway. Messages of the server are not
// shown: they may have the role, the host or a key in them (P8).
var hints = map[string]string{
	stateReadOnly:    "the server is read-only; name the primary, or add target_session_attrs=read-write to the DSN",
	stateNoPrivilege: "the role may not do this; make it the owner of the schema",
	stateDiskFull:    "the server's disk is full",
	stateConnections: "the server has no connection left; lower pool_max_conns in the dsn, or raise max_connections",
	stateLockTimeout: "something in the database holds a lock for too long",
	stateCanceled:    "the server stopped it after statement_timeout",
	stateStarting:    "the server is starting or stopping",
	stateBadRole:     "the server refuses the role or the way in which it logs in",
	stateBadPassword: "the server refuses the password",
	stateNoDatabase:  "the server has no such database",
}

// unavailable is a store.ErrUnavailable with a cause in words that may be logged.
func unavailable(cause string) error {
	return fmt.Errorf("postgres: %w: %s", store.ErrUnavailable, cause)
}

// translate returns err as an error of the contract. It keeps nothing of the DSN: no host, role,
// database or password.
func translate(err error) error {
	if errors.Is(err, store.ErrUnavailable) {
		return err // of a sequence
	}
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) {
		what := "SQLSTATE " + refused.Code
		if hint := hints[refused.Code]; hint != "" {
			what = hint + " (" + what + ")"
		}
		switch {
		case refused.Code == stateDiskFull:
			return fmt.Errorf("postgres: %w: %s", store.ErrFull, what)
		case strings.HasPrefix(refused.Code, "XX00") && refused.Code != "XX000": // data or index corrupted
			return fmt.Errorf("postgres: %w: %s", store.ErrDamaged, what)
		}
		return unavailable(what)
	}
	return unavailable(causeOf(err))
}

// causeOf names what went wrong on the way to the server.
func causeOf(err error) string {
	var (
		errno     syscall.Errno
		notFound  *net.DNSError
		authority x509.UnknownAuthorityError
		hostname  x509.HostnameError
		invalid   x509.CertificateInvalidError
		netErr    net.Error
	)
	switch {
	case errors.As(err, &authority), errors.As(err, &invalid):
		return "TLS: the server's certificate is not trusted"
	case errors.As(err, &hostname):
		return "TLS: the server's certificate is for another name"
	case errors.Is(err, context.DeadlineExceeded):
		return "no answer in time"
	case errors.As(err, &notFound):
		return "the server's name is not found"
	case errors.As(err, &errno):
		return errno.Error()
	case errors.As(err, &netErr) && netErr.Timeout():
		return "no answer in time"
	}
	return "the connection to the server was lost"
}

// fatal reports that err leaves open what happened: the connection is gone, or the server ended it.
func fatal(err error) bool {
	refused := (*pgconn.PgError)(nil)
	if errors.Is(err, store.ErrUnavailable) { // a sequence does not go on
		return false
	}
	return !errors.As(err, &refused) || refused.SeverityUnlocalized != "ERROR"
}

// again reports that the same transaction may succeed when it is tried again.
func again(err error) bool {
	refused := (*pgconn.PgError)(nil)
	return errors.As(err, &refused) && (refused.Code == stateSerialization || refused.Code == stateDeadlock)
}

// late reports that a statement was ended for the time that it took, as where it waits for a lock.
func late(err error) bool {
	refused := (*pgconn.PgError)(nil)
	return errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &refused) && (refused.Code == stateCanceled || refused.Code == stateLockTimeout)
}
