package postgres

import (
	"reflect"
	"time"
)

// Waiting is the number of commits that wait for the committer.
func (s *Store) Waiting() int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return len(s.queue.waiting)
}

// Busy reports that so much is written that the member is not notified of it.
func (s *Store) Busy() bool { return s.member.busy.Load() }

// AgeClock makes the server's time as it is known one that was read so long ago.
func (s *Store) AgeClock(by time.Duration) {
	now := time.Now()
	s.clock.Store(&instant{server: now.Add(-by), at: now.Add(-by)})
}

// GroupReads has Gets wait while so many statements are under way that take no longer than slow.
func (s *Store) GroupReads(atOnce int, slow time.Duration) {
	s.reads.mu.Lock()
	defer s.reads.mu.Unlock()
	s.reads.atOnce, s.reads.slow = atOnce, slow
}

// HoldReads has all Gets wait, and release lets them go.
func (s *Store) HoldReads() (release func()) {
	s.reads.mu.Lock()
	defer s.reads.mu.Unlock()
	held := s.reads.atOnce
	s.reads.running += held
	return func() {
		for range held {
			s.handOn()
		}
	}
}

// Reads are the statements of Gets that are under way and count, and the Gets that wait.
func (s *Store) Reads() (running, waiting int) {
	s.reads.mu.Lock()
	defer s.reads.mu.Unlock()
	return s.reads.running, len(s.reads.waiting)
}

// Lose is what happens when another member has removed this one.
func (s *Store) Lose() { s.lose() }

// PruneFeed deletes what all members have read.
func (s *Store) PruneFeed() { s.pruneFeed(0) }

// LockKey is the key of an advisory lock of a schema.
func LockKey(schema, name, of string) int64 {
	return (&Store{options: Options{Schema: schema}}).lockKey(name, of)
}

// Migrations are the texts of the migrations, with the schema's name in them.
func Migrations(schema string) (all []string) {
	files, err := migrations.ReadDir("migrations")
	if err != nil {
		panic(err)
	}
	q := newStatements(schema, "")
	for _, file := range files {
		text, err := migrations.ReadFile("migrations/" + file.Name())
		if err != nil {
			panic(err)
		}
		all = append(all, q.in(string(text)))
	}
	return all
}

// Prepared are the statements of a schema that are put together once.
func Prepared(schema, channel string) (all []string) {
	q := reflect.ValueOf(newStatements(schema, channel))
	for i := range q.NumField() {
		if q.Type().Field(i).Name != "schema" {
			all = append(all, q.Field(i).String())
		}
	}
	return all
}
