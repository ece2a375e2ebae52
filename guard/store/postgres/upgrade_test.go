//go:build unix

package postgres_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

var update = flag.Bool("update", false, "write the golden files anew")

// migrated makes a schema as it was at a version.
func migrated(t *testing.T, conn *pgx.Conn, version int) (schema string) {
	t.Helper()
	schema = newSchema()
	exec(t, conn, "create schema "+schema)
	exec(t, conn, "create table "+schema+".migrations (version int primary key, at timestamptz not null default now())")
	for n, text := range postgres.Migrations(schema)[:version] {
		if _, err := conn.PgConn().Exec(t.Context(), text).ReadAll(); err != nil {
			t.Fatal(err)
		}
		exec(t, conn, "insert into "+schema+".migrations (version) values ($1)", n+1)
	}
	return schema
}

// described asks the catalogue about a schema, whose name is $1; each row is a line of text.
func described(t *testing.T, conn *pgx.Conn, schema, query string) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), query, schema)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for i := range lines {
		lines[i] = strings.ReplaceAll(lines[i], schema, "{schema}")
	}
	return lines
}

const (
	// uses is what statements of a build use.
	uses = `select 'column ' || table_name || '.' || column_name || ' ' || data_type from information_schema.columns where table_schema = $1
		union all select 'sequence ' || sequence_name from information_schema.sequences where sequence_schema = $1`
	// refuses is what may refuse a row, or change it: columns that must be given, constraints, unique indexes, triggers.
	refuses = `select table_name || '|column ' || column_name || ' that must be given' from information_schema.columns
			where table_schema = $1 and is_nullable = 'NO' and column_default is null
		union all select c.relname || '|constraint ' || pg_get_constraintdef(k.oid) from pg_constraint k join pg_class c on c.oid = k.conrelid
			where k.connamespace = $1::regnamespace and k.contype <> 'n'
		union all select c.relname || '|' || pg_get_indexdef(i.indexrelid) from pg_index i join pg_class c on c.oid = i.indrelid
			where c.relnamespace = $1::regnamespace and i.indisunique
		union all select c.relname || '|trigger ' || g.tgname from pg_trigger g join pg_class c on c.oid = g.tgrelid
			where c.relnamespace = $1::regnamespace and not g.tgisinternal`
)

// incompatible is what in the newer schema is in the way of a build of the older one.
func incompatible(t *testing.T, conn *pgx.Conn, older, newer string) (all []string) {
	t.Helper()
	has := described(t, conn, newer, uses)
	for _, line := range described(t, conn, older, uses) {
		if !slices.Contains(has, line) {
			all = append(all, line+" is missing")
		}
	}
	known := described(t, conn, older, refuses)
	tables := described(t, conn, older, "select table_name::text from information_schema.tables where table_schema = $1")
	for _, line := range described(t, conn, newer, refuses) {
		if table, what, _ := strings.Cut(line, "|"); slices.Contains(tables, table) && !slices.Contains(known, line) {
			all = append(all, table+" has "+what)
		}
	}
	return all
}

// ADR 0146: a migration adds, so that a gateway of the build before it goes on: what its statements use stays, and
// nothing refuses the rows that it writes.
func TestMigrationsAdd(t *testing.T) {
	conn := database(t)
	newest := len(postgres.Migrations(""))
	now := newSchema()
	if err := open(t, postgres.Options{Schema: now}).Close(); err != nil {
		t.Fatal(err)
	}
	for version := 1; version < newest; version++ {
		if found := incompatible(t, conn, migrated(t, conn, version), now); found != nil {
			t.Errorf("a build of version %d: %q", version, found)
		}
	}
	before := migrated(t, conn, newest)
	for change, want := range map[string]string{
		"alter table {schema}.entries rename column value to content":                                                           "column entries.value bytea is missing",
		"alter table {schema}.members alter column read type text":                                                              "column members.read bigint is missing",
		"drop sequence {schema}.feed_seq":                                                                                       "sequence feed_seq is missing",
		"alter table {schema}.feed add column why text not null":                                                                "feed has column why that must be given",
		"alter table {schema}.feed add check (seq < 1000)":                                                                      "feed has constraint CHECK ((seq < 1000))",
		"create unique index on {schema}.entries (version)":                                                                     "entries has CREATE UNIQUE INDEX",
		"create trigger t before update on {schema}.entries for each row execute function suppress_redundant_updates_trigger()": "entries has trigger t",
	} {
		schema := migrated(t, conn, newest)
		exec(t, conn, strings.ReplaceAll(change, "{schema}", schema))
		found := incompatible(t, conn, before, schema)
		if len(found) == 0 || !strings.HasPrefix(found[0], want) {
			t.Errorf("%s: %q", change, found)
		}
	}
}

// sent has the statements that clients send through a proxy.
type sent struct {
	mu  sync.Mutex
	all map[string]bool
}

// note reads the statements of a write of pgx, which begins with a message.
func (s *sent) note(b []byte) pgserver.Fate {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(b) >= 5 && b[0] != 0 { // without a type it begins a session
		size := 1 + int(binary.BigEndian.Uint32(b[1:]))
		if size < 5 || size > len(b) {
			break
		}
		text := b[5:size]
		if b[0] == 'P' { // behind its name
			_, text, _ = bytes.Cut(text, []byte{0})
		}
		if b[0] == 'P' || b[0] == 'Q' {
			text, _, _ = bytes.Cut(text, []byte{0})
			s.all[string(text)] = true
		}
		b = b[size:]
	}
	return pgserver.Pass
}

// ADR 0146: the statements of each build that the schema is for can be prepared on the newest schema. Those of this
// build are in testdata/statements, under the version of the schema that it knows; what it has not listed there a later
// build cannot look at. Files of earlier versions stay as they are.
func TestGoldenStatements(t *testing.T) {
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	schema := newSchema()
	seen := &sent{all: map[string]bool{}}
	p.Judge(seen.note)
	everything(t, p.DSN(), schema)
	quoted, channel := pgx.Identifier{schema}.Sanitize(), fmt.Sprintf("agent_guard_%016x", uint64(postgres.LockKey(schema, "feed", "")))
	seen.mu.Lock()
	for _, text := range postgres.Prepared(schema, channel) {
		seen.all[text] = true
	}
	var now []string
	for text := range seen.all {
		text = strings.ReplaceAll(strings.ReplaceAll(text, channel, "{channel}"), quoted, "{schema}")
		if strings.Contains(text, "{schema}") {
			now = append(now, strings.ReplaceAll(text, "\t", " "))
		}
	}
	seen.mu.Unlock()
	slices.Sort(now)
	const between = "\n;\n"
	golden := filepath.Join("testdata", "statements", fmt.Sprintf("%04d.sql", len(postgres.Migrations(""))))
	if *update {
		if err := os.WriteFile(golden, []byte(strings.Join(now, between)+between), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob("testdata/statements/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(files, golden) {
		t.Fatalf("%s is missing: make golden", golden)
	}
	conn := database(t)
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		listed := strings.Split(strings.TrimSuffix(string(b), between), between)
		for _, text := range listed {
			text = strings.ReplaceAll(strings.ReplaceAll(text, "{schema}", quoted), "{channel}", channel)
			if _, err := conn.Prepare(t.Context(), "", text); err != nil {
				t.Errorf("%s: %v: %s", file, err, text)
			}
		}
		for _, text := range now {
			if file == golden && !slices.Contains(listed, text) {
				t.Errorf("%s does not have it: %s (make golden)", file, text)
			}
		}
	}
}

// everything has a member send what gateways send.
func everything(t *testing.T, dsn, schema string) {
	t.Helper()
	b := join(t, postgres.Options{Schema: schema, Node: "b"}) // which makes the schema
	a := join(t, postgres.Options{DSN: dsn, Schema: schema, Node: "a"})
	left := a.Left()
	for n := range 3 {
		if _, err := a.Commit(t.Context(), put(fmt.Sprint("key ", n), "1")); err != nil {
			t.Fatal(err)
		}
	}
	if got := value(t, a, "key 1"); got != "1" {
		t.Fatal(got)
	}
	for _, r := range []store.Range{{}, {Reverse: true}, store.Prefix([]byte("key")), {From: []byte("k"), To: []byte("l"), Reverse: true, Limit: 2}} {
		for _, err := range a.Scan(t.Context(), r) {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := a.Now(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Members(t.Context()); err != nil {
		t.Fatal(err)
	}
	if gone, err := a.Gone(t.Context(), b.Self().Boot); err != nil || gone {
		t.Fatal(gone, err)
	}
	if err := a.CatchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.Describe(store.About{Version: "later"})
	await(t, func() bool {
		all, err := b.Members(t.Context())
		return err == nil && len(all) == 2 && all[0].Version == "later"
	})
	a.PruneFeed()
	await(t, func() bool { return !a.Stats().Server.Asked.IsZero() })
	conn := database(t)
	exec(t, conn, "update "+schema+".members set expires = 0 where node = 'b'")
	<-left // a has removed it
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}

// ADR 0146: a newer build says with its schema which older ones can use it. They go on, and also join anew, beside it;
// others go on as long as they live, and are refused for good when they start.
func TestSchemaOfANewerBuild(t *testing.T) {
	schema, conn := newSchema(), database(t)
	newest := len(postgres.Migrations(""))
	a := join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
	if _, err := a.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, "alter table "+schema+".entries add column later int")
	exec(t, conn, "alter table "+schema+".members add column later text not null default ''")
	exec(t, conn, "create table "+schema+".later (key bytea primary key)")
	exec(t, conn, "insert into "+schema+".migrations (version, oldest) values (1000, $1)", newest)
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	seen := make(chan struct{}, 10)
	b.Follow([]byte("key"), func([]byte) { seen <- struct{}{} })
	serves := func(when string) {
		t.Helper()
		for _, m := range []postgres.Member{a, b} {
			if _, err := m.Commit(t.Context(), put("key", when)); err != nil {
				t.Errorf("%s: %v", when, err)
			}
			if got := value(t, b, "key"); got != when {
				t.Errorf("%s: %q", when, got)
			}
		}
		<-seen
	}
	serves("beside a newer build that admits it")
	for _, row := range []string{"(1001, null)", fmt.Sprintf("(1001, %d)", newest+1)} {
		exec(t, conn, "delete from "+schema+".migrations where version > 1000")
		exec(t, conn, "insert into "+schema+".migrations (version, oldest) values "+row+", (1002, 1)")
		m, err := postgres.Join(t.Context(), postgres.Options{DSN: server.DSN(), Schema: schema, Node: "c"})
		if err == nil {
			_ = m.Close()
		}
		if err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "of version 1002") {
			t.Errorf("%s: join = %v", row, err)
		}
		serves("beside a newer build that does not")
	}
}

// A process that was stopped while it looked at the schema keeps nobody from opening the store.
func TestStoppedInAMigration(t *testing.T) {
	schema := newSchema()
	if err := open(t, postgres.Options{Schema: schema}).Close(); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	exec(t, conn, "select pg_advisory_lock($1)", postgres.LockKey(schema, "migrations", "0"))
	if err := open(t, postgres.Options{Schema: schema}).Close(); err != nil {
		t.Fatal(err)
	}
}
